"""Commands that only read: list, show, why, watch, audit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.lock_views import (
    ORDERS,
    Ranking,
    is_known,
    list_locks,
    rank_locks,
    show_lock,
    shown_of,
)
from celery_singleton_lock.admin.why import Answer, why
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.options import FiniteRange, as_json, lock_name
from celery_singleton_lock.cli.target import REFUSED, Target, with_target
from celery_singleton_lock.cli.watch import watch
from celery_singleton_lock.config.limits import MAX_COUNT
from celery_singleton_lock.core.lock_mode import relaxed_by

INTERVAL: Final = FiniteRange(0.1, 86_400.0)
"""Seconds between two refreshes of ``watch``."""

NUMBER: Final = click.IntRange(1, MAX_COUNT)
"""A number of locks, or of refreshes."""


@click.command("list")
@click.argument("pattern", default="")
@click.option("--sort", type=click.Choice(list(ORDERS)), help="Default: name.")
@click.option("--limit", "most", type=NUMBER, help="Largest number of locks to show.")
@click.option("--all", "every", is_flag=True, help="With --limit: read all locks of a large Redis.")
@click.option("--idle", is_flag=True, help="Include locks without holder and waiter.")
@as_json
@with_target
def list_command(  # click gives them by name
    target: Target,
    pattern: str,
    sort: str | None,
    most: int | None,
    *,
    every: bool,
    idle: bool,
    machine: bool,
) -> None:
    """List locks that are held or waited for. PATTERN is part of the name, or a pattern (*?[).

    With --limit, only locks with waiters are listed if Redis has more than 20,000 keys.
    """
    if most is not None and not (every or idle):
        ranking = rank_locks(target.store, pattern, sort or "waiting", most)
        if ranking is not None:
            return _list_waited(target, ranking, machine=machine)
    with no_collection():
        found = list_locks(target.store, pattern, order=sort or "name", idle=idle)
        shown = found[:most]
        if machine:
            return render.as_json(shown)
        note = _switched(target)
        if not found:
            fits = f" that matches {pattern!r}" if pattern else ""
            none = f"No lock{fits} is {'known' if idle else 'held or waited for'}."
            return render.show([none, *note])
        lines = render.table(render.LOCK_HEADINGS, render.lock_rows(shown), render.width())
        return render.show([*lines, "", render.summary(found, len(shown)), *note])


def _list_waited(target: Target, ranking: Ranking, *, machine: bool) -> None:
    """Print the locks that have waiters, and a line that says that others are not listed."""
    shown = shown_of(target.store, ranking)
    limited = (
        f"Redis has {ranking.keys:,} keys: only locks are listed that have waiters, or lately had. "
        "--all reads all locks."
    )
    if machine:
        render.as_json(shown)
        return render.say(limited, err=True)
    lines = [*render.table(render.LOCK_HEADINGS, render.lock_rows(shown), render.width()), ""]
    told = render.of_waited(ranking, len(shown))
    return render.show([*(lines if shown else []), told, limited, *_switched(target)])


def _switched(target: Target) -> list[str]:
    relaxed = relaxed_by(target.store.switches())
    return [f"Switched to run without locks: {relaxed}. See mode."] if relaxed else []


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection: with 100,000 locks it takes 0.5 s and frees nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@click.command()
@lock_name
@click.option("--waiters", type=click.IntRange(0, MAX_COUNT), default=20, show_default=True)
@as_json
@with_target
def show(target: Target, name: str, waiters: int, *, machine: bool) -> None:
    """Show one lock: its holders with their tokens, and its waiters in order."""
    found = show_lock(target.store, name, waiters=waiters)
    if machine:
        render.as_json(found)
    elif is_known(found.view) or found.waiting or found.calls:
        render.show(render.detail(found))
    else:
        msg = f"no lock {name!r} is known: it has no holder and no waiter. See list and list --idle"
        raise Refused(msg, name)


@click.command("why")
@click.argument("task_id")
@click.option("--all", "every", is_flag=True, help="Search all locks of a large Redis.")
@as_json
@with_target
def why_command(target: Target, task_id: str, *, every: bool, machine: bool) -> None:
    """Explain in one sentence why a task does not run.

    TASK_ID may be shortened to its first 6 characters or more.
    """
    if not task_id.strip():
        msg = "TASK_ID is empty: give the id of a task"
        raise click.UsageError(msg)
    answer = why(target.store, task_id, target.witness(), every=every)
    if machine:
        render.as_json(answer)
    else:
        _say(answer, task_id)
    if answer.state in {"unseen", "ambiguous"}:
        click.get_current_context().exit(REFUSED)


def _say(answer: Answer, task_id: str) -> None:
    """Print an answer, with the answers for further messages with the same id."""
    whole = "" if answer.task_id == task_id else f" (task {answer.task_id})"
    if answer.others:
        render.say(f"{len(answer.others) + 1} messages have this id:")
    for each in (answer, *answer.others):
        render.say(f"{each.state}: {each.sentence}{whole}")


@click.command("watch")
@click.argument("pattern", default="")
@click.option("--interval", type=INTERVAL, default=1.0, show_default=True)
@click.option("--count", "times", type=NUMBER, help="Number of refreshes. Default: until Ctrl-C.")
@click.option("--limit", "most", type=NUMBER, default=20, show_default=True)
@click.option("--sort", type=click.Choice(list(ORDERS)), default="waiting", show_default=True)
@with_target
def watch_command(  # noqa: PLR0917  # click gives them by name
    target: Target, pattern: str, interval: float, times: int | None, most: int, sort: str
) -> None:
    """Show the busiest locks, and refresh the table.

    Only locks with waiters are shown if Redis has more than 20,000 keys.
    """

    def look() -> str:
        ranking = rank_locks(target.store, pattern, sort, most)
        if ranking is None:
            found, told = list_locks(target.store, pattern, order=sort, most=most), []
        else:
            found = shown_of(target.store, ranking)
            told = ["", render.of_waited(ranking, len(found))]
        rows = render.lock_rows(found)
        lines = render.table(render.LOCK_HEADINGS, rows, render.width())
        return "\n".join([*lines, *told])

    watch(look, interval, times)


@click.command()
@click.option("--limit", "most", type=click.IntRange(1, 1000), default=50, show_default=True)
@as_json
@with_target
def audit(target: Target, most: int, *, machine: bool) -> None:
    """Show what operators changed, newest first: who, when, from where."""
    entries = target.store.audit(most)
    if machine:
        return render.as_json(entries)
    if not entries:
        return render.say("The audit has no entries.")
    return render.show(render.table(render.AUDIT_HEADINGS, render.audit_rows(entries)))

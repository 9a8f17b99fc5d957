"""Commands that only read: list, show, why, watch, audit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.lock_views import ORDERS, is_known, list_locks, show_lock
from celery_singleton_lock.admin.why import why
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.options import FiniteRange, as_json, lock_name
from celery_singleton_lock.cli.target import Target, with_target
from celery_singleton_lock.cli.watch import watch
from celery_singleton_lock.config.limits import MAX_COUNT
from celery_singleton_lock.core.lock_mode import relaxed_by

INTERVAL: Final = FiniteRange(0.1, 86_400.0)
"""Seconds between two refreshes of ``watch``."""

NUMBER: Final = click.IntRange(1, MAX_COUNT)
"""A number of locks, or of refreshes."""


@click.command("list")
@click.argument("pattern", default="")
@click.option("--sort", type=click.Choice(list(ORDERS)), default="name", show_default=True)
@click.option("--limit", "most", type=NUMBER, help="Largest number of locks to show.")
@click.option("--idle", is_flag=True, help="Include locks without holder and waiter.")
@as_json
@with_target
def list_command(
    target: Target, pattern: str, sort: str, most: int | None, *, idle: bool, machine: bool
) -> None:
    """List locks that are held or waited for. PATTERN is part of the name, or a pattern (*?[)."""
    with no_collection():
        found = list_locks(target.store, pattern, order=sort, idle=idle)
        shown = found[:most]
        if machine:
            return render.as_json(shown)
        relaxed = relaxed_by(target.store.switches())
        note = [f"Switched to run without locks: {relaxed}. See mode."] if relaxed else []
        if not found:
            fits = f" that matches {pattern!r}" if pattern else ""
            none = f"No lock{fits} is {'known' if idle else 'held or waited for'}."
            return render.show([none, *note])
        lines = render.table(render.LOCK_HEADINGS, render.lock_rows(shown), render.width())
        return render.show([*lines, "", render.summary(found, len(shown)), *note])


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
    elif is_known(found.view) or found.waiting:
        render.show(render.detail(found))
    else:
        msg = f"no lock {name!r} is known: it has no holder and no waiter. See list and list --idle"
        raise Refused(msg, name)


@click.command("why")
@click.argument("task_id")
@as_json
@with_target
def why_command(target: Target, task_id: str, *, machine: bool) -> None:
    """Explain in one sentence why a task does not run.

    TASK_ID may be shortened to its first 6 characters or more.
    """
    answer = why(target.store, task_id, target.witness())
    if machine:
        return render.as_json(answer)
    whole = "" if answer.task_id == task_id else f" (task {answer.task_id})"
    if answer.others:
        render.say(f"{len(answer.others) + 1} messages have this id:")
    for each in (answer, *answer.others):
        render.say(f"{each.state}: {each.sentence}{whole}")
    return None


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
    """Show the busiest locks, and refresh the table."""

    def look() -> str:
        found = list_locks(target.store, pattern, order=sort, most=most)
        rows = render.lock_rows(found)
        return "\n".join(render.table(render.LOCK_HEADINGS, rows, render.width()))

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

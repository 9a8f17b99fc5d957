"""Commands that change nothing: list, show, why, watch, audit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import click

from celery_singleton_lock.admin.lock_views import ORDERS, is_known, list_locks, show_lock
from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.why import why
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.options import as_json, lock_name
from celery_singleton_lock.cli.target import Place, with_place
from celery_singleton_lock.cli.watch import watch


@click.command("list")
@click.argument("pattern", default="")
@click.option("--sort", type=click.Choice(list(ORDERS)), default="name", show_default=True)
@click.option("--limit", "most", type=click.IntRange(1), help="Only the first of them.")
@click.option("--idle", is_flag=True, help="Also those that nobody holds or waits for.")
@as_json
@with_place
def list_command(
    place: Place, pattern: str, sort: str, most: int | None, *, idle: bool, machine: bool
) -> None:
    """Locks that are held or waited for; PATTERN is a part of the name, or a pattern (*?[)."""
    with no_collection():
        found = list_locks(place.store, pattern, order=sort, idle=idle)
        shown = found[:most]
        if machine:
            return render.as_json(shown)
        if not found:
            fits = f" that fits {pattern!r}" if pattern else ""
            return render.say(f"No lock{fits} is {'known' if idle else 'held or waited for'}.")
        lines = render.table(render.LOCK_HEADINGS, render.lock_rows(shown), render.width())
        return render.show([*lines, "", render.summary(found, len(shown))])


@contextmanager
def no_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: among 100,000 locks is none, and looks take half a second."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@click.command()
@lock_name
@click.option("--waiters", type=click.IntRange(0), default=20, show_default=True)
@as_json
@with_place
def show(place: Place, name: str, waiters: int, *, machine: bool) -> None:
    """One lock: its holders with their tokens, and who waits, in order."""
    found = show_lock(place.store, name, waiters=waiters)
    if machine:
        render.as_json(found)
    elif is_known(found.view) or found.waiting:
        render.show(render.detail(found))
    else:
        msg = (
            f"no lock {name!r} is known: nobody holds it or waits for it. See list, and list --idle"
        )
        raise Refused(msg, name)


@click.command("why")
@click.argument("task_id")
@as_json
@with_place
def why_command(place: Place, task_id: str, *, machine: bool) -> None:
    """Why a task does not run: in one sentence.

    TASK_ID may be the beginning of the id, of 6 characters or more.
    """
    answer = why(place.store, task_id, place.witness())
    if machine:
        return render.as_json(answer)
    whole = "" if answer.task_id == task_id else f" (task {answer.task_id})"
    return render.say(f"{answer.state}: {answer.sentence}{whole}")


@click.command("watch")
@click.argument("pattern", default="")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True)
@click.option("--count", "times", type=click.IntRange(1), help="How often; until Ctrl-C.")
@click.option("--limit", "most", type=click.IntRange(1), default=20, show_default=True)
@click.option("--sort", type=click.Choice(list(ORDERS)), default="waiting", show_default=True)
@with_place
def watch_command(  # noqa: PLR0917  # click gives them by name
    place: Place, pattern: str, interval: float, times: int | None, most: int, sort: str
) -> None:
    """The busiest locks, as they change."""

    def look() -> str:
        found = list_locks(place.store, pattern, order=sort, most=most)
        rows = render.lock_rows(found)
        return "\n".join(render.table(render.LOCK_HEADINGS, rows, render.width()))

    watch(look, interval, times)


@click.command()
@click.option("--limit", "most", type=click.IntRange(1, 1000), default=50, show_default=True)
@as_json
@with_place
def audit(place: Place, most: int, *, machine: bool) -> None:
    """What operators did, newest first: who, when, from where."""
    entries = place.store.audit(most)
    if machine:
        return render.as_json(entries)
    if not entries:
        return render.say("Nobody has stepped in.")
    return render.show(render.table(render.AUDIT_HEADINGS, render.audit_rows(entries)))

"""Commands for many parked tasks: purge, drain, export, import."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, TextIO

import click

from celery_singleton_lock.admin.bulk_parked import (
    Pace,
    drain,
    not_drained,
    not_purged,
    purge,
)
from celery_singleton_lock.admin.export_parked import (
    ENDED,
    PurgedFile,
    export,
    refuse_drained,
    restore,
    served_realms,
    would_restore,
)
from celery_singleton_lock.admin.select_parked import Filter, Tally, count, select
from celery_singleton_lock.admin.sweep import requeue_expired
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.app_context import sent
from celery_singleton_lock.cli.options import (
    FiniteRange,
    agreed,
    as_json,
    chosen,
    dry,
    filters,
    reason,
)
from celery_singleton_lock.cli.target import NotDone, Target, with_target
from celery_singleton_lock.message_text import printable

SEVERAL: Final = "(several locks)"
"""Lock name of an event about several locks."""

NO_BROKER: Final = "(none)"
"""A realm that no task has."""


@click.command("purge")
@filters
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to create. import --again parks the dropped tasks again.",
)
@click.option(
    "--any-broker",
    is_flag=True,
    help="Also tasks of other brokers, which may be those of another application.",
)
@reason
@agreed
@dry
@as_json
@with_target
def purge_command(target: Target, output: Path | None, **how: Any) -> None:
    """Drop parked tasks permanently, selected by lock, task, age, queue or state."""
    wanted = chosen(how)
    if not how["dry_run"]:
        requeue_expired(target.store)
    realm = ""
    if not how["any_broker"]:
        realm = target.app.realm if target.app else _only_broker(target, wanted)
    if how["dry_run"] or not how["yes"]:
        tally = count(target.store, wanted, not_purged(realm))
        if how["dry_run"] or not tally.total:
            return tell_tally(tally, "would be dropped", how["machine"])
        locks = f"{len(tally.done):,} lock{'s' * (len(tally.done) > 1)}"
        question = f"Drop {tally.total:,} parked tasks of {locks}? They will not run."
        render.ask(question)
    by = target.operator("purge", how["why_text"])
    app = target.app
    tell = (lambda each: app.tell_dropped(each, by)) if app else None
    with ExitStack() as stack:
        kept = stack.enter_context(_opened(output)) if output else None
        file = PurgedFile(target.store, kept) if kept else None
        done_for = target.settings.done_for
        tally = purge(
            target.store, wanted, by, realm=realm, dropped=tell, done_for=done_for, file=file
        )
    target.announce(by, tally.done, "purge")
    return tell_dropped(target, tally, how["machine"])


def _only_broker(target: Target, wanted: Filter) -> str:
    """Return the realm of the tasks' broker. Without an app, nothing tells which one is meant.

    Tasks of others that are parked from now on stay.

    Raises:
        NotDone: they have several brokers. Nothing was dropped.
    """
    first = ""
    for each in select(target.store, wanted):
        first = first or each.realm
        if each.realm != first:
            msg = (
                "these tasks have several brokers, so they may be those of several applications. "
                "Nothing was dropped. Give the app (celery -A YOUR_APP locks purge …) to drop "
                "those of its broker, or --any-broker to drop all"
            )
            raise NotDone(msg)
    return first or NO_BROKER


def tell_dropped(target: Target, tally: Tally, machine: bool) -> None:
    """Print the dropped tasks by lock, and the number of results that were not stored."""
    tell_tally(tally, "dropped", machine)
    if target.app is None and tally.total:
        render.say("No results were stored, since no app was given.", err=True)
    elif target.app is not None and target.app.untold:
        render.say(f"{target.app.untold:,} results could not be stored as REVOKED.", err=True)


def tell_tally(tally: Tally, done: str, machine: bool) -> None:
    """Print the number of tasks by lock, and the number of skipped tasks by reason."""
    left, locks = +tally.skipped, +tally.done
    if machine:
        return render.as_json({"done": done, "total": tally.total, "locks": locks, "left": left})
    most = locks.most_common(20)
    for name, number in most:
        render.say(f"{number:>9,}  {printable(name, render.WIDEST)}")
    if len(locks) > len(most):
        render.say(f"           … and {len(locks) - len(most):,} more locks")
    for why_not, number in left.items():
        hint = " (--again parks what was purged or dropped)" if why_not == ENDED else ""
        render.say(f"{number:>9,}  left: {why_not}{hint}")
    return render.say(f"{tally.total:>9,}  {done}")


@click.command("drain")
@filters
@click.option(
    "--rate",
    type=FiniteRange(0),
    default=100.0,
    show_default=True,
    help="Messages per second; 0 for no limit.",
)
@reason
@agreed
@dry
@as_json
@with_target
def drain_command(target: Target, rate: float, **how: Any) -> None:
    """Send parked tasks back to the broker, in their order, before this library is uninstalled.

    Workers that still have this library park them again: first replace these workers.
    """
    app = target.need_app("drain")
    wanted = chosen(how)
    if how["dry_run"] or not how["yes"]:
        if not how["dry_run"]:
            requeue_expired(target.store)
        tally = count(target.store, wanted, not_drained(target.store, app.realm))
        if how["dry_run"] or not tally.total:
            return tell_tally(tally, "would be sent to the broker", how["machine"])
        risk = "A worker that does not have the task of a message discards it."
        render.ask(f"{risk} Send {tally.total:,} parked tasks back to the broker?")
    by = target.operator("drain", how["why_text"])
    with app.publisher() as publisher:
        tally = drain(
            target.store,
            wanted,
            by,
            realm=app.realm,
            publish=lambda each: sent(
                publisher.send_back, each.message, each.queue, each.attempt, each.place, each.token
            ),
            pace=Pace(rate),
        )
    target.announce(by, tally.done, "drain")
    return tell_tally(tally, "sent to the broker", how["machine"])


@click.command("export")
@filters
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to create. Default: standard output.",
)
@reason
@with_target
def export_command(target: Target, output: Path | None, **how: Any) -> None:
    """Write parked tasks as lines of JSON, with their arguments. Changes no task."""
    wanted = chosen(how)
    by = target.operator("export", how["why_text"])
    written = 0
    with _opened(output) as file:
        for line in export(target.store, wanted, by):
            file.write(f"{line}\n")
            written += 1
    target.announce(
        by, {wanted.lock if wanted.exact else SEVERAL: written} if written else {}, "export"
    )
    render.say(f"{written:,} parked tasks written", err=True)


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    """Open a new file that only its owner can read: arguments of tasks may be secret."""
    if output is None:
        yield sys.stdout
        return
    try:
        output.touch(0o600, exist_ok=False)
    except OSError as error:
        msg = f"{output} cannot be created ({error.strerror}): give a new file"
        raise click.UsageError(msg) from None
    try:
        with output.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        msg = f"{output} cannot be written ({error.strerror}). What is not in it is still parked."
        raise NotDone(msg) from None
    except BaseException:
        if not output.stat().st_size:
            output.unlink()  # so that the same command can be repeated
        raise


@click.command("import")
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option(
    "--adopt",
    is_flag=True,
    help="Assign the tasks to the app's broker, unless theirs has live workers.",
)
@click.option(
    "--again", is_flag=True, help="Also park tasks that were purged or dropped since the export."
)
@click.option(
    "--force", is_flag=True, help="Also park tasks that may have been drained since the export."
)
@reason
@dry
@as_json
@with_target
def import_command(target: Target, file: TextIO, **how: Any) -> None:
    """Park the tasks that export wrote, at their old places. Importing twice changes nothing."""
    realm = target.need_app("--adopt").realm if how["adopt"] else ""
    with _rewindable(file) as lines:
        if not how["force"]:
            start = lines.tell()
            refuse_drained(target.store, lines, realm=realm)
            lines.seek(start)
        if how["dry_run"]:
            served = served_realms(target.store, realm)
            tell_tally(would_restore(lines, served), "would be parked", how["machine"])
            if not how["machine"]:
                render.say("           … less those that wait, run or have ended: not asked here")
            return None
        by = target.operator("import --force" if how["force"] else "import", how["why_text"])
        tally = restore(target.store, lines, by, realm=realm, again=how["again"])
    target.announce(by, tally.done, by.action)
    return tell_tally(tally, "parked", how["machine"])


@contextmanager
def _rewindable(file: TextIO) -> Iterator[TextIO]:
    """Yield the file, or a copy of a pipe that only its owner can read: it is read twice."""
    if file.seekable():
        yield file
        return
    with TemporaryFile() as copy:
        shutil.copyfileobj(file.buffer, copy)
        copy.seek(0)
        yield TextIOWrapper(copy, encoding="utf-8")

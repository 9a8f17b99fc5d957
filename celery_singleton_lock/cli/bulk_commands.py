"""Commands for many parked tasks: purge, drain, export, import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

import click

from celery_singleton_lock.admin.bulk_parked import (
    Pace,
    Tally,
    count,
    drain,
    export,
    purge,
    restore,
)
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.options import agreed, as_json, chosen, dry, filters, reason
from celery_singleton_lock.cli.target import Place, with_place
from celery_singleton_lock.cli.app_context import sent
from celery_singleton_lock.message_text import printable

SEVERAL: Final = "(several locks)"
"""Stands in an event for the name of a lock."""


@click.command("purge")
@filters
@reason
@agreed
@dry
@as_json
@with_place
def purge_command(place: Place, **how: Any) -> None:
    """Drop parked tasks for good, by lock, task, age, queue or state."""
    wanted = chosen(how)
    if how["dry_run"] or not how["yes"]:
        tally = count(place.store, wanted)
        if how["dry_run"] or not tally.total:
            return tell_tally(tally, "would be dropped", how["machine"])
        locks = f"{len(tally.done):,} lock{'s' * (len(tally.done) > 1)}"
        question = f"Drop {tally.total:,} parked tasks of {locks}? They will not run."
        render.ask(question)
    by = place.operator("purge", how["why_text"])
    app = place.app
    tell = (lambda each: app.tell_dropped(each, by)) if app else None
    tally = purge(place.store, wanted, by, dropped=tell)
    place.announce(by, tally.done, "purge")
    return tell_dropped(place, tally, how["machine"])


def tell_dropped(place: Place, tally: Tally, machine: bool) -> None:
    """Tell what was dropped, and what became of the results."""
    tell_tally(tally, "dropped", machine)
    if place.app is None and tally.total:
        render.say("Their results were not touched: no app was given.", err=True)
    elif place.app is not None and place.app.untold:
        render.say(f"{place.app.untold:,} results could not be stored as REVOKED.", err=True)


def tell_tally(tally: Tally, done: str, machine: bool) -> None:
    """Tell how many, of which locks, and what was left."""
    left = {why_not: number for why_not, number in tally.skipped.items() if number}
    if machine:
        return render.as_json(
            {"done": done, "total": tally.total, "locks": tally.done, "left": left}
        )
    most = tally.done.most_common(20)
    for name, number in most:
        render.say(f"{number:>9,}  {printable(name, render.WIDEST)}")
    if len(tally.done) > len(most):
        render.say(f"           … and {len(tally.done) - len(most):,} more locks")
    for why_not, number in left.items():
        render.say(f"{number:>9,}  left: {why_not}")
    return render.say(f"{tally.total:>9,}  {done}")


@click.command("drain")
@filters
@click.option(
    "--rate",
    type=click.FloatRange(0),
    default=100.0,
    show_default=True,
    help="Messages a second; 0 for no bound.",
)
@reason
@agreed
@dry
@as_json
@with_place
def drain_command(place: Place, rate: float, **how: Any) -> None:
    """Send parked tasks back to the broker, in their order: before this library is uninstalled.

    Workers that still lock park them again: roll out those without locks first.
    """
    app = place.need_app("drain")
    wanted = chosen(how)
    if how["dry_run"] or not how["yes"]:
        tally = count(place.store, wanted)
        if how["dry_run"] or not tally.total:
            return tell_tally(tally, "would be sent to the broker", how["machine"])
        render.ask(f"Send {tally.total:,} parked tasks back to the broker?")
    by = place.operator("drain", how["why_text"])
    with app.publisher() as publisher:
        tally = drain(
            place.store,
            wanted,
            by,
            realm=app.realm,
            publish=lambda each: sent(
                publisher.send_back, each.message, each.queue, each.attempt, each.place
            ),
            pace=Pace(rate),
        )
    place.announce(by, tally.done, "drain")
    return tell_tally(tally, "sent to the broker", how["machine"])


@click.command("export")
@filters
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file; else standard output.",
)
@reason
@with_place
def export_command(place: Place, output: Path | None, **how: Any) -> None:
    """Write parked tasks as lines of JSON, with their arguments; takes nothing away."""
    wanted = chosen(how)
    by = place.operator("export", how["why_text"])
    written = 0
    with _opened(output) as file:
        for line in export(place.store, wanted, by):
            file.write(f"{line}\n")
            written += 1
    place.announce(
        by, {wanted.lock if wanted.exact else SEVERAL: written} if written else {}, "export"
    )
    render.say(f"{written:,} parked tasks written", err=True)


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    """Give a file that only its owner reads: arguments of tasks may be secrets."""
    if output is None:
        yield sys.stdout
        return
    try:
        output.touch(0o600, exist_ok=False)
    except OSError as error:
        msg = f"{output} cannot be written ({error.strerror}): give a new file"
        raise click.UsageError(msg) from None
    with output.open("w", encoding="utf-8") as file:
        yield file


@click.command("import")
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option("--adopt", is_flag=True, help="The app's broker takes the place of theirs.")
@click.option("--again", is_flag=True, help="Also what was purged or has run; twice is twice.")
@reason
@dry
@as_json
@with_place
def import_command(place: Place, file: TextIO, **how: Any) -> None:
    """Park what export wrote, each at its place; twice is once."""
    realm = place.need_app("--adopt").realm if how["adopt"] else ""
    if how["dry_run"]:
        number = sum(1 for line in file if line.strip())
        return render.say(f"{number:>9,}  would be parked")
    by = place.operator("import", how["why_text"])
    tally = restore(place.store, file, by, realm=realm, again=how["again"])
    place.announce(by, tally.done, "import")
    return tell_tally(tally, "parked", how["machine"])

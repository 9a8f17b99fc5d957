"""Text for people, JSON for programs. The commands print here alone: see :func:`printable`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, Final

import click

from celery_singleton_lock.admin.lock_views import Detail
from celery_singleton_lock.admin.why import named, seconds, short
from celery_singleton_lock.core.model import Holder
from celery_singleton_lock.store.operator.base import Glance, Waiting
from celery_singleton_lock.message_text import number_of, printable

_GAP: Final = "  "

NARROWEST: Final = 12
"""Characters of a column that are shown however narrow the terminal is."""

WIDEST: Final = 60
"""Signs of a name that a table shows."""


def say(text: str, *, err: bool = False) -> None:
    """Print a line, with nothing in it that a terminal would obey."""
    click.echo(printable(text), err=err)


def show(lines: Iterable[str]) -> None:
    """Print lines, likewise."""
    click.echo("\n".join(map(printable, lines)))


def ask(question: str) -> None:
    """Ask a person, likewise.

    Raises:
        click.Abort: they do not agree.
    """
    click.confirm(printable(question), abort=True, err=True)


def as_json(value: Any) -> None:
    """Print a value as one document of JSON."""
    click.echo(json.dumps(_plain(value), default=str))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if hasattr(value, "_asdict"):
        fields = value._asdict()
        fields.pop("message", None)  # bytes, and somebody's arguments
        return {name: _plain(each) for name, each in fields.items()}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def width() -> int | None:
    """Return the width of the terminal; None if a program reads, which wants whole names."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], most: int | None = None
) -> list[str]:
    """Return the lines of a table.

    Args:
        headings: of the columns.
        rows: their cells.
        most: characters of a line; None for as many as it takes.
    """
    lines = [tuple(headings), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if most is not None:
        widths = _narrowed(widths, most)
        lines = [
            tuple(printable(cell, room) for cell, room in zip(cells, widths, strict=True))
            for cells in lines
        ]
    shape = "".join(f"%-{room}s{_GAP}" for room in widths[:-1]) + "%s"
    return [(shape % cells).rstrip() for cells in lines]


def _narrowed(widths: Sequence[int], most: int) -> list[int]:
    """Take from the widest columns what does not fit into a line."""
    narrowed = list(widths)
    over = sum(narrowed) + len(_GAP) * (len(narrowed) - 1) - most
    while over > 0 and max(narrowed) > NARROWEST:
        widest = narrowed.index(max(narrowed))
        narrowed[widest] -= 1
        over -= 1
    return narrowed


def _cells(row: Sequence[object]) -> tuple[str, ...]:
    cells = tuple(map(str, row))
    return cells if "".join(cells).isprintable() else tuple(map(printable, cells))


def lock_rows(locks: Iterable[Glance]) -> Iterable[Sequence[object]]:
    """Yield a row for each lock; see :data:`LOCK_HEADINGS`."""
    for lock in locks:
        name = printable(lock.name, WIDEST)
        if lock.broken:
            yield name, "?", "?", "", "", "another program's keys"
            continue
        held = f"{lock.held}/{lock.limit}" if lock.limit else str(lock.held)
        oldest = seconds(lock.oldest) if lock.waiting else ""
        lease = seconds(lock.holders[0].expires_in) if lock.holders else ""
        yield name, held, str(lock.waiting + lock.adrift), oldest, lease, _who(lock)


def summary(locks: Sequence[Glance], shown: int) -> str:
    """Return how many locks there are, and in which states.

    Args:
        locks: all that were found.
        shown: how many of them are in the table.
    """
    counts = {
        "held": sum(lock.held > 0 for lock in locks),
        "paused": sum(lock.paused for lock in locks),
        "of another program": sum(lock.broken for lock in locks),
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    waiting = sum(lock.waiting + lock.adrift for lock in locks)
    line = f"{number_of(len(locks), 'lock')}{f', {told}' if told else ''}; {waiting:,} in line"
    return line if shown == len(locks) else f"{line}; the first {shown:,} are shown"


LOCK_HEADINGS: Final = ("LOCK", "HELD", "WAITING", "OLDEST", "LEASE", "BY")


def _who(lock: Glance) -> str:
    told = [short(each) + _silence(each) for each in lock.holders]
    if lock.adrift:
        told.insert(0, f"{lock.adrift} without a worker")
    if lock.paused:
        told.insert(0, "PAUSED")
    return ", ".join(told)


def _silence(holder: Holder) -> str:
    return f", silent for {seconds(holder.silent)}" if holder.silent else ""


def detail(found: Detail) -> list[str]:
    """Return the lines that tell of one lock in full."""
    view = found.view
    set_by = ", set by an operator" if view.limit_set else ""
    waiting = f"{view.waiting:,} in line"
    if view.adrift:
        waiting += f", {view.adrift:,} for which no live worker consumes the queue"
    state = f"PAUSED ({view.paused})" if view.paused else "granted as usual"
    lines = [
        f"lock     {view.name}",
        f"state    {state}",
        f"limit    {view.limit or 'as its tasks declare'}{set_by}",
        f"fence    {view.fencing_token}",
        f"waiting  {waiting}; {number_of(view.bodies, 'message')} kept",
    ]
    for holder in view.holders:
        state = "silent" if holder.silent else holder.state
        state = "kept" if holder.token in found.elsewhere else state
        lines.append(f"holder   {named((holder,), found.elsewhere)}, {state}")
        lines.append(f"token    {holder.token}")
    if found.waiting:
        lines += ["", *table(_WAITING, _line(found.waiting))]
    return lines


_WAITING: Final = ("RANK", "AGE", "STATE", "TASK", "QUEUE", "TOKEN")


def _line(waiting: Sequence[Waiting]) -> Iterable[Sequence[object]]:
    for rank, each in enumerate(waiting, 1):
        in_line = each.state in {"parked", "waiting"}
        task = f"{each.task}[{each.task_id}]" if each.task else "a client"
        yield (rank if in_line else "", seconds(each.age), each.state, task, each.queue, each.token)


def audit_rows(entries: Iterable[dict[str, Any]]) -> Iterable[Sequence[object]]:
    """Yield a row for each entry of the audit."""
    for entry in entries:
        when = datetime.fromtimestamp(entry["at"], timezone.utc).isoformat(" ", "seconds")
        who = f"{entry.get('who', '?')}@{entry.get('host', '?')} ({entry.get('via', '?')})"
        what = f"{entry['action']} x{entry['count']}" if entry["count"] > 1 else entry["action"]
        what += f" {entry['to']}" if "to" in entry else ""
        lock = printable(entry["lock"], WIDEST)
        more = f" and {entry['more']:,} more" if "more" in entry else ""
        yield when, who, what, lock + more, entry.get("why", "")


AUDIT_HEADINGS: Final = ("WHEN", "WHO", "WHAT", "LOCK", "WHY")

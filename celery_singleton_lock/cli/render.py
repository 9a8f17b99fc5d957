"""Text for people, JSON for programs. No sign of a lock's name may rule a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, Final

import click

from celery_singleton_lock.admin.locks import Detail
from celery_singleton_lock.admin.why import named, seconds, short
from celery_singleton_lock.store.admin import Glance, Waiting
from celery_singleton_lock.words import number_of

WIDEST: Final = 60
"""Signs of a name that a table shows."""


def printable(text: str, most: int | None = None) -> str:
    """Return a text without signs that a terminal would obey, cut to ``most`` signs."""
    safe = text if text.isprintable() else "".join(map(_shown, text))
    return safe if most is None or len(safe) <= most else f"{safe[: most - 1]}…"


def _shown(sign: str) -> str:
    return sign if sign.isprintable() else sign.encode("unicode_escape").decode()


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


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in plain text; its last column is as wide as it likes."""
    lines = [tuple(headings), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shape = "".join(f"%-{width}s  " for width in widths[:-1]) + "%s"
    return "\n".join([(shape % cells).rstrip() for cells in lines])


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


LOCK_HEADINGS: Final = ("LOCK", "HELD", "WAITING", "OLDEST", "LEASE", "BY")


def _who(lock: Glance) -> str:
    told = [*map(short, lock.holders)]
    if lock.adrift:
        told.insert(0, f"{lock.adrift} without a worker")
    if lock.paused:
        told.insert(0, "PAUSED")
    return ", ".join(told)


def detail(found: Detail) -> str:
    """Return one lock in full."""
    view = found.view
    set_by = ", set by an operator" if view.limit_set else ""
    waiting = f"{view.waiting:,} in line"
    if view.adrift:
        waiting += f", {view.adrift:,} for which no live worker consumes the queue"
    state = f"PAUSED ({view.paused})" if view.paused else "granted as usual"
    lines = [
        f"lock     {printable(view.name)}",
        f"state    {printable(state)}",
        f"limit    {view.limit or 'as its tasks declare'}{set_by}",
        f"fence    {view.fencing_token}",
        f"waiting  {waiting}; {number_of(view.bodies, 'message')} kept",
    ]
    for holder in view.holders:
        state = "kept" if holder.token in found.elsewhere else holder.state
        lines.append(f"holder   {printable(named((holder,), found.elsewhere))}, {state}")
        lines.append(f"token    {printable(holder.token)}")
    if found.waiting:
        lines += ["", table(_WAITING, _line(found.waiting))]
    return "\n".join(lines)


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

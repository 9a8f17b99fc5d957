"""Text and JSON output. Commands print only with this module, which escapes control characters."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final

import click

from celery_singleton_lock.admin.lock_views import Detail, Ranking
from celery_singleton_lock.admin.why_sentences import named, of_call, seconds, short
from celery_singleton_lock.config.limits import NO_LIMIT
from celery_singleton_lock.core.lock_view import (
    SETTLING,
    Holder,
    LockView,
    RateInForce,
    WaitingGroup,
    WaitsFor,
)
from celery_singleton_lock.core.unique import FirstCall
from celery_singleton_lock.message_text import number_of, printable
from celery_singleton_lock.store.operator.base import Glance, Waiting

_GAP: Final = "  "

NARROWEST: Final = 12
"""Least width of a column, in characters, on a narrow terminal."""

WIDEST: Final = 60
"""Largest number of characters of a name in a table."""


def say(text: str, *, err: bool = False) -> None:
    """Print a line, with control characters escaped."""
    click.echo(printable(text), err=err)


def show(lines: Iterable[str]) -> None:
    """Print lines, with control characters escaped."""
    click.echo("\n".join(map(printable, lines)))


def ask(question: str) -> None:
    """Ask for confirmation.

    Raises:
        click.Abort: the answer is no.
    """
    click.confirm(printable(question), abort=True, err=True)


def as_json(value: Any) -> None:
    """Print a value as one JSON document."""
    click.echo(json.dumps(_plain(value), default=str))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if hasattr(value, "_asdict"):
        fields = value._asdict()
        fields.pop("message", None)  # bytes with the arguments of the task
        return {name: _plain(each) for name, each in fields.items()}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def width() -> int | None:
    """Return the width of the terminal; None if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], most: int | None = None
) -> list[str]:
    """Return the lines of a table.

    Args:
        headings: one for each column.
        rows: the cells of each row.
        most: largest length of a line in characters; None for no limit.
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
    """Shrink the widest columns until a line fits."""
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
        held = f"{lock.held}/{lock.limit}" if 0 < lock.limit < NO_LIMIT else str(lock.held)
        oldest = seconds(lock.oldest) if lock.waiting else ""
        lease = seconds(lock.holders[0].expires_in) if lock.holders else ""
        yield name, held, str(lock.waiting + lock.adrift), oldest, lease, _who(lock)


def summary(locks: Sequence[Glance], shown: int) -> str:
    """Return the number of locks by state.

    Args:
        locks: all locks that were found.
        shown: number of locks in the table.
    """
    counts = {
        "held": sum(lock.held > 0 for lock in locks),
        "paused": sum(lock.paused for lock in locks),
        "closed for a time": sum(lock.closed_for > 0 for lock in locks),
        "of another program": sum(lock.broken for lock in locks),
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    waiting = sum(lock.waiting + lock.adrift for lock in locks)
    line = f"{number_of(len(locks), 'lock')}{f', {told}' if told else ''}; {waiting:,} waiting"
    return line if shown == len(locks) else f"{line}; the first {shown:,} are shown"


def of_waited(ranking: Ranking, shown: int) -> str:
    """Return the number of locks with waiters.

    Args:
        ranking: these locks.
        shown: number of locks in the table.
    """
    total = number_of(ranking.total, "lock")
    line = f"{total} with waiters, now or lately; {ranking.waiting:,} waiting"
    return line if shown == ranking.total else f"{line}; the first {shown:,} are shown"


LOCK_HEADINGS: Final = ("LOCK", "HELD", "WAITING", "OLDEST", "LEASE", "BY")


def _who(lock: Glance) -> str:
    told = [short(each) + _not_running(each) for each in lock.holders]
    if told and lock.held > len(told):
        told.append(f"and {lock.held - len(told):,} more")
    if lock.adrift:
        told.insert(0, f"{lock.adrift} without a worker")
    if lock.rated and not lock.holders:
        told.insert(0, "its rate may be reached")
    if lock.groups:
        told.append(f"{number_of(lock.groups, 'group')} waiting")
    if lock.aside:
        told.append(f"{lock.aside:,} out of the queue")
    if lock.closed_for:
        told.insert(0, f"CLOSED for {seconds(lock.closed_for)}")
    if lock.paused:
        told.insert(0, f"PAUSED{f' for {seconds(lock.paused_for)}' if lock.paused_for else ''}")
    return ", ".join(told)


def _not_running(holder: Holder) -> str:
    if holder.silent:
        return f", silent for {seconds(holder.silent)}"
    return ", granted" if holder.state == "granted" else ""


def detail(found: Detail) -> list[str]:
    """Return the lines of ``show``."""
    view = found.view
    set_by = ", computed by a task" if view.limit_computed else ""
    if view.limit_set:
        set_by = _by_operator(view.limit_left)
    rates_by = _by_operator(view.rates_left)
    waiting = f"{view.waiting:,} in the queue"
    if view.adrift:
        waiting += f", {view.adrift:,} that no live worker takes"
    lines = [
        f"lock     {view.name}",
        f"state    {_state(view)}",
        f"limit    {_limit(view.limit)}{set_by}",
        *(f"rate     {_rate(rate)}{rates_by if rate.by_operator else ''}" for rate in view.rates),
        f"fence    {view.fencing_token}",
        f"waiting  {waiting}; {number_of(view.bodies, 'message')} stored",
        *_groups(view),
        *_calls(found.calls),
    ]
    for holder in view.holders:
        state = "silent" if holder.silent else holder.state
        state = "kept" if holder.token in found.elsewhere else state
        group = f", group {holder.group}" if holder.group else ""
        lines.append(f"holder   {named((holder,), found.elsewhere)}, {state}{group}")
        lines.append(f"token    {holder.token}")
        if holder.pid:
            lines.append(f"process  pid {holder.pid} on {holder.host}")
    if found.waiting:
        more = {name: of for name, of in _FLOW_COLUMNS.items() if any(map(of, found.waiting))}
        rows = [
            (*row, *(of(each) for of in more.values()))
            for row, each in zip(_line(found.waiting), found.waiting, strict=True)
        ]
        lines += ["", *table((*_WAITING, *more), rows)]
    return lines


def _groups(view: LockView) -> list[str]:
    """Return how many groups wait, and a line for each of the largest."""
    if not view.groups_waiting:
        return []
    left = view.groups_waiting - len(view.groups)
    more = f"; {left:,} are not shown" if left else ""
    return [f"groups   {view.groups_waiting:,} waiting{more}", *map(_group, view.groups)]


def _group(group: WaitingGroup) -> str:
    name = group.name or "(tasks without a group)"
    full = ", at its limit" if group.is_at_limit else ""
    return f"group    {name}: {group.waiting:,} waiting, {group.held:,} held{full}"


def _calls(calls: Sequence[FirstCall]) -> list[str]:
    """Return a line for each of the first unique calls."""
    lines = [f"unique   {call.key}: {_call(call)}" for call in calls[:_MOST_CALLS]]
    left = len(calls) - len(lines)
    return [*lines, f"unique   {number_of(left, 'more call')}"] if left else lines


_MOST_CALLS: Final = 10
"""Largest number of unique calls that are shown."""


def _call(call: FirstCall) -> str:
    return f"task {call.task_id} {of_call(call)}"


def _state(view: LockView) -> str:
    if view.waits_for is WaitsFor.REDIS:
        left = seconds(view.next_look)
        return f"granted to nobody for {left}: Redis was replaced or restarted (quarantine)"
    if view.waits_for is WaitsFor.RATE:
        later = f" for {seconds(view.next_look)}" if view.next_look else " now"
        return f"granted to nobody{later}: it has reached its rate"
    if view.waits_for is WaitsFor.GROUP:
        return "each group that waits holds as many permits as it may (lock_fair_limit)"
    left = f" for another {seconds(view.pause_left)}" if view.pause_left else ""
    closed = f"CLOSED for another {seconds(view.closed_for)}, {view.closed}"
    told = [f"PAUSED{left} ({view.paused})"] if view.paused else []
    told += [closed] if view.closed else []
    return "; ".join(told) or "granted as usual"


def _by_operator(left: float) -> str:
    """Return that an operator has set a value, and for how long."""
    return ", set by an operator" + (f" for another {seconds(left)}" if left else "")


def _limit(limit: int) -> str:
    return "none" if limit == NO_LIMIT else str(limit or "as its tasks declare")


def _rate(rate: RateInForce) -> str:
    return (
        str(rate)
        if rate.is_smooth or rate.by_cost
        else f"{rate}: {rate.started:,} in the last period"
    )


_FLOW_COLUMNS: Final[Mapping[str, Callable[[Waiting], str]]] = {
    "HEAD START": lambda each: f"{each.head_start:+.10g} s" if each.head_start else "",
    "QUEUES IN": lambda each: seconds(each.settles_for) if each.state == SETTLING else "",
    "GROUP": lambda each: each.group.name if each.group else "",
}
"""Columns that are shown only if a task has a value for them."""

_WAITING: Final = ("RANK", "AGE", "STATE", "TASK", "QUEUE", "TOKEN")


def _line(waiting: Sequence[Waiting]) -> Iterable[Sequence[object]]:
    for rank, each in enumerate(waiting, 1):
        in_line = each.state in {"parked", "waiting"}
        task = f"{each.task}[{each.task_id}]" if each.task else "a client"
        yield (rank if in_line else "", seconds(each.age), each.state, task, each.queue, each.token)


def audit_rows(entries: Iterable[dict[str, Any]]) -> Iterable[Sequence[object]]:
    """Yield a row for each audit entry."""
    for entry in entries:
        when = datetime.fromtimestamp(entry["at"], timezone.utc).isoformat(" ", "seconds")
        who = f"{entry.get('who', '?')}@{entry.get('host', '?')} ({entry.get('via', '?')})"
        what = f"{entry['action']} x{entry['count']}" if entry["count"] > 1 else entry["action"]
        what += f" {entry['to']}" if "to" in entry else ""
        if "until" in entry:
            ends = datetime.fromtimestamp(entry["until"], timezone.utc)
            what += f" until {ends.isoformat(' ', 'seconds')}"
        lock = printable(entry["lock"], WIDEST)
        more = f" and {entry['more']:,} more" if "more" in entry else ""
        yield when, who, what, lock + more, entry.get("why", "")


AUDIT_HEADINGS: Final = ("WHEN", "WHO", "WHAT", "LOCK", "WHY")

"""Locks, holders and waiters as values for JSON. Texts are cut and made printable here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from celery_singleton_lock.admin import Glance, Waiting
from celery_singleton_lock.core.lock_view import Holder, LockView, WaitsFor
from celery_singleton_lock.core.unique import FirstCall
from celery_singleton_lock.message_text import printable

HOLDERS: Final = 5
"""Largest number of holders of a lock in a list."""

SHORT: Final = 200
"""Largest number of characters of a name in a list."""

_VISIBLE: Final = {code: 0x2400 + code for code in range(32)} | {127: 0x2421}
"""Control characters -> the symbols that Unicode has for them."""


def id_of(name: str) -> str:
    """Return an id of fixed length for a lock name of any length."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def visible(text: str, longest: int) -> str:
    """Return a text that is cut to a length, with symbols in place of control characters.

    Other characters that cannot be printed are escaped: a bidirectional mark would reverse the rest
        of the line.
    """
    cut = text[: longest - 1] + "…" if len(text) > longest else text
    return printable(cut.translate(_VISIBLE).encode("utf-8", "replace").decode())


def holder_values(holder: Holder, now: float) -> dict[str, Any]:
    """Return the values of a holder.

    Args:
        holder: the holder.
        now: server time in seconds.
    """
    return {
        "token": holder.token,
        "task": visible(holder.task, SHORT),
        "task_id": visible(holder.task_id, SHORT),
        "worker": visible(holder.worker.rpartition("#")[0] or holder.worker, SHORT),
        "client": "" if holder.task else visible(str(holder), SHORT),
        "state": "silent" if holder.silent else holder.state,
        "silent_for": holder.silent,
        "left": holder.expires_in,
        "group": visible(holder.group, SHORT),
        "held_for": max(0.0, now - holder.since) if holder.since else 0.0,
        "fence": str(holder.fencing_token),  # has more digits than a number in JavaScript
    }


def waiter_values(waiter: Waiting, rank: int) -> dict[str, Any]:
    """Return the values of a waiter. Rank 0: it is not in the queue."""
    return {
        "rank": rank,
        "token": waiter.token,
        "task": visible(waiter.task, SHORT),
        "task_id": visible(waiter.task_id, SHORT),
        "state": waiter.state,
        "age": waiter.age,
        "head_start": waiter.head_start,
        "settles_for": waiter.settles_for,
        "queue": visible(waiter.queue, SHORT),
        "group": visible(waiter.group.name, SHORT) if waiter.group else "",
    }


def call_values(call: FirstCall) -> dict[str, Any]:
    """Return the values of a unique call that counts as sent."""
    return {
        "key": visible(call.key, SHORT),
        "task_id": visible(call.task_id, SHORT),
        "state": call.state,
        "age": call.age,
        "expires_in": call.expires_in,
        "followers": call.followers,
    }


def audit_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an audit entry."""
    return {
        "at": entry["at"],
        "who": visible(str(entry.get("who", "?")), SHORT),
        "host": visible(str(entry.get("host", "?")), SHORT),
        "via": visible(str(entry.get("via", "?")), SHORT),
        "action": visible(str(entry["action"]), SHORT),
        "to": visible(str(entry.get("to", "")), SHORT),
        "until": entry.get("until", 0),
        "count": entry["count"],
        "lock": visible(str(entry["lock"]), SHORT),
        "more": entry.get("more", 0),
        "why": visible(str(entry.get("why", "")), 3 * SHORT),
    }


def ranked(waiting: Sequence[Waiting]) -> Iterable[tuple[int, Waiting]]:
    """Yield waiters with their ranks. Rank 0: the waiter is not in the queue."""
    rank = 0
    for each in waiting:
        in_queue = each.state in {"parked", "waiting"}
        rank += in_queue
        yield (rank if in_queue else 0), each


def totals(view: LockView) -> dict[str, Any]:
    """Return the numbers of a lock."""
    return {
        "limit": view.limit,
        "rates": [str(rate) for rate in view.rates],
        "operator_rates": [rate.by_operator for rate in view.rates],
        "paused": view.paused,
        "closed": view.closed,
        "closed_for": view.closed_for,
        "pause_left": view.pause_left,
        "limit_by": limit_by(view),
        "limit_left": view.limit_left,
        "rates_set": view.rates_set,
        "rates_left": view.rates_left,
        "held": len(view.holders),
        "waiting": view.waiting,
        "adrift": view.adrift,
        "counters": dict(view.counters),
        "groups_waiting": view.groups_waiting,
        "groups": [
            {**group._asdict(), "name": visible(group.name, SHORT)} for group in view.groups
        ],
    }


def limit_by(view: LockView) -> str:
    """Return who has set the limit: ``operator``, ``arguments`` (of a task), or ``tasks``."""
    if view.limit_set:
        return "operator"
    return "arguments" if view.limit_computed else "tasks"


def glance_of(view: LockView, now: float) -> Glance:
    """Return the summary of a lock.

    Args:
        view: the lock, with its first waiter.
        now: server time in seconds.
    """
    oldest = max((now - w.since for w in view.waiters if w.since), default=0.0)
    queues = view.waiting or view.adrift
    return Glance(
        view.name,
        len(view.holders),
        view.waiting,
        view.adrift,
        view.bodies,
        view.limit,
        bool(view.paused),
        max(0.0, oldest),
        view.holders[:HOLDERS],
        rated=view.waits_for is WaitsFor.RATE,
        grouped=view.waits_for is WaitsFor.GROUP,
        paused_for=view.pause_left,
        closed_for=view.closed_for,
        groups=view.groups_waiting,
        aside=0 if queues else max(0, view.bodies - len(view.holders)),
    )


def locks_in(stats: Mapping[str, Any]) -> list[str]:
    """Return the names of the locks of tasks in a worker's pool, from the worker's ``stats``."""
    section = stats.get("singleton_lock")
    in_flight = section.get("in_flight") if isinstance(section, Mapping) else None
    return [str(name) for name in in_flight] if isinstance(in_flight, Mapping) else []

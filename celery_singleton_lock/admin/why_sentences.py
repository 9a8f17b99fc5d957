"""The sentences of ``why``: what a task waits for, or what it does."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from celery_singleton_lock.core.lock_view import HELD_AFTER, Holder, LockView, WaitsFor
from celery_singleton_lock.message_text import nth, printable
from celery_singleton_lock.store.operator.base import Waiting

NAMED: Final = 3
"""Largest number of holders that a sentence names."""


def of_holder(view: LockView, holder: Holder) -> tuple[str, str]:
    """Return the state of a holder, and a sentence about it.

    Args:
        view: the lock.
        holder: one of its holders.
    """
    left = f"lease {seconds(holder.expires_in)} left"
    sentences = {
        "granted": f"granted to {worker_name(holder.worker) or 'its client'}, not started, {left}",
        "reserved": f"waits for its retry, for which {view.name!r} is reserved, {left}",
        HELD_AFTER: f"has succeeded; {view.name!r} stays held {_for_another(holder)}",
        "running": f"runs{_on(holder)}, holds {view.name!r}, {left}",
        "silent": (
            f"ran{_on(holder)}, which has shown no sign of life for {seconds(holder.silent)}; if "
            f"it is dead, {view.name!r} is free in {seconds(holder.expires_in)} at the latest"
        ),
    }
    state = "silent" if holder.silent else holder.state
    state = state if state in sentences else "running"
    return state, sentences[state]


def without_worker(view: LockView, me: Waiting, rank: int) -> str:
    """Return a sentence about a waiter of a free lock whose queue no live worker consumes."""
    return (
        f"has waited {seconds(me.age)}; {view.name!r} is free, {ordinal(rank)}, but no live worker "
        f"consumes the queue {me.queue!r}: start one (celery worker -Q {me.queue})"
    )


def of_waiter(view: LockView, me: Waiting, rank: int, elsewhere: Mapping[str, str]) -> str:
    """Return a sentence about a waiter.

    Args:
        view: the lock.
        me: the waiter.
        rank: its rank in the queue; 0: it is not in the queue.
        elsewhere: owner token -> name of the other lock for which that holder waits.
    """
    for_long = seconds(me.age)
    match me.state:
        case "delayed":
            times = "time" if me.returns == 1 else "times"
            again = "it is back in the queue within a minute, behind other waiters"
            return f"has started and returned unfinished {me.returns} {times}: {again}"
        case "overdue" | "replaced" | "revoked" | "rejected":
            return (
                f"{_VERDICTS[me.state]} after {for_long}; waits for a worker that consumes the "
                f"queue {me.queue!r} to end it"
            )
        case "leaving":
            return (
                f"is being sent back to the broker's queue {me.queue!r}: no live worker consumes "
                "that queue, or the task is drained; if it cannot be sent, it is parked again "
                "within a minute"
            )
        case "adrift":
            return (
                f"has waited {for_long} and is next, but no live worker consumes the queue "
                f"{me.queue!r}: start one (celery worker -Q {me.queue})"
            )
        case "granted" | "running":  # its lease has ended, and no sweep has noticed it yet
            return _lapsed(view, me)
        case _:
            return _in_line(view, me, rank, elsewhere)


def _lapsed(view: LockView, me: Waiting) -> str:
    then = "queues it again" if me.size else "frees the lock"
    return (
        f"its lease of {view.name!r} has ended, and its worker has not renewed it; a live worker "
        f"{then} within two seconds; locks doctor shows whether one lives"
    )


def _in_line(view: LockView, me: Waiting, rank: int, elsewhere: Mapping[str, str]) -> str:
    for_long = seconds(me.age)
    if view.waits_for is WaitsFor.REDIS:
        left = seconds(view.next_look)
        return (
            f"has waited {for_long}; the locks' Redis was replaced or restarted, and grants "
            f"nothing for another {left} (singleton_lock_quarantine), {ordinal(rank)}"
        )
    if view.paused:
        return f"has waited {for_long}; {view.name!r} is paused ({view.paused}), {ordinal(rank)}"
    if not view.holders:
        free = f"{view.name!r} is free, {ordinal(rank)}"
        return f"has waited {for_long}; {free}: the next sweep grants it"
    return f"blocked {for_long} by {named(view.holders, elsewhere)}, {ordinal(rank)}"


_VERDICTS = {
    "overdue": "timed out (lock_wait_timeout)",
    "replaced": "replaced by a later task",
    "revoked": "revoked",
    "rejected": "rejected by its task",
}


def _for_another(holder: Holder) -> str:
    return f"for another {seconds(holder.expires_in)} (lock_hold_for)"


def _on(holder: Holder) -> str:
    return f" on {worker_name(holder.worker)}" if holder.worker else ""


def named(holders: tuple[Holder, ...], elsewhere: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the holders as text, each with the rest of its lease.

    Args:
        holders: the holders of a lock.
        elsewhere: owner token -> name of the other lock for which that holder waits.
    """
    told = []
    for holder in holders[:NAMED]:
        other = elsewhere.get(holder.token)
        kept = "" if other is None else f" (which waits for {other!r})"
        told.append(f"{short(holder)}{kept}{_lease(holder)}")
    more = len(holders) - NAMED
    return "; ".join(told) + (f" and {more} more" if more > 0 else "")


def _lease(holder: Holder) -> str:
    left = seconds(holder.expires_in)
    if holder.state == HELD_AFTER:
        return f", which has succeeded; held {_for_another(holder)}"
    if not holder.silent:
        return f", lease {left} left"
    silence = seconds(holder.silent)
    return f" (no sign of life for {silence}; if it is dead, free in {left} at the latest)"


def short(holder: Holder) -> str:
    """Return a holder as short printable text, such as ``settle[3f2a91c0] on worker-2``."""
    if not holder.task_id:  # a client, or a test's hold()
        return str(holder)
    return printable(f"{holder.task.rpartition('.')[2]}[{holder.task_id[:8]}]{_on(holder)}")


def worker_name(worker: str) -> str:
    """Return the node name in a worker's id."""
    return worker.rpartition("#")[0] or worker


def ordinal(rank: int) -> str:
    """Return a rank as a clause, such as ``you are 3rd``; 0 is not in the queue."""
    if rank < 1:
        return "not in the queue"
    return "you are next" if rank == 1 else f"you are {nth(rank)}"


def seconds(duration: float) -> str:
    """Return a duration as text: ``0.4 s``, ``41 s``, ``7 min 3 s``, ``5 h 2 min``."""
    if duration < 10:  # noqa: PLR2004  # below that with tenths
        return f"{duration:.1f} s"
    whole = round(duration)
    for unit, name, below in ((86_400, "d", "h"), (3600, "h", "min"), (60, "min", "s")):
        if whole >= 2 * unit or (unit > 60 and whole >= unit):  # noqa: PLR2004
            return f"{whole // unit} {name} {whole % unit // _UNITS[below]} {below}"
    return f"{whole} s"


_UNITS = {"h": 3600, "min": 60, "s": 1}

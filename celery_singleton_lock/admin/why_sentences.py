"""The sentences of ``why``: what a task waits for, or what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from types import MappingProxyType
from typing import Final, NamedTuple

from celery_singleton_lock.core.lock_view import HELD_AFTER, Holder, LockView, WaitsFor
from celery_singleton_lock.core.unique import EntryState, FirstCall
from celery_singleton_lock.message_text import nth, number_of, printable
from celery_singleton_lock.store.operator.base import Waiting

NAMED: Final = 3
"""Largest number of holders that a sentence names."""


class Takers(NamedTuple):
    """The live workers that could take a parked message.

    Args:
        lock: those that consume its queue and declare its task as a LockedTask.
        plain: those that consume its queue and do not declare its task.
        silent: those that consume its queue, by the answers through the broker, and send no
            heartbeat.
    """

    lock: Sequence[str] = ()
    plain: Sequence[str] = ()
    silent: Sequence[str] = ()


def of_holder(view: LockView, holder: Holder) -> tuple[str, str]:
    """Return the state of a holder, and a sentence about it.

    Args:
        view: the lock.
        holder: one of its holders.
    """
    left = f"lease {seconds(holder.expires_in)} left"
    sentences = {
        "granted": f"{_granted(holder)}, {left}",
        "reserved": f"waits for its retry, for which {view.name!r} is reserved, {left}",
        HELD_AFTER: f"has succeeded; {view.name!r} stays held {_for_another(holder)}",
        "running": f"runs{_on(holder)}, holds {view.name!r}, {left}",
        "preempted": (
            f"runs{_on(holder)}, holds {view.name!r}, and must end, since a newer call of its task "
            f'waits for {view.name!r} (lock_on_conflict="preempt"); {left}'
        ),
        "silent": (
            f"ran{_on(holder)}, which has shown no sign of life for {seconds(holder.silent)}; if "
            f"it is dead, {view.name!r} is free in {seconds(holder.expires_in)} at the latest"
        ),
    }
    state = "silent" if holder.silent else holder.state
    state = state if state in sentences else "running"
    return state, sentences[state]


def _granted(holder: Holder) -> str:
    if not holder.worker:
        return "granted to its client, not started"
    place = "on its way there, or waits there for a free pool slot"
    return f"granted to {worker_name(holder.worker)}, not started: {place}"


def without_worker(view: LockView, me: Waiting, rank: int, takers: Takers) -> str:
    """Return a sentence about a waiter of a free lock that no live worker takes."""
    free = f"{view.name!r} is free, {ordinal(rank)}"
    return f"has waited {seconds(me.age)}; {free}, but {_no_taker(me, takers)}"


def _no_taker(me: Waiting, takers: Takers) -> str:
    """Return as a clause why no live worker takes a message, and what to do."""
    drain = f"to run without a lock ({drain_command(me)})"
    if takers.plain:
        told = f"{plain_takers(me, takers.plain)}: deploy the version that does, or {_SEND} {drain}"
        return f"{told}. {_SENT_BACK}"
    if takers.silent:
        several = len(takers.silent) > 1
        consume = "consume" if several else "consumes"
        send, they = ("send", "they are") if several else ("sends", "it is")
        do, logs = ("do", "their logs") if several else ("does", "its log")
        return (
            f"{_names(takers.silent)} {consume} the queue {me.queue!r} and {send} no heartbeat to "
            f"the locks' Redis: {they} of a version without locks, or {do} not reach this Redis "
            f"(see {logs}). Start a worker with locks, or {_SEND} {drain}; a worker without the "
            "task would discard them"
        )
    start = f"start one (celery worker -Q {me.queue})"
    return f"no live worker with locks consumes the queue {me.queue!r}: {start}"


_SEND: Final = "send such tasks back"
_SENT_BACK: Final = (
    "A worker without the task would discard them; one that has it as a plain task sends it back "
    "by itself after 5 s; locks pause prevents that"
)


def plain_takers(me: Waiting, workers: Sequence[str]) -> str:
    """Return as a clause that workers consume a message's queue and do not lock its task.

    Args:
        me: the message.
        workers: ids of the workers; at least one.
    """
    consume, do = ("consume", "do") if len(workers) > 1 else ("consumes", "does")
    return (
        f"{_names(workers)} {consume} the queue {me.queue!r} and {do} not declare {me.task!r} as a "
        "LockedTask"
    )


def drain_command(me: Waiting) -> str:
    """Return the command that sends a message, and those like it, back to the broker."""
    return f"locks drain --queue {quote(me.queue)} --task {quote(me.task)}"


def _names(workers: Sequence[str]) -> str:
    shown = [worker_name(each) for each in sorted(workers)]
    more = len(shown) - NAMED
    if more > 0:
        return f"{', '.join(shown[:NAMED])} and {more} more"
    *first, last = shown
    return f"{', '.join(first)} and {last}" if first else last


def of_waiter(
    view: LockView, me: Waiting, rank: int, elsewhere: Mapping[str, str], takers: Takers
) -> str:
    """Return a sentence about a waiter.

    Args:
        view: the lock.
        me: the waiter.
        rank: its rank in the queue; 0: it is not in the queue.
        elsewhere: owner token -> name of the other lock for which that holder waits.
        takers: the workers that could take its message.
    """
    match me.state:
        case "delayed" | "settling" | "following":
            return _out_of_queue_for_a_time(view, me)
        case "overdue" | "replaced" | "revoked" | "rejected" | "too_costly" | "above_rate":
            return _to_be_ended(me, takers)
        case "leaving":
            return (
                f"is being sent back to the broker's queue {me.queue!r}: no live worker that locks "
                "the task consumes that queue, or the task is drained; if it cannot be sent, it is "
                "parked again within a minute"
            )
        case "adrift":
            return _adrift(me, takers)
        case "granted" | "running":  # its lease has ended, and no sweep has noticed it yet
            return _lapsed(view, me)
        case _:
            return _in_line(view, me, rank, elsewhere)


def _following(view: LockView, me: Waiting) -> str:
    if me.worker:  # it was delivered there
        return (
            f"follows {me.follows}, which has ended or was lost: {me.worker} ends it with that "
            "result when it has a slot and the result backend answers (lock_on_duplicate)"
        )
    if me.comes_again:
        return (
            f"follows {me.follows}, which has ended or was lost. A worker could not end it with "
            "that result, and it is tried again within a minute. If the result backend does not "
            "answer, the worker's log says so (lock_on_duplicate)"
        )
    return (
        f"follows {me.follows}, which was sent before and has the lock {view.name!r} or waits "
        f"for it, for {seconds(me.age)}: it ends with its result, or runs itself if there is "
        "none (lock_on_duplicate)"
    )


def _out_of_queue_for_a_time(view: LockView, me: Waiting) -> str:
    if me.state == "following":
        return _following(view, me)
    if me.state == "settling":
        return (
            f"has settled for {seconds(me.age)}: it queues for {view.name!r} in "
            f"{seconds(me.settles_for)}, if no later call of its task comes and replaces it "
            "(lock_debounce)"
        )
    again = "it is back in the queue within a minute, behind other waiters"
    if me.refused:
        return f"does not start, since Redis refuses {me.refused!r}, which it takes, too: {again}"
    times = "time" if me.returns == 1 else "times"
    return f"has started and returned unfinished {me.returns} {times}: {again}"


def of_call(call: FirstCall) -> str:
    """Return the state of a unique call that counts as sent, and how many follow it."""
    if call.state == EntryState.PENDING.value:
        told = "is being sent"
    elif call.expires_in is not None:
        told = f"is in the broker, and counts as sent for another {seconds(call.expires_in)}"
    else:
        told = f"is {call.state}, and came {seconds(call.age)} ago"
    return f"{told}{_followers(call)}"


def _followers(call: FirstCall) -> str:
    if not call.followers:
        return ""
    wait = "waits" if call.followers == 1 else "wait"
    return f"; {number_of(call.followers, 'duplicate')} {wait} for its result"


def of_uniqueness(call: FirstCall | None) -> str:
    """Return a clause on the calls that are like it; empty if the task does not count as sent."""
    return "" if call is None else f"; calls like it are duplicates (lock_unique){_followers(call)}"


def of_priority(me: Waiting, passed_by: int, is_all: bool) -> str:
    """Return the effect of priority on a waiter, as a clause; empty if there is none.

    Args:
        me: the waiter.
        passed_by: how many of those before it arrived later.
        is_all: whether all of those before it were read.
    """
    told = ""
    if me.head_start > 0:
        start = seconds(me.head_start)
        shown = "less than 0.1 s" if start == "0.0 s" else start
        told = f"; it has a head start of {shown} (lock_priority, or promoted)"
    elif me.head_start < 0:
        told = f"; it lets later tasks pass for {seconds(-me.head_start)} (lock_priority)"
    if passed_by:
        least, tasks = "" if is_all else "at least ", "task" if passed_by == 1 else "tasks"
        told += f"; {least}{passed_by} {tasks} with priority passed it"
    return told


def _to_be_ended(me: Waiting, takers: Takers) -> str:
    told = (
        f"{_VERDICTS[me.state]} after {seconds(me.age)}; waits for a worker that consumes the "
        f"queue {me.queue!r} to end it"
    )
    if takers.lock or not takers.plain:
        return told
    return f"{told}, but {plain_takers(me, takers.plain)}: deploy the version that does"


def _adrift(me: Waiting, takers: Takers) -> str:
    for_long = seconds(me.age)
    if takers.lock:
        return (
            f"has waited {for_long}; a live worker now takes it from the queue {me.queue!r}: the "
            "next sweep queues it again"
        )
    return f"has waited {for_long} and is next, but {_no_taker(me, takers)}"


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
        left = f" for another {seconds(view.pause_left)}" if view.pause_left else ""
        paused = f"{view.name!r} is paused{left} ({view.paused})"
        return f"has waited {for_long}; {paused}, {ordinal(rank)}"
    if view.closed:
        closed = f"is closed for another {seconds(view.closed_for)}, {view.closed}"
        return f"has waited {for_long}; {view.name!r} {closed}, {ordinal(rank)}"
    if view.waits_for in {WaitsFor.RATE, WaitsFor.GROUP}:
        return f"has waited {for_long}; {_beside_a_free_permit(view, rank)}"
    if not view.holders:
        free = f"{view.name!r} is free, {ordinal(rank)}"
        return f"has waited {for_long}; {free}: the next sweep grants it"
    blocked = f"blocked {for_long} by {named(view.holders, elsewhere)}, {ordinal(rank)}"
    return blocked + (_limit_set(view) if view.limit_set else "")


def _limit_set(view: LockView) -> str:
    left = f" for another {seconds(view.limit_left)}" if view.limit_left else ""
    return f"; an operator has set the limit {view.limit}{left}"


def _beside_a_free_permit(view: LockView, rank: int) -> str:
    if view.waits_for is WaitsFor.GROUP:
        return (
            f"each group that waits for {view.name!r} holds as many permits as it may "
            f"(lock_fair_limit), {ordinal(rank)} by arrival"
        )
    later = f"; the next one may start in {seconds(view.next_look)}" if view.next_look else ""
    rates = ", ".join(
        f"{rate}, set by an operator" if rate.by_operator else str(rate) for rate in view.rates
    )
    return f"{view.name!r} has reached its rate ({rates}), {ordinal(rank)}{later}"


_VERDICTS = {
    "overdue": "timed out (lock_wait_timeout)",
    "replaced": "replaced by a later task",
    "revoked": "revoked",
    "rejected": "rejected by its task",
    "above_rate": "found above the rate of its lock (lock_on_rate)",
    "too_costly": "found to cost more than the rate of its lock",
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

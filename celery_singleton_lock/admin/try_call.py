"""Say what would happen to a call of a locked task now. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from celery_singleton_lock.admin.lock_views import waiting_in
from celery_singleton_lock.admin.silent_holders import with_silent_holders
from celery_singleton_lock.admin.why_sentences import named, seconds
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import Facts, Outcome, outcome_of
from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_mode import ENFORCE
from celery_singleton_lock.core.lock_set import Key
from celery_singleton_lock.core.lock_view import Holder, LockView, WaitsFor
from celery_singleton_lock.core.model import Reply, Verdict
from celery_singleton_lock.core.unique import EntryState, SentCall
from celery_singleton_lock.message_text import nth, number_of
from celery_singleton_lock.store.operator.base import AdminStore

REPLACE: Final = "replace"
"""Outcome of a call that would be parked in place of the oldest waiting message of its task."""

DUPLICATE: Final = "duplicate"
"""Outcome of a call that its sender would not send."""

FOLLOW: Final = "follow"
"""Outcome of a call that would be sent, and would end with the result of an earlier one."""


@dataclass(frozen=True, slots=True)
class LockNow:
    """A lock that a call would take, as it is now.

    Args:
        name: the lock's name.
        limit: permits that would be in force for the call.
        held: number of holders.
        waiting: number of waiters.
        waits_for: what the call would wait for (``redis``, ``pause``, ``holder``, ``rate``,
            ``group``, ``queue``); empty if it would get the lock.
        told: the state of the lock, as text that follows "is".
        holders: the holders of the lock.
    """

    name: str
    limit: int
    held: int = 0
    waiting: int = 0
    waits_for: str = ""
    told: str = "free"
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would happen to a call now.

    Args:
        outcome: ``run``, ``run-unlocked``, ``park``, ``wait``, ``requeue``, ``skip``, ``fail``,
            ``skip-full``, ``fail-full``, ``replace``, ``duplicate`` or ``follow``.
        sentence: the same as a sentence.
        lock: the lock for which it would wait; empty if all are free.
        rank: the rank that it would have in the queue of that lock; 0 if it would not queue.
        locks: all its locks, in the order in which it would acquire them.
        duplicate_of: id of the task that was sent before, with the outcome ``duplicate`` or
            ``follow``.
    """

    outcome: str
    sentence: str
    lock: str = ""
    rank: int = 0
    locks: tuple[LockNow, ...] = ()
    duplicate_of: str = ""


def not_sent(forecast: Forecast, call: SentCall, options: LockOptions) -> Forecast:
    """Return the forecast for a call that is like one that counts as sent.

    Args:
        forecast: what would happen if it were sent.
        call: the one that counts.
        options: the task's options.
    """
    raised = ": DuplicateTask would be raised" if options.on_duplicate == "raise" else ""
    told = f"It would not be sent{raised}. Task {call.task_id} "
    follows = options.on_duplicate == "follow"
    if follows:
        told = f"It would be sent to have the result of task {call.task_id}, which "
    match call.state:
        case EntryState.PENDING:
            sender_died = "runs itself" if follows else "is sent after a second"
            told += f"is being sent. If its sender has died, this call {sender_died}"
        case EntryState.PARKED_OR_HELD:
            told += "is parked, or holds the lock"
        case _:
            told += f"was sent before, and counts for another {seconds(call.expires_in or 0.0)}"
    told += " (lock_unique)."
    outcome = FOLLOW if follows else DUPLICATE
    return replace(
        forecast, outcome=outcome, sentence=told, lock="", rank=0, duplicate_of=call.task_id
    )


def try_call(
    store: AdminStore,
    task: str,
    keys: Sequence[Key],
    options: LockOptions,
    realm: str = "",
) -> Forecast:
    """Return what would happen to a call if a worker received it now.

    Args:
        store: the store of the locks.
        task: name of the task.
        keys: the locks that the call takes, in order. None as a limit: that of the task.
        options: the task's options, with the mode that is in force.
        realm: the realm of the app's broker.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    views = [
        (with_silent_holders(store, store.inspect(key.name, waiters=0)), key.limit) for key in keys
    ]
    locks = tuple(_now(view, limit or options.limit, options.group) for view, limit in views)
    if options.mode != ENFORCE:
        told = f"It would start at once, without a lock: its mode is {options.mode}."
        return Forecast(Outcome.RUN_UNLOCKED.value, told, locks=locks)
    if options.debounce is not None and options.debounce_first == "wait":
        told = (
            f"It would settle for {seconds(options.debounce)}, and a later call may replace it "
            f"meanwhile (lock_debounce). Then it would queue for {locks[0].name!r}."
        )
        return Forecast(Outcome.PARK.value, told, locks[0].name, locks=locks)
    at = next((n for n, lock in enumerate(locks) if lock.waits_for), None)
    if at is None:
        under = f"{locks[0].name!r}" if len(locks) == 1 else f"all {len(locks)} locks"
        return Forecast(Outcome.RUN.value, f"It would start at once, under {under}.", locks=locks)
    busy, view = locks[at], views[at][0]
    full = options.max_waiting is not None and busy.waiting >= options.max_waiting
    reply = Reply(Verdict.BLOCKED, waits_for=WaitsFor(busy.waits_for))
    outcome = outcome_of(options, reply, Facts()).value
    if full and outcome in _QUEUED:
        outcome = outcome_of(options, Reply(Verdict.FULL), Facts()).value
        if options.on_full == REPLACE and _has_message_of(store, view.name, task, realm):
            outcome = REPLACE
    told = f"It would {_fate(outcome, busy, options)}: {busy.name!r} is {busy.told}."
    if at and outcome in {*_QUEUED, REPLACE}:
        kept = ", ".join(repr(lock.name) for lock in locks[:at])
        told += f" It would hold {kept} meanwhile."
    rank = busy.waiting + 1 if outcome in _QUEUED else 0
    return Forecast(outcome, told, busy.name, rank, locks)


_QUEUED: Final = frozenset({Outcome.PARK.value, Outcome.WAIT.value})


def _now(view: LockView, wanted: int, group: Group | None) -> LockNow:
    """Return a lock as a call with this limit and group finds it."""
    waiting = view.waiting + view.adrift
    idle = not view.holders and not waiting
    own = idle or view.limit_computed
    limit = view.limit if view.limit_set else wanted if own else min(view.limit or wanted, wanted)
    held = len(view.holders)
    reason, told = _reason(view, held, limit, group)
    return LockNow(view.name, limit, held, waiting, reason, told, view.holders)


def _reason(view: LockView, held: int, limit: int, group: Group | None) -> tuple[str, str]:
    """Return what a call would wait for, and the state of the lock as it follows "is"."""
    if view.waits_for is WaitsFor.REDIS:
        left = seconds(view.next_look)
        told = f"in quarantine for another {left}, since its Redis was replaced or restarted"
        return WaitsFor.REDIS.value, f"{told} (singleton_lock_quarantine)"
    if view.paused or view.closed:
        left = f" for another {seconds(view.pause_left)}" if view.pause_left else ""
        closed = f"closed for another {seconds(view.closed_for)}, {view.closed}"
        return WaitsFor.PAUSE.value, f"paused{left} ({view.paused})" if view.paused else closed
    if held >= limit:
        return WaitsFor.HOLDER.value, f"held by {named(view.holders)}"
    if view.waits_for is WaitsFor.RATE:
        later = (
            f", and the next one may start in {seconds(view.next_look)}" if view.next_look else ""
        )
        return WaitsFor.RATE.value, f"above its rate ({', '.join(map(str, view.rates))}){later}"
    return _reason_in_queue(view, held, limit, group)


def _reason_in_queue(view: LockView, held: int, limit: int, group: Group | None) -> tuple[str, str]:
    """As :func:`_reason`, for a lock that has a free permit and is below its rate."""
    if group is not None and group.limit is not None:
        mine = sum(holder.group == group.name for holder in view.holders)
        if mine >= group.limit:
            told = f"free, but the group {group.name!r} holds as many permits as it may"
            return WaitsFor.GROUP.value, f"{told} (lock_fair_limit)"
    passes_all = view.waits_for is WaitsFor.GROUP  # the groups that wait are at their limits
    if not passes_all and held + view.waiting >= limit:
        return WaitsFor.QUEUE.value, f"free, and {number_of(view.waiting, 'waiter')} before"
    return "", "free"


def _has_message_of(store: AdminStore, name: str, task: str, realm: str) -> bool:
    """Return whether a message of a task is parked, which a later one can replace."""
    return any(
        each.task == task and each.realm == realm and each.state in {"parked", "adrift"}
        for each in waiting_in(store, name)
    )


def _fate(outcome: str, lock: LockNow, options: LockOptions) -> str:
    most = options.max_waiting
    full = f", since {lock.waiting:,} of at most {most} wait already (lock_max_waiting)"
    timeout = options.wait_timeout
    in_time = f" for at most {seconds(timeout)}" if timeout is not None else ""
    replaces = ", and replace the older calls of its task that wait or run"
    older = replaces if options.preempts else ""
    return {
        "park": f"be parked{in_time}, as the {nth(lock.waiting + 1)} in the queue{older}",
        "wait": f"wait in its pool slot{in_time}",
        "requeue": f"go back to the broker for {seconds(options.requeue_delay)}",
        "skip": "be skipped and end as REVOKED",
        "fail": "fail with LockConflict",
        "skip-full": f"be skipped and end as REVOKED{full}",
        "fail-full": f"fail with LockQueueFull{full}",
        REPLACE: f"replace the oldest waiting message of its task{full}",
    }[outcome]

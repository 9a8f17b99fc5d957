"""The exceptions that end a run which did not get its lock."""

from __future__ import annotations

from typing import Final

from celery.exceptions import Ignore

from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import TWINS, Outcome, unexpected
from celery_singleton_lock.core.lock_set import LockSet
from celery_singleton_lock.core.lock_view import LockView, WaitsFor, reason_in
from celery_singleton_lock.core.model import Reply, why_busy
from celery_singleton_lock.core.rate import why_never
from celery_singleton_lock.errors import (
    LockConflict,
    LockCostError,
    LockError,
    LockQueueFull,
    LockWaitTimeout,
    MaxReturnsExceeded,
)


class NotStarted(Ignore):  # type: ignore[misc]  # celery is untyped
    """The task was not run. The main process parks, requeues, holds or ends its message.

    Args:
        outcome: what to do with the message.
        reason: the reason as text.
        rank: the rank in the queue that it would have; 1 is next.
        lock_set: for a task with several locks: those that it holds, and the busy one.
        waits_for: why the lock was not granted, see ``TaskBlocked``; may be empty.
        closed_for: with the outcome LATER, for how many seconds the task has closed a lock.
        lock: with the outcome REFUSED, the lock that Redis refuses; with LATER, the closed one.
        lost: with the outcome LATER, whether Redis has lost the message, which was parked.
    """

    def __init__(  # noqa: PLR0917  # pickled with these args
        self,
        outcome: Outcome,
        reason: str = "",
        rank: int = 0,
        lock_set: LockSet | None = None,
        waits_for: str = "",
        closed_for: float = 0.0,
        lock: str = "",
        lost: bool = False,
    ) -> None:
        super().__init__(outcome, reason, rank, lock_set, waits_for, closed_for, lock, lost)
        self.outcome = outcome
        self.reason = reason
        self.rank = rank
        self.lock_set = lock_set
        self.waits_for = waits_for
        self.closed_for = closed_for
        self.lock = lock
        self.lost = lost


_REASONS: Final = {
    **dict.fromkeys((*TWINS, Outcome.DONE), "another copy of this attempt is here"),
    Outcome.GONE: "its grant expired; the message is delivered again",
    Outcome.AGAIN: "a lock that it held while it waited was lost",
}
"""Reasons for outcomes that do not depend on the reply of Redis."""


def refusal(
    outcome: Outcome, name: str, options: LockOptions, answer: Reply | LockView | None = None
) -> Exception:
    """Return the exception that ends a run without its lock.

    Args:
        outcome: as ``outcome_of`` returns.
        name: of the lock.
        options: of the task.
        answer: the reply that refused the lock, or a view of the lock; None if neither is known.

    Raises:
        ValueError: the outcome is none of a refused lock.
    """
    reason, waits_for = why_busy(name, answer), reason_in(answer)
    match outcome:
        case Outcome.PARK | Outcome.REQUEUE | Outcome.SKIP:
            return NotStarted(outcome, reason, getattr(answer, "rank", 0), waits_for=waits_for)
        case Outcome.TWIN | Outcome.REQUEUE_TWIN | Outcome.DONE | Outcome.GONE | Outcome.AGAIN:
            return NotStarted(outcome, _REASONS[outcome])
        case Outcome.FAIL:
            return LockConflict(f"The {reason}.", name, *_holder_in(answer), waits_for)
        case Outcome.FAIL_COST:
            return too_costly(name, getattr(answer, "excess", ""))
        case Outcome.SKIP_FULL | Outcome.FAIL_FULL:
            full = f"{reason}, and as many wait as lock_max_waiting allows"
            return no_room(outcome, name, full, waits_for)
        case Outcome.FAIL_TIMEOUT:
            return waited_in_vain(name, f"{options.wait_timeout or MAX_WAIT:g}")
        case (
            Outcome.RUN
            | Outcome.RUN_UNLOCKED
            | Outcome.WAIT
            | Outcome.FAIL_BACKEND
            | Outcome.UNAVAILABLE
            | Outcome.REFUSED
            | Outcome.LATER
            | Outcome.SKIP_DEBOUNCED
            | Outcome.SKIP_PREEMPTED
            | Outcome.SKIP_FOLLOWING
            | Outcome.FOLLOW
        ):
            raise unexpected(outcome)


def _holder_in(answer: Reply | LockView | None) -> tuple[str, float]:
    """Return the holder of a lock as text, and the seconds left of its lease."""
    if isinstance(answer, Reply):
        return str(answer.holder or ""), answer.next_look
    if answer is None or not answer.holders:
        return "", 0.0
    return str(answer.holders[0]), answer.holders[0].expires_in


def cannot_wait(name: str, options: LockOptions, reason: str, waits_for: str = "") -> Exception:
    """Return the exception that ends a blocked task whose message cannot be parked.

    Args:
        name: of the lock.
        options: of the task; ``on_full`` says whether it is skipped or fails.
        reason: why the message cannot be parked, as text.
        waits_for: why the lock was not granted; see ``TaskBlocked``.
    """
    outcome = Outcome.SKIP_FULL if options.on_full == "skip" else Outcome.FAIL_FULL
    busy = f"lock {name!r} is busy, and the task cannot wait for it: {reason}"
    return no_room(outcome, name, busy, waits_for)


def no_room(outcome: Outcome, name: str, sentence: str, waits_for: str) -> Exception:
    """Return the exception that ends a task since the queue is full: skipped or failed."""
    if outcome is Outcome.SKIP_FULL:
        return NotStarted(outcome, sentence, waits_for=waits_for)
    return LockQueueFull(f"The {sentence}.", name, waits_for)


def waited_in_vain(name: str, seconds: str) -> LockWaitTimeout:
    """Return the error of a task whose ``lock_wait_timeout`` is over."""
    return LockWaitTimeout(f"Waited {seconds} s for the lock {name!r} (lock_wait_timeout).", name)


def above_rate(name: str, options: LockOptions) -> Exception:
    """Return the exception that ends a parked task that was next when the rate was used up.

    Args:
        name: of the lock.
        options: of the task; ``on_rate`` says whether it is skipped or fails.
    """
    reason = f"lock {name!r} had reached its rate when the task was next (lock_on_rate)"
    if options.on_rate == "fail":
        return LockConflict(f"The {reason}.", name, waits_for=WaitsFor.RATE.value)
    return NotStarted(Outcome.SKIP, reason, waits_for=WaitsFor.RATE.value)


def too_costly(name: str, excess: str) -> LockCostError:
    """Return the error of a task whose start costs more than the rate of its lock allows.

    Args:
        name: of the lock.
        excess: see :func:`celery_singleton_lock.core.rate.why_never`.
    """
    msg = (
        f"The task can never start under the lock {name!r}: {why_never(excess)}. Raise "
        "lock_rate, or send smaller tasks."
    )
    return LockCostError(msg, name)


REFUSALS: Final[dict[type[LockError], str]] = {
    LockConflict: "fail",
    LockCostError: "cost",
    LockQueueFull: "full",
    LockWaitTimeout: "timeout",
    MaxReturnsExceeded: "returned",
}
"""Errors of tasks that did not get their lock -> the policy in the event."""

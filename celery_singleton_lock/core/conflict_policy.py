"""What becomes of a task that asked for its lock, in a worker, in a batch or called eagerly.

:func:`outcome_of` only decides; its callers act. They match the outcome exhaustively.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Reply, Verdict
from celery_singleton_lock.errors import BackendError, BackendUnreachable, LockUnusable


class Outcome(enum.Enum):
    """What becomes of a task that asked for its lock."""

    RUN = "run"
    """It runs: it has the lock."""
    RUN_UNLOCKED = "run-unlocked"
    """It runs without the lock, since Redis does not answer (``lock_on_backend_error="run"``)."""
    PARK = "park"
    """Its message is parked in Redis."""
    TWIN = "twin"
    """Another copy of this attempt runs or waits. The message is parked beside it."""
    REQUEUE = "requeue"
    """Its message goes back to the broker."""
    REQUEUE_TWIN = "requeue-twin"
    """Another copy of this attempt runs or waits. The message goes back to the broker."""
    WAIT = "wait"
    """It waits where it runs, for the lock or for Redis."""
    SKIP = "skip"
    """It ends as REVOKED (``lock_on_conflict="skip"``)."""
    SKIP_FULL = "skip-full"
    """It ends as REVOKED: the queue is full, or a later message replaced it (``lock_on_full``)."""
    SKIP_DEBOUNCED = "skip-debounced"
    """It ends as REVOKED: a later message came before it had settled (``lock_debounce``)."""
    SKIP_PREEMPTED = "skip-preempted"
    """It ends as REVOKED: a later call of its task waits or runs (``preempt``)."""
    SKIP_FOLLOWING = "skip-following"
    """It ends as REVOKED, since the task that it follows did (``lock_on_duplicate="follow"``)."""
    FOLLOW = "follow"
    """It ends with the result of another task. If there is no result, its message queues."""
    FAIL = "fail"
    """It fails with ``LockConflict`` (``lock_on_conflict="fail"``)."""
    FAIL_FULL = "fail-full"
    """It fails with ``LockQueueFull``: the queue is full."""
    FAIL_TIMEOUT = "fail-timeout"
    """It fails with ``LockWaitTimeout``: its wait has timed out."""
    FAIL_COST = "fail-cost"
    """It fails with ``LockCostError``: its start costs more than the rate of the lock allows."""
    FAIL_BACKEND = "fail-backend"
    """It fails with the error of Redis."""
    DONE = "done"
    """Another copy of this attempt has run, or is stored. The message is acknowledged."""
    GONE = "gone"
    """Its grant lapsed before the task began. The message is delivered again."""
    AGAIN = "again"
    """While it waited for a lock of its lock set, it lost another lock; or Redis has lost its
    message. It is parked again, at its first lock."""
    LATER = "later"
    """It has run, and runs again when its lock is open (``RetryLater``)."""
    UNAVAILABLE = "unavailable"
    """Its worker holds the message until Redis answers."""
    REFUSED = "refused"
    """Redis refuses this lock and serves others. Its worker holds the message and tries again."""


SKIPPED: Final = frozenset(
    {
        Outcome.SKIP,
        Outcome.SKIP_FULL,
        Outcome.SKIP_DEBOUNCED,
        Outcome.SKIP_PREEMPTED,
        Outcome.SKIP_FOLLOWING,
    }
)
"""The task ends as REVOKED, without an error."""

TWINS: Final = frozenset({Outcome.TWIN, Outcome.REQUEUE_TWIN})
"""Another copy of the attempt runs or waits."""


class Asker(enum.Enum):
    """Who asks for the lock. It determines where the task can wait."""

    POOL = "pool"
    """A pool slot. The main process of its worker has the message and can hold it back."""
    SLOT = "slot"
    """A pool slot. The main process does not have the message: it did not pass the dispatcher."""
    CALLER = "caller"
    """The caller of an eager task. There is no message."""
    PARKING = "parking"
    """The main process, which asks to have the message parked."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a delivery on which the decision depends.

    Args:
        asker: who asks for the lock.
        granted: the message was parked and was delivered with a grant.
        further: the lock is not the first of its lock set. Only the first recognises copies.
        waited: the task must not wait any longer.
        keeps_messages: whether the locks' Redis can store the message; a quorum of servers cannot.
        sender_ends: the attempt that has sent it at its end holds the lock, and is about to release
            it.
    """

    asker: Asker = Asker.POOL
    granted: bool = False
    further: bool = False
    waited: bool = False
    keeps_messages: bool = True
    sender_ends: bool = False


class Policy(Protocol):
    """The options of a task that the decision needs; see ``LockOptions``."""

    @property
    def on_conflict(self) -> str:
        """``park``, ``preempt``, ``wait``, ``requeue``, ``skip`` or ``fail``."""
        ...

    @property
    def on_rate(self) -> str:
        """``park``, ``skip`` or ``fail``."""
        ...

    @property
    def on_full(self) -> str:
        """``fail``, ``skip`` or ``replace``."""
        ...

    @property
    def on_backend_error(self) -> str:
        """``retry``, ``fail`` or ``run``."""
        ...


def outcome_of(policy: Policy, answer: Reply | BackendError | None, facts: Facts) -> Outcome:
    """Return what becomes of a task that asked for its lock.

    Args:
        policy: the task's options.
        answer: the store's answer or error; None if a lock of a partial lock set was lost.
        facts: of the delivery.

    Returns:
        The outcome. The caller carries it out.
    """
    if answer is None:
        return Outcome.AGAIN
    if isinstance(answer, BackendError):
        return _without_redis(policy, answer, facts)
    if answer.verdict is Verdict.TOO_COSTLY:
        return Outcome.FAIL_COST
    return _answered(policy, answer, facts)


def waits_if_blocked(policy: Policy) -> bool:
    """Return whether a task waits if its lock is busy; else it ends without having run."""
    return _blocked(policy, Facts(), policy.on_conflict) not in {Outcome.SKIP, Outcome.FAIL}


def _answered(policy: Policy, reply: Reply, facts: Facts) -> Outcome:
    match reply.verdict:
        case Verdict.GRANTED:
            return Outcome.RUN
        case Verdict.DONE | Verdict.TWIN if facts.further and policy.on_conflict == "park":
            return Outcome.PARK
        case Verdict.DONE:
            return Outcome.DONE
        case Verdict.TWIN:
            return Outcome.REQUEUE_TWIN if _requeues(policy, facts) else Outcome.TWIN
        case Verdict.FULL if not facts.granted:
            return Outcome.SKIP_FULL if policy.on_full == "skip" else Outcome.FAIL_FULL
        case _:
            above_rate = reply.waits_for is WaitsFor.RATE
            on_block = policy.on_rate if above_rate else policy.on_conflict
            if facts.sender_ends and not above_rate and on_block in {"skip", "fail"}:
                on_block = "park"  # its sender ends at once; the work must not end with it
            gone = Outcome.AGAIN if reply.lost else Outcome.GONE
            return gone if facts.granted else _blocked(policy, facts, on_block)


def _blocked(policy: Policy, facts: Facts, on_block: str) -> Outcome:
    """Return what becomes of a task whose lock is busy, or has reached its rate.

    Args:
        policy: the task's options.
        facts: of the delivery.
        on_block: ``lock_on_conflict``, or ``lock_on_rate`` above the rate.
    """
    if facts.asker is Asker.PARKING:
        return Outcome.PARK
    if on_block == "skip":
        return Outcome.SKIP
    if on_block == "fail":
        return Outcome.FAIL
    if on_block == "wait" or facts.asker is not Asker.POOL:
        return Outcome.FAIL_TIMEOUT if facts.waited else Outcome.WAIT
    return Outcome.REQUEUE if _requeues(policy, facts) else Outcome.PARK


def _requeues(policy: Policy, facts: Facts) -> bool:
    """Return whether a message goes back to the broker; one that was parked is parked again."""
    if facts.granted or facts.asker is not Asker.POOL:
        return False
    return not facts.keeps_messages or policy.on_conflict == "requeue"


def _without_redis(policy: Policy, error: BackendError, facts: Facts) -> Outcome:
    # The message of a granted task is in Redis, which delivers it again.
    is_stored = facts.asker is Asker.PARKING or facts.granted
    if not is_stored and policy.on_backend_error != "retry":
        return Outcome.RUN_UNLOCKED if policy.on_backend_error == "run" else Outcome.FAIL_BACKEND
    match facts.asker:
        case Asker.POOL | Asker.PARKING:
            refused = isinstance(error, LockUnusable)
            return Outcome.REFUSED if refused else Outcome.UNAVAILABLE
        case Asker.SLOT:
            waits = isinstance(error, BackendUnreachable) and not facts.waited
            return Outcome.WAIT if waits else Outcome.FAIL_BACKEND
        case Asker.CALLER:
            return Outcome.FAIL_BACKEND


def unexpected(outcome: Outcome) -> ValueError:
    """Return the error for an outcome that cannot arise where it is handled."""
    return ValueError(f"{outcome} cannot arise here")


def assert_never(value: NoReturn) -> NoReturn:
    """Make a type checker report an unhandled case; ``typing.assert_never`` of Python 3.11."""
    msg = f"unhandled: {value!r}"
    raise AssertionError(msg)

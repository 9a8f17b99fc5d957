"""The states of a holder's or waiter's record in Redis, and the moves between them.

The scripts make the moves. The diagram in the documentation is generated from this table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class RecordState(str, enum.Enum):
    """The state of a holder or waiter in Redis, as ``Holder.state`` has it."""

    WAITING = "waiting"
    """A client or a blocking task waits in the queue, without a stored message."""
    PARKED = "parked"
    """A message is stored and waits in the queue."""
    ADRIFT = "adrift"
    """A stored message is next, and no live worker takes it."""
    LEAVING = "leaving"
    """A stored message is on its way back to the broker.

    In Redis, delayed, settling and following messages have this state, too; other fields tell
    them apart. Likewise, a preempted holder has the state running there."""
    DELAYED = "delayed"
    """A stored message has returned more than once. It joins the queue again after a delay."""
    SETTLING = "settling"
    """A stored message joins the queue unless a later one replaces it (``lock_debounce``)."""
    FOLLOWING = "following"
    """A stored message of a duplicate waits for the end of the first task, and then ends with its
    result (``lock_on_duplicate="follow"``)."""
    OVERDUE = "overdue"
    """A stored message has waited too long. It is delivered so that its task fails."""
    REPLACED = "replaced"
    """A later message replaced a stored one, which is delivered so that its task ends."""
    REVOKED = "revoked"
    """The task of a stored message was revoked. It is delivered so that its task ends."""
    REJECTED = "rejected"
    """The task of a stored message rejected it. A worker publishes it to be dead-lettered."""
    TOO_COSTLY = "too_costly"
    """The start of a stored message costs more than the rate. It is delivered so that it fails."""
    ABOVE_RATE = "above_rate"
    """A stored message is next, above the rate, and its task does not wait for that. It is
    delivered so that its task ends (``lock_on_rate``)."""
    GRANTED = "granted"
    """It holds the lock, and has not claimed the grant yet. With a rate and several locks, it also
    waits for the others."""
    RUNNING = "running"
    """It holds the lock, and has claimed the grant or needed no claim."""
    PREEMPTED = "preempted"
    """Its task runs and must end for a newer call of it (``lock_on_conflict="preempt"``)."""
    RESERVED = "reserved"
    """The permit of a task is reserved for its next attempt."""
    HELD_AFTER = "held_after"
    """The task has succeeded, and its permit stays taken for the rest of ``lock_hold_for``."""


TO_END: Final = frozenset(
    {
        RecordState.OVERDUE,
        RecordState.REPLACED,
        RecordState.REVOKED,
        RecordState.REJECTED,
        RecordState.TOO_COSTLY,
        RecordState.ABOVE_RATE,
    }
)
"""States of a stored message that does not run: a worker that consumes its queue has to end it."""

RECORD_MOVES: Final[Mapping[RecordState | None, Mapping[RecordState | None, str]]] = {
    None: {
        RecordState.RUNNING: "acquire, a permit is free",
        RecordState.GRANTED: "likewise, with a rate and further locks",
        RecordState.PARKED: "park",
        RecordState.SETTLING: "park, with lock_debounce",
        RecordState.FOLLOWING: 'park, with lock_on_duplicate="follow"',
        RecordState.WAITING: "a Lock blocks",
    },
    RecordState.WAITING: {
        RecordState.GRANTED: "a permit is free, it is first",
        None: "blocking_timeout, its client is gone, or its cost is above the rate",
    },
    RecordState.PARKED: {
        RecordState.GRANTED: "a permit is free, it is first, a worker consumes its queue",
        RecordState.ADRIFT: "it is first, no live worker takes it",
        RecordState.OVERDUE: "lock_wait_timeout",
        RecordState.REPLACED: "a later message replaces it, or preempts",
        RecordState.REVOKED: "its task is revoked",
        RecordState.TOO_COSTLY: "it is first, and costs more than the rate in force",
        RecordState.ABOVE_RATE: 'it is first, above the rate, with lock_on_rate="skip" or "fail"',
        None: "it is dropped, or its task has ended after its lease",
    },
    RecordState.ADRIFT: {
        RecordState.PARKED: "such a worker lives",
        RecordState.FOLLOWING: 'likewise, with lock_on_duplicate="follow"',
        RecordState.LEAVING: "5 seconds later",
        RecordState.REVOKED: "its task is revoked",
        None: "it is dropped, or its task has ended after its lease",
    },
    RecordState.LEAVING: {
        RecordState.PARKED: "it could not be sent, or has come back",
        RecordState.FOLLOWING: 'likewise, with lock_on_duplicate="follow"',
        None: "its queue at the broker has it",
    },
    RecordState.DELAYED: {
        RecordState.PARKED: "its delay is over, behind those who wait",
        RecordState.REVOKED: "its task is revoked",
    },
    RecordState.SETTLING: {
        RecordState.PARKED: "its quiet period is over, behind those who wait",
        RecordState.REPLACED: "a later message of its task comes",
        RecordState.REVOKED: "its task is revoked",
        None: "it is dropped",
    },
    RecordState.FOLLOWING: {
        RecordState.PARKED: "the first task has ended without a result, and no other counts",
        RecordState.ADRIFT: "the first task has ended, no live worker takes it",
        RecordState.LEAVING: "an operator drains it",
        RecordState.OVERDUE: "lock_wait_timeout",
        RecordState.REVOKED: "its task is revoked",
        None: "it has ended with the result of the first task, or is dropped",
    },
    RecordState.OVERDUE: {None: "fails with LockWaitTimeout"},
    RecordState.REPLACED: {None: "ends as REVOKED"},
    RecordState.REVOKED: {None: "ends as REVOKED"},
    RecordState.REJECTED: {None: "a worker has published it to be rejected"},
    RecordState.TOO_COSTLY: {None: "fails with LockCostError"},
    RecordState.ABOVE_RATE: {None: "ends as REVOKED, or fails with LockConflict"},
    RecordState.GRANTED: {
        RecordState.RUNNING: "claim",
        RecordState.PARKED: "not claimed in 5 seconds, given back by its worker, or revoked",
        RecordState.REPLACED: "a newer call of its task preempts it before it has begun",
        None: "it ends without having begun",
    },
    RecordState.RUNNING: {
        RecordState.PARKED: (
            "its lease ends or it is requeued for the first time, with a stored message"
        ),
        RecordState.DELAYED: "likewise, and not for the first time",
        RecordState.REJECTED: "its task rejects it, and its message is stored",
        RecordState.PREEMPTED: 'a newer call of its task is next, with lock_on_conflict="preempt"',
        RecordState.RESERVED: 'retried, with lock_on_retry="keep"',
        RecordState.HELD_AFTER: "succeeds, with lock_hold_for",
        None: "release",
    },
    RecordState.PREEMPTED: {
        RecordState.PARKED: "its lease ends or it is requeued, with a stored message",
        None: "release",
    },
    RecordState.RESERVED: {
        RecordState.RUNNING: "the next attempt comes",
        None: "its time is over, or its task was revoked",
    },
    RecordState.HELD_AFTER: {None: "its time is over"},
}
"""Where a record may move, and when. None: there is no record."""

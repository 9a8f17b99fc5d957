"""The position of a message in the worker's main process, and the moves that are allowed."""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

logger: Final = logging.getLogger(__name__)

STRICT: Final = "CELERY_SINGLETON_LOCK_STRICT_MOVES"
"""Environment variable: if it is set, an illegal move raises. The test suite sets it."""


class UnansweredClaim(NamedTuple):
    """A claim that Redis did not answer, of a delivery that has not begun.

    Args:
        attempt: ``id/retries/nesting``.
        token: owner token of the delivery at its lock; at the first one, if it has several.
        others: name and token of each other lock that the delivery may hold.
    """

    attempt: str
    token: str
    others: Sequence[tuple[str, str]] = ()


class Arrival(NamedTuple):
    """Facts about a message that are known when it arrives. They are set once.

    Args:
        copy: whether it is a copy of a parked message that an older version has published.
        requeues: number of its requeues.
        returns: number of its returns.
        first_place: server microseconds of its first arrival, if it was requeued since; else 0.
        delivered: whether it was parked, so that the broker has no message for it.
        claim: the unanswered claim of the worker that sent it to the broker when it ended; None if
            no such worker sent it.
    """

    copy: bool = False
    requeues: int = 0
    returns: int = 0
    first_place: int = 0
    delivered: bool = False
    claim: UnansweredClaim | None = None


FIRST_ARRIVAL: Final = Arrival()
"""The facts about a message that was neither requeued nor returned."""


class Stage(enum.Enum):
    """The position of a message in the worker's main process.

    A delivery from Redis creates a new request, so no stage follows :attr:`PARKED`.
    """

    RECEIVED = "received"
    """It has just arrived, or has stopped waiting, and is dispatched next."""
    LOOKED_UP = "looked up"
    """It is a copy of a parked message: the agent checks whether that is still in Redis."""
    FOLLOWING = "following"
    """It waits until it is known whether an earlier message of its lock gets the lock."""
    SUSPENDED = "suspended"
    """It waits until Redis answers, or stops refusing its lock."""
    DISPATCHED = "dispatched"
    """It is on its way to the pool, which may be full."""
    IN_POOL = "in pool"
    """The pool has it; no process or thread has accepted it."""
    ACCEPTED = "accepted"
    """A process or thread of the pool has accepted it and asks for its lock."""
    RUNNING = "running"
    """It runs: the process has announced that it has its lock."""
    BLOCKED = "blocked"
    """It did not get its lock and did not run."""
    WITHDRAWN = "withdrawn"
    """Another worker has the message; this request only has to free its slot."""
    GIVEN_BACK = "given back"
    """It is delivered again. If a process of the pool has already accepted it, it runs here."""
    REQUEUING = "requeuing"
    """It is held back until the broker has it again."""
    PARKING = "parking"
    """The agent is putting it into Redis."""
    PUBLISHED = "published"
    """It was published, since this worker ends and Redis may not have it."""
    PARKED = "parked"
    """Redis has it."""
    ENDED = "ended"
    """This process has nothing more to do with it."""

    __hash__: Callable[..., int] = object.__hash__  # for speed, as in AckState


STAGE_MOVES: Final[Mapping[Stage, Mapping[Stage, str]]] = {
    Stage.RECEIVED: {
        Stage.DISPATCHED: "its lock may be free, or it has a grant",
        Stage.FOLLOWING: "as many as may hold its lock are in the pool",
        Stage.PARKING: "as many as may hold its lock are in the pool, and hold it",
        Stage.SUSPENDED: "Redis does not answer, or refuses its lock",
        Stage.LOOKED_UP: "it is a copy of a parked message",
        Stage.ENDED: "it was revoked, rejected, or has run already",
    },
    Stage.LOOKED_UP: {
        Stage.RECEIVED: "the parked message is gone",
        Stage.ENDED: "the parked message is there",
    },
    Stage.FOLLOWING: {
        Stage.PARKING: "it is known whether the earlier one gets the lock",
        Stage.SUSPENDED: "Redis does not answer, or refuses its lock",
        Stage.ENDED: "the connection to the broker was lost",
    },
    Stage.SUSPENDED: {
        Stage.RECEIVED: "Redis answers, or its lock is tried again",
        Stage.PARKING: "the connection was lost, and only Redis may have it",
        Stage.PUBLISHED: "the worker ends, and Redis may not have it",
        Stage.ENDED: "the connection to the broker was lost",
    },
    Stage.DISPATCHED: {
        Stage.IN_POOL: "Celery hands it to the pool",
        Stage.DISPATCHED: "it could not be sent, and fails in a slot",
        Stage.WITHDRAWN: "another worker has a free slot",
        Stage.GIVEN_BACK: "the connection was lost, or the worker ends",
        Stage.ENDED: "its message could not be received",
    },
    Stage.IN_POOL: {
        Stage.ACCEPTED: "a process or thread accepts it",
        Stage.RUNNING: "its lock is announced before the pool accepts it",
        Stage.DISPATCHED: "the pool refused it, and it fails in a slot",
        Stage.WITHDRAWN: "another worker has a free slot",
        Stage.GIVEN_BACK: "the connection was lost, or the worker ends",
        Stage.ENDED: "it was revoked, or its process died",
    },
    Stage.ACCEPTED: {
        Stage.RUNNING: "the lock is announced",
        Stage.BLOCKED: "its lock is busy, or Redis does not answer",
        Stage.WITHDRAWN: "another worker has the message",
        Stage.ENDED: "the task ends, or its process died",
    },
    Stage.RUNNING: {
        Stage.BLOCKED: "it is to run again later (RetryLater)",
        Stage.ENDED: "the task ends, or its process died",
    },
    Stage.BLOCKED: {
        Stage.PARKING: "it waits in Redis",
        Stage.SUSPENDED: "Redis does not answer, or refuses its lock",
        Stage.REQUEUING: "it waits at the broker",
        Stage.DISPATCHED: "it has waited too long, and fails in a slot",
        Stage.ENDED: "it is skipped, or another copy is safe",
    },
    Stage.WITHDRAWN: {
        Stage.BLOCKED: "its slot had accepted it",
        Stage.ENDED: "its slot is free",
    },
    Stage.GIVEN_BACK: {
        Stage.ACCEPTED: "a process or thread had it already",
        Stage.ENDED: "it was revoked, or its process died",
    },
    Stage.REQUEUING: {
        Stage.ENDED: "the broker has it again",
    },
    Stage.PARKING: {
        Stage.PARKED: "Redis has it",
        Stage.SUSPENDED: "Redis refuses its lock",
        Stage.DISPATCHED: "the queue is full, and it fails in a slot",
        Stage.PUBLISHED: "the worker ends, and Redis may not have it",
        Stage.ENDED: "another copy has ended",
    },
    Stage.PUBLISHED: {
        Stage.PARKED: "Redis has it, too",
        Stage.SUSPENDED: "Redis refuses its lock",
        Stage.DISPATCHED: "the queue is full, and it fails in a slot",
        Stage.ENDED: "another copy has ended",
    },
    Stage.PARKED: {},
    Stage.ENDED: {},
}
"""Stage -> next stages, and when. A message begins in the first stage and ends in the last two."""

UNACCEPTED: Final = frozenset({Stage.IN_POOL, Stage.GIVEN_BACK})
"""A process of the pool may accept it."""

UNANNOUNCED: Final = frozenset({Stage.IN_POOL, Stage.ACCEPTED})
"""A process of the pool may announce that it has its lock."""

BEGUN: Final = frozenset({Stage.ACCEPTED, Stage.RUNNING, Stage.BLOCKED})
"""A process of the pool has accepted it."""

IN_HAND: Final = BEGUN | {Stage.RECEIVED, Stage.DISPATCHED, Stage.IN_POOL}
"""It may run here, so its end must be recorded."""

UNBEGUN: Final = frozenset({Stage.DISPATCHED, Stage.IN_POOL})
"""The pool has it, or is about to get it; no process has accepted it."""

LEFT_BEFORE: Final = frozenset({Stage.WITHDRAWN, Stage.GIVEN_BACK})
"""Another worker or the broker has it, but its slot here may not be free yet."""

NOT_IN_POOL: Final = frozenset(
    {Stage.RECEIVED, Stage.LOOKED_UP, Stage.FOLLOWING, Stage.SUSPENDED, Stage.DISPATCHED}
)
"""It waits here, and the pool does not have it."""

WAITING_FOR_REDIS: Final = frozenset({Stage.SUSPENDED, Stage.PARKING})
"""It waits for Redis to answer."""

OFFERED: Final = frozenset({Stage.DISPATCHED, Stage.IN_POOL, Stage.ACCEPTED})
"""Another worker may have the message instead."""


class AckState(enum.Enum):
    """The acknowledgement of a message to the broker."""

    LEFT_TO_CELERY = "left to Celery"
    """Celery decides when it acknowledges the message."""
    HELD_BACK = "held back"
    """It must not be acknowledged yet: the task may not get its lock."""
    DUE = "due"
    """Celery has called ``acknowledge()`` while it was held back."""
    ACKNOWLEDGED = "acknowledged"
    """The broker has the acknowledgement."""
    REJECTED = "rejected"
    """It was rejected: the broker drops it, or sends it to the dead-letter exchange."""
    REQUEUED = "requeued"
    """It was rejected with ``requeue``: the broker delivers it again."""

    # For speed: Enum.__hash__ is a Python function.
    __hash__: Callable[..., int] = object.__hash__


_REFUSALS: Final = {
    AckState.REJECTED: "rejected, without requeue",
    AckState.REQUEUED: "rejected, with requeue",
}

ACK_MOVES: Final[Mapping[AckState, Mapping[AckState, str]]] = {
    AckState.LEFT_TO_CELERY: {
        AckState.HELD_BACK: "dispatched, with early acknowledgement",
        AckState.ACKNOWLEDGED: "Celery acknowledges, or it is parked",
        **_REFUSALS,
    },
    AckState.HELD_BACK: {
        AckState.DUE: "Celery acknowledges",
        AckState.LEFT_TO_CELERY: "the lock is announced, the task ends or is blocked",
        **_REFUSALS,
    },
    AckState.DUE: {
        AckState.LEFT_TO_CELERY: "the lock is announced, the task ends or is blocked",
        **_REFUSALS,
    },
    AckState.ACKNOWLEDGED: {},
    AckState.REJECTED: {},
    AckState.REQUEUED: {},
}
"""State -> next states, and when. The last three states are final."""

mutex: Final = threading.RLock()
"""Guards the moves, since threads of a pool make them too.

Reentrant: Celery's cold shutdown ends tasks in a signal handler of the main thread.
"""


class IllegalMove(Exception):
    """A message has made a move that is not in its table. This is a defect of this package."""


class IllegalMoves:
    """Counts the illegal moves of this process, and logs each kind once.

    Attributes:
        count: number of illegal moves.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self._logged: set[tuple[enum.Enum, enum.Enum]] = set()

    def report(self, subject: Any, was: enum.Enum, to: enum.Enum) -> None:
        """Count an illegal move, and log it if it is the first of its kind.

        Args:
            subject: the message.
            was: its former stage or state.
            to: its present one.

        Raises:
            IllegalMove: in tests, see :data:`STRICT`.
        """
        text = f"{subject} moved from {was.name} to {to.name}"
        with mutex:
            self.count += 1
            is_first = (was, to) not in self._logged
            self._logged.add((was, to))
        if is_first:
            logger.error(
                "celery-singleton-lock: illegal move: %s. The task continues. Please report this "
                "defect; it is logged once, and `inspect locks` counts all (illegal_moves).",
                text,
            )
        if os.environ.get(STRICT):
            raise IllegalMove(text)


illegal_moves: Final = IllegalMoves()

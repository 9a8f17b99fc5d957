"""The commands that a worker's agent carries out: one frozen value for each kind of I/O.

The main loop puts them into the agent's queue; ``agent/loop.py`` matches all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_singleton_lock.core.model import Ending, Reservation
from celery_singleton_lock.core.parked_message import Delivery, UntakenMessage
from celery_singleton_lock.core.unique import UniqueCall
from celery_singleton_lock.worker.lock_header import LockHeader, task_id_of
from celery_singleton_lock.worker.request import LockedRequest


@dataclass(frozen=True, slots=True)
class Park:
    """Park a message in Redis, then report the result to the dispatcher.

    Args:
        request: the message.
        again: whether it was parked already, and a failover may have lost it.
    """

    request: LockedRequest
    again: bool = False


@dataclass(frozen=True, slots=True)
class LeavePreviousQueue:
    """Remove a message of a task with several locks from the queue in which it waited before."""

    request: LockedRequest


@dataclass(frozen=True, slots=True)
class CheckBlocked:
    """Report to the dispatcher that a parked message is blocked, if it still is."""

    request: LockedRequest


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look for the original of ``request``, which may be a copy; report to the dispatcher.

    Args:
        request: the copy.
        name: name of the lock at which the message may be parked.
        token: owner token of the message.
    """

    request: LockedRequest
    name: str
    token: str


@dataclass(frozen=True, slots=True)
class NoteNextStart:
    """Sweep a lock at the time at which its rate allows the next start.

    Args:
        name: the lock's name.
        seconds: until then.
    """

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SweepLock:
    """Sweep a lock now.

    Args:
        name: the lock's name.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Send a message back to the broker, then report the result to the dispatcher."""

    request: LockedRequest


@dataclass(frozen=True, slots=True)
class RetryRefused:
    """Let the dispatcher try again a lock that Redis has refused.

    Args:
        name: name of the lock.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Release:
    """Release the locks of a task in the main process.

    Either its process cannot, since it has died or is being killed, or its delivery does not run.

    Args:
        lock_header: the lock header of the task.
        ending: how the task has ended.
        pid: id of the process; None if the command does not wait for its end.
        since: monotonic time of the command.
        until: monotonic time at which the lease ends; None if that is unknown.
        kept: the reservation, if the ending is KEEP, HOLD, LATER or REFUSED.
        logged: whether it was logged that the process still exists.
    """

    lock_header: LockHeader
    ending: Ending
    pid: int | None = None
    since: float = 0.0
    until: float | None = None
    kept: Reservation | None = None
    logged: bool = False


@dataclass(frozen=True, slots=True)
class EndUnique:
    """End the entry of a unique call that runs without its lock, or not at all.

    Args:
        unique: the unique call, as its message describes it.
        task_id: id of its task.
        retries: number of retries of its attempt.
    """

    unique: UniqueCall
    task_id: str
    retries: int


@dataclass(frozen=True, slots=True)
class TrackReservation:
    """End the reservation for a retry as soon as its task is revoked.

    Args:
        name: name of the lock.
        token: owner token of the reservation.
        task_id: id of the task.
        until: monotonic time at which the reservation expires.
    """

    name: str
    token: str
    task_id: str
    until: float


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Report a lost lock, unless its task has just ended.

    Args:
        name: name of the lock.
        token: owner token of the task.
        not_before: monotonic time until which the pool may still report the end of the task.
        ended: a sentence about the end of the task, if it has ended without its lock.
        task: name of the task, if it has ended.
        task_id: id of the task, if it has ended.
    """

    name: str
    token: str
    not_before: float
    ended: str = ""
    task: str = ""
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class RecordPublished:
    """Record in Redis which messages of one lock the broker has.

    Args:
        messages: the messages; one call took them out of the queue of the lock.
        sent: whether the broker has them.
    """

    messages: tuple[UntakenMessage, ...]
    sent: bool


@dataclass(frozen=True, slots=True)
class DeliverRevoked:
    """Deliver the parked messages of these revoked tasks, so that workers end them."""

    task_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SwitchMode:
    """Switch the mode of a task, or of all tasks (``*``), in all workers; None: as declared."""

    task: str
    mode: str | None


@dataclass(frozen=True, slots=True)
class LeaveFleet:
    """Delete the worker's heartbeat, and return the grants in its inbox."""


@dataclass(frozen=True, slots=True)
class Call:
    """Make a call that uses Redis. It handles its own errors, and is not repeated."""

    call: Callable[[], None]


Command = (
    Park
    | LeavePreviousQueue
    | CheckBlocked
    | LookUp
    | NoteNextStart
    | SweepLock
    | Requeue
    | RetryRefused
    | Release
    | EndUnique
    | TrackReservation
    | ReportLoss
    | RecordPublished
    | DeliverRevoked
    | SwitchMode
    | LeaveFleet
    | Call
    | Delivery
)
"""All commands. A delivery (a grant that has arrived) is carried out in the same queue."""


def loss_of(header: LockHeader, ended: str) -> ReportLoss:
    """Return the command that reports the loss of a task that has ended.

    Args:
        header: the lock header of the task.
        ended: a sentence about the end of the task.
    """
    return ReportLoss(
        header.name, header.token, 0.0, ended, header.task, task_id_of(header.attempt)
    )


def lock_of(command: Command) -> str:
    """Return the name of the lock that a command concerns; empty if it concerns none."""
    match command:
        case Park() | Requeue() | LeavePreviousQueue() | CheckBlocked():
            return command.request.lock_header.name
        case Release():
            return command.lock_header.name
        case RecordPublished():
            return command.messages[0].name
        case LookUp() | ReportLoss() | TrackReservation() | Delivery() | SweepLock():
            return command.name
        case EndUnique() | RetryRefused() | DeliverRevoked() | SwitchMode() | LeaveFleet() | Call():
            return ""
        case NoteNextStart():
            return ""

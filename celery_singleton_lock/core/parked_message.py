"""Messages that are stored in Redis: frozen values.

Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class MessageToPark:
    """A message to park.

    Args:
        body: the message, packed by :mod:`celery_singleton_lock.worker.message_codec`.
        realm: hash of the broker URL without credentials.
        queue: queue from which the message came.
        deadline: longest wait in seconds; None for no limit.
        returns: how often it has returned before.
    """

    body: bytes = field(repr=False)  # it has the arguments of the call
    realm: str
    queue: str
    deadline: float | None = None
    returns: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """An entry of a worker's inbox: a parked message with its grant, or the reason why it must end.

    Args:
        name: the lock's name.
        token: the token under which the message now holds the lock.
        fencing_token: number of the grant; 0 if ``verdict`` is not ``granted``.
        body: the parked message; None if it is too long for the inbox and must be fetched.
        verdict: ``granted``, or why it must end without having run: ``overdue`` (it has waited too
            long), ``replaced`` (by a later message), ``revoked`` or ``rejected`` (by its task),
            ``too_costly`` (its start costs more than the lock's rate) or ``above_rate`` (it does
            not wait for the rate). ``following``: the task that it follows has ended. ``preempted``
            is not a message: the task that runs under this token must end.
        waited: seconds since it arrived.
        by: the attempt that replaced or preempts it, or the id of the task that it follows.
        returns: how often it has returned unfinished or unread.
        queue: the queue from which it came.
        excess: why it is ``too_costly``, see :func:`celery_singleton_lock.core.rate.why_never`.
        settled: whether it was replaced before it had settled (``lock_debounce``).
    """

    name: str
    token: str
    fencing_token: int
    body: bytes | None = field(repr=False)  # it has the arguments of the call
    verdict: str = "granted"
    waited: float = 0.0
    by: str = ""
    returns: int = 0
    queue: str = ""
    excess: str = ""
    settled: bool = False


@dataclass(frozen=True, slots=True)
class UntakenMessage:
    """A parked message that no live worker takes, to be sent back to the broker.

    Args:
        name: the lock's name.
        token: its owner token for this lock.
        queue: the queue from which it came.
        body: the message, packed.
        seal: identifies the call that took it out of the lock's queue.
        attempt: ``id/retries/nesting``.
        place: server microseconds of its arrival.
        task: name of its task.
    """

    name: str
    token: str
    queue: str
    body: bytes = field(repr=False)  # it has the arguments of the call
    seal: str = ""
    attempt: str = ""
    place: int = 0
    task: str = ""


class SweepReply(list[UntakenMessage]):
    """The result of a sweep: messages that no live worker takes.

    Attributes:
        next_starts: name of a lock that the sweep has granted -> seconds until its rate allows the
            next waiter to start.
    """

    def __init__(self, messages: Iterable[UntakenMessage] = ()) -> None:
        super().__init__(messages)
        self.next_starts: dict[str, float] = {}

    def add(self, other: SweepReply) -> None:
        """Append the result of another sweep."""
        self += other
        self.next_starts |= other.next_starts


class ParkedMessage(NamedTuple):
    """A message that a worker has parked.

    Args:
        lock: name of the lock for which it waits.
        token: owner token under which it was parked.
        task: name of the task.
        task_id: id of the task.
        moved: whether it was parked before, and was sent to the broker in between.
        attempt: with several locks, the attempt of the task. The task may start over under other
            tokens; its end is remembered by its attempt, too.
        former: if it was parked again, locks and tokens of its former delivery, which had ended.
        worker: id of the worker where that was.
    """

    lock: str
    token: str
    task: str
    task_id: str
    moved: bool = False
    attempt: str = ""
    former: tuple[tuple[str, str], ...] = ()
    worker: str = ""

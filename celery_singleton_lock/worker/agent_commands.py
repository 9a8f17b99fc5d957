"""What a worker's agent can be told to do: each order is a value, carried out in its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from celery_singleton_lock.core.model import Delivery, Ending, Stray
from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.worker.lock_header import Stamp


@dataclass(frozen=True, slots=True)
class Park:
    """Keep a message."""

    request: LockedRequest


@dataclass(frozen=True, slots=True)
class End:
    """Release for a process that cannot: once it is gone, or when its lease ends.

    Args:
        stamp: of the task.
        ending: how it has ended.
        pid: of the process; None if there is none to wait for.
        since: monotonic time of the order.
        until: monotonic time at which the lease ends.
        told: whether it was logged that the process does not go.
    """

    stamp: Stamp
    ending: Ending
    pid: int | None
    since: float = 0.0
    until: float = 0.0
    told: bool = False
    hold: float = 0.0


@dataclass(frozen=True, slots=True)
class Requeue:
    """Send a message back to the broker."""

    request: LockedRequest


@dataclass(frozen=True, slots=True)
class Left:
    """Tell Redis what became of messages of one lock that were to be sent to the broker.

    Args:
        strays: the messages; one call took them out of the line.
        sent: whether the broker has them.
    """

    strays: tuple[Stray, ...]
    sent: bool


@dataclass(frozen=True, slots=True)
class Settle:
    """Drop a message of a task with several locks where it was kept before it was parked."""

    request: LockedRequest


@dataclass(frozen=True, slots=True)
class LookUp:
    """See what became of the message of which ``request`` is a copy."""

    request: LockedRequest
    name: str
    token: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Report a loss, unless the task has just ended: its end may be on its way from the pool."""

    name: str
    token: str
    until: float
    ended: str = ""
    """What became of the task, if it is known to have ended without its lock."""
    task: str = ""
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class Revoke:
    """Have those of these tasks that are parked ended now: they were revoked."""

    task_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Switch:
    """Switch the mode of a task, or of all (``*``), for the whole fleet; None: as declared."""

    task: str
    mode: str | None


@dataclass(frozen=True, slots=True)
class Errand:
    """Make a call for somebody who must not wait, such as the main loop; it handles its errors."""

    call: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell the fleet that this worker takes no more grants, and give back those in the inbox."""


Order = (
    Park
    | Requeue
    | Left
    | Settle
    | End
    | LookUp
    | Lost
    | Revoke
    | Switch
    | Errand
    | Leave
    | Delivery
)


@dataclass(frozen=True, slots=True)
class Later:
    """Carry out an order, not before ``at`` (monotonic)."""

    at: float
    order: Order


def alike(orders: list[Order]) -> Iterator[list[Order]]:
    """Cut orders into runs of the same kind, keeping their order."""
    batch: list[Order] = []
    for order in orders:
        if batch and type(order) is not type(batch[0]):
            yield batch
            batch = []
        batch.append(order)
    if batch:
        yield batch

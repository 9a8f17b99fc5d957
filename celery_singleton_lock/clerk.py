"""What the desk asks of whoever does its I/O."""

from __future__ import annotations

from typing import Protocol

from celery_singleton_lock.core.model import Ending, Reservation
from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.worker.lock_header import Stamp


class Clerk(Protocol):
    """Who does the desk's I/O: the agent."""

    def park(self, request: LockedRequest) -> None:
        """Keep the message in Redis, then tell the desk."""
        ...

    def end(self, stamp: Stamp, ending: Ending, pid: int | None, hold: float = 0.0) -> None:
        """Release for a process that cannot; not before ``pid`` is gone.

        Args:
            stamp: of the task.
            ending: of the task.
            pid: of the process; None if it is gone, or does not matter.
            hold: seconds for which the lock stays taken, if the ending is HOLD.
        """
        ...

    def requeue(self, request: LockedRequest, delay: float) -> None:
        """Send the message back to the broker, not before ``delay`` seconds; then tell the desk."""
        ...

    def rescue(self, request: LockedRequest) -> None:
        """Send the message to the broker at once; Redis does not answer."""
        ...

    def mind(self, name: str, reservation: Reservation, task_id: str) -> None:
        """End a reservation when its task is revoked."""
        ...

    def look_again(self, request: LockedRequest) -> None:
        """Tell the desk that a message is blocked, if it still is."""
        ...

    def report_loss(self, stamp: Stamp, ended: str) -> None:
        """Report that the lock of a task was lost, unless that was done.

        Args:
            stamp: of the task.
            ended: what became of it, in a sentence.
        """
        ...

    def look_up(self, request: LockedRequest, name: str, token: str) -> None:
        """See what became of the message that this one is a copy of, then tell the desk."""
        ...

    def watch(self, stamp: Stamp, lease: float, *, held: bool) -> None:
        """Renew a lease from now on."""
        ...

    def take_over(self, token: str) -> None:
        """Leave to the desk to renew what a message keeps that has come back here."""
        ...

    def confirm(self, token: str) -> None:
        """Note that its lock was taken: if the store does not know it, it was lost."""
        ...

    def forget(self, token: str) -> None:
        """Renew it no more. Does not wait."""
        ...

    def backend_failed(self) -> None:
        """Look whether Redis is there, and tell the desk when it is back."""
        ...

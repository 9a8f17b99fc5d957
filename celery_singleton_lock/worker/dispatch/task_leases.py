"""Lets the watchdog renew the leases of tasks in the pool, and of grants that wait for a slot."""

from __future__ import annotations

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.lock.lease import OnLost
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.worker.lock_header import LockHeader, in_order_of_release, singles
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets


class TaskLeases:
    """The leases of a worker's tasks. No call waits for Redis.

    Args:
        watchdog: renews leases.
        partial_lock_sets: renews the locks that parked messages hold.
        on_lost: called by the watchdog if a lease is lost.
    """

    def __init__(
        self, watchdog: Watchdog, partial_lock_sets: PartialLockSets, on_lost: OnLost
    ) -> None:
        self._watchdog = watchdog
        self._partial_lock_sets = partial_lock_sets
        self._on_lost = on_lost

    def renew(self, header: LockHeader, lease: float, *, held: bool) -> None:
        """Renew the lease of one lock from now on.

        Args:
            header: the lock header.
            lease: seconds.
            held: whether the lock is known to be held, so that a failed renewal is a loss.
        """
        self._watchdog.watch_later(
            header.name, header.token, lease, held=held, on_lost=self._on_lost
        )

    def renew_accepted(
        self, header: LockHeader, lease: float, *, held: bool, others_held: bool
    ) -> None:
        """Renew the locks of a task that the pool has accepted.

        Args:
            header: its lock header.
            lease: seconds.
            held: whether the lock of the header is known to be held.
            others_held: the same for the other locks of its lock set.
        """
        self.renew(header, lease, held=held)
        for other in other_parts(header):
            self.renew(other, lease, held=others_held)

    def renew_granted(self, header: LockHeader, lease: float) -> None:
        """Renew a grant, and the locks of its partial lock set, while it waits for a slot."""
        self.renew(header, min(CLAIM_LEASE, lease), held=True)
        if header.lock_set is not None:
            self._partial_lock_sets.taken_over(header.token)
        for part in kept_parts(header):
            self.renew(part, lease, held=True)

    def renew_parked(self, header: LockHeader, options: LockOptions) -> None:
        """Renew the locks that a message holds while it is parked at another lock."""
        if header.lock_set is not None:
            self._partial_lock_sets.begin(header, options)

    def confirm(self, header: LockHeader) -> None:
        """Note that the locks of a task were acquired: if a renewal does not find one, it is lost.

        This does not extend the time up to which a lease is known to be valid.
        """
        for each in (header, *other_parts(header)):
            self._watchdog.confirm(each.token, 0.0)

    def valid_until(self, header: LockHeader) -> float | None:
        """Return the monotonic time when the last lease of a task ends; None if not known."""
        ends = [self._watchdog.valid_until(part.token) for part in in_order_of_release(header)]
        return max((end for end in ends if end is not None), default=None)

    def forget(self, header: LockHeader) -> None:
        """Stop renewing the locks of a task."""
        for each in (header, *other_parts(header)):
            self.forget_token(each.token)

    def forget_token(self, token: str) -> None:
        """Stop renewing one lock."""
        self._watchdog.forget(token, patience=0)


def other_parts(header: LockHeader) -> list[LockHeader]:
    """Return headers for the other locks of a task with several locks."""
    if not header.lock_set:
        return []
    return [each for each in singles(header) if each.token != header.token]


def kept_parts(header: LockHeader) -> list[LockHeader]:
    """Return headers for the locks that a message held while it was parked."""
    return [] if header.lock_set is None else singles(header)[: header.lock_set.at]

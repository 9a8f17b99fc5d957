"""Several locks as one, for whoever waits in place: taken in order, given back together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.lock.sync import Lock


class Row:
    """Locks that are taken one after the other, all or none.

    Args:
        locks: in the order that all tasks keep.
        clock: source of monotonic seconds.
    """

    def __init__(self, locks: Sequence[Lock], clock: Clock) -> None:
        """Hold none."""
        self.locks = tuple(locks)
        self._clock = clock
        self.lease, self.limit = locks[0].lease, locks[0].limit
        self.name = locks[0].name
        """Of the first lock; after an :meth:`acquire` in vain, of the one that was busy."""

    def acquire(self, blocking: bool = True, blocking_timeout: float | None = None) -> bool:
        """Take all locks, each in its turn.

        Args:
            blocking: whether to wait.
            blocking_timeout: most seconds to wait in all; None for as long as it takes.

        Returns:
            Whether all are held; else none is.

        Raises:
            BackendError: the store did not answer, or refused; none is held.
        """
        clock = self._clock
        until = math.inf if blocking_timeout is None else clock.monotonic() + blocking_timeout
        taken: list[Lock] = []
        try:
            for lock in self.locks:
                left = until - clock.monotonic()
                wait = None if math.isinf(left) or not blocking else max(left, 0.001)
                if not lock.acquire(blocking=blocking, blocking_timeout=wait):
                    self.name = lock.name
                    break
                taken.append(lock)
            else:
                self.name = self.locks[0].name
                return True
        except BaseException:
            _give_back(taken)
            raise
        _give_back(taken)
        return False

    def release(self) -> None:
        """Give all locks back.

        Raises:
            LockNotOwned: one was not held any more; the others are given back.
            BackendError: one could not be given back; its lease ends.
        """
        error = _give_back(self.locks)
        if error is not None:
            raise error

    @property
    def held(self) -> bool:
        """Whether all locks are held."""
        return all(lock.held for lock in self.locks)

    @property
    def lost(self) -> bool:
        """Whether one of the locks was lost."""
        return any(lock.lost for lock in self.locks)

    @property
    def fencing_token(self) -> int:
        """Of the first lock; each lock has its own."""
        return self.locks[0].fencing_token

    @property
    def expires_in(self) -> float:
        """Seconds for which all locks are known to be held."""
        return min(lock.expires_in for lock in self.locks)

    def ensure_held(self) -> None:
        """Ask the store whether all locks are still held, and renew them.

        Raises:
            LockLost: one is not; stop writing.
            BackendError: the store did not answer, or refused.
        """
        for lock in self.locks:
            lock.ensure_held()


def _give_back(locks: Sequence[Lock]) -> SingletonLockError | None:
    """Release what is held, the last first; return the first error."""
    first: SingletonLockError | None = None
    for lock in reversed(locks):
        try:
            lock.release()
        except SingletonLockError as error:
            first = first or error
    return first

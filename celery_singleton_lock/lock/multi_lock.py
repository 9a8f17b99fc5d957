"""Several locks as one: acquired in order, released together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.lock.sync import Lock


class MultiLock:
    """Locks that are acquired one after another, all or none.

    Args:
        locks: the locks, in the order in which all tasks acquire them.
        clock: source of monotonic seconds.
    """

    def __init__(self, locks: Sequence[Lock], clock: Clock) -> None:
        self.locks = tuple(locks)
        self._clock = clock
        self.lease, self.limit = locks[0].lease, locks[0].limit
        self.name = locks[0].name
        """Name of the first lock; after a failed :meth:`acquire`, of the lock that was busy."""

    def acquire(self, blocking: bool = True, blocking_timeout: float | None = None) -> bool:
        """Acquire all locks, one after another.

        Args:
            blocking: whether to wait.
            blocking_timeout: longest wait for all of them, in seconds; None for no limit.

        Returns:
            Whether all locks are held. If not, none is.

        Raises:
            BackendError: Redis did not answer, or refused. No lock is held.
        """
        clock = self._clock
        until = math.inf if blocking_timeout is None else clock.monotonic() + blocking_timeout
        try:
            if self._acquired_all(until, blocking=blocking):
                return True
            _release_all(self._taken)
        except BaseException:
            _release_all(self._taken)
            raise
        return False

    def _acquired_all(self, until: float, *, blocking: bool) -> bool:
        for lock in self.locks:
            left = until - self._clock.monotonic()
            wait = None if math.isinf(left) or not blocking else max(left, 0.001)
            if not lock.acquire(blocking=blocking, blocking_timeout=wait):
                self.name = lock.name
                return False
        self.name = self.locks[0].name
        return True

    def release(self) -> None:
        """Release all locks that were acquired.

        Raises:
            LockNotOwned: one was no longer held; the others are released.
            BackendError: one was not released; its lease ends.
        """
        error = _release_all(self._taken)
        if error is not None:
            raise error

    @property
    def _taken(self) -> list[Lock]:
        """The locks that were acquired and are not released."""
        return [lock for lock in self.locks if lock.token]

    @property
    def token(self) -> str:
        """Owner token of one of the locks; empty if none was acquired."""
        return next((lock.token for lock in self._taken), "")

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
        """Fencing token of the first lock; each lock has its own."""
        return self.locks[0].fencing_token

    @property
    def expires_in(self) -> float:
        """Seconds for which all locks are certainly held."""
        return min(lock.expires_in for lock in self.locks)

    def ensure_held(self) -> None:
        """Ask Redis whether all locks are still held, and renew their leases.

        Raises:
            LockLost: one was lost; stop writing.
            BackendError: Redis did not answer, or refused.
        """
        for lock in self.locks:
            lock.ensure_held()


def _release_all(locks: Sequence[Lock]) -> SingletonLockError | None:
    """Release locks in reverse order; return the first error."""
    first: SingletonLockError | None = None
    for number in reversed(range(len(locks))):
        try:
            locks[number].release()
        except SingletonLockError as error:
            first = first or error
        except BaseException:  # a soft time limit: perhaps this lock is not released, either
            _release_all(locks[: number + 1])
            raise
    return first

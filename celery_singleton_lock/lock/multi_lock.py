"""Several locks as one: acquired in order, released together."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from typing import Final

from celery_singleton_lock.config.timed_close import name_to_close
from celery_singleton_lock.core.charge import one_named
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import Claim, Owner, Reply, Verdict
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.lock.sync import Lock


class MemberLock(Lock):
    """A lock that may be acquired together with others, as a part of a :class:`MultiLock`."""

    later: bool = False
    """Whether a rate counts the start at :meth:`start` instead of when the lock is acquired."""

    @property
    def _request(self) -> Claim:
        return self._claim._replace(later=self.later)

    def start(self) -> bool:
        """Let the rate count the start, since all locks are held.

        Returns:
            Whether this lock is still held.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        if not self.later:
            return True
        owner = Owner(self.token, host=platform.node(), pid=os.getpid())
        reply: Reply = self._store.claim(owner, self.name, self.lease)
        return reply.verdict is Verdict.GRANTED


class MultiLock:
    """Locks that are acquired one after another, all or none.

    Args:
        locks: the locks, in the order in which all tasks acquire them.
        clock: source of monotonic seconds.
    """

    preempted: bool = False
    """No newer call preempts a task with several locks."""

    def __init__(self, locks: Sequence[Lock], clock: Clock) -> None:
        self.locks: Final = tuple(locks)
        self._clock = clock
        self.lease: float = locks[0].lease
        self.limit: int = locks[0].limit
        self.name: str = locks[0].name
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
        for lock in self.locks:
            if isinstance(lock, MemberLock) and not lock.start():
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

    def pause(self, seconds: float, why: str = "", *, name: str = "") -> float:
        """Close one of the locks for everybody for a time.

        Args:
            seconds: for how long.
            why: the reason, for people.
            name: its name.

        Returns:
            Seconds for which it is closed.

        Raises:
            ConfigurationError: an argument is invalid.
            BackendError: Redis did not answer, or refused.
        """
        closing = name_to_close([lock.name for lock in self.locks], name)
        return next(lock for lock in self.locks if lock.name == closing).pause(seconds, why)

    def charge(
        self,
        amount: int,
        *,
        id: str | None = None,  # noqa: A002  # the word for it
        rate: str | Rate | None = None,
        name: str = "",
    ) -> None:
        """Correct what the start of the lock ``name`` has cost; see :meth:`Lock.charge`."""
        one_named(name, self.locks).charge(amount, id=id, rate=rate)

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

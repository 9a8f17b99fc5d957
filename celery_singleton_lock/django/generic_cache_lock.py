"""The lock of a cache that can add, get and delete, and no more.

What it promises rests on one thing: that of two who ``add`` the same key, one is told so. It cannot
promise that a release deletes its own key only: between ``get`` and ``delete`` the lease may end,
and another may have added the key. Three habits make that window small. The key lives for a second
longer than we believe in it; what is over by our own clock is not touched; and in the last half
second of a lease nothing is deleted, since the key ends by itself.
"""

from __future__ import annotations

import math
import os
import platform
import random
import threading
from contextlib import suppress
from typing import Any, Final

from django.core.cache import caches

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import ConfigurationError, LockNotOwned, LockReentered
from celery_singleton_lock.core.model import new_token

LONGER: Final = 1
"""Seconds by which a key outlives its lease: memcached and databases count in whole seconds."""

TOO_LATE: Final = 0.5
"""Seconds before the end of a lease in which its key is left to end by itself."""

FIRST_PAUSE: Final = 0.02
"""Seconds between the first two tries of a busy key; then half as much again each time."""

LONGEST_PAUSE: Final = 0.5
"""Most seconds between two tries."""


class _Hold:
    """What one thread has added."""

    __slots__ = ("leaving", "pid", "valid_until", "value")

    def __init__(self, value: str, valid_until: float) -> None:
        self.value = value
        self.valid_until = valid_until
        self.pid = os.getpid()
        self.leaving = False


class AddedLock:
    """A key that one of all who add it gets. Not renewed; nobody is woken, all look now and then.

    Args:
        alias: of the cache.
        key: as the cache takes it.
        name: of the lock, for errors.
        lease: seconds.
    """

    fencing_token: Final = 0

    def __init__(self, alias: str, key: str, name: str, lease: float) -> None:
        """Add nothing yet."""
        self.alias, self.key, self.name, self.lease = alias, key, name, lease
        self._clock: Final = SystemClock()
        self._mine: Final = threading.local()
        self._never: Final = threading.Event()

    def acquire(self, wait_timeout: float) -> bool:
        """Add the key, within so many seconds; return whether it was added.

        Raises:
            LockReentered: this thread has added it.
            ConfigurationError: the cache does not keep what is added.
        """
        if self.expires_in > 0:
            msg = f"Lock {self.name!r} is held already by who asks: it would be waited for in vain."
            raise LockReentered(msg, self.name)
        value = f"{new_token()} pid {os.getpid()} on {platform.node()}"
        try:
            return self._add_within(wait_timeout, value)
        except BaseException:
            # Also an asynchronous one (soft time limit, Ctrl-C) anywhere after the key was added.
            self._undo(value)
            raise

    def release(self) -> None:
        """Delete the key, if it is ours. After an error of the cache it may be called again.

        Raises:
            LockNotOwned: it is not, or not any more.
        """
        hold = self._hold
        if hold is None or (not hold.leaving and self._left(hold) <= 0):
            self._mine.hold = None
            raise self._not_owned()
        found = self._cache.get(self.key)
        if found == hold.value and self._left(hold) > TOO_LATE:
            hold.leaving = True  # an error now does not mean that it was not deleted
            self._cache.delete(self.key)
        self._mine.hold = None
        if found != hold.value and not hold.leaving:
            raise self._not_owned()

    @property
    def expires_in(self) -> float:
        """Seconds for which this thread certainly holds it; 0 if it does not."""
        hold = self._hold
        return 0.0 if hold is None or hold.leaving else self._left(hold)

    def holder(self) -> tuple[str, float]:
        """Return who holds it, and for how long: a cache does not tell, so 0."""
        found = self._cache.get(self.key)
        return (found.partition(" ")[2] if isinstance(found, str) else ""), 0.0

    # -- steps -------------------------------------------------------------------------------------

    @property
    def _cache(self) -> Any:
        """The cache, of which Django makes one per thread."""
        return caches[self.alias]

    @property
    def _hold(self) -> _Hold | None:
        """What this thread has added; a forked child has added nothing of its parent's."""
        hold: _Hold | None = getattr(self._mine, "hold", None)
        return hold if hold is not None and hold.pid == os.getpid() else None

    def _left(self, hold: _Hold) -> float:
        return max(0.0, hold.valid_until - self._clock.monotonic())

    def _not_owned(self) -> LockNotOwned:
        msg = (
            f"Cannot release lock {self.name!r}: this thread (or process) does not hold it, or not "
            f"any more. Its lease of {self.lease:g} s is not renewed: give it more than the work "
            "takes."
        )
        return LockNotOwned(msg, self.name)

    def _add_within(self, wait_timeout: float, value: str) -> bool:
        deadline = self._clock.monotonic() + wait_timeout
        pause = FIRST_PAUSE
        while not self._added(value):
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            # Not all at once: each for a time of its own.
            self._never.wait(min(left, pause * random.uniform(0.5, 1)))  # noqa: S311  # no secret
            pause = min(pause * 1.5, LONGEST_PAUSE)
        return True

    def _added(self, value: str) -> bool:
        """Add the key, and see that it is there: a cache may lose it, or keep nothing at all."""
        asked = self._clock.monotonic()
        if not self._cache.add(self.key, value, timeout=math.ceil(self.lease) + LONGER):
            return False
        found = self._cache.get(self.key)
        if found is None:
            msg = (
                f"The cache {self.alias!r} does not keep what is added to it (it is full, or keeps "
                "nothing), so it can keep no lock. Give CacheLock the alias of another cache."
            )
            raise ConfigurationError(msg)
        if found == value:
            self._mine.hold = _Hold(value, asked + self.lease)
        return bool(found == value)

    def _undo(self, value: str) -> None:
        """Leave nothing of a value behind."""
        self._mine.hold = None
        with suppress(Exception):  # the first error counts
            if self._cache.get(self.key) == value:
                self._cache.delete(self.key)

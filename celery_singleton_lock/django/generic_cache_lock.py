"""A lock on a cache that can only add, get and delete.

It relies on one guarantee of the cache: if two callers ``add`` the same key, only one succeeds. It
cannot guarantee that a release deletes only its own key: between ``get`` and ``delete`` the lease
may expire and another holder may add the key. Three measures make this unlikely. The key expires
one second after the lease. A lease that has expired by the local clock is not released. In the last
half second of a lease the key is not deleted, since it expires anyway.
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
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import ConfigurationError, LockNotOwned, LockReentered

EXPIRY_MARGIN: Final = 1
"""Seconds from the end of the lease to the expiry of the key. Caches count whole seconds."""

TOO_LATE: Final = 0.5
"""Seconds before the end of a lease in which a release lets the key expire."""

FIRST_PAUSE: Final = 0.02
"""Seconds between the first two attempts. Each further pause is 1.5 times as long."""

LONGEST_PAUSE: Final = 0.5
"""Largest number of seconds between two attempts."""


class _Hold:
    """The lock as one thread holds it."""

    __slots__ = ("pid", "releasing", "valid_until", "value")

    def __init__(self, value: str, valid_until: float) -> None:
        self.value = value
        self.valid_until = valid_until
        self.pid = os.getpid()
        self.releasing = False


class GenericCacheLock:
    """A lock that is a key in a cache. The lease is not renewed, and waiters poll.

    Args:
        alias: alias of the cache.
        key: key in the cache.
        name: name of the lock, for error texts.
        lease: seconds until the lock is free.
    """

    fencing_token: Final = 0

    def __init__(self, alias: str, key: str, name: str, lease: float) -> None:
        """Create it. Nothing is added to the cache yet."""
        self.alias = alias
        self.key = key
        self.name = name
        self.lease = lease
        self._clock: Final = SystemClock()
        self._mine: Final = threading.local()
        self._never: Final = threading.Event()

    def acquire(self, wait_timeout: float) -> bool:
        """Add the key. Try again until it is added or the time is over.

        Args:
            wait_timeout: longest wait in seconds; 0: try once.

        Returns:
            Whether the key was added.

        Raises:
            LockReentered: this thread already holds the lock.
            ConfigurationError: the cache does not store the key.
        """
        if self.expires_in > 0:
            msg = f"This thread already holds lock {self.name!r}, and would wait for itself."
            raise LockReentered(msg, self.name)
        value = f"{new_token()} pid {os.getpid()} on {platform.node()}"
        try:
            return self._add_within(wait_timeout, value)
        except BaseException:
            # An asynchronous exception (soft time limit, Ctrl-C) may come after the key was added.
            self._undo(value)
            raise

    def release(self) -> None:
        """Delete the key if it has the value of this thread. After an error it may be called again.

        Raises:
            LockNotOwned: this thread does not hold the lock, or no longer holds it.
        """
        hold = self._hold
        if hold is None or (not hold.releasing and self._left(hold) <= 0):
            self._mine.hold = None
            raise self._not_owned()
        found = self._cache.get(self.key)
        if found == hold.value and self._left(hold) > TOO_LATE:
            hold.releasing = True  # if delete() raises, the key may be deleted nevertheless
            self._cache.delete(self.key)
        self._mine.hold = None
        if found != hold.value and not hold.releasing:
            raise self._not_owned()

    def abandon(self) -> None:
        """Delete the key if this thread holds the lock, as after an interruption."""
        with suppress(Exception):
            self.release()

    @property
    def expires_in(self) -> float:
        """Seconds for which this thread certainly holds the lock; 0 if it does not."""
        hold = self._hold
        return 0.0 if hold is None or hold.releasing else self._left(hold)

    def holder(self) -> tuple[str, float]:
        """Return the display text of the holder, and 0, since a cache has no time to live."""
        found = self._cache.get(self.key)
        return (found.partition(" ")[2] if isinstance(found, str) else ""), 0.0

    # -- steps -------------------------------------------------------------------------------------

    @property
    def _cache(self) -> Any:
        """The cache. Django creates one object per thread."""
        return caches[self.alias]

    @property
    def _hold(self) -> _Hold | None:
        """The lock as this thread holds it; None in a forked child, where the parent holds it."""
        hold: _Hold | None = getattr(self._mine, "hold", None)
        return hold if hold is not None and hold.pid == os.getpid() else None

    def _left(self, hold: _Hold) -> float:
        return max(0.0, hold.valid_until - self._clock.monotonic())

    def _not_owned(self) -> LockNotOwned:
        msg = (
            f"Cannot release lock {self.name!r}: this thread (or process) does not hold it, or no "
            f"longer. Its lease of {self.lease:g} s is not renewed: it must be longer than the "
            "work."
        )
        return LockNotOwned(msg, self.name)

    def _add_within(self, wait_timeout: float, value: str) -> bool:
        deadline = self._clock.monotonic() + wait_timeout
        pause = FIRST_PAUSE
        while not self._added(value):
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            # Random, so that waiters do not try at the same moment.
            self._never.wait(min(left, pause * random.uniform(0.5, 1)))  # noqa: S311  # no secret
            pause = min(pause * 1.5, LONGEST_PAUSE)
        return True

    def _added(self, value: str) -> bool:
        """Add the key, and check that the cache has stored it."""
        asked = self._clock.monotonic()
        if not self._cache.add(self.key, value, timeout=math.ceil(self.lease) + EXPIRY_MARGIN):
            return False
        found = self._cache.get(self.key)
        if found is None:
            msg = (
                f"The cache {self.alias!r} has not stored the key of a lock: it is full, or stores "
                "nothing. Give CacheLock the alias of another cache."
            )
            raise ConfigurationError(msg)
        if found == value:
            self._mine.hold = _Hold(value, asked + self.lease)
        return bool(found == value)

    def _undo(self, value: str) -> None:
        """Delete the key if it has this value."""
        self._mine.hold = None
        with suppress(Exception):  # the first error is raised
            if self._cache.get(self.key) == value:
                self._cache.delete(self.key)

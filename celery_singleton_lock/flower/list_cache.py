"""Lists of locks. Each is read from Redis once for all viewers, at a limited rate."""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from celery_singleton_lock.admin import Glance, order_of
from celery_singleton_lock.admin.signs_of_life import in_glances
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.flower.values import HOLDERS
from celery_singleton_lock.store.operator.base import AdminStore

LOCKS: Final = 10_000
"""Largest number of locks of one list that stay in memory: the first ones in its order."""

LISTS: Final = 8
"""Largest number of lists (filter and order) that stay in memory."""

MIN_AGE: Final = 0.9
"""Seconds for which a list is not read again."""

AGE_FACTOR: Final = 5.0
"""A list is not read again for this multiple of the time that reading it took."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The locks that match a filter, in one order, at one time.

    Args:
        rows: the first locks.
        total: number of locks.
        waiting: number of waiters of all locks.
        broken: number of keys that hold other data.
        read_at: local monotonic time at which the list was read.
        took: seconds that reading it took.
        now: server time at that moment.
    """

    rows: Sequence[Glance] = ()
    total: int = 0
    waiting: int = 0
    broken: int = 0
    read_at: float = float("-inf")
    took: float = 0.0
    now: float = 0.0


@dataclass
class _Entry:
    """A list in the cache. The thread that has the mutex reads it; others wait for the result."""

    mutex: threading.Lock = field(default_factory=threading.Lock)
    listing: Listing = Listing()


class ListCache:
    """The lists of locks that viewers have requested.

    Args:
        store: the operator's store of the locks.
        clock: local time.
    """

    def __init__(self, store: AdminStore, clock: Clock) -> None:
        """Create an empty cache."""
        self._store = store
        self._clock = clock
        self._mutex = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, pattern: str, order: str) -> Listing:
        """Return a list, read again if it is too old.

        Args:
            pattern: part of the name, or a pattern with ``*?[``; empty: all locks.
            order: one of :data:`celery_singleton_lock.admin.ORDERS`.

        Raises:
            BackendError: Redis did not answer, or refused the command.
        """
        entry = self._entry(pattern, order)
        with entry.mutex:
            usable_for = max(MIN_AGE, AGE_FACTOR * entry.listing.took)
            if self._clock.monotonic() - entry.listing.read_at >= usable_for:
                entry.listing = self._read(pattern, order)
            return entry.listing

    def expire(self) -> None:
        """Read each list again at the next request for it."""
        with self._mutex:
            for entry in self._entries.values():
                entry.listing = replace(entry.listing, took=0.0, read_at=float("-inf"))

    def _entry(self, pattern: str, order: str) -> _Entry:
        with self._mutex:
            entry = self._entries.setdefault((pattern, order), _Entry())
            self._entries.move_to_end((pattern, order))
            while len(self._entries) > LISTS:
                self._entries.popitem(last=False)
            return entry

    def _read(self, pattern: str, order: str) -> Listing:
        began, now = self._clock.monotonic(), self._store.time()
        total = waiting = broken = 0

        def counted() -> Iterator[Glance]:
            nonlocal total, waiting, broken
            for lock in self._store.summarise_locks(pattern, holders=HOLDERS):
                broken += lock.broken
                if not lock.broken and not lock.is_idle:
                    total += 1
                    waiting += lock.waiting + lock.adrift
                    yield lock

        rows = in_glances(self._store, heapq.nsmallest(LOCKS, counted(), key=order_of(order)))
        ended = self._clock.monotonic()
        return Listing(rows, total, waiting, broken, ended, ended - began, now)

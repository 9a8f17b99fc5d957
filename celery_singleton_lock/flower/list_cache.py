"""Lists of locks. Each list is read from Redis once for all viewers, and at a limited rate."""

from __future__ import annotations

import heapq
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from celery_singleton_lock.admin import ORDERS, Glance
from celery_singleton_lock.admin.lock_views import Ranking, rank_locks, shown_of
from celery_singleton_lock.admin.silent_holders import each_with_silent_holders
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.flower.lock_filter import STATES, ListQuery, states_of
from celery_singleton_lock.flower.values import HOLDERS
from celery_singleton_lock.store.operator.base import AdminStore

LOCKS: Final = 10_000
"""Largest number of locks of one list that stay in memory: the first ones in its order.

Also the largest number of locks with waiters that are read without SCAN.
"""

LISTS: Final = 8
"""Largest number of lists (filter and order) that stay in memory."""

MIN_AGE: Final = 0.9
"""Seconds for which a list is not read again."""

AGE_FACTOR: Final = 5.0
"""A list is not read again for the time that reading it took, multiplied by this number."""


MOST_IDS: Final = 100
"""Largest number of task ids that are looked up if only the beginning of an id is given."""

_START: Final = re.compile("[0-9a-f-]{6,35}")
"""Beginning of a task id from Celery."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The locks that match a query, in its order, at one time.

    Args:
        rows: the first locks.
        total: number of locks.
        waiting: number of waiters of these locks.
        states: state -> number of locks that match the text of the query.
        broken: number of keys that hold other data.
        keys: number of keys in Redis, if only locks with waiters were read; else 0.
        unread: number of locks with waiters that were not read. The other numbers do not include
            them.
        read_at: local monotonic time at which the list was read.
        took: seconds that reading it took.
        now: server time at that moment.
    """

    rows: Sequence[Glance] = ()
    total: int = 0
    waiting: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    broken: int = 0
    keys: int = 0
    unread: int = 0
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
        self._entries: OrderedDict[ListQuery, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, query: ListQuery) -> Listing:
        """Return a list, read again if it is too old.

        Raises:
            BackendError: Redis did not answer, or refused the command.
        """
        entry = self._entry(query)
        with entry.mutex:
            usable_for = max(MIN_AGE, AGE_FACTOR * entry.listing.took)
            if self._clock.monotonic() - entry.listing.read_at >= usable_for:
                entry.listing = self._read(query)
            return entry.listing

    def expire(self) -> None:
        """Read each list again at the next request for it."""
        with self._mutex:
            for entry in self._entries.values():
                entry.listing = replace(entry.listing, took=0.0, read_at=float("-inf"))

    def _entry(self, query: ListQuery) -> _Entry:
        with self._mutex:
            entry = self._entries.setdefault(query, _Entry())
            self._entries.move_to_end(query)
            while len(self._entries) > LISTS:
                self._entries.popitem(last=False)
            return entry

    def _read(self, query: ListQuery) -> Listing:
        began, now = self._clock.monotonic(), self._store.time()
        ranking = self._ranking(query)
        named = locks_of_task(self._store, query.text)
        total = waiting = broken = 0
        states = dict.fromkeys(("all", *STATES), 0)

        def counted() -> Iterator[Glance]:
            nonlocal total, waiting, broken
            for lock in self._locks(ranking):
                broken += lock.broken
                if lock.broken or lock.is_idle or not query.finds(lock, named):
                    continue
                states["all"] += 1
                for state in states_of(lock):
                    states[state] += 1
                if query.selects(lock):
                    total += 1
                    waiting += lock.waiting + lock.adrift
                    yield lock

        rows = heapq.nsmallest(LOCKS, counted(), key=query.key)
        ended = self._clock.monotonic()
        keys = unread = 0
        if ranking is not None:
            keys, unread = ranking.keys, ranking.total - len(ranking.names)
        counts = (total, waiting, states, broken, keys, unread)
        return Listing(rows, *counts, ended, ended - began, now)

    def _ranking(self, query: ListQuery) -> Ranking | None:
        """Return the locks to read; None for all."""
        if not query.can_omit_unwaited:
            return None
        order = query.order if query.order in ORDERS else "waiting"
        return rank_locks(self._store, "", order, LOCKS)

    def _locks(self, ranking: Ranking | None) -> Iterable[Glance]:
        if ranking is not None:
            return shown_of(self._store, ranking, holders=HOLDERS)
        return each_with_silent_holders(self._store, self._store.summarise_locks(holders=HOLDERS))


def locks_of_task(store: AdminStore, text: str) -> frozenset[str]:
    """Return the names of the locks for which tasks with such an id wait, or have waited.

    Args:
        store: the operator's store of the locks.
        text: a whole id, or the beginning of an id from Celery.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    if not text:
        return frozenset()
    starts = islice(store.task_ids(text), MOST_IDS) if _START.fullmatch(text) else ()
    return frozenset(name for name, _ in store.locate_tasks(list({text, *starts})))

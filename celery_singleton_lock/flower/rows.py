"""What the pages show, as JSON: read from the locks' Redis, as seldom as they allow.

Everything here waits for Redis, and runs in threads of its own: Flower's loop does not wait. Lists
are shared by all who look, bounded, and read anew only as often as that takes a small part of the
time. No name of a lock leaves here at a length, or with signs, that a page could not stand.
"""

from __future__ import annotations

import hashlib
import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from celery_singleton_lock.admin import (
    Glance,
    Operator,
    Waiting,
    end_holder,
    force_release,
    forced_release_warning,
    order_of,
    show_lock,
    why,
)
from celery_singleton_lock.admin.multi_lock_views import standing_of
from celery_singleton_lock.admin.signs_of_life import in_glances, in_view
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.events import LockAdmin
from celery_singleton_lock.core.model import Holder, LockView
from celery_singleton_lock.store.operator.base import AdminStore

KEPT: Final = 10_000
"""Most locks of one list that are kept in memory: the first in its order."""

LISTS: Final = 8
"""Most lists (of a filter and an order) that are kept."""

FRESH: Final = 0.9
"""Seconds for which a list is not read again."""

REST: Final = 5.0
"""How many times as long as reading a list took, it is not read again."""

ROWS: Final = 50
"""Locks on one page."""

MOST_ROWS: Final = 500
"""Most that may be asked for."""

HOLDERS: Final = 5
"""Holders of a lock in the list."""

DETAILS: Final = 100
"""Holders and waiters of the lock that is unfolded."""

SHORT: Final = 200
"""Characters of a name in the list."""

LONGEST: Final = 12_000
"""Characters of a name where it is shown in full."""

_VISIBLE: Final = {sign: 0x2400 + sign for sign in range(32)} | {127: 0x2421}
"""Control characters, and the pictures of them that Unicode has."""


class UnknownLock(LookupError):
    """No list that was shown has a lock of that id."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The locks that fit a filter, in one order, as they were.

    Args:
        rows: the first of them.
        total: how many there are.
        waiting: how many wait for them.
        broken: how many keys hold something else.
        read_at: local monotonic time at which they were read.
        took: seconds that it took.
        now: server's time at that moment.
    """

    rows: Sequence[Glance] = ()
    total: int = 0
    waiting: int = 0
    broken: int = 0
    read_at: float = float("-inf")
    took: float = 0.0
    now: float = 0.0


@dataclass
class Shelf:
    """Where a list is kept, until it is read again by whoever has the mutex."""

    mutex: threading.Lock = field(default_factory=threading.Lock)
    listing: Listing = Listing()


class Feed:
    """Answers the pages' questions.

    Args:
        store: of the app's locks.
        clock: local time.
    """

    def __init__(self, store: AdminStore, clock: Clock | None = None) -> None:
        """Know nothing yet."""
        self._store = store
        self._clock = clock or SystemClock()
        self._mutex = threading.Lock()
        self._lists: OrderedDict[tuple[str, str], Shelf] = OrderedDict()
        self._names: OrderedDict[str, str] = OrderedDict()

    # -- the list ---------------------------------------------------------------------------------

    def page(
        self, pattern: str = "", order: str = "waiting", offset: int = 0, limit: int = ROWS
    ) -> dict[str, Any]:
        """Return some of the locks.

        Args:
            pattern: part of the name, or a pattern with ``*?[``; empty for all.
            order: one of :data:`celery_singleton_lock.admin.ORDERS`.
            offset: of the first.
            limit: most of them.

        Raises:
            ValueError: there is no such order.
            BackendError: Redis did not answer, or refused.
        """
        order_of(order)
        found = self._listing(pattern, order)
        offset = max(0, min(offset, len(found.rows)))
        shown = found.rows[offset : offset + max(1, min(limit, MOST_ROWS))]
        return {
            "locks": [self._row(lock, found.now) for lock in shown],
            "total": found.total,
            "listed": len(found.rows),
            "waiting": found.waiting,
            "broken": found.broken,
            "offset": offset,
            "age": max(0.0, self._clock.monotonic() - found.read_at),
        }

    def _listing(self, pattern: str, order: str) -> Listing:
        with self._mutex:
            shelf = self._lists.setdefault((pattern, order), Shelf())
            self._lists.move_to_end((pattern, order))
            while len(self._lists) > LISTS:
                self._lists.popitem(last=False)
        with shelf.mutex:  # whoever comes meanwhile waits for the one reading
            rest = max(FRESH, REST * shelf.listing.took)
            if self._clock.monotonic() - shelf.listing.read_at >= rest:
                shelf.listing = self._read(pattern, order)
            return shelf.listing

    def _read(self, pattern: str, order: str) -> Listing:
        began, now = self._clock.monotonic(), self._store.time()
        total = waiting = broken = 0

        def counted() -> Iterator[Glance]:
            nonlocal total, waiting, broken
            for lock in self._store.glances(pattern, holders=HOLDERS):
                broken += lock.broken
                if not lock.broken and not lock.is_idle:
                    total += 1
                    waiting += lock.waiting + lock.adrift
                    yield lock

        rows = in_glances(self._store, heapq.nsmallest(KEPT, counted(), key=order_of(order)))
        ended = self._clock.monotonic()
        return Listing(rows, total, waiting, broken, ended, ended - began, now)

    def _row(self, lock: Glance, now: float) -> dict[str, Any]:
        holders = [told_of_holder(holder, now) for holder in lock.holders]
        return {
            **self._named(lock.name, SHORT),
            "limit": lock.limit,
            "paused": lock.paused,
            "held": lock.held,
            "waiting": lock.waiting,
            "adrift": lock.adrift,
            "oldest": lock.oldest,
            "held_for": max((holder["held_for"] for holder in holders), default=0.0),
            "holders": holders,
        }

    # -- one lock ---------------------------------------------------------------------------------

    def details(self, lock_id: str) -> dict[str, Any]:
        """Return a lock with its first waiters; a name of any length in full.

        Args:
            lock_id: ``id`` of a row.

        Raises:
            UnknownLock: no list had it.
            BackendError: Redis did not answer, or refused.
        """
        return self._detailed(self.name_of(lock_id), DETAILS)

    def _detailed(self, name: str, waiters: int) -> dict[str, Any]:
        now, found = self._store.time(), show_lock(self._store, name, waiters=waiters)
        view, kept = found.view, found.elsewhere
        return {
            **self._named(name, LONGEST),
            **_totals(view),
            "holders": [
                {**told_of_holder(each, now), **({"state": "kept"} if each.token in kept else {})}
                for each in view.holders[:DETAILS]
            ],
            "queue": [told_of_waiter(each, n) for n, each in _ranked(found.waiting)],
        }

    def _named(self, name: str, longest: int) -> dict[str, Any]:
        lock_id = id_of(name)
        with self._mutex:
            self._names[lock_id] = name
            self._names.move_to_end(lock_id)
            while len(self._names) > 2 * KEPT:
                self._names.popitem(last=False)
        return {"id": lock_id, "name": visible(name, longest), "length": len(name)}

    def name_of(self, lock_id: str) -> str:
        """Return the name of a lock that was shown.

        Raises:
            UnknownLock: none was, since Flower was started.
        """
        with self._mutex:
            found = self._names.get(lock_id)
        if found is None:
            msg = "That lock is not in a list that was shown lately. Look at the list again."
            raise UnknownLock(msg)
        return found

    # -- tasks and workers ------------------------------------------------------------------------

    def of_task(self, task_id: str, hint: str = "") -> dict[str, Any] | None:
        """Return the lock that a task waits for, or holds; None if it does neither.

        Args:
            task_id: its id.
            hint: the lock's name, as an event told it: who never waited is in no index.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        found = standing_of(self._store, task_id)
        if found is not None:
            name, waiting, rank = found
            return self._place(name, task_id, rank, waiting)
        return self._place(hint, task_id, 0, None) if hint else None

    def _place(
        self, name: str, task_id: str, rank: int, waiting: Waiting | None
    ) -> dict[str, Any] | None:
        now = self._store.time()
        view = in_view(self._store, self._store.inspect(name, waiters=0))
        own = [holder for holder in view.holders if holder.task_id == task_id]
        if not own and waiting is None:
            return None
        held = told_of_holder(own[0], now)["state"] if own else ""
        state = held or (waiting.state if waiting else "")
        sentence = "" if own else why(self._store, task_id, _Nobody()).sentence
        return {
            **self._named(name, SHORT),
            **_totals(view),
            "state": state,
            "sentence": visible(sentence, 3 * SHORT),
            "rank": 0 if own else rank,
            "waited": 0.0 if own or waiting is None else waiting.age,
            "holders": [told_of_holder(h, now) for h in own or view.holders[:HOLDERS]],
        }

    def of_worker(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the locks of these names that somebody holds, or waits for.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        now, rows = self._store.time(), []
        for name in names[:ROWS]:
            view = in_view(self._store, self._store.inspect(name, waiters=1))
            if view.holders or view.waiting:
                rows.append(self._row(_glance_of(view, now), now))
        return rows

    # -- stepping in ------------------------------------------------------------------------------

    def risk(self, lock_id: str, token: str) -> str:
        """Return what a forced release risks; empty if that token does not hold the lock.

        Raises:
            UnknownLock: no list had it.
            BackendError: Redis did not answer, or refused.
        """
        name = self.name_of(lock_id)
        for holder in self._store.inspect(name, waiters=0).holders:
            if holder.token == token:
                who = visible(str(holder), SHORT)
                return forced_release_warning(visible(name, SHORT), who, holder.state)
        return ""

    def end(
        self, lock_id: str, token: str, by: Operator, terminate: Callable[[str], object]
    ) -> LockAdmin:
        """Have the task that holds a lock ended; audited.

        Args:
            lock_id: ``id`` of a row.
            token: owner token of the holder.
            by: who does it.
            terminate: has the worker that runs a task end it; given its id.

        Returns:
            The event of it.

        Raises:
            UnknownLock: no list had it.
            Refused: that token does not hold the lock any more, or its holder is no task.
            BackendError: Redis did not answer, or refused.
            Exception: what ``terminate`` raises.
        """
        name = self.name_of(lock_id)
        end_holder(self._store, name, token, by, terminate)
        return by.step(name, "terminate")

    def release(self, lock_id: str, token: str, by: Operator) -> LockAdmin:
        """Take a lock from one holder; audited.

        Args:
            lock_id: ``id`` of a row.
            token: owner token of the holder.
            by: who does it.

        Returns:
            The event of it.

        Raises:
            UnknownLock: no list had it.
            Refused: that token does not hold the lock any more.
            BackendError: Redis did not answer, or refused.
        """
        name = self.name_of(lock_id)
        force_release(self._store, name, token, by)
        with self._mutex:
            for shelf in self._lists.values():
                shelf.listing = replace(shelf.listing, took=0.0, read_at=float("-inf"))
        return by.step(name, "release")


class _Nobody:
    """A witness that has :func:`why` look at those who wait alone, and not through all locks."""

    def seen(self, task_id: str) -> tuple[str, str]:  # noqa: ARG002  # of the protocol
        """Say that the task has ended: it has just left its lock, if this is asked."""
        return "finished", "does not wait any more"

    def queues(self) -> str:
        """Know nothing of the broker."""
        return ""


def id_of(name: str) -> str:
    """Return an id that a page can carry, of a name of any length."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def visible(text: str, longest: int) -> str:
    """Return a text with its control characters made visible, and no longer than that."""
    cut = text[: longest - 1] + "…" if len(text) > longest else text
    return cut.translate(_VISIBLE).encode("utf-8", "replace").decode()


def told_of_holder(holder: Holder, now: float) -> dict[str, Any]:
    """Return what pages are told of a holder.

    Args:
        holder: who.
        now: server's time, in seconds.
    """
    return {
        "token": holder.token,
        "task": visible(holder.task, SHORT),
        "task_id": visible(holder.task_id, SHORT),
        "worker": visible(holder.worker.rpartition("#")[0] or holder.worker, SHORT),
        "client": "" if holder.task else visible(str(holder), SHORT),
        "state": "silent" if holder.silent else holder.state,
        "silent_for": holder.silent,
        "left": holder.expires_in,
        "held_for": max(0.0, now - holder.since) if holder.since else 0.0,
        "fence": str(holder.fencing_token),  # has more digits than a number in JavaScript
    }


def told_of_waiter(waiter: Waiting, rank: int) -> dict[str, Any]:
    """Return what pages are told of a waiter; a rank of 0 is not in line."""
    return {
        "rank": rank,
        "task": visible(waiter.task, SHORT),
        "task_id": visible(waiter.task_id, SHORT),
        "state": waiter.state,
        "age": waiter.age,
        "queue": visible(waiter.queue, SHORT),
    }


def _ranked(waiting: Sequence[Waiting]) -> Iterable[tuple[int, Waiting]]:
    rank = 0
    for each in waiting:
        in_line = each.state in {"parked", "waiting"}
        rank += in_line
        yield (rank if in_line else 0), each


def _totals(view: LockView) -> dict[str, Any]:
    return {
        "limit": view.limit,
        "paused": view.paused,
        "held": len(view.holders),
        "waiting": view.waiting,
        "adrift": view.adrift,
        "counters": dict(view.counters),
    }


def _glance_of(view: LockView, now: float) -> Glance:
    oldest = max((now - w.since for w in view.waiters if w.since), default=0.0)
    return Glance(
        view.name,
        len(view.holders),
        view.waiting,
        view.adrift,
        view.bodies,
        view.limit,
        bool(view.paused),
        max(0.0, oldest),
        view.holders[:HOLDERS],
    )


def locks_in(stats: Mapping[str, Any]) -> list[str]:
    """Return the locks that are in a worker's pool, of its ``stats``."""
    section = stats.get("singleton_lock")
    flying = section.get("in_flight") if isinstance(section, Mapping) else None
    return [str(name) for name in flying] if isinstance(flying, Mapping) else []

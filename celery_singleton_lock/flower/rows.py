"""The data of Flower's pages, read from the locks' Redis.

All methods wait for Redis, so call them in a thread and not in Flower's event loop.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

from celery_singleton_lock.admin import (
    Glance,
    Operator,
    Waiting,
    end_holder,
    force_release,
    forced_release_warning,
    show_lock,
    why,
)
from celery_singleton_lock.admin.lock_views import call_of
from celery_singleton_lock.admin.multi_lock_views import standing_of
from celery_singleton_lock.admin.silent_holders import with_silent_holders
from celery_singleton_lock.admin.why import why_at_lock
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.flower.changes import Effects, LockChanges
from celery_singleton_lock.flower.list_cache import LOCKS, ListCache
from celery_singleton_lock.flower.lock_filter import STUCK, ListQuery, sentence_of, trouble_of
from celery_singleton_lock.flower.values import (
    HOLDERS,
    SHORT,
    audit_values,
    call_values,
    glance_of,
    holder_values,
    id_of,
    ranked,
    totals,
    visible,
    waiter_values,
)
from celery_singleton_lock.store.operator.base import AdminStore

ROWS: Final = 50
"""Locks on one page."""

MAX_ROWS: Final = 500
"""Largest number of locks of one answer."""

DETAILS: Final = 100
"""Largest number of holders, and of waiters, of the lock that is shown in full."""

LONGEST_NAME: Final = 12_000
"""Largest number of characters of a name that is shown in full."""


class UnknownLock(LookupError):
    """No list that was shown has a lock with this id."""


class LockRows:
    """Answers the requests of the pages.

    Args:
        store: the operator's store of the app's locks.
        clock: local time.
    """

    def __init__(self, store: AdminStore, clock: Clock | None = None) -> None:
        """Create the object. Nothing is read yet."""
        self._store = store
        self._clock = clock or SystemClock()
        self._mutex = threading.Lock()
        self._lists = ListCache(store, self._clock)
        self._names: OrderedDict[str, str] = OrderedDict()

    # -- the list ---------------------------------------------------------------------------------

    def page(  # noqa: PLR0917  # the arguments of a request
        self,
        text: str = "",
        order: str = "waiting",
        offset: int = 0,
        limit: int = ROWS,
        state: str = "",
        longer: float = 0.0,
    ) -> dict[str, Any]:
        """Return a part of the list of locks.

        Args:
            text: what to search; see :class:`ListQuery`. Empty: all locks.
            order: one of :data:`PAGE_ORDERS`.
            offset: index of the first lock.
            limit: largest number of locks.
            state: one of :data:`STATES`; empty: any.
            longer: seconds for which the first waiter has waited at least.

        Raises:
            ValueError: no order, or no state, has that name.
            BackendError: Redis did not answer, or refused the command.
        """
        query = ListQuery(text, order, state, longer)
        query.check()
        found = self._lists.get(query)
        offset = max(0, min(offset, len(found.rows)))
        shown = found.rows[offset : offset + max(1, min(limit, MAX_ROWS))]
        return {
            "locks": [self._row(lock, found.now) for lock in shown],
            "total": found.total,
            "listed": len(found.rows),
            "waiting": found.waiting,
            "states": dict(found.states),
            "broken": found.broken,
            "keys": found.keys,
            "unread": found.unread,
            "offset": offset,
            "age": max(0.0, self._clock.monotonic() - found.read_at),
        }

    def _row(self, lock: Glance, now: float) -> dict[str, Any]:
        holders = [holder_values(holder, now) for holder in lock.holders]
        trouble = trouble_of(lock)
        return {
            **self._named(lock.name, SHORT),
            "state": trouble.kind,
            "stuck": trouble.level == STUCK,
            "sentence": visible(sentence_of(lock), 3 * SHORT),
            "limit": lock.limit,
            "paused": lock.paused,
            "held": lock.held,
            "waiting": lock.waiting,
            "adrift": lock.adrift,
            "aside": lock.aside,
            "groups": lock.groups,
            "oldest": lock.oldest,
            "held_for": max((holder["held_for"] for holder in holders), default=0.0),
            "holders": holders,
        }

    # -- one lock ---------------------------------------------------------------------------------

    def details(self, lock_id: str) -> dict[str, Any]:
        """Return a lock with its whole name, its holders and its first waiters.

        Args:
            lock_id: ``id`` of a row.

        Raises:
            UnknownLock: no list had it.
            BackendError: Redis did not answer, or refused the command.
        """
        name = self.name_of(lock_id)
        now, found = self._store.time(), show_lock(self._store, name, waiters=DETAILS)
        view, elsewhere = found.view, found.elsewhere
        first = next(iter(ranked(found.waiting)), None)
        answer = None if first is None else why_at_lock(self._store, first[1], first[0])
        return {
            **self._named(name, LONGEST_NAME),
            **totals(view),
            "waits_for": answer.waits_for if answer else "",
            "sentence": visible(answer.sentence, 3 * SHORT) if answer else "",
            "holders": [
                # A holder that waits for another lock does not run.
                holder_values(each, now) | ({"state": "kept"} if each.token in elsewhere else {})
                for each in view.holders[:DETAILS]
            ],
            "queue": [waiter_values(each, rank) for rank, each in ranked(found.waiting)],
            "calls": [call_values(call) for call in found.calls[:DETAILS]],
        }

    def _named(self, name: str, longest: int) -> dict[str, Any]:
        """Return a name with its id, and remember it for requests with that id."""
        lock_id = id_of(name)
        with self._mutex:
            self._names[lock_id] = name
            self._names.move_to_end(lock_id)
            while len(self._names) > 2 * LOCKS:
                self._names.popitem(last=False)
        return {"id": lock_id, "name": visible(name, longest), "length": len(name)}

    def name_of(self, lock_id: str) -> str:
        """Return the name of a lock that was shown.

        Raises:
            UnknownLock: no lock with this id was shown since Flower started.
        """
        with self._mutex:
            found = self._names.get(lock_id)
        if found is None:
            msg = "This lock is not in a list that was shown lately. Reload the list."
            raise UnknownLock(msg)
        return found

    # -- the audit --------------------------------------------------------------------------------

    def audit(self, most: int = ROWS) -> list[dict[str, Any]]:
        """Return the audit entries, newest first.

        Args:
            most: largest number of entries.

        Raises:
            BackendError: Redis did not answer, or refused the command.
        """
        return [audit_values(entry) for entry in self._store.audit(max(1, min(most, MAX_ROWS)))]

    # -- tasks and workers ------------------------------------------------------------------------

    def of_task(self, task_id: str, hint: str = "") -> dict[str, Any] | None:
        """Return the lock that a task waits for or holds; None if there is none.

        Args:
            task_id: id of the task.
            hint: name of the lock in an event, for a task that has never waited: it is in no index.

        Raises:
            BackendError: Redis did not answer, or refused the command.
        """
        found = standing_of(self._store, task_id)
        if found is not None:
            name, waiting, rank = found
            return self._task_at_lock(name, task_id, rank, waiting)
        return self._task_at_lock(hint, task_id, 0, None) if hint else None

    def _task_at_lock(
        self, name: str, task_id: str, rank: int, waiting: Waiting | None
    ) -> dict[str, Any] | None:
        now = self._store.time()
        view = with_silent_holders(self._store, self._store.inspect(name, waiters=0))
        own = [holder for holder in view.holders if holder.task_id == task_id]
        if not own and waiting is None:
            return None
        held = holder_values(own[0], now)["state"] if own else ""
        answer = None if own else why(self._store, task_id, _WaitersOnly())
        unique = own[0].unique if own else waiting.unique if waiting else ""
        call = call_of(self._store, name, task_id, unique)
        return {
            **self._named(name, SHORT),
            **totals(view),
            "state": held or (waiting.state if waiting else ""),
            "sentence": visible(answer.sentence, 3 * SHORT) if answer else "",
            "waits_for": answer.waits_for if answer else "",
            "rank": 0 if own else rank,
            "waited": 0.0 if own or waiting is None else waiting.age,
            "call": None if call is None else call_values(call),
            "holders": [holder_values(h, now) for h in own or view.holders[:HOLDERS]],
        }

    def of_worker(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return those of the named locks that have a holder or a waiter.

        Raises:
            BackendError: Redis did not answer, or refused the command.
        """
        now, rows = self._store.time(), []
        for name in names[:ROWS]:
            view = with_silent_holders(self._store, self._store.inspect(name, waiters=1))
            if view.holders or view.waiting:
                rows.append(self._row(glance_of(view, now), now))
        return rows

    # -- forced release ---------------------------------------------------------------------------

    def risk(self, lock_id: str, token: str) -> str:
        """Return the risk of a forced release; empty if the token does not hold the lock.

        Raises:
            UnknownLock: no list had it.
            BackendError: Redis did not answer, or refused the command.
        """
        name = self.name_of(lock_id)
        for holder in self._store.inspect(name, waiters=0).holders:
            if holder.token == token:
                who = visible(str(holder), SHORT)
                return forced_release_warning(visible(name, SHORT), who, holder.state)
        return ""

    def end(
        self, lock_id: str, token: str, by: Operator, terminate: Callable[[str], object]
    ) -> str:
        """Terminate the task that holds a lock. Writes an audit entry.

        Args:
            lock_id: ``id`` of a row.
            token: owner token of the holder.
            by: the operator.
            terminate: called with the task id; tells the task's worker to terminate it.

        Returns:
            The lock's name.

        Raises:
            UnknownLock: no list had it.
            Refused: the token does not hold the lock, or the holder is not a task.
            BackendError: Redis did not answer, or refused the command.
            Exception: any error of ``terminate``.
        """
        name = self.name_of(lock_id)
        end_holder(self._store, name, token, by, terminate)
        return name

    def release(self, lock_id: str, token: str, by: Operator) -> str:
        """Take a lock from one holder. Writes an audit entry.

        Args:
            lock_id: ``id`` of a row.
            token: owner token of the holder.
            by: the operator.

        Returns:
            The lock's name.

        Raises:
            UnknownLock: no list had it.
            Refused: the token does not hold the lock.
            BackendError: Redis did not answer, or refused the command.
        """
        name = self.name_of(lock_id)
        force_release(self._store, name, token, by)
        self.expire()
        return name

    # -- further changes --------------------------------------------------------------------------

    def changes(self, effects: Effects) -> LockChanges:
        """Return an object that changes locks of these rows.

        Args:
            effects: stores results of dropped tasks.
        """
        return LockChanges(self._store, self.name_of, effects)

    def expire(self) -> None:
        """Read each list again at the next request for it."""
        self._lists.expire()


class _WaitersOnly:
    """A witness that makes :func:`why` search only the waiters, not the holders of all locks."""

    def seen(self, task_id: str) -> tuple[str, str]:  # noqa: ARG002  # of the protocol
        """Return that the task has ended. :func:`why` calls this if it has just left its lock."""
        return "finished", "does not wait any more"

    def queues(self) -> str:
        """Return no queue lengths."""
        return ""

    def consumers(self, realm: str, queue: str) -> tuple[str, ...]:  # noqa: ARG002  # of the protocol
        """Return no workers: a page of rows must not wait for their answers."""
        return ()

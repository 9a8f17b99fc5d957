"""List locks, and show one lock in full."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from celery_singleton_lock.admin.multi_lock_views import (
    Elsewhere,
    look_elsewhere,
    with_running_pid,
)
from celery_singleton_lock.admin.silent_holders import all_with_silent_holders, with_silent_holders
from celery_singleton_lock.core.lock_view import LockView
from celery_singleton_lock.core.unique import FirstCall
from celery_singleton_lock.message_text import natural
from celery_singleton_lock.store.operations import PROBE
from celery_singleton_lock.store.operator.base import PARTS, AdminStore, Glance, Waiting
from celery_singleton_lock.store.operator.listing import fits

ASKED: Final = 100
"""Number of holders for which the other lock, for which they may wait, is searched.

For further holders no process is shown, since they may wait, too.
"""

ORDERS: Final[Mapping[str, Callable[[Glance], Any]]] = {
    "name": lambda lock: natural(lock.name),
    "waiting": lambda lock: (-(lock.waiting + lock.adrift), natural(lock.name)),
    "oldest": lambda lock: (-lock.oldest, natural(lock.name)),
    "held": lambda lock: (-lock.held, natural(lock.name)),
    "lease": lambda lock: (
        min((h.expires_in for h in lock.holders), default=0.0),
        natural(lock.name),
    ),
}
"""Sort orders: the largest first, except ``name`` (alphabetical) and ``lease`` (first to end)."""


def order_of(name: str) -> Callable[[Glance], Any]:
    """Return the sort key of an order.

    Args:
        name: one of :data:`ORDERS`.

    Raises:
        ValueError: no order has that name.
    """
    if name not in ORDERS:
        msg = f"order is {name!r}: use one of {', '.join(ORDERS)}."
        raise ValueError(msg)
    return ORDERS[name]


def list_locks(
    store: AdminStore,
    pattern: str = "",
    *,
    order: str = "name",
    most: int | None = None,
    idle: bool = False,
    holders: int = 1,
) -> list[Glance]:
    """Return the locks. Reads them in small batches, so that Redis is not blocked.

    Args:
        store: the store of the locks.
        pattern: part of the name. With one of ``*?[``: a pattern for the whole name. Empty: all.
        order: one of :data:`ORDERS`.
        most: largest number of locks; None for all.
        idle: include locks without holder or waiter. Redis keeps them for a minute. Locks that only
            a connection check has used are left out. A lock whose keys hold another program's data
            is always included.
        holders: largest number of holders of each lock.

    Raises:
        ValueError: no order has that name.
        BackendError: Redis did not answer, or refused the command.
    """
    key = order_of(order)
    found = (
        lock
        for lock in store.summarise_locks(pattern, holders=holders)
        if lock.broken or not lock.is_idle or (idle and not lock.name.startswith(PROBE))
    )
    chosen = sorted(found, key=key) if most is None else heapq.nsmallest(most, found, key=key)
    return all_with_silent_holders(store, chosen)


FEW_KEYS: Final = 20_000
"""Largest number of keys of a Redis that are all read: 20 SCAN commands of 0.3 ms."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Names of locks that have waiters, in an order. Reading it takes no SCAN.

    Args:
        names: the first locks.
        total: number of locks.
        waiting: number of their waiters.
        keys: number of keys in Redis, among which locks without waiters may be.
    """

    names: Sequence[str]
    total: int
    waiting: int
    keys: int


def rank_locks(store: AdminStore, pattern: str, order: str, most: int) -> Ranking | None:
    """Return the locks that have waiters; None if Redis has so few keys that all can be read.

    A lock whose whole name is given is found even if it has no waiters.

    Args:
        store: the store of the locks.
        pattern: as of :func:`list_locks`.
        order: one of :data:`ORDERS`.
        most: largest number of names.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    keys = store.key_count()
    if keys <= FEW_KEYS:
        return None
    found = store.count_waiters(order)
    if pattern:
        alone = store.summarise_named([pattern])
        known = [each for each in found if fits(each[0], pattern)]
        found = known or [(each.name, 0, 0.0) for each in alone if not each.is_idle]
    chosen = heapq.nsmallest(most, found, key=_RANKS[order])
    waiting = sum([waiting for _, waiting, _ in found])
    return Ranking([name for name, _, _ in chosen], len(found), waiting, keys)


def shown_of(store: AdminStore, ranking: Ranking, *, holders: int = 1) -> list[Glance]:
    """Return the locks of a ranking that still exist.

    Args:
        store: the store of the locks.
        ranking: their names.
        holders: largest number of holders of each lock.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    return all_with_silent_holders(store, store.summarise_named(ranking.names, holders=holders))


_RANKS: Final[Mapping[str, Callable[[tuple[str, int, float]], Any]]] = {
    "name": lambda lock: natural(lock[0]),
    "waiting": lambda lock: (-lock[1], lock[0]),
    "oldest": lambda lock: (-lock[2], lock[0]),
    "held": lambda lock: (-lock[2], lock[0]),
    "lease": lambda lock: (lock[2], lock[0]),
}
"""Sort keys of locks with waiters, as :data:`ORDERS`. Equal locks are sorted as texts, which is ten
times as fast."""


@dataclass(frozen=True, slots=True)
class Detail:
    """One lock in full.

    Args:
        view: holders and counts.
        waiting: the first waiters: the queue, then adrift messages, then messages that a worker has
            to end.
        elsewhere: owner token -> name of the other lock for which that holder waits while it holds
            this one.
        calls: its unique calls that count as sent (``lock_unique``); those with most followers
            first.
    """

    view: LockView
    waiting: tuple[Waiting, ...]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[FirstCall, ...] = ()


def show_lock(store: AdminStore, name: str, *, waiters: int = 20) -> Detail:
    """Return the present state of a lock.

    Args:
        store: the store of the locks.
        name: the lock's name.
        waiters: largest number of waiters.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    view = with_silent_holders(store, store.inspect(name, waiters=0))
    asked, others = view.holders[:ASKED], view.holders[ASKED:]
    elsewhere = look_elsewhere(store, name, asked)
    unknown = Elsewhere({}, frozenset(each.token for each in others))
    holders = [
        *(with_running_pid(each, elsewhere) for each in asked),
        *(with_running_pid(each, unknown) for each in others),
    ]
    view = replace(view, holders=tuple(holders))
    waiting = tuple(islice(waiting_in(store, name), waiters))
    return Detail(view, waiting, elsewhere.waits, tuple(unique_calls(store, name)))


def unique_calls(store: AdminStore, name: str) -> list[FirstCall]:
    """Return the calls of a lock that count as sent, those with most followers first.

    If Redis has many keys, a call whose message is in the broker is left out, unless duplicates
    follow it.

    Args:
        store: the store of the locks.
        name: the lock's name.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    keys = store.call_keys(name) if store.key_count() <= FEW_KEYS else ()
    found = store.list_calls(name, islice(keys, MOST_CALLS))
    return sorted(found, key=lambda call: (-call.followers, natural(call.key)))


def call_of(store: AdminStore, name: str, task_id: str, key: str) -> FirstCall | None:
    """Return the unique call of a task; None if it no longer counts as sent.

    Args:
        store: the store of the locks.
        name: name of its lock.
        task_id: id of its task.
        key: the key of the unique call; empty if the task has none.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    found = store.list_calls(name, [key]) if key else ()
    return next((each for each in found if (each.key, each.task_id) == (key, task_id)), None)


MOST_CALLS: Final = 1000
"""Largest number of unique calls of a lock that are searched."""


def is_known(view: LockView) -> bool:
    """Return whether Redis has data of the lock.

    It has data while the lock is held, waited for, paused or limited by an operator, and for a
    minute after its last use.
    """
    used = view.fencing_token or view.holders or view.waiting or view.adrift or view.bodies
    return bool(used or view.paused or view.limit_set or view.rates or view.closed)


def waiting_in(
    store: AdminStore, name: str, most: int = 100, parts: Sequence[str] = PARTS
) -> Iterator[Waiting]:
    """Yield all waiters of a lock: the queue, adrift messages, messages that are out of the queue.

    Reads page by page. A waiter that changes its state meanwhile may be missing or appear twice.

    Args:
        store: the store of the locks.
        name: the lock's name.
        most: size of a page.
        parts: the collections that are read.
    """
    for part in parts:
        after = ""
        while True:
            page = store.list_waiters(name, part, after, most)
            yield from page.waiting
            after = page.end
            if not after:
                break

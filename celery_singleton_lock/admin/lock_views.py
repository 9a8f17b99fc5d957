"""All locks in short, and one lock in full."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from celery_singleton_lock.admin.multi_lock_views import parked_elsewhere
from celery_singleton_lock.admin.signs_of_life import in_glances, in_view
from celery_singleton_lock.core.model import LockView
from celery_singleton_lock.store.operator.base import PARTS, AdminStore, Glance, Waiting
from celery_singleton_lock.store.message_operations import PROBE
from celery_singleton_lock.message_text import natural

ASKED: Final = 10
"""Most holders of a lock of which it is asked whether they wait for another."""

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
"""By what locks are sorted: most, or longest, first; ``lease`` by what ends first."""


def order_of(name: str) -> Callable[[Glance], Any]:
    """Return the key by which locks are sorted.

    Args:
        name: one of :data:`ORDERS`.

    Raises:
        ValueError: there is no such order.
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
    """Return the locks that there are, without keeping Redis for more than a moment at a time.

    Args:
        store: where.
        pattern: part of the name; a pattern for all of it if it has one of ``*?[``; empty for all.
        order: one of :data:`ORDERS`.
        most: how many of them, the first in that order; None for all.
        idle: also those that nobody holds or waits for (they are forgotten after a minute); not
            what is left of a probe.
        holders: most holders of each that are shown.

    Raises:
        ValueError: there is no such order.
        BackendError: Redis did not answer, or refused.
    """
    key = order_of(order)
    found = (
        lock
        for lock in store.glances(pattern, holders=holders)
        if not lock.is_idle or (idle and not lock.name.startswith(PROBE))
    )
    chosen = sorted(found, key=key) if most is None else heapq.nsmallest(most, found, key=key)
    return in_glances(store, chosen)


@dataclass(frozen=True, slots=True)
class Detail:
    """One lock in full.

    Args:
        view: holders and counts.
        waiting: the first that wait: in line, then adrift, then with a verdict.
        elsewhere: for which lock those of the first holders wait that keep this one: by token.
    """

    view: LockView
    waiting: tuple[Waiting, ...]
    elsewhere: Mapping[str, str] = field(default_factory=dict)


def show_lock(store: AdminStore, name: str, *, waiters: int = 20) -> Detail:
    """Return a lock as it stands.

    Args:
        store: where.
        name: the lock's name.
        waiters: most that are shown of who waits.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    view = in_view(store, store.inspect(name, waiters=0))
    elsewhere = parked_elsewhere(store, name, view.holders[:ASKED])
    return Detail(view, tuple(islice(waiting_in(store, name), waiters)), elsewhere)


def is_known(view: LockView) -> bool:
    """Return whether a lock of that name is there: in use, stepped in, or used a minute ago."""
    used = view.fencing_token or view.holders or view.waiting or view.adrift or view.bodies
    return bool(used or view.paused or view.limit_set)


def waiting_in(store: AdminStore, name: str, most: int = 100) -> Iterator[Waiting]:
    """Yield all that wait for a lock: in line, then adrift, then with a verdict; page by page.

    What moves from one to the other meanwhile may be passed by, or come twice.
    """
    for part in PARTS:
        after = ""
        while True:
            page = store.page(name, part, after, most)
            yield from page.waiting
            after = page.end
            if not after:
                break

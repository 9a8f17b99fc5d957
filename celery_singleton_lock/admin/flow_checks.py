"""Facts for ``doctor`` about paused and closed locks, costs, and grants that wait for a slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest
from operator import attrgetter
from typing import Final

from celery_singleton_lock.admin.why_sentences import seconds, worker_name
from celery_singleton_lock.core.lock_view import Holder, RateInForce
from celery_singleton_lock.store.operator.base import AdminStore, Waiting

READ: Final = 1000
"""Most waiters, and most holders, of one lock that are read."""


def paused_locks(store: AdminStore, named: int) -> tuple[int, int, list[str]]:
    """Return how many locks are paused, how many wait for them, and clauses about some of them.

    Args:
        store: the store of the locks.
        named: largest number of locks that are described: who waits, by whom and why they are
            paused, and for how long. Those with most waiters come first.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    paused = [lock for lock in store.summarise_locks(holders=0) if lock.paused]
    some = list[str]()
    for lock in nlargest(named, paused, key=attrgetter("waiting")):
        view = store.inspect(lock.name, waiters=0)
        if view.paused:  # it may have been resumed by now
            left = f" for another {lock.paused_for:.0f} s" if lock.paused_for else ""
            some.append(f"{lock.name!r}{left} with {lock.waiting} waiting ({view.paused})")
    return len(paused), sum(lock.waiting for lock in paused), some


def closed_locks(store: AdminStore, named: int) -> tuple[int, list[str]]:
    """Return how many locks are closed for a time, and clauses about some of them.

    Args:
        store: the store of the locks.
        named: largest number of locks that are described: by whom, why and for how long they are
            closed.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    total, some = 0, list[str]()
    for lock in store.summarise_locks(holders=0):
        if not lock.closed_for:
            continue
        total += 1
        view = store.inspect(lock.name, waiters=0) if len(some) < named else None
        if view and view.closed:  # it may be open by now
            some.append(f"{lock.name!r} for another {view.closed_for:.0f} s, {view.closed}")
    return total, some


def grants_without_slot(
    store: AdminStore, named: int, *, after: float, locks: int
) -> tuple[int, list[str]]:
    """Return how many grants wait for a pool slot while callers wait behind them, and some of them.

    A caller in code, or a task that waits in its slot, may occupy the slot that the grant needs.

    Args:
        store: the store of the locks.
        named: largest number of grants that are described.
        after: seconds for which a grant must have waited.
        locks: largest number of locks with such a grant that are examined.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    total, some, looked, now = 0, list[str](), 0, store.time()
    for lock in store.summarise_locks(holders=READ):
        late = [each for each in lock.holders if _waits_for_slot(each) and now - each.since > after]
        if not (late and lock.waiting):
            continue
        if looked == locks:
            break
        looked += 1
        page = store.list_waiters(lock.name, "queue", most=READ).waiting
        callers = sum(each.state == "waiting" for each in page)
        for each in late if callers else ():
            total += 1
            if len(some) < named:
                worker, age = worker_name(each.worker), seconds(now - each.since)
                some.append(f"{lock.name!r} on {worker} for {age}, with {callers} behind it")
    return total, some


def _waits_for_slot(holder: Holder) -> bool:
    return holder.state == "granted" and bool(holder.worker)


def too_costly_tasks(store: AdminStore, named: int, *, locks: int) -> tuple[int, list[str]]:
    """Return how many parked tasks cost more than a rate of their lock, and some of them.

    They fail when they are next: the rate was lowered while they waited.

    Args:
        store: the store of the locks.
        named: largest number of tasks that are named.
        locks: largest number of locks with waiters that are examined.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    total, some, looked = 0, list[str](), 0
    for lock in store.summarise_locks(holders=0):
        if not lock.waiting:
            continue
        if looked == locks:
            break
        looked += 1
        rates = [rate for rate in store.inspect(lock.name, waiters=0).rates if rate.by_cost]
        page = store.list_waiters(lock.name, "queue", most=READ).waiting if rates else ()
        for each, cost, rate in _above(page, rates):
            total += 1
            if len(some) < named:
                what = f"{each.task}[{each.task_id}]" if each.task else "a client"
                some.append(f"{what} for {lock.name!r} costs {cost}, {rate} allows {rate.most}")
    return total, some


def _above(
    waiting: Iterable[Waiting], rates: list[RateInForce]
) -> Iterator[tuple[Waiting, int, RateInForce]]:
    """Yield the waiters that cost more than a rate, each with the first such rate."""
    for each in waiting:
        for rate in rates:
            cost = (each.costs or {}).get(rate.key, 1)
            if cost > rate.most:
                yield each, cost, rate
                break

"""One sweep by hand: for a cron job, where all workers may be gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from celery_singleton_lock.model import Stray
from celery_singleton_lock.store.admin import AdminStore, Operator

ALL_LOCKS = "(all locks)"
"""Stands in the audit for the name of a lock."""


@dataclass(slots=True)
class Swept:
    """What a sweep found.

    Args:
        locks: how many wanted a look.
        published: copies of parked messages that were sent to the broker, to wake a worker.
        adrift: parked messages that no live worker consumes.
    """

    locks: int = 0
    published: int = 0
    adrift: int = 0


def sweep_once(
    store: AdminStore,
    by: Operator,
    realm: str = "",
    publish: Callable[[Stray], None] | None = None,
) -> Swept:
    """Look at all locks that want it: lapsed leases end, and who is next is granted.

    Where no live worker consumes a message's queue, a copy of it goes to the broker, at most at
    intervals that double up to an hour: an autoscaler sees that there is work.

    Args:
        store: where.
        by: who does it. In the audit the sweeps of one, as of a cron job, are one entry, as long as
            nobody else steps in.
        realm: of the broker; empty: no copies.
        publish: sends a copy.

    Raises:
        BackendError: Redis did not answer, or refused.
        Exception: what ``publish`` raises; a later sweep sends that copy again.
    """
    store.remark(ALL_LOCKS, replace(by, action="sweep", op=f"sweep:{by.who}@{by.host}"))
    swept = Swept()
    seen: set[str] = set()
    while fresh := [name for name in store.take_due() if name not in seen]:
        seen.update(fresh)
        for stray in store.kick_many(fresh, realm=realm):
            if publish is not None:
                publish(stray)
                swept.published += 1
        swept.adrift += sum(store.inspect(name, waiters=0).adrift for name in fresh)
    swept.locks = len(seen)
    return swept

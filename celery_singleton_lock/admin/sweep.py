"""One sweep by hand: for a cron job, where all workers may be gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from celery_singleton_lock.core.model import Stray
from celery_singleton_lock.store.operator.base import AdminStore, Operator

ALL_LOCKS = "(all locks)"
"""Stands in the audit for the name of a lock."""


@dataclass(slots=True)
class Swept:
    """What a sweep found.

    Args:
        locks: how many wanted a look.
        published: parked messages that were sent to the broker.
        adrift: parked messages that no live worker takes, and that were not sent.
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

    Messages that no live worker takes go to the broker, at most 100 of a lock: an autoscaler sees
    that there is work.

    Args:
        store: where.
        by: who does it. In the audit the sweeps of one, as of a cron job, are one entry, as long as
            nobody else steps in.
        realm: of the broker.
        publish: sends a message to its queue; None: none is sent.

    Raises:
        BackendError: Redis did not answer, or refused.
        Exception: what ``publish`` raises; what was not sent queues again.
    """
    store.remark(ALL_LOCKS, replace(by, action="sweep", op=f"sweep:{by.who}@{by.host}"))
    swept = Swept()
    seen: set[str] = set()
    while fresh := [name for name in store.take_due() if name not in seen]:
        seen.update(fresh)
        if publish is None:
            store.kick_many(fresh)
        else:
            strays = store.kick_many(fresh, realm=realm)
            for _, group in groupby(strays, attrgetter("name")):
                swept.published += _send_on(store, list(group), publish)
        swept.adrift += sum(store.inspect(name, waiters=0).adrift for name in fresh)
    swept.locks = len(seen)
    return swept


def _send_on(store: AdminStore, strays: list[Stray], publish: Callable[[Stray], None]) -> int:
    """Send messages of one lock to the broker; return how many."""
    first, sent = strays[0], list[str]()
    try:
        for stray in strays:
            publish(stray)
            sent.append(stray.token)
    finally:
        unsent = [stray.token for stray in strays[len(sent) :]]
        for tokens, are_sent in ((sent, True), (unsent, False)):
            if tokens:
                store.left(first.name, first.seal, tokens, sent=are_sent)
    return len(sent)

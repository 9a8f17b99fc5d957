"""Sweep all locks once: for a cron job, while no worker runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from operator import attrgetter

from celery_singleton_lock.core.parked_message import UntakenMessage
from celery_singleton_lock.store.operator.base import AdminStore, Operator

ALL_LOCKS = "(all locks)"
"""Lock name of the sweep's audit entry."""

AT_ONCE = 100
"""Largest number of locks that are swept in one call."""


@dataclass(slots=True)
class Swept:
    """The result of a sweep.

    Args:
        locks: number of locks that were swept.
        published: number of parked messages that were sent to the broker.
        adrift: number of parked messages that no live worker takes and that were not sent.
    """

    locks: int = 0
    published: int = 0
    adrift: int = 0


def sweep_once(
    store: AdminStore,
    by: Operator,
    realm: str = "",
    publish: Callable[[UntakenMessage], None] | None = None,
) -> Swept:
    """Sweep all locks that are due: remove expired holders, and grant to the next waiters.

    Sends messages that no live worker takes to the broker, at most 100 of each lock, so that an
    autoscaler sees the work.

    Args:
        store: the store of the locks.
        by: the operator. Successive sweeps by one operator share an audit entry, so that a cron job
            does not fill the audit.
        realm: the realm of the broker.
        publish: sends a message to its queue. None: no message is sent.

    Raises:
        BackendError: Redis did not answer, or refused the command.
        Exception: any error of ``publish``. Messages that were not sent are parked again.
    """
    store.write_audit_entry(ALL_LOCKS, replace(by, action="sweep", op=f"sweep:{by.who}@{by.host}"))
    swept, done = Swept(), set[str]()
    for fresh in chain(_due(store), _untaken(store, realm, done) if publish else ()):
        done.update(fresh)
        swept.locks += len(fresh)
        if publish is None:
            store.sweep_and_grant_many(fresh)
        else:
            messages = store.sweep_and_grant_many(fresh, realm=realm)
            for _, group in groupby(messages, attrgetter("name")):
                swept.published += _send_on(store, list(group), publish)
        swept.adrift += sum(store.inspect(name, waiters=0).adrift for name in fresh)
    return swept


def requeue_expired(store: AdminStore, *, within: float = math.inf) -> None:
    """Return the stored messages of expired holders to their queues, and send none.

    Workers do this about once a second. Without a live worker, a command does it before it selects
    parked tasks. Otherwise it would miss tasks whose workers have died.

    Args:
        store: the store of the locks.
        within: seconds after which no further locks are swept; the next call sweeps others first.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    until = store.clock.monotonic() + within
    for fresh in _due(store):
        store.sweep_and_grant_many(fresh)
        if store.clock.monotonic() > until:
            return


def _due(store: AdminStore) -> Iterator[list[str]]:
    """Yield the names of the locks that are due, in parts, each lock once."""
    seen: set[str] = set()
    while fresh := [name for name in store.take_due_locks() if name not in seen]:
        seen.update(fresh)
        yield fresh


def _untaken(store: AdminStore, realm: str, done: Collection[str]) -> Iterator[list[str]]:
    """Yield in parts, without those of ``done``, the locks of messages that no live worker takes.

    If another application shares this Redis, its workers sweep these locks before they are due
    here, and send none of this broker's messages.
    """
    if all(store.consumers(realm, queue, "") for queue in store.parked(realm)):
        return
    found = store.summarise_locks(holders=0)
    names = (lock.name for lock in found if lock.adrift and not lock.broken)
    rest = (name for name in names if name not in done)
    while fresh := list(islice(rest, AT_ONCE)):
        yield fresh


def _send_on(
    store: AdminStore, messages: list[UntakenMessage], publish: Callable[[UntakenMessage], None]
) -> int:
    """Send messages of one lock to the broker, and return their number."""
    first, sent = messages[0], list[str]()
    try:
        for message in messages:
            publish(message)
            sent.append(message.token)
    finally:
        unsent = [message.token for message in messages[len(sent) :]]
        for tokens, are_sent in ((sent, True), (unsent, False)):
            if tokens:
                store.record_publish_result(first.name, first.seal, tokens, sent=are_sent)
    return len(sent)

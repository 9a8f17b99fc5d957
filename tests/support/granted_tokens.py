"""The tokens that a lock has granted, on one Redis and on a quorum."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.store.quorum.coordinators import ranked
from celery_singleton_lock.store.quorum.sync import QuorumStore, RedisNode


def queue_server(store: QuorumStore, name: str) -> RedisNode:
    """Return the server of a quorum that has the lock's queue."""
    return store.nodes[ranked(store.operations.addresses, name)[0]]


def granted_tokens(store: Any, name: str) -> list[str]:
    """Return the tokens with a permit. On a quorum: those that may collect votes next."""
    where = queue_server(store, name) if isinstance(store, QuorumStore) else store
    return [holder.token for holder in where.inspect(name).holders]

"""Whose turn it is, on one Redis and on a quorum."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.store.quorum.sync import QuorumStore, RedisNode
from celery_singleton_lock.store.quorum.operations import ranked


def coordinator(store: QuorumStore, name: str) -> RedisNode:
    """The server of a quorum at which a lock's waiters queue."""
    return store.nodes[ranked(store.verbs.addresses, name)[0]]


def turns(store: Any, name: str) -> list[str]:
    """Tokens that were granted a permit; on a quorum, a turn, with which they get the lock."""
    where = coordinator(store, name) if isinstance(store, QuorumStore) else store
    return [holder.token for holder in where.inspect(name).holders]

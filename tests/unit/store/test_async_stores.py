"""The stores for asyncio have what a lock needs."""

from __future__ import annotations

import pytest

from celery_singleton_lock.store.base import LockStore
from celery_singleton_lock.store.cluster.aio import AsyncClusterStore
from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
from celery_singleton_lock.store.redis.aio import AsyncRedisStore

NEEDED = {name for name in vars(LockStore) if not name.startswith("_")}


@pytest.mark.parametrize("store", [AsyncRedisStore, AsyncClusterStore, AsyncQuorumStore])
def test_a_store_for_asyncio_has_each_operation_of_a_lock(store):
    """``AsyncLock.pause`` raised AttributeError on a Cluster."""
    assert NEEDED
    assert {name for name in NEEDED if not hasattr(store, name)} == set()

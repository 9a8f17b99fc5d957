"""The stores that have to keep the contract."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import redis.asyncio

from celery_singleton_lock.store.async_redis import AsyncRedisStore
from celery_singleton_lock.store.redis import RedisStore
from support.loop import Driven, LoopThread


@pytest.fixture
def loop_thread():
    """A running loop, through which threads drive what is written for asyncio."""
    with LoopThread() as thread:
        yield thread


@pytest.fixture
def async_client(loop_thread, redis_server, redis_url):
    """A client for asyncio of the shared server, empty; it lives in that loop."""
    client = redis.asyncio.Redis.from_url(redis_server.url)
    yield client
    loop_thread.run(client.aclose())


@pytest.fixture
def make_store(request, redis_client):
    """Make a store of a kind: ``make_store("asyncio", claim_lease=0.5)``. They end with the test.

    One for asyncio is driven through a loop thread, so that the same test speaks to both.
    """
    with ExitStack() as stack:

        def make(kind, **options):
            if kind == "asyncio":
                store = AsyncRedisStore(request.getfixturevalue("async_client"), **options)
                return Driven(request.getfixturevalue("loop_thread"), store)
            store = RedisStore(redis_client, **options)
            stack.callback(store.close)
            return store

        yield make

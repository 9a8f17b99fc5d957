"""The clients that a quorum makes for its servers."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from celery_singleton_lock import AsyncQuorumStore

SERVERS = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]


@pytest.mark.parametrize(("name", "other"), [("close", "aclose"), ("aclose", "close")])
def test_the_end_of_an_async_quorum_closes_its_connections_with_every_redis_py(
    name, other, monkeypatch
):
    """redis-py 5.0.0 has only ``close``: leaving the block raised AttributeError."""
    closed = []

    async def close(client):
        closed.append(client)

    async def use():
        async with AsyncQuorumStore(SERVERS) as store:
            return [node.client for node in store.nodes]

    monkeypatch.delattr(redis.asyncio.Redis, other, raising=False)
    monkeypatch.setattr(redis.asyncio.Redis, name, close, raising=False)
    assert asyncio.run(use()) == closed

"""The clients that a quorum makes for its servers."""

from __future__ import annotations

import asyncio

import redis.asyncio

from celery_singleton_lock import AsyncQuorumStore

SERVERS = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]


def test_the_end_of_an_async_quorum_closes_its_connections(monkeypatch):
    closed = []

    async def close(client):
        closed.append(client)

    async def use():
        async with AsyncQuorumStore(SERVERS) as store:
            return [node.client for node in store.nodes]

    monkeypatch.setattr(redis.asyncio.Redis, "aclose", close)
    assert asyncio.run(use()) == closed

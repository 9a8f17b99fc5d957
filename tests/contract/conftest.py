"""The stores that must fulfil the contract, and their servers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import redis.asyncio

from celery_singleton_lock.core.clock import MovableClock
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.lock import lease as lease_module
from celery_singleton_lock.lock import wait_for_turn
from celery_singleton_lock.store.operator.redis import ClusterAdminStore, RedisAdminStore
from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
from celery_singleton_lock.store.quorum.sync import QuorumStore, RedisNode
from celery_singleton_lock.store.quorum.worker_store import TaskQuorum
from celery_singleton_lock.store.redis import aio
from celery_singleton_lock.testing import memory_client
from support.ci import skip_or_fail
from support.loop_thread import Driven, LoopThread

MEMORY = "in_memory"

PATIENCE = 10.0
"""Seconds within which a server must answer, on a busy machine too."""


def quorum(clients, **options):
    """Make a quorum whose time can pass; see :mod:`support.passing_time`."""
    times = {"timeout": PATIENCE, "longest_lease": 3600.0, "clock": MovableClock()}
    return TaskQuorum(clients, **times, **options)


STORES = {"cluster": ClusterAdminStore, "quorum": quorum}


@pytest.fixture(params=["redis", MEMORY])
def kind(request):
    """The kind of store: on a Redis, and in the memory of this process. Files may name others."""
    return request.param


@pytest.fixture
def lock_client(request, kind):
    """A client of the server on which that kind lives, empty."""
    if kind == "cluster":
        return request.getfixturevalue("cluster_client")
    if kind == "quorum":
        unfit = request.node.get_closest_marker("not_on_quorum")
        if unfit is not None:
            pytest.skip(unfit.args[0])
        return request.getfixturevalue("quorum_clients")
    if kind != MEMORY:
        return request.getfixturevalue("redis_client")
    unfit = request.node.get_closest_marker("not_in_memory")
    if unfit is not None:
        pytest.skip(unfit.args[0])
    client = memory_client("contract")
    client.flushall()
    client.server.clock.go()  # an earlier test may have stopped it
    return client


@pytest.fixture
def renew_often(monkeypatch):
    """Leases are renewed after a fortieth of their length.

    So a test sees renewals soon, of a lease that is longer than any pause of a busy machine.
    """
    monkeypatch.setattr(lease_module, "RENEW_AT", 1 / 40)
    monkeypatch.setattr(lease_module, "JOIN_AT", 1 / 80)


@pytest.fixture
def no_heartbeat(monkeypatch):
    """Waiters ask again only when they are woken, or when a lease or their wait ends."""
    monkeypatch.setattr(wait_for_turn, "HEARTBEAT", 60.0)


@pytest.fixture
def patient_quorums(monkeypatch):
    """Quorums wait for answers longer than the default, which is a quarter of a second."""
    for kind in (QuorumStore, AsyncQuorumStore):
        monkeypatch.setitem(kind.__init__.__kwdefaults__, "timeout", PATIENCE)


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
def async_backend(request, kind, loop_thread):
    """The client, or clients, of an AsyncLock for that kind of store."""
    if kind == "redis":
        yield request.getfixturevalue("async_client")
        return
    if kind == "cluster":
        port = request.getfixturevalue("redis_cluster").masters[0].port
        client = loop_thread.call(redis.asyncio.RedisCluster, "127.0.0.1", port)
        yield client
        loop_thread.run(client.aclose())
        return
    servers = request.getfixturevalue("three_servers")
    clients = [redis.asyncio.Redis.from_url(server.url) for server in servers]
    yield clients
    for client in clients:
        loop_thread.run(client.aclose())


@pytest.fixture(scope="session")
def three_servers(redis_provider):
    """Three servers for the quorums of this run; which leave them as they were."""
    if not redis_provider.is_real:
        skip_or_fail(f"a quorum needs real servers, and this run has {redis_provider}")
    with ExitStack() as stack:
        yield [stack.enter_context(RedisServer(redis_provider)) for _ in range(3)]


@pytest.fixture
def quorum_clients(three_servers):
    """Clients of these servers, which are empty and admitted as voters."""
    with ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for server in three_servers]
        for client in clients:
            client.flushall()
            RedisNode(client).admit_voter()
        yield clients


@pytest.fixture
def new_prefix(kind, each_client):
    """A function that admits the servers of a quorum for a new prefix, so that it need not wait."""

    def met(prefix):
        for client in each_client if kind == "quorum" else ():
            RedisNode(client, Keyspace(prefix)).admit_voter()
        return prefix

    return met


@pytest.fixture
def all_keys(kind, lock_client):
    """Find keys that fit a pattern, wherever the store of this test keeps them."""
    everywhere = {"target_nodes": "primaries"} if kind == "cluster" else {}
    return lambda pattern: lock_client.keys(pattern, **everywhere)


@pytest.fixture
def key_clients(kind, lock_client):
    """The clients that may have a key: several, or one."""
    return lock_client if kind == "quorum" else [lock_client]


@pytest.fixture
def each_client(kind, lock_client, key_clients):
    """A client of each server."""
    if kind != "cluster":
        return key_clients
    nodes = lock_client.get_primaries()
    return [lock_client.get_redis_connection(node) for node in nodes]


@pytest.fixture
def lose_data(kind, each_client):
    """A function that deletes the data of all servers; those of a quorum are admitted again."""

    def lose():
        for client in each_client:
            client.flushall()
            if kind == "quorum":
                RedisNode(client).admit_voter()

    return lose


@pytest.fixture
def make_store(request, kind, lock_client):
    """Make a store of that kind: ``make_store(claim_lease=0.5)``. They end with the test.

    One for asyncio is driven through a loop thread, so that the same test speaks to all.
    """
    with ExitStack() as stack:

        def make_one(**options):
            options = {"claim_lease": 60.0, **options}  # no grant lapses on a busy machine
            if kind == "asyncio":
                request.getfixturevalue("monkeypatch").setattr(aio, "SLACK", PATIENCE)
                store = aio.AsyncRedisStore(request.getfixturevalue("async_client"), **options)
                return Driven(request.getfixturevalue("loop_thread"), store)
            store = STORES.get(kind, RedisAdminStore)(lock_client, **options)
            stack.callback(store.close)
            return store

        yield make_one

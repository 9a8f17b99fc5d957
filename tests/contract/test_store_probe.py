"""Checks of a server before use: whether it accepts locks, and has replicas."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import SCHEMA, Claim, Identity, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import ParkedMessage
from celery_singleton_lock.errors import BackendError, BackendRefused
from celery_singleton_lock.store.requests import Replicas

pytestmark = pytest.mark.contract

LOST = ParkedMessage("a", "t1.0", "app.task", "id1")
SERVERS = pytest.mark.parametrize("kind", ["redis", "cluster"], indirect=True)
"""Stores that may have replicas; the one for asyncio serves clients, which park no messages."""


@pytest.fixture(params=["redis", "asyncio", "cluster", "quorum", "in_memory"])
def kind(request):
    """Each kind of store there is."""
    return request.param


@pytest.fixture
def store(make_store):
    return make_store()


@pytest.fixture
def fill(each_client):
    """Let the servers refuse all writes that need memory."""
    for client in each_client:
        client.config_set("maxmemory", 1)
    yield
    for client in each_client:
        client.config_set("maxmemory", 0)


def test_the_schema_of_the_data_is_that_of_the_first_worker(store):
    """Asked again, it is the same; and a probe needs none."""
    store.probe()
    assert store.schema() == SCHEMA
    assert store.schema() == SCHEMA


def test_a_probe_takes_no_lock_of_others_and_can_be_repeated(store):
    """It acquires and releases its own lock."""
    holder = Owner(new_token())
    store.acquire(holder, Claim("a"))
    for _ in range(2):
        store.probe()
    assert [each.token for each in store.inspect("a").holders] == [holder.token]
    assert store.acquire(Owner(new_token()), Claim("b")).verdict is Verdict.GRANTED


@pytest.mark.not_in_memory("it is never full")
def test_a_probe_fails_on_a_redis_that_takes_no_locks(store, request):
    store.probe()
    request.getfixturevalue("fill")
    with pytest.raises(BackendError):
        store.probe()


@SERVERS
def test_without_replicas_wait_no_replica_is_waited_for(store):
    assert list(store.confirm(["a", "b"])) == [True, True]


@SERVERS
def test_what_no_replica_has_is_not_confirmed_and_the_setting_is_named(make_store):
    store = make_store(replicas=Replicas(1000, 0.05))
    assert list(store.confirm(["a", "b"])) == [False, False]
    told = store.too_few()
    assert "1000 replicas" in told
    assert "singleton_lock_replicas_wait" in told


@pytest.mark.parametrize("kind", ["in_memory"], indirect=True)
def test_a_store_in_memory_refuses_to_wait_for_replicas(make_store):
    """It has none, so nothing is reported as safe."""
    with pytest.raises(BackendRefused, match="WAIT"):
        make_store(replicas=Replicas(1, 0.05)).confirm(["a"])


@pytest.mark.parametrize("kind", ["quorum"], indirect=True)
def test_a_quorum_keeps_no_message_that_it_could_lose(store, all_values):
    """A worker may ask it like every other store: it knows nothing, and notes nothing."""
    before = all_values()
    assert store.identify() == Identity()
    assert store.identify().differs(store.identify()) == ""
    assert list(store.has_messages([LOST])) == list(store.has_traces([LOST])) == []
    store.vouch(["t1"])
    store.note_lost({"id1": "{}"})
    assert all_values() == before


@pytest.fixture
def all_values(each_client):
    return lambda: [sorted(client.keys("*")) for client in each_client]

"""What a store says of itself before it is relied on: whether it takes locks, and has replicas."""

from __future__ import annotations

import pytest

from celery_singleton_lock.errors import BackendError, BackendRefused
from celery_singleton_lock.core.model import Claim, Identity, Owner, ParkedMessage, Verdict, new_token
from celery_singleton_lock.store.message_operations import Replicas

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


def test_a_probe_takes_no_lock_of_others_and_can_be_repeated(store):
    """It takes a lock of its own and gives it back."""
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
def test_who_wishes_for_no_replicas_waits_for_none(store):
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
    """It has none; nothing is told to be safe."""
    with pytest.raises(BackendRefused, match="WAIT"):
        make_store(replicas=Replicas(1, 0.05)).confirm(["a"])


@pytest.mark.parametrize("kind", ["quorum"], indirect=True)
def test_a_quorum_refuses_to_wait_for_replicas(store):
    for ask in (lambda: store.confirm(["a"]), store.too_few):
        with pytest.raises(BackendRefused, match="replicas"):
            ask()


@pytest.mark.parametrize("kind", ["quorum"], indirect=True)
def test_a_quorum_keeps_no_message_that_it_could_lose(store, all_values):
    """A worker may ask it like every other store: it knows nothing, and notes nothing."""
    before = all_values()
    assert store.identify() == Identity()
    assert store.identify().differs(store.identify()) == ""
    assert list(store.kept([LOST])) == list(store.traced([LOST])) == []
    store.vouch(["t1"])
    store.note_lost({"id1": "{}"})
    assert all_values() == before


@pytest.fixture
def all_values(each_client):
    return lambda: [sorted(client.keys("*")) for client in each_client]

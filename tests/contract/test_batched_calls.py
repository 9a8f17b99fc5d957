"""Several locks in one round trip: each gets its own answer, and one that is refused stops none."""

from __future__ import annotations

import pytest

from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.model import Claim, Ending, Owner, Parcel, Verdict, new_token
from celery_singleton_lock.store.redis.sync import RedisStore

pytestmark = pytest.mark.contract

LOCKS = ("one", "broken", "two")


@pytest.fixture
def store(lock_client):
    store = RedisStore(lock_client)
    yield store
    store.close()


@pytest.fixture
def broken(lock_client):
    """A lock of which another program uses a key."""
    lock_client.set(Keyspace().lock("broken").queue, "x")


def parcels(realm="R"):
    """A message for each lock; who sends it is known by the lock's name."""
    return [
        (Owner(new_token(), f"{name}/0/0"), Claim(name), Parcel(name.encode(), realm, "q"))
        for name in LOCKS
    ]


@pytest.fixture
def held(store):
    for name in ("one", "two"):
        store.acquire(Owner(new_token()), Claim(name))


def test_of_a_batch_only_what_was_refused_is_refused(store, held, broken):
    """With the words that a single call would have."""
    first, refused, last = store.park_many(parcels())
    assert [first.verdict, last.verdict] == [Verdict.WAITING, Verdict.WAITING]
    assert type(refused) is BackendRefused
    assert "WRONGTYPE" in str(refused)
    assert store.park_many([]) == []


def test_after_the_scripts_were_forgotten_each_is_answered_still(store, held, broken, lock_client):
    """What is sent again can be refused, too."""
    lock_client.script_flush()
    first, refused, last = store.park_many(parcels())
    assert [first.verdict, last.verdict] == [Verdict.WAITING, Verdict.WAITING]
    assert type(refused) is BackendRefused


def test_the_sweep_of_many_finds_what_nobody_consumes_in_any_of_them(store, held, broken):
    """Each stray under the name of its own lock, and a refused lock in between is passed by."""
    sent = parcels()
    store.park_many(sent)
    for name in ("one", "two"):
        (holder,) = store.inspect(name).holders
        store.release(name, holder.token, Ending.FINAL)
    found = store.kick_many(LOCKS, worker="w", realm="R")
    assert [(stray.name, stray.token, stray.queue, stray.body) for stray in found] == [
        (name, owner.token, "q", name.encode())
        for name, (owner, _, _) in zip(LOCKS, sent, strict=True)
        if name != "broken"
    ]
    assert store.kick_many([], worker="w", realm="R") == []


def test_messages_of_another_broker_are_left_to_its_workers(store, held):
    """Whoever sweeps, and whether one lock or many."""
    store.park_many(parcels("S")[::2])
    for name in ("one", "two"):
        (holder,) = store.inspect(name).holders
        store.release(name, holder.token, Ending.FINAL)
    assert store.kick_many(["one", "two"], worker="w", realm="R") == []
    assert store.kick_many(["one", "two"]) == []
    assert len(store.kick_many(["one", "two"], realm="S")) == 2


def test_a_sweep_hands_the_lock_to_the_worker_that_asked_if_it_can_run_the_message(store, held):
    """Of several that consume the queue."""
    store.park_many(parcels()[::2])
    for worker in ("a", "b", "c"):
        store.beat(worker, "R", ["q"], 30.0)
    for name in ("one", "two"):
        store.reset(name)
    assert store.kick_many(["one", "two"], worker="b", realm="R") == []
    granted = [store.receive(worker, 0.01) for worker in ("a", "b", "c")]
    assert any(granted)


@pytest.mark.needs_real_redis("replication")
@pytest.mark.parametrize("direct", [False, True], ids=["client", "wire"])
def test_a_server_that_is_no_master_any_more_is_unreachable_and_left(make_redis, direct):
    """Who connects anew may be led elsewhere; to ask again on the same connection is in vain."""
    with make_redis().client(decode_responses=False) as client:
        store = RedisStore(client, direct=direct)
        store.acquire(Owner(new_token()), Claim("one"))
        client.replicaof("127.0.0.1", 1)
        calls = (
            lambda: store.acquire(Owner(new_token()), Claim("one")),
            lambda: store.park(*parcels()[0]),
            store.schema,
            store.probe,
        )
        for call in calls:
            before = client.client_id()
            with pytest.raises(BackendUnreachable):
                call()
            assert direct or client.client_id() != before
        before = client.client_id()
        answers = store.park_many(parcels())
        assert [type(answer) for answer in answers] == [BackendUnreachable] * 3
        assert client.client_id() != before
        assert not direct or store._wire._idle == []
        store.close()

"""Several locks in one round trip: each has its own result, and a refused one stops no other."""

from __future__ import annotations

import pytest
import redis

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendUnreachable, LockUnusable
from celery_singleton_lock.store.redis.sync import RedisStore
from support.older_pool import OlderBlockingPool

pytestmark = pytest.mark.contract

LOCKS = ("one", "broken", "two")


@pytest.fixture
def store(lock_client):
    store = RedisStore(lock_client)
    yield store
    store.close()


@pytest.fixture
def broken(lock_client):
    """A lock with a key that another program uses."""
    lock_client.set(Keyspace().lock("broken").queue, "x")


def to_park(realm="R"):
    """A message for each lock; who sends it is known by the lock's name."""
    return [
        (Owner(new_token(), f"{name}/0/0"), Claim(name), MessageToPark(name.encode(), realm, "q"))
        for name in LOCKS
    ]


@pytest.fixture
def held(store):
    for name in ("one", "two"):
        store.acquire(Owner(new_token()), Claim(name))


def test_of_a_batch_only_what_was_refused_is_refused(store, held, broken):
    """With the words that a single call would have."""
    first, refused, last = store.park_many(to_park())
    assert [first.verdict, last.verdict] == [Verdict.WAITING, Verdict.WAITING]
    assert type(refused) is LockUnusable
    assert "WRONGTYPE" in str(refused)
    assert store.park_many([]) == []


def test_after_the_scripts_were_forgotten_each_is_answered_still(store, held, broken, lock_client):
    """What is sent again can be refused, too."""
    lock_client.script_flush()
    first, refused, last = store.park_many(to_park())
    assert [first.verdict, last.verdict] == [Verdict.WAITING, Verdict.WAITING]
    assert type(refused) is LockUnusable


def test_a_sweep_of_several_locks_finds_messages_without_a_consumer(store, held, broken):
    """Each adrift message with its own lock; a refused lock between them is skipped."""
    sent = to_park()
    store.park_many(sent)
    for name in ("one", "two"):
        (holder,) = store.inspect(name).holders
        store.release(name, holder.token, Ending.FINAL)
    found = store.sweep_and_grant_many(LOCKS, worker="w", realm="R")
    assert [(stray.name, stray.token, stray.queue, stray.body) for stray in found] == [
        (name, owner.token, "q", name.encode())
        for name, (owner, _, _) in zip(LOCKS, sent, strict=True)
        if name != "broken"
    ]
    assert store.sweep_and_grant_many([], worker="w", realm="R") == []


def test_others_are_served_while_a_process_renews_very_many_leases(store, held, monkeypatch):
    """Redis serves nobody while a script runs, so each script renews a bounded number."""
    (holder,) = store.inspect("two").holders
    nobodys = [(f"lock:{number}", "nobody.0", 30.0) for number in range(999)]
    leases = [*nobodys, ("two", holder.token, 30.0)]
    keys, do = [], store.do

    def noting(request):
        keys.append(int(request.words[2]))
        return do(request)

    monkeypatch.setattr(store, "do", noting)
    assert store.extend(leases) == [False] * 999 + [True]
    assert max(keys) <= 200 * 11


def test_messages_of_another_broker_are_left_to_its_workers(store, held):
    """Whoever sweeps, and whether one lock or many."""
    store.park_many(to_park("S")[::2])
    for name in ("one", "two"):
        (holder,) = store.inspect(name).holders
        store.release(name, holder.token, Ending.FINAL)
    assert store.sweep_and_grant_many(["one", "two"], worker="w", realm="R") == []
    assert store.sweep_and_grant_many(["one", "two"]) == []
    assert len(store.sweep_and_grant_many(["one", "two"], realm="S")) == 2


def test_a_sweep_hands_the_lock_to_the_worker_that_asked_if_it_can_run_the_message(store, held):
    """Of several that consume the queue."""
    store.park_many(to_park()[::2])
    for worker in ("a", "b", "c"):
        store.worker_heartbeat(worker, "R", ["q"], 30.0)
    for name in ("one", "two"):
        store.reset(name)
    assert store.sweep_and_grant_many(["one", "two"], worker="b", realm="R") == []
    granted = [store.receive(worker, 0.01) for worker in ("a", "b", "c")]
    assert any(granted)


@pytest.mark.needs_real_redis("replication")
@pytest.mark.parametrize("direct", [False, True], ids=["client", "wire"])
def test_a_server_that_is_no_master_any_more_is_unreachable_and_left(make_redis, direct):
    """A new connection may reach another server; to repeat on the same connection is useless."""
    with make_redis().client(decode_responses=False) as client:
        store = RedisStore(client, direct=direct)
        store.acquire(Owner(new_token()), Claim("one"))
        client.replicaof("127.0.0.1", 1)
        calls = (
            lambda: store.acquire(Owner(new_token()), Claim("one")),
            lambda: store.park(*to_park()[0]),
            store.schema,
            store.probe,
        )
        for call in calls:
            before = client.client_id()
            with pytest.raises(BackendUnreachable):
                call()
            assert direct or client.client_id() != before
        before = client.client_id()
        answers = store.park_many(to_park())
        assert [type(answer) for answer in answers] == [BackendUnreachable] * 3
        assert client.client_id() != before
        assert not direct or store._fast_path._idle == []
        store.close()


@pytest.mark.needs_real_redis("replication")
def test_a_client_with_a_blocking_pool_leaves_a_server_that_is_no_master_any_more(make_redis):
    pool = OlderBlockingPool(host="127.0.0.1", port=make_redis().port)
    with redis.Redis(connection_pool=pool) as client:
        store = RedisStore(client)
        client.replicaof("127.0.0.1", 1)
        before = client.client_id()
        with pytest.raises(BackendUnreachable):
            store.acquire(Owner(new_token()), Claim("one"))
        assert client.client_id() != before
        store.close()
    pool.disconnect()

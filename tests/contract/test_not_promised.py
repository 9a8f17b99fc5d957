"""The exceptions in docs/guarantees.md are reproduced here, so that they stay known.

They also show what is still guaranteed: as a rule the holder is notified of the loss, and the later
holder has a greater fencing token.
"""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import load_scripts
from support.waiting import eventually

pytestmark = pytest.mark.contract

NAME = "account:42"
LEASE = 30.0
SECOND = 1_000_000
NOW = 1_800_000_000 * SECOND
HELD_CLOCK = "local function server_time() return redis.call('GET', 'now') end"
"""In place of the script that reads the server's clock: nobody can set that one."""


def owner(attempt=""):
    return Owner(new_token(), attempt, "app.task", host="host", pid=1)


@pytest.fixture
def clocked(redis_client):
    """A store on a server whose clock the test sets, in microseconds: the key ``now``."""
    redis_client.set("now", NOW)
    store = RedisStore(redis_client, scripts=load_scripts(HELD_CLOCK))
    yield store
    store.close()


def test_a_clock_that_jumps_forward_admits_a_second_holder_and_notifies_the_first(
    clocked, redis_client
):
    """By an hour: the lease has expired; the holder is notified at its next renewal."""
    first, second = owner(), owner()
    before = clocked.acquire(first, Claim(NAME, LEASE))
    redis_client.set("now", NOW + 3600 * SECOND)
    after = clocked.acquire(second, Claim(NAME, LEASE))
    assert (before.verdict, after.verdict) == (Verdict.GRANTED, Verdict.GRANTED)
    assert after.fencing_token > before.fencing_token
    assert clocked.extend([(NAME, first.token, LEASE)]) == [False]


def test_a_clock_that_jumps_back_keeps_a_dead_holders_lock_that_much_longer(clocked, redis_client):
    """By an hour: nobody gets the lock until the clock reaches the end of the lease."""
    clocked.acquire(owner(), Claim(NAME, LEASE))
    redis_client.set("now", NOW - 3600 * SECOND)
    assert clocked.acquire(owner(), Claim(NAME, LEASE)).verdict is Verdict.BLOCKED
    redis_client.set("now", NOW + (LEASE + 1) * SECOND)
    assert clocked.acquire(owner(), Claim(NAME, LEASE)).verdict is Verdict.GRANTED


@pytest.mark.needs_real_redis("eviction")
def test_a_redis_that_evicts_forgets_a_lock_and_a_parked_message(make_redis):
    """When full it evicts keys: a second holder gets the lock, and a message is lost."""
    server = make_redis("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    with server.client(decode_responses=False) as client:
        store = RedisStore(client)
        first = owner()
        before = store.acquire(first, Claim(NAME, LEASE))
        store.park(owner("id/0/0"), Claim(NAME, LEASE), MessageToPark(b"body", "R", "q"))
        numbers = iter(range(100_000))

        def forgotten():
            client.mset({f"cache:{next(numbers)}": b"x" * 10_000 for _ in range(20)})
            return not any(client.exists(key) for key in store.keyspace.lock(NAME))

        eventually(forgotten, 20, "the lock's keys are evicted")
        after = store.acquire(owner(), Claim(NAME, LEASE))
        assert after.verdict is Verdict.GRANTED
        assert after.fencing_token > before.fencing_token
        assert store.extend([(NAME, first.token, LEASE)]) == [False]
        assert store.inspect(NAME).bodies == 0
        store.close()


def test_a_parked_task_whose_grant_was_lost_may_run_twice_and_release_the_other_run(redis_client):
    """A snapshot of the time before its grant is restored: both deliveries have one token."""
    store, task = RedisStore(redis_client), owner("id/0/0")
    for worker in ("first", "second"):
        store.worker_heartbeat(worker, "R", ["q"], LEASE)
    holder, behind = owner(), owner("id2/0/0")
    store.acquire(holder, Claim(NAME, LEASE))
    for waits in (task, behind):
        store.park(waits, Claim(NAME, LEASE), MessageToPark(b"body", "R", "q"))
    snapshot = {key: redis_client.dump(key) for key in redis_client.scan_iter(f"*{NAME}*")}

    def runs(worker):
        store.release(NAME, holder.token, Ending.FINAL, worker=worker)
        return store.claim(task._replace(worker=worker), NAME, LEASE).fencing_token

    before = runs("first")
    redis_client.delete(*redis_client.scan_iter(f"*{NAME}*"))
    for key, value in snapshot.items():
        redis_client.restore(key, 0, value)
    assert runs("second") > before
    assert store.extend([(NAME, task.token, LEASE)]) == [True], "the first run"
    store.release(NAME, task.token, Ending.FINAL, worker="first")
    assert [held.token for held in store.inspect(NAME).holders] == [behind.token]
    store.close()


def test_places_are_what_each_worker_takes_for_the_servers_time(redis_client):
    """Of two workers, one that guesses the clock 5 ms too low comes first, though it came last."""
    store = RedisStore(redis_client)
    holder, prompt, behind = owner(), owner(), owner()
    store.acquire(holder, Claim(NAME, LEASE))
    now = round(store.time() * SECOND)
    store.acquire(prompt, Claim(NAME, LEASE, place=now), wait=LEASE)
    store.acquire(behind, Claim(NAME, LEASE, place=now - 5000), wait=LEASE)
    store.release(NAME, holder.token, Ending.FINAL)
    assert [held.token for held in store.inspect(NAME).holders] == [behind.token]
    store.close()

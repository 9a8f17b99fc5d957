"""Rates of Lock, AsyncLock and @locked."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio

from celery_singleton_lock import (
    AsyncLock,
    AsyncQuorumStore,
    BackendRefused,
    ConfigurationError,
    Lock,
    LockConflict,
    LockTimeout,
    Rate,
    locked,
)
from celery_singleton_lock.admin.lock_views import Detail, is_known
from celery_singleton_lock.cli.render import detail
from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import ending_at_rate, packed, rates_of, waiting_or_ending
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.lock import wait_for_turn
from celery_singleton_lock.lock.backends import _watchdogs
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import VERBS, assemble, file_of, load_scripts, read
from celery_singleton_lock.testing import memory_client
from celery_singleton_lock.testing.clock_control import LockTime
from support.passing_time import let_pass
from support.waiting import eventually

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
KEYS = Keyspace().lock("k")
LOG = f"{KEYS.flow}:log"


@pytest.fixture(autouse=True)
def _no_watchdog_stays():
    yield
    for dog in list(_watchdogs.values()):
        if hasattr(dog, "stop"):
            dog.stop()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def starts(client):
    """Return the times at which the lock was started, in microseconds."""
    return [round(at) for _, at in client.zrange(LOG, 0, -1, withscores=True)]


def hold_for_a_moment(lock):
    with lock:
        pass


@on_all_stores
def test_no_period_has_more_starts_than_the_rate(lock_client, pool):
    """The second rate only keeps the log for longer than a second."""
    lock = Lock(lock_client, "k", limit=9, rate=["3/s", "1000/m"])
    list(pool.map(hold_for_a_moment, [lock] * 8))
    times = starts(lock_client)
    assert len(times) == 8
    assert all(late - early >= 1_000_000 for early, late in zip(times, times[3:]))  # noqa: B905


@on_all_stores
def test_a_smooth_rate_spaces_its_starts(lock_client, pool):
    lock = Lock(lock_client, "k", limit=9, rate=[Rate("10/s", kind="smooth", burst=2), "1000/m"])
    list(pool.map(hold_for_a_moment, [lock] * 6))
    times = starts(lock_client)
    assert all(late - early >= 100_000 for early, late in zip(times, times[2:]))  # noqa: B905


@on_all_stores
def test_who_does_not_wait_is_told_of_the_rate_and_of_the_next_start(lock_client):
    lock = Lock(lock_client, "k", rate="1/h", blocking=False)
    hold_for_a_moment(lock)
    with pytest.raises(LockTimeout) as error, lock:
        pass
    assert error.value.waits_for == "rate"
    assert "has reached its rate (1/h): the next one may start in 3" in str(error.value)
    assert not lock.acquire()


@on_all_stores
def test_a_wait_for_the_rate_times_out(lock_client):
    lock = Lock(lock_client, "k", rate="1/h", blocking_timeout=0.2)
    hold_for_a_moment(lock)
    with pytest.raises(LockTimeout) as error, lock:
        pass
    assert error.value.waits_for == "rate"
    store = lock._store
    assert not store.inspect("k").waiting


@on_all_stores
def test_a_caller_without_a_rate_waits_for_that_of_the_others(lock_client):
    hold_for_a_moment(Lock(lock_client, "k", rate="2/h"))
    hold_for_a_moment(Lock(lock_client, "k"))
    assert not Lock(lock_client, "k", blocking=False).acquire()


@on_all_stores
def test_a_lock_with_a_rate_shows_it(lock_client):
    lock = Lock(lock_client, "k", rate=["2/h", Rate("60/m", kind="smooth", burst=5)])
    for _ in range(2):
        hold_for_a_moment(lock)
    view = lock._store.inspect("k")
    assert {(r.rate, r.number, r.started, r.is_smooth) for r in view.rates} == {
        ("2/h", 2, 2, False),
        ("60/m smooth, burst 5", 60, 0, True),
    }
    assert view.waits_for is WaitsFor.RATE
    assert 3590 < view.next_look <= 3600
    assert is_known(view)


@on_all_stores
def test_a_lock_without_a_rate_has_no_key_for_it(lock_client):
    hold_for_a_moment(Lock(lock_client, "k", limit=2))
    assert not lock_client.exists(KEYS.flow, LOG)
    assert Lock(lock_client, "k")._store.inspect("k").rates == ()


@on_all_stores
def test_a_rate_is_forgotten_a_minute_after_its_period(lock_client):
    hold_for_a_moment(Lock(lock_client, "k", rate="5/h"))
    assert 3_600_000 < lock_client.pttl(KEYS.flow) <= 3_660_000
    assert 3_600_000 < lock_client.pttl(LOG) <= 3_660_000


def test_the_first_waiter_starts_first(redis_client, pool):
    """A queue of waiters for a rate is a queue as behind a holder."""
    store, order = RedisStore(redis_client), []
    hold_for_a_moment(Lock(redis_client, "k", rate="1/s"))

    def wait(number):
        with Lock(store, "k", rate="1/s"):
            order.append(number)

    ends = []
    for number in range(3):
        ends.append(pool.submit(wait, number))
        eventually(lambda n=number: store.inspect("k").waiting == n + 1)
    for end in ends:
        end.result()
    assert order == [0, 1, 2]


def test_who_waits_for_a_rate_sends_no_more_than_a_heartbeat(redis_client):
    """Nobody polls: while the rate allows no start, a waiter asks every three seconds."""
    lock = Lock(redis_client, "k", rate="1/h", blocking_timeout=1.0)
    hold_for_a_moment(lock)
    before = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert not lock.acquire()
    after = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert after - before <= 3  # acquire, perhaps a heartbeat, and the end of the wait


def test_a_thread_waits_for_its_rate_in_virtual_time():
    client = memory_client("rates in virtual time")
    client.flushdb()
    lock, started = Lock(client, "k", rate="1/d"), threading.Event()
    hold_for_a_moment(lock)
    time = LockTime(client.server)
    with time.frozen():
        thread = threading.Thread(target=lambda: (lock.acquire(), started.set(), lock.release()))
        thread.start()
        eventually(lambda: lock._store.inspect("k").waiting == 1)
        time.advance(86_390)
        assert not started.is_set()
        time.advance(20)
        assert started.wait(10)
        thread.join()


# --- asyncio, and the decorator -------------------------------------------------------------------


def test_a_coroutine_waits_for_its_rate(redis_url, redis_client):
    async def several():
        async with redis.asyncio.Redis.from_url(redis_url) as client:

            async def one():
                async with AsyncLock(client, "k", limit=9, rate=["2/s", "1000/m"]):
                    pass

            await asyncio.gather(*(one() for _ in range(5)))
            busy = AsyncLock(client, "k", rate="1/s", blocking=False)
            with pytest.raises(LockTimeout) as error:
                async with busy:
                    pass
            assert error.value.waits_for == "rate"

    asyncio.run(several())
    times = starts(redis_client)
    assert len(times) == 5
    assert all(late - early >= 1_000_000 for early, late in zip(times, times[2:]))  # noqa: B905


@pytest.mark.parametrize("cluster", [False, True])
def test_an_async_lock_has_a_rate_on_a_cluster_too(request, cluster):
    async def once(make):
        async with make() as client:
            lock = AsyncLock(client, "k", rate="1/h", blocking=False)
            assert await lock.acquire()
            await lock.release()
            assert not await lock.acquire()

    if cluster:
        nodes = request.getfixturevalue("cluster_client").get_primaries()
        host, port = nodes[0].host, nodes[0].port
        asyncio.run(once(lambda: redis.asyncio.RedisCluster(host=host, port=port)))
    else:
        url = request.getfixturevalue("redis_url")
        asyncio.run(once(lambda: redis.asyncio.Redis.from_url(url)))


def test_a_function_with_a_rate_is_skipped_or_refused_above_it(redis_client):
    """A cool-down: `on_conflict="skip"` returns None without a call."""
    calls = []
    skipped = locked("k:{n}", redis_client, rate="2/h", limit=9, on_conflict="skip")(
        lambda n: calls.append(n) or n
    )
    assert [skipped(7) for _ in range(3)] == [7, 7, None]
    refused = locked("k:{n}", redis_client, rate="2/h", limit=9, on_conflict="fail")(lambda n: n)
    with pytest.raises(LockConflict) as error:
        refused(7)
    assert error.value.waits_for == "rate"


def test_a_coroutine_function_has_a_rate(redis_url, redis_client):
    @locked("k", lambda: client, rate="1/h", on_conflict="skip")
    async def digest():
        return "sent"

    async def twice():
        return [await digest(), await digest()]

    async def run():
        nonlocal client
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            return await twice()

    client = None
    assert asyncio.run(run()) == ["sent", None]


@on_all_stores
def test_a_lock_without_limit_bounds_only_its_starts(lock_client):
    """Each start is a holder all the same: it is seen, renewed and released."""
    locks = [Lock(lock_client, "k", limit=None, rate="3/h", blocking=False) for _ in range(4)]
    assert [lock.acquire() for lock in locks] == [True, True, True, False]
    view = locks[0]._store.inspect("k")
    assert len(view.holders) == 3
    assert any("limit    none" in line for line in detail(Detail(view, (), {})))
    for lock in locks[:3]:
        lock.release()


def test_grants_that_ended_unclaimed_are_no_starts_though_many_others_are_unclaimed(redis_client):
    """A worker with many slots has died; those of another one wait for their slots."""
    store = RedisAdminStore(redis_client, claim_lease=60.0)
    store.worker_heartbeat("w", "R", ["q"], 600)
    claim = Claim("k", 60.0, 300, flow=packed(rates_of("200/h")))
    tokens = sorted(new_token() for _ in range(150))
    for token in tokens:
        store.park(Owner(token, f"{token}/0/0"), claim, MessageToPark(b"", "R", "q", None))
    let_pass(store, 40)
    store.extend([("k", token, 600.0) for token in tokens[:120]])
    let_pass(store, 40)  # 30 grants have ended, and are repeated
    for _ in range(100):
        store.sweep_and_grant("k")
    (rate,) = store.inspect("k").rates
    assert rate.started == 150


# --- bad input ------------------------------------------------------------------------------------


def test_a_lock_without_limit_and_rate_bounds_nothing_and_is_refused(redis_client):
    with pytest.raises(ConfigurationError, match='Add rate="100/m"'):
        Lock(redis_client, "k", limit=None)


def test_a_wrong_rate_is_refused_where_it_is_written(redis_client):
    with pytest.raises(ConfigurationError, match="'fast' cannot be read"):
        Lock(redis_client, "k", rate="fast")
    with pytest.raises(ConfigurationError, match="allows no start"):
        AsyncLock(redis.asyncio.Redis(), "k", rate="0/m")
    with pytest.raises(ConfigurationError, match='Use kind="smooth"'):
        locked("k", redis_client, rate="20000/d")


def test_a_quorum_refuses_a_rate(three_servers):
    urls = [server.url for server in three_servers]
    with pytest.raises(ConfigurationError, match="QuorumStore counts no starts"):
        Lock(urls, "k", rate="1/m")
    clients = [redis.asyncio.Redis.from_url(url) for url in urls]
    with pytest.raises(ConfigurationError, match="AsyncQuorumStore counts no starts"):
        AsyncLock(AsyncQuorumStore(clients), "k", rate="1/m")


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_full_redis_refuses_a_start_and_counts_none(redis_client):
    lock = Lock(redis_client, "k", rate="1/h", blocking=False)
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(BackendRefused):
            lock.acquire()
    finally:
        redis_client.config_set("maxmemory", 0)
    assert not redis_client.exists(KEYS.flow, LOG)
    assert lock.acquire()


def test_a_full_redis_counts_the_start_of_a_waiter(redis_client):
    """A claim is not refused, so its start must count."""
    store, claim = RedisStore(redis_client), claim_with("2/h", limit=1)
    first, waiter = Owner(new_token()), Owner(new_token())
    store.acquire(first, claim)
    store.acquire(waiter, claim, wait=60.0)
    redis_client.config_set("maxmemory", 1)
    try:
        store.release("k", first.token, Ending.FINAL)
        assert store.claim(waiter, "k", 30.0).verdict is Verdict.GRANTED
    finally:
        redis_client.config_set("maxmemory", 0)
    assert len(starts(redis_client)) == 2


def test_a_redis_that_lost_its_data_starts_a_new_period(redis_client):
    lock = Lock(redis_client, "k", rate="1/h", blocking=False)
    hold_for_a_moment(lock)
    assert not lock.acquire()
    redis_client.flushall()
    assert lock.acquire()


def test_a_key_of_another_type_is_refused_before_anything_is_written(redis_client):
    redis_client.set(LOG, "another program's")
    redis_client.hset(KEYS.flow, "rates", "[]")
    with pytest.raises(BackendRefused):
        Lock(redis_client, "k", rate="1/h", blocking=False).acquire()
    assert not redis_client.exists(KEYS.holders, KEYS.record)


def claim_with(rate, limit=1):
    return Claim("k", 30.0, limit, flow=packed(rates_of(rate)))


def older_store(client):
    """A store of a version that knows no rates."""
    library = read("shared").replace(
        "rates = left > 0 and redis.call('EXISTS', flow) == 1 and open_rates() or nil",
        "left = left - redis.call('EXISTS', flow)",
    )
    clock = read("_clock.lua")
    scripts = {v: assemble(v, clock, library, read(file_of(v))) for v in VERBS}
    return RedisStore(client, scripts=scripts)


def test_a_grant_of_an_older_version_counts_once_it_is_claimed(redis_client):
    """A release of an older client grants above the rate: the start counts all the same."""
    new, old, claim = RedisStore(redis_client), older_store(redis_client), claim_with("2/h")
    first, waiter = Owner(new_token()), Owner(new_token())
    new.acquire(first, claim)
    new.acquire(waiter, claim, wait=60.0)
    old.release("k", first.token, Ending.FINAL)
    assert new.claim(waiter, "k", 30.0).verdict is Verdict.GRANTED
    assert len(starts(redis_client)) == 2


def test_a_grant_that_an_older_version_ended_does_not_count(redis_client):
    new, old, claim = RedisStore(redis_client), older_store(redis_client), claim_with("2/h")
    first, waiter = Owner(new_token()), Owner(new_token())
    new.acquire(first, claim)
    new.acquire(waiter, claim, wait=60.0)
    new.release("k", first.token, Ending.FINAL)
    old.release("k", waiter.token, Ending.FINAL)
    assert new.acquire(Owner(new_token()), claim).verdict is Verdict.GRANTED
    assert len(starts(redis_client)) == 2


def test_a_lost_reply_counts_one_start(redis_client):
    """A caller that asks again with its token has started once."""
    store, me = RedisStore(redis_client), Owner(new_token())
    for _ in range(2):
        assert store.acquire(me, claim_with("2/h")).verdict is Verdict.GRANTED
    assert len(starts(redis_client)) == 1


def test_a_caller_without_flow_options_sends_the_commands_that_it_sent_before(redis_client):
    """Its script is not the one of callers with a rate; a lock that is free takes six commands."""
    scripts = load_scripts()
    assert scripts["acquire"].sha != scripts["acquire_with_flow"].sha
    assert "wanted_flow = cjson" not in scripts["acquire"].text
    store = RedisStore(redis_client)
    store.acquire(Owner(new_token()), Claim("warm"))
    before = redis_client.info("commandstats")
    store.acquire(Owner(new_token()), Claim("k"))
    after = redis_client.info("commandstats")
    counts = {
        name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"]
        for name in after
        if name != "cmdstat_info"
    }
    sent = {name.removeprefix("cmdstat_"): number for name, number in counts.items() if number}
    assert sent == {"evalsha": 1, "time": 1, "exists": 1, "hset": 2, "zadd": 1, "pexpire": 3}


# --- parked messages ------------------------------------------------------------------------------


@pytest.fixture
def store(redis_client):
    store = RedisStore(redis_client, claim_lease=60.0)
    store.worker_heartbeat("w1", "R", ["q"], 600.0, 9)
    return store


def park(store, rate):
    me = Owner(new_token(), f"{new_token()}/0/0", "t", "w1")
    return me, store.park(me, claim_with(rate), MessageToPark(b"body", "R", "q", None))


def start_one(store, rate):
    me = Owner(new_token())
    assert store.acquire(me, claim_with(rate)).verdict is Verdict.GRANTED
    return me


def test_who_parks_is_told_when_the_rate_allows_the_next_start(store):
    me = start_one(store, "1/h")
    store.release("k", me.token, Ending.FINAL)
    _, reply = park(store, "1/h")
    assert reply.waits_for is WaitsFor.RATE
    assert 3590 < reply.next_look <= 3600.001


def test_a_list_of_locks_tells_which_ones_a_rate_may_hold_back(store, redis_client):
    """A permit is free and a task waits: without that, the lock looks as if nobody granted it."""
    admin = RedisAdminStore(redis_client)
    me = start_one(store, "1/h")
    park(store, "1/h")
    assert [lock.rated for lock in admin.summarise_locks()] == [False]
    store.release("k", me.token, Ending.FINAL)
    (lock,) = admin.summarise_locks()
    assert (lock.rated, lock.held, lock.waiting) == (True, 0, 1)


def test_who_releases_is_told_when_the_next_one_may_start(store):
    """Its worker sets a timer: else the next one would start up to a second late."""
    me = start_one(store, "1/h")
    _, reply = park(store, "1/h")
    assert reply.waits_for is WaitsFor.HOLDER
    released = store.release("k", me.token, Ending.FINAL)
    assert (released.verdict, released.waits_for) == (Verdict.RELEASED, WaitsFor.RATE)
    assert 3590 < released.next_look < 3601


def test_who_claims_is_told_when_the_next_one_may_start(store):
    """Nobody knows before: a grant counts in every period until it is claimed."""
    claim = claim_with("1/h", limit=9)
    me = Owner(new_token())
    store.acquire(me, claim)
    first = Owner(new_token(), "a/0/0", "t", "w1")
    store.park(first, claim, MessageToPark(b"body", "R", "q", None))
    store.park(
        Owner(new_token(), "b/0/0", "t", "w1"), claim, MessageToPark(b"body", "R", "q", None)
    )
    store.release("k", me.token, Ending.FINAL)
    let_pass(store, 3601)
    store.worker_heartbeat("w1", "R", ["q"], 600.0, 9)
    assert store.sweep_and_grant("k", worker="w1").next_starts == {}
    claimed = store.claim(first, "k", 600.0)
    assert (claimed.verdict, claimed.waits_for) == (Verdict.GRANTED, WaitsFor.RATE)
    assert 3590 < claimed.next_look <= 3600.001


def test_who_grants_is_told_when_the_next_one_may_start(store):
    """A later sweep that grants nothing is not told: one timer is enough."""
    claim = claim_with("2/h", limit=9)
    store.acquire(Owner(new_token()), claim)
    let_pass(store, 1800)
    store.acquire(Owner(new_token()), claim)
    for number in range(2):
        owner = Owner(new_token(), f"a{number}/0/0", "t", "w1")
        store.park(owner, claim, MessageToPark(b"body", "R", "q", None))
    let_pass(store, 1801)
    store.worker_heartbeat("w1", "R", ["q"], 600.0, 9)
    swept = store.sweep_and_grant_many(["k", "other"], worker="w1")
    assert (list(swept), set(swept.next_starts)) == ([], {"k"})
    assert 1780 < swept.next_starts["k"] <= 1799
    assert store.sweep_and_grant("k", worker="w1").next_starts == {}


def test_a_rate_does_not_expire_while_a_message_waits_for_it(store, redis_client):
    """The message does not declare it again, as a waiting client does."""
    me = start_one(store, "1/s")
    parked, _ = park(store, "1/s")
    assert redis_client.pttl(KEYS.flow) == -1
    store.release("k", parked.token, Ending.FINAL)
    assert 0 < redis_client.pttl(KEYS.flow) <= 61_000
    store.release("k", me.token, Ending.FINAL)
    assert 0 < redis_client.pttl(KEYS.flow) <= 61_000


def test_a_grant_that_nobody_claims_for_long_counts_while_its_lease_is_renewed(store, redis_client):
    """Else the next ones were granted too, and all of them could start in one period."""
    waits, reply = park(store, "1/s")
    assert reply.verdict is Verdict.WAITING
    assert redis_client.zcard(LOG) == 1, "it waits in the pool of its worker"
    redis_client.pexpire(LOG, 900)
    store.extend([("k", waits.token, 60.0)])
    assert redis_client.pttl(LOG) > 1000


# --- observe mode, and a storm --------------------------------------------------------------------


def observe(store, name, rate, runs):
    """Record runs of a task in mode observe; return why each would have been blocked."""
    found = []
    for number in range(runs):
        owner = Owner(new_token(), f"{number}/0/0", "t", "w")
        claim = Claim(name, 30.0, 9, flow=packed(rates_of(rate)))
        found.append(store.record_observation(owner, claim, waits=True))
        store.record_observation(owner, claim, waits=True, took=0.001)
    return [blocked and blocked.waits_for for blocked in found]


def test_observe_mode_reports_the_waits_that_a_rate_would_have_caused(store):
    """Each run would have begun when the rate allowed it, behind those before it."""
    rate = WaitsFor.RATE
    assert observe(store, "s", "2/10s", 5) == [None, None, rate, rate, rate]
    assert observe(store, "g", Rate("1/10s", kind="smooth"), 3) == [None, rate, rate]
    waited = {lock.name: round(lock.waited) for lock in store.observations().locks}
    assert waited == {"s": 10 + 10 + 20, "g": 10 + 20}


def test_observe_mode_adds_up_the_costs_of_starts(store):
    """A rate of tokens is no rate of starts; a smooth one has its burst."""
    rate = WaitsFor.RATE
    costed = Rate("100/10s", cost=40)
    assert observe(store, "s", costed, 5) == [None, None, rate, rate, rate]
    smooth = Rate("100/100s", kind="smooth", burst=100, cost=40)
    assert observe(store, "g", smooth, 3) == [None, None, rate]
    both = ["1/10s", costed]
    assert observe(store, "b", both, 2) == [None, rate]
    waited = {lock.name: round(lock.waited) for lock in store.observations().locks}
    assert waited == {"s": 10 + 10 + 20, "g": 20, "b": 10}


def test_observe_mode_counts_each_run_with_its_own_cost(store):
    rate = WaitsFor.RATE
    found = [observe(store, "s", Rate("100/10s", cost=cost), 1) for cost in (90, 10, 0, 1)]
    assert found == [[None], [None], [None], [rate]]
    assert observe(store, "free", Rate("2/10s", cost=0), 3) == [None, None, None]


def test_observe_mode_reports_a_run_that_would_have_cost_too_much(store):
    """It would have failed, so it uses nothing, and no later one waits for it."""
    RedisAdminStore(store.client).set_rates("k", [Rate("10/h", cost=1)], Operator("test"))
    costed = Rate("100/h", cost=40)
    assert observe(store, "k", costed, 2) == [WaitsFor.RATE, WaitsFor.RATE]
    assert observe(store, "k", Rate("100/h", cost=10), 1) == [None]
    (lock,) = store.observations().locks
    assert (lock.blocked, lock.waited) == (2, 0)


def skipping(store, number):
    """Return the owner and the claim of a run that would end above a rate, with one permit."""
    flow = waiting_or_ending(packed(rates_of("2/10s")), "skip")
    return Owner(new_token(), f"{number}/0/0", "t", "w"), Claim("k", 30.0, 1, flow=flow)


def test_observe_mode_counts_no_wait_for_a_run_that_would_be_skipped_above_its_rate(store):
    """Such runs counted as waiting ever longer, and later ones behind them (lock_on_rate)."""
    found = []
    for number in range(6):
        owner, claim = skipping(store, number)
        found.append(store.record_observation(owner, claim, waits=True))
        if number != 1:  # this one holds the lock meanwhile
            store.record_observation(owner, claim, waits=True, took=0.0)
    assert [each and each.waits_for for each in found] == [None, None, *[WaitsFor.RATE] * 4]
    (lock,) = store.observations().locks
    assert (lock.blocked, lock.waited) == (4, 0)


def test_observe_mode_skips_a_run_that_is_next_above_its_rate(store):
    """It waits for a holder that has a permit; then the rate allows no start."""
    runs = [skipping(store, number) for number in range(3)]
    found = [store.record_observation(owner, claim, waits=True) for owner, claim in runs]
    assert [each and each.waits_for for each in found] == [None, *[WaitsFor.HOLDER] * 2]
    for (owner, claim), took in zip(runs, (0.4, 0.2, 0.1), strict=True):
        store.record_observation(owner, claim, waits=True, took=took)
    (lock,) = store.observations().locks
    assert lock.blocked == 2
    assert 0 < lock.waited <= 1.0, "0.4 s and 0.6 s for the holders, and none for the rate"


def test_observe_mode_sees_the_limit_and_rates_of_an_operator(store):
    """They are in force as soon as locks are enforced, whatever the tasks declare."""
    rate, by, admin = WaitsFor.RATE, Operator("test"), RedisAdminStore(store.client)
    admin.set_rates("r", [Rate("2/10s")], by)
    assert observe(store, "r", None, 3) == [None, None, rate]
    admin.set_rates("h", [Rate("9/10s")], by)
    assert observe(store, "h", "1/10s", 3) == [None, None, None]
    admin.set_limit("n", 1, by)
    owners = [Owner(new_token(), f"{number}/0/0", "t", "w") for number in range(2)]
    found = [store.record_observation(owner, Claim("n", 30.0, 9), waits=True) for owner in owners]
    assert [each and each.waits_for for each in found] == [None, WaitsFor.HOLDER]


OBSERVATION_MUTANTS = [
    (
        "rate[5] and allowed_by_costs(entry, from, rate) or allowed_by_count(from, rate)",
        "not rate[5] and allowed_by_count(from, rate) or from",
    ),
    (
        "rate[5] and allowed_by_costs(entry, from, rate) or allowed_by_count(from, rate)",
        "allowed_by_count(from, rate)",
    ),
    ("left = left - tonumber(string.match(seen[i], '^%d+'))", "left = left - 1"),
    ("local left, since = most - cost", "local left, since = most"),
    ("on_time(rate) + (cost - most) * gap_ms(rate)", "on_time(rate)"),
    ("digits(math.max(on_time(rate), entry.begins) + cost * gap_ms(rate))", "entry.begins"),
    ("if rates then rates_in_force = rates.in_force(rates_in_force) end", ""),
    ("tonumber(ruled or computed.limit or limit_arg)", "tonumber(computed.limit or limit_arg)"),
    ("(waits == '0' or never)", "waits == '0'"),
    ("local never = me and (starts.costs_too_much(me) or above_rate)", "local never = false"),
    ("(starts.costs_too_much(me) or above_rate)", "starts.costs_too_much(me)"),
    ("entry.ends_at_rate and begins > next_at and next_at", "nil"),
]


@pytest.mark.parametrize(("old", "new"), OBSERVATION_MUTANTS)
def test_a_wrong_line_of_observe_mode_is_noticed(redis_client, old, new):
    store = RedisAdminStore(redis_client)
    scripts = store.operations.scripts
    script = scripts["record_observation"]
    assert old in script.text
    changed = dataclasses.replace(script, text=script.text.replace(old, new))
    scripts["record_observation"] = changed
    with pytest.raises(AssertionError):
        play_observations(store)


def play_observations(store):
    for play in (
        test_observe_mode_reports_the_waits_that_a_rate_would_have_caused,
        test_observe_mode_adds_up_the_costs_of_starts,
        test_observe_mode_counts_each_run_with_its_own_cost,
        test_observe_mode_reports_a_run_that_would_have_cost_too_much,
        test_observe_mode_counts_no_wait_for_a_run_that_would_be_skipped_above_its_rate,
        test_observe_mode_skips_a_run_that_is_next_above_its_rate,
        test_observe_mode_sees_the_limit_and_rates_of_an_operator,
    ):
        store.client.flushall()
        play(store)


def test_observe_mode_sees_the_rate_of_callers_that_lock(store):
    start_one(store, "1/h")
    assert observe(store, "k", None, 1) == [WaitsFor.RATE]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_no_window_of_a_storm_has_more_starts_than_the_rate(redis_client):
    """64 clients for half a minute; each start is in the log, and each window is checked."""
    rates, stop, begun = ["50/s", "5000/m"], threading.Event(), []

    def run():
        while not stop.is_set():
            lock = Lock(redis_client, "k", limit=1000, rate=rates, blocking_timeout=5)
            if lock.acquire():
                begun.append(1)
                lock.release()

    threads = [threading.Thread(target=run) for _ in range(64)]
    for thread in threads:
        thread.start()
    stop.wait(30)
    stop.set()
    for thread in threads:
        thread.join()
    times = starts(redis_client)
    assert len(times) >= len(begun) > 500
    assert all(late - early >= 1_000_000 for early, late in zip(times, times[50:]))  # noqa: B905


def test_a_caller_with_another_rate_does_not_let_the_first_one_forget_its_starts(store):
    """Between the calls the lock is idle, so each caller's rate is the one in force."""
    rare, often = packed(rates_of("2/h")), packed(rates_of("100/s"))

    def call(flow):
        who = Owner(new_token())
        reply = store.acquire(who, Claim("k", flow=flow))
        store.release("k", who.token, Ending.FINAL)
        return reply.verdict

    for _ in range(2):
        assert call(rare) is Verdict.GRANTED
    for _ in range(3):
        let_pass(store, 5)
        assert call(often) is Verdict.GRANTED
    assert call(rare) is Verdict.BLOCKED
    let_pass(store, 1800)
    assert call(often) is Verdict.GRANTED  # the hour of the other rate goes on
    assert call(rare) is Verdict.BLOCKED
    let_pass(store, 3600)
    assert call(rare) is Verdict.GRANTED
    assert [rate.rate for rate in store.inspect("k").rates] == ["2/h"]


def told(store):
    """Return what the worker receives: (verdict, token)."""
    found = []
    while (each := store.receive("w1", 0.01)) is not None:
        found.append((each.verdict, each.token))
    return found


def park_ending(store, rate):
    me = Owner(new_token(), f"{new_token()}/0/0", "t", "w1")
    claim = Claim("k", flow=ending_at_rate(packed(rates_of(rate))))
    assert store.park(me, claim, MessageToPark(b"body", "R", "q", None)).verdict is Verdict.WAITING
    return me.token


def test_parked_tasks_that_do_not_wait_for_the_rate_end_when_it_is_their_turn(store):
    """They were parked for the holder, and the first of them has used the rate up."""
    holder = Owner(new_token())
    assert store.acquire(holder, Claim("k")).verdict is Verdict.GRANTED
    first, *others = [park_ending(store, "1/h") for _ in range(3)]
    _, last = park(store, "1/h")
    store.release("k", holder.token, Ending.FINAL, worker="w1")
    assert told(store) == [("granted", first)]
    store.claim(Owner(first, worker="w1"), "k", 30.0)
    store.release("k", first, Ending.FINAL, worker="w1")
    assert sorted(told(store)) == sorted(("above_rate", token) for token in others)
    for token in others:
        store.release("k", token, Ending.FINAL)
    view = store.inspect("k")
    assert (view.waiting, view.bodies, view.waits_for) == (1, 1, WaitsFor.RATE)
    assert view.waiters[0].task == "t"
    assert last.verdict is Verdict.WAITING


def test_a_task_that_has_started_and_comes_back_waits_for_the_rate(store):
    """Its worker was lost: it is not skipped for that."""
    holder = Owner(new_token())
    assert store.acquire(holder, Claim("k")).verdict is Verdict.GRANTED
    token = park_ending(store, "1/h")
    store.release("k", holder.token, Ending.FINAL, worker="w1")
    store.claim(Owner(token, worker="w1"), "k", 30.0)
    assert told(store) == [("granted", token)]
    store.release("k", token, Ending.AGAIN, worker="w1")
    assert told(store) == []
    assert store.inspect("k").waits_for is WaitsFor.RATE


def test_a_message_that_ends_above_the_rate_is_ended_after_its_worker_was_lost(store):
    """It is delivered until a worker has ended it, and never granted, whatever the rate allows."""
    holder = Owner(new_token())
    assert (
        store.acquire(holder, Claim("k", flow=packed(rates_of("1/m")))).verdict is Verdict.GRANTED
    )
    token = park_ending(store, "1/m")
    store.release("k", holder.token, Ending.FINAL, worker="w1")
    assert told(store) == [("above_rate", token)]
    let_pass(store, 120)
    store.sweep_and_grant("k", worker="w1")
    assert told(store) == [("above_rate", token)]


def test_a_list_says_what_may_hold_the_waiters_of_a_free_permit_back(redis_client):
    """Else a monitor takes them for stuck."""
    store = RedisAdminStore(redis_client, claim_lease=60.0)
    store.worker_heartbeat("w1", "R", ["q"], 600.0, 9)

    def parked(name, flow):
        me = Owner(new_token(), f"{new_token()}/0/0", "t", "w1")
        store.park(me, Claim(name, 60.0, 3, flow=flow), MessageToPark(b"body", "R", "q", None))

    for _ in range(2):
        parked("rated", packed(rates_of("1/h")))
        parked("grouped", packed((), group=Group("a", 1)))
        parked("plain", "")
        parked("ruled", "")
    store.set_rates("ruled", rates_of("1/h"), Operator("test"))
    parked("ruled", "")
    parked("ruled", "")
    found = {each.name: (each.rated, each.grouped) for each in store.summarise_locks()}
    assert found == {
        "rated": (True, False),
        "grouped": (False, True),
        "plain": (False, False),
        "ruled": (True, False),
    }


def learned_by_waiter(store, release):
    """Return why a waiter waits, and for how long, once the holder of its lock has released it."""
    claim = claim_with("1/m")
    holder, waiter = Owner(new_token()), Owner(new_token())
    store.acquire(holder, claim)
    assert store.acquire(waiter, claim, wait=60.0).waits_for is WaitsFor.HOLDER
    release(holder.token)
    assert store.wait("k", waiter.token, 5.0)
    reply = store.claim(waiter, "k", 30.0)
    assert reply.verdict is Verdict.WAITING
    return reply.waits_for, reply.next_start


def test_a_waiter_learns_of_the_rate_when_the_holder_ends(redis_client):
    """It asked 3.3 s later: a lock with a rate of 1/s started every 3.4 s."""
    store = RedisStore(redis_client)
    reason, left = learned_by_waiter(store, lambda token: store.release("k", token, Ending.FINAL))
    assert reason is WaitsFor.RATE
    assert 50 < left <= 60


def test_a_waiter_learns_that_the_holder_has_closed_the_lock(redis_client):
    store = RedisStore(redis_client)

    def close_and_release(token):
        store.close_for("k", 100.0, "429")
        store.release("k", token, Ending.FINAL)

    reason, left = learned_by_waiter(store, close_and_release)
    assert reason is WaitsFor.PAUSE
    assert 90 < left <= 100


def test_a_waiter_behind_the_next_holder_is_not_woken(redis_client):
    store, claim = RedisStore(redis_client), claim_with("9/s")
    holder, following, last = (Owner(new_token()) for _ in range(3))
    store.acquire(holder, claim)
    for waiter in (following, last):
        store.acquire(waiter, claim, wait=60.0)
    store.release("k", holder.token, Ending.FINAL)
    lists = [Keyspace().wake("k", waiter.token) for waiter in (following, last)]
    assert [redis_client.llen(each) for each in lists] == [1, 0]


def test_a_waiter_learns_of_the_rate_when_the_one_before_it_gives_up(redis_client):
    """It asked 3.3 s later, and started late by as much."""
    store, claim = RedisStore(redis_client), claim_with("1/m")
    holder, first, next_one = (Owner(new_token()) for _ in range(3))
    store.acquire(holder, claim)
    store.release("k", holder.token, Ending.FINAL)
    for waiter in (first, next_one):
        store.acquire(waiter, claim, wait=60.0)
    store.release("k", first.token, Ending.CANCEL)
    assert store.wait("k", next_one.token, 5.0)
    reply = store.claim(next_one, "k", 30.0)
    assert (reply.verdict, reply.waits_for) == (Verdict.WAITING, WaitsFor.RATE)
    assert 50 < reply.next_start <= 60


def test_the_first_waiter_keeps_its_place_though_each_release_wakes_it(
    redis_client, pool, monkeypatch
):
    """It lost its place after ten seconds of releases, and started 20 to 40 s later."""
    monkeypatch.setattr(wait_for_turn, "LIVENESS", 1.2)
    monkeypatch.setattr(wait_for_turn, "HEARTBEAT", 0.4)
    store, claim = RedisStore(redis_client), claim_with("6/4s", 6)
    holders = [Owner(new_token()) for _ in range(6)]
    for holder in holders:
        assert store.acquire(holder, claim).verdict is Verdict.GRANTED

    def use():
        with Lock(redis_client, "k", rate="6/4s", limit=6):
            pass

    waiters = []
    for number in (1, 2):
        waiters.append(pool.submit(use))
        eventually(lambda number=number: redis_client.zcard(KEYS.queue) == number)
    in_order = redis_client.zrange(KEYS.queue, 0, -1)
    for holder in holders:
        time.sleep(0.3)  # the releases have to last for longer than a waiter stays queued
        store.release("k", holder.token, Ending.FINAL)
    assert redis_client.zrange(KEYS.queue, 0, -1) == in_order
    for waiter in waiters:
        waiter.result(10)

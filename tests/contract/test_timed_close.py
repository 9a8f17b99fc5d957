"""A lock is closed for a time: by Lock.pause, or by a release with the ending LATER."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis.asyncio

from celery_singleton_lock import AsyncLock, ConfigurationError, Lock, LockTimeout, Rate
from celery_singleton_lock.admin import change_lock, why
from celery_singleton_lock.admin.lock_views import Detail
from celery_singleton_lock.cli.render import detail, lock_rows, summary
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import (
    Claim,
    Ending,
    Owner,
    Reservation,
    Verdict,
)
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed, rates_of
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.flower.lock_filter import sentence_of
from celery_singleton_lock.lock.backends import _watchdogs
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import load_admin_scripts, load_scripts
from celery_singleton_lock.testing import memory_client
from celery_singleton_lock.testing.clock_control import LockTime
from support.waiting import eventually

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
KEYS = Keyspace().lock("k")
WORKER, REALM, ROUTE = "w1", "R", "q"
ME = Operator("ann", "laptop")
CLOCK = "local function server_time() return redis.call('GET', 'clock') end"


@pytest.fixture(autouse=True)
def _no_watchdog_stays():
    yield
    for dog in list(_watchdogs.values()):
        if hasattr(dog, "stop"):
            dog.stop()


class World:
    """A store, one worker, and a clock that the test moves. The keys expire by the real time."""

    def __init__(self, client, scripts=None, admin_scripts=None):
        self.client = client
        scripts = scripts or load_scripts(CLOCK)
        self.store = RedisStore(client, scripts=scripts)
        self.admin = RedisAdminStore(client, scripts=scripts)
        self.admin.operations.scripts.update(admin_scripts or load_admin_scripts(CLOCK))
        self.now = 1_000
        self.advance(0)

    def advance(self, seconds):
        self.now += seconds
        self.client.set("clock", self.now * 1_000_000)

    def holds(self, attempt="", **claim):
        owner = Owner(new_token(), attempt, "t", WORKER)
        reply = self.store.acquire(owner, Claim("k", **claim))
        assert reply.verdict is Verdict.GRANTED
        return owner.token

    def parks(self, attempt="m/0/0", *, deadline=None, body=b"body", token="", **claimed):
        token = token or new_token()
        self.beats()
        owner = Owner(token, attempt, "t", WORKER)
        claim, to_park = Claim("k", **claimed), MessageToPark(body, REALM, ROUTE, deadline)
        return token, self.store.park(owner, claim, to_park)

    def beats(self):
        self.store.worker_heartbeat(WORKER, REALM, [ROUTE], 1000.0, 9)

    def later(self, token, seconds=30.0, why="by t: 429"):
        close = Reservation(why, seconds) if seconds else None
        return self.store.release("k", token, Ending.LATER, reserve=close, worker=WORKER)

    def received(self):
        self.beats()
        self.store.sweep_and_grant("k", worker=WORKER)
        return self.store.receive(WORKER, 0.01)

    def is_free(self):
        token = new_token()
        reply = self.store.acquire(Owner(token), Claim("k"))
        self.store.release("k", token, Ending.FINAL)
        return reply.verdict is Verdict.GRANTED


@pytest.fixture
def world(redis_client):
    return World(redis_client)


# -- for everybody ---------------------------------------------------------------------------------


@on_all_stores
def test_nobody_is_granted_a_closed_lock_and_who_asks_learns_why(lock_client):
    """Also on a lock that has no rate."""
    Lock(lock_client, "k").pause(30, why="429 from\nthe API")
    with pytest.raises(LockTimeout) as error, Lock(lock_client, "k", blocking=False):
        pass
    assert error.value.waits_for == "pause"
    assert "It is closed for another 29." in str(error.value) or "30.0 s" in str(error.value)
    assert ": 429 from the API" in str(error.value)


@on_all_stores
def test_the_lock_opens_by_itself(lock_client):
    lock = Lock(lock_client, "k", blocking_timeout=20)
    lock.pause(0.3)
    with lock:
        assert lock.held


def test_an_async_lock_closes_it_too(redis_url):
    async def scene():
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            lock = AsyncLock(client, "k", blocking=False)
            assert await lock.pause(30, "429") >= 29
            return await lock.acquire()

    assert not asyncio.run(scene())


def test_a_waiter_is_granted_when_the_lock_opens():
    """It asks at that time, and does not poll."""
    client = memory_client("closed in virtual time")
    client.flushdb()
    lock, started = Lock(client, "k"), threading.Event()
    time = LockTime(client.server)
    with time.frozen():
        lock.pause(86_400)
        thread = threading.Thread(target=lambda: (lock.acquire(), started.set(), lock.release()))
        thread.start()
        eventually(lambda: lock._store.inspect("k").waiting == 1)
        time.advance(86_390)
        assert not started.is_set()
        time.advance(20)
        assert started.wait(10)
        thread.join()


def test_the_holder_keeps_a_lock_that_is_closed(world):
    token, store = world.holds(), world.store
    store.close_for("k", 30, "by me")
    assert store.extend([("k", token, 30.0)]) == [True]
    assert world.store.acquire(Owner(token), Claim("k")).verdict is Verdict.GRANTED
    assert not world.is_free()


def test_the_longer_of_two_closes_is_in_force(world):
    assert world.store.close_for("k", 60, "by long") == 60
    assert world.store.close_for("k", 30, "by short") == 60
    assert world.store.inspect("k").closed == "by long"
    world.advance(59)
    assert not world.is_free()
    assert world.store.close_for("k", 30, "by short") == 30
    assert world.store.inspect("k").closed == "by short"
    world.advance(30)
    assert world.is_free()


def test_a_pause_and_a_close_end_apart(world):
    world.store.close_for("k", 30, "by t")
    world.admin.pause("k", ME)
    reply = world.store.acquire(Owner(new_token()), Claim("k"))
    assert (reply.waits_for, reply.closed, reply.paused[:3]) == (WaitsFor.PAUSE, "", "ann")
    world.advance(31)
    assert not world.is_free()
    world.store.close_for("k", 30, "by t")
    world.admin.resume("k", ME)
    reply = world.store.acquire(Owner(new_token()), Claim("k"))
    assert (reply.waits_for, reply.closed, reply.paused) == (WaitsFor.PAUSE, "by t", "")
    assert reply.next_look == reply.next_start == 30
    world.advance(30)
    assert world.is_free()


def test_an_operator_opens_a_closed_lock_and_a_pause_stays(world):
    world.store.close_for("k", 3600, "by t")
    _, reply = world.parks()
    assert reply.closed == "by t"
    world.admin.pause("k", ME)
    assert world.admin.reopen("k", ME)
    assert not world.admin.reopen("k", ME)
    assert world.received() is None
    world.admin.resume("k", ME)
    assert world.received() is not None
    entries = [entry for entry in world.admin.audit() if entry["action"] == "reopen"]
    assert [(entry["lock"], entry["who"]) for entry in entries] == [("k", "ann")]


def test_an_operator_who_opens_a_lock_grants_it_at_once(world):
    world.store.close_for("k", 3600, "by t")
    world.parks()
    assert world.admin.reopen("k", ME)
    assert world.store.receive(WORKER, 0.01) is not None


def test_a_closed_lock_stays_known_and_is_forgotten_afterwards(world):
    """Lists find a lock by its key ``meta``."""
    token = world.holds(lease=2.0)
    world.store.close_for("k", 3600, "by t")
    world.store.extend([("k", token, 2.0)])
    world.store.release("k", token, Ending.FINAL)
    for key in (KEYS.meta, KEYS.flow):
        assert 3_599_000 < world.client.pttl(key) <= 3_660_000
    world.parks()
    assert world.client.pttl(KEYS.flow) == -1
    world.advance(3600)
    delivery = world.received()
    world.store.claim(Owner(delivery.token), "k", 2.0, acks_early=True)
    world.store.release("k", delivery.token, Ending.FINAL)
    for key in (KEYS.meta, KEYS.flow):
        assert 0 < world.client.pttl(key) <= 62_000


def test_a_closed_lock_without_a_rate_logs_no_starts(world):
    world.store.close_for("k", 1, "by t")
    world.parks()
    world.advance(1)
    delivery = world.received()
    assert world.store.claim(Owner(delivery.token), "k", 30.0).verdict is Verdict.GRANTED
    assert not world.client.exists(f"{KEYS.flow}:log")


def test_grants_before_a_rate_count_on_a_lock_that_was_closed(world):
    """A close must not look like an earlier declaration."""
    flow = packed(rates_of("1/h"))
    world.parks()
    world.store.close_for("k", 1, "by t")
    world.advance(1)
    reply = world.store.acquire(Owner(new_token()), Claim("k", limit=1, flow=flow))
    assert reply.verdict is Verdict.BLOCKED
    assert world.client.zcard(f"{KEYS.flow}:log") == 1


def test_grants_before_an_operator_sets_rates_count_on_a_lock_that_was_closed(world):
    """A close must not look like a declared rate, which has counted them."""
    world.parks()
    world.store.close_for("k", 1, "by t")
    world.advance(1)
    assert not world.admin.set_rates("k", rates_of("1/h"), ME)
    assert world.client.zcard(f"{KEYS.flow}:log") == 1
    assert not world.is_free()


def test_a_rate_and_a_close_of_one_lock_both_hold(world):
    flow = packed(rates_of("1/m"))
    token = world.holds(flow=flow)
    assert world.later(token, 3600).verdict is Verdict.RELEASED
    assert world.client.pttl(KEYS.flow) > 3_590_000
    world.advance(3599)
    reply = world.store.acquire(Owner(new_token()), Claim("k", flow=flow))
    assert reply.closed
    world.advance(1)
    world.holds(flow=flow)


def test_lists_show_a_closed_lock_also_if_it_is_idle(world):
    world.store.close_for("k", 30, "by t: 429")
    assert 0 < world.client.pttl(KEYS.meta) <= 90_000
    (lock,) = world.admin.summarise_locks()
    assert (lock.closed_for, lock.is_idle, lock.rated) == (30, False, False)
    assert "CLOSED for 30 s" in str(list(lock_rows([lock])))
    assert "1 closed for a time" in summary([lock], 1)
    assert sentence_of(lock) == ""
    world.parks()
    (lock,) = world.admin.summarise_locks()
    assert "closed it for another 30 s" in sentence_of(lock)
    assert world.admin.reopen("k", ME)
    assert [lock.closed_for for lock in world.admin.summarise_locks()] == [0]


def test_show_and_why_tell_who_has_closed_it_for_how_long_and_why(world):
    world.store.close_for("k", 90, "by app.push[17]: 429")
    world.parks("m/0/0")
    told = "for another 90 s, by app.push[17]: 429"
    assert f"state    CLOSED {told}" in detail(Detail(world.store.inspect("k"), (), {}))
    answer = why(world.admin, "m")
    assert f"'k' is closed {told}, you are next" in answer.sentence
    assert (answer.waits_for, answer.closed) == ("pause", "by app.push[17]: 429")
    world.admin.pause("k", ME)
    shown = detail(Detail(world.store.inspect("k"), (), {}))
    assert [told in line for line in shown if "PAUSED" in line] == [True]


def test_an_operator_who_errs_in_the_name_is_told_so(world):
    world.store.close_for("k", 30, "by t")
    assert change_lock.reopen(world.admin, "k", ME)
    with pytest.raises(change_lock.UnknownName):
        change_lock.reopen(world.admin, "kk", ME)


# -- ending LATER ----------------------------------------------------------------------------------


def test_the_ending_later_releases_and_closes_in_one_step(world):
    token = world.holds()
    _, parked = world.parks("other/0/0")
    assert parked.waits_for is WaitsFor.HOLDER
    reply = world.later(token)
    assert reply.verdict is Verdict.RELEASED
    assert reply.next_start == 30
    view = world.store.inspect("k")
    assert (view.holders, view.closed, view.closed_for) == ((), "by t: 429", 30)
    assert (view.waits_for, view.next_look) == (WaitsFor.PAUSE, 30)
    assert world.received() is None
    world.advance(30)
    assert world.received() is not None


@pytest.mark.parametrize("rate", ["2/h", Rate("2/h", cost=1)])
def test_each_run_of_a_task_that_runs_later_counts_for_its_rate(world, rate):
    """Its worker parks it under the token that it had, and the log has one start of each token."""
    flow = packed(rates_of(rate))
    token, runs = world.holds("m/0/0", flow=flow), 1
    while world.later(token, 1.0) and runs < 4:
        world.parks("m/0/0", token=token, copy=1, unanswered=True, flow=flow)
        world.advance(2)
        delivery = world.received()
        if delivery is None:
            break
        token, runs = delivery.token, runs + 1
        world.store.claim(Owner(token), "k", 30.0, acks_early=True)
    assert runs == 2
    world.advance(3600)
    assert world.received() is not None


def test_a_stored_message_queues_again_at_its_place(world):
    world.parks("first/0/0")
    world.advance(1)
    world.parks("second/0/0")
    delivery = world.received()
    world.store.claim(Owner(delivery.token), "k", 30.0)
    for _ in range(3):  # never delayed, as a message that comes back
        world.later(delivery.token)
        assert world.received() is None
        world.advance(30)
        delivery = world.received()
        assert world.store.claim(Owner(delivery.token), "k", 30.0).holder is None
        assert delivery.returns == 0
        assert [("k", delivery.token)] == list(world.store.locate_tasks(["first"]))


def test_a_wait_goes_on_while_the_lock_is_closed(world):
    """lock_wait_timeout counts from the arrival, also while the task ran."""
    world.parks("first/0/0", deadline=100.0)
    delivery = world.received()
    world.store.claim(Owner(delivery.token), "k", 30.0)
    world.advance(20)
    world.later(delivery.token, 3600)
    world.advance(79)
    assert world.received() is None
    world.advance(2)
    assert world.received().verdict == "overdue"


def test_a_message_whose_wait_has_ended_meanwhile_is_delivered_as_overdue(world):
    world.parks("first/0/0", deadline=10.0)
    delivery = world.received()
    world.store.claim(Owner(delivery.token), "k", 30.0)
    world.advance(20)
    world.later(delivery.token, 3600)
    assert world.received().verdict == "overdue"


def test_the_message_of_a_duplicate_waits_on_too(world):
    """A waiter in a slot has a deadline of its own, which is none of the message."""
    first, copy = Owner(new_token(), "m/0/0", "t", WORKER), new_token()
    assert world.store.acquire(first, Claim("k", copy=1), wait=5.0).verdict is Verdict.GRANTED
    _, reply = world.parks("m/0/0", token=copy, copy=1, deadline=100.0)
    assert reply.verdict is Verdict.TWIN
    world.advance(20)
    world.later(first.token, 30)
    world.advance(30)
    assert world.received().verdict == "granted"


def test_a_message_that_only_its_worker_has_is_parked_behind_the_release(world):
    """Its process has released the lock, or could not; both end in one stored message."""
    for heard in (True, False):
        token = world.holds("m/0/0")
        if heard:
            world.later(token, 10)
        _, reply = world.parks("m/0/0", token=token, copy=1, unanswered=True, deadline=None)
        assert reply.verdict is Verdict.WAITING
        if not heard:
            world.later(token, 10)
        world.parks("m/0/0", token=token, copy=1, unanswered=True)
        view = world.store.inspect("k")
        assert (view.bodies, view.closed_for) == (1, 10) if heard else view.bodies == 1
        world.advance(10 if heard else 0)
        delivery = world.received()
        claimed = world.store.claim(Owner(delivery.token), "k", 30.0, acks_early=True)
        assert claimed.verdict is Verdict.GRANTED
        world.store.release("k", delivery.token, Ending.FINAL)
        assert world.received() is None
        world.client.flushall()
        world.advance(0)


def test_a_lost_lock_is_closed_all_the_same(world):
    assert world.later(new_token()).verdict is Verdict.ABSENT
    assert not world.is_free()


def test_without_a_time_the_lock_stays_open(world):
    token = world.holds()
    world.later(token, None)
    assert world.is_free()


def test_a_retry_waits_for_the_end_of_the_close_before_all_others(world):
    token = world.holds("m/0/0")
    world.store.release("k", token, Ending.KEEP, reserve=Reservation("m/1/0", 1000.0))
    world.store.close_for("k", 30, "by t")
    world.parks("other/0/0")
    _, reply = world.parks("m/1/0")
    assert (reply.rank, reply.closed) == (1, "by t")


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, -1, True, None, "30", float("nan"), 367 * 86_400, 1e-9])
def test_a_time_that_is_none_is_refused_at_the_call(lock_client, seconds):
    with pytest.raises(ConfigurationError, match=r"seconds must be a number .* from 0\.001"):
        Lock(lock_client, "k").pause(seconds)
    with pytest.raises(ConfigurationError, match="why must be a str"):
        Lock(lock_client, "k").pause(1, why=429)


def test_a_long_or_hostile_reason_is_cut_and_escaped(world):
    Lock(world.client, "k").pause(30, "\x1b[31m" + "x" * 10_000)
    shown = world.store.inspect("k").closed
    assert len(shown) == 500
    assert "\x1b" not in shown
    assert "\\x1b[31mxxx" in shown

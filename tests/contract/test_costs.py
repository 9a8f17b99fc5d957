"""Rates that count costs, and charges, of Lock, AsyncLock and the store."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from celery_singleton_lock import ConfigurationError, Lock, LockCostError, LockTimeout, Rate, locked
from celery_singleton_lock.admin.lock_views import Detail
from celery_singleton_lock.cli.render import detail
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed, rates_of
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.lock.backends import _watchdogs
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.testing import memory_client
from celery_singleton_lock.testing.clock_control import LockTime
from support.waiting import eventually

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
KEYS = Keyspace().lock("k")


@pytest.fixture(autouse=True)
def _no_watchdog_stays():
    yield
    for dog in list(_watchdogs.values()):
        if hasattr(dog, "stop"):
            dog.stop()


def sliding(cost, number=100):
    return Rate(f"{number}/h", cost=cost)


def smooth(cost, burst=100):
    return Rate("3600/h", kind="smooth", burst=burst, cost=cost)


BOTH = pytest.mark.parametrize("rate", [sliding, smooth])


def tried(client, rate, **options):
    """Return a lock that has tried to start once."""
    lock = Lock(client, "k", rate=rate, limit=None, blocking=False, **options)
    lock.acquire()
    return lock


def used(client):
    (rate,) = Lock(client, "k")._store.inspect("k").rates
    return rate.started


@on_all_stores
@BOTH
def test_a_start_counts_what_it_costs(lock_client, rate):
    assert tried(lock_client, rate(60)).held
    assert not tried(lock_client, rate(60)).held
    assert tried(lock_client, rate(30)).held
    assert not tried(lock_client, rate(20)).held
    assert used(lock_client) in {89, 90}


@on_all_stores
def test_a_lock_shows_what_is_used(lock_client):
    lock = tried(lock_client, [sliding(60), "9/h"])
    lock.charge(1000)
    view = lock._store.inspect("k")
    assert {str(rate) for rate in view.rates} == {"100/h, 1,060 used", "9/h"}
    text = "\n".join(detail(Detail(view, ())))
    assert "rate     100/h, 1,060 used" in text
    busy = Lock(lock_client, "k", limit=None, rate=[sliding(60), "9/h"], blocking=False)
    lock.release()
    with pytest.raises(LockTimeout, match=r"has reached its rate .*100/h, 1,060 used"), busy:
        pass


@on_all_stores
@BOTH
def test_a_caller_without_a_cost_costs_one(lock_client, rate):
    assert tried(lock_client, rate(100)).held
    assert not Lock(lock_client, "k", limit=9, blocking=False).acquire()


@on_all_stores
def test_a_start_that_costs_nothing_waits_only_above_the_rate(lock_client):
    assert tried(lock_client, sliding(100)).held
    free = tried(lock_client, sliding(0))
    assert free.held
    free.charge(1)
    assert not tried(lock_client, sliding(0)).held


@on_all_stores
@BOTH
def test_a_rate_with_a_cost_and_one_without_count_apart(lock_client, rate):
    assert tried(lock_client, [rate(60), "2/d"]).held
    assert not tried(lock_client, [rate(60), "2/d"]).held
    assert tried(lock_client, [rate(1), "2/d"]).held
    assert not tried(lock_client, [rate(1), "2/d"]).held


@on_all_stores
@BOTH
def test_a_charge_counts_from_now_on(lock_client, rate):
    lock = tried(lock_client, rate(10))
    lock.charge(60)
    assert used(lock_client) in {69, 70}
    assert not tried(lock_client, rate(40)).held
    lock.charge(1000)
    assert used(lock_client) in {1069, 1070}


@on_all_stores
@BOTH
def test_a_negative_charge_gives_back_at_most_the_cost(lock_client, rate):
    lock = tried(lock_client, rate(90))
    lock.charge(-50)
    assert used(lock_client) in {39, 40}
    assert tried(lock_client, rate(50)).held
    lock.charge(-1000)
    assert used(lock_client) in {49, 50}
    lock.charge(-1)
    assert used(lock_client) in {49, 50}


@on_all_stores
@BOTH
def test_a_charge_with_one_id_counts_once(lock_client, rate):
    lock = tried(lock_client, rate(10))
    for _ in range(3):
        lock.charge(20, id="response 7")
    assert used(lock_client) in {29, 30}
    for _ in range(3):
        lock.charge(20)
    assert used(lock_client) in {89, 90}


@on_all_stores
@pytest.mark.parametrize("rate", [Rate("1/h", kind="smooth", burst=1, cost=1), sliding(1)])
def test_the_highest_charge_does_not_break_the_lock(lock_client, rate):
    lock = tried(lock_client, rate)
    lock.charge(10**12)
    lock.release()
    later = Lock(lock_client, "k", rate=rate, limit=9, blocking_timeout=0.01)
    assert not later.acquire()
    assert not Lock(lock_client, "k", limit=9, blocking=False).acquire()


@on_all_stores
def test_a_charge_may_choose_one_of_several_rates(lock_client):
    lock = tried(lock_client, [sliding(1), Rate("50/d", cost=2), "9/h"])
    lock.charge(10, rate="50/d")
    lock.charge(20, rate=sliding(1))
    lock.charge(3)
    assert sorted(rate.started for rate in lock._store.inspect("k").rates) == [1, 15, 24]
    with pytest.raises(ConfigurationError, match="no such rate with a cost"):
        lock.charge(1, rate="9/h")


@on_all_stores
def test_a_charge_needs_a_rate_with_a_cost(lock_client):
    lock = tried(lock_client, "5/h")
    with pytest.raises(ConfigurationError, match="Declare one"):
        lock.charge(1)
    for wrong in (True, 1.5, "1", None):
        with pytest.raises(ConfigurationError, match="whole number"):
            tried(lock_client, sliding(1)).charge(wrong)


@on_all_stores
def test_a_cost_above_the_rate_in_force_fails_at_once(lock_client):
    assert tried(lock_client, sliding(1, number=30)).held
    lock = Lock(lock_client, "k", rate=sliding(40), limit=9)
    with pytest.raises(LockCostError, match="it costs 40, and the rate in force, 30/h, allows"):
        lock.acquire()
    assert not lock._store.inspect("k").waiting


def test_a_waiter_ends_when_its_rate_becomes_lower_than_its_cost(redis_client):
    store = RedisStore(redis_client)
    first = tried(store, sliding(60))
    errors = []

    def wait():
        with pytest.raises(LockCostError) as error, Lock(store, "k", rate=sliding(60), limit=9):
            pass
        errors.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: store.inspect("k").waiting == 1)
    tried(store, sliding(1, number=50))
    thread.join(10)
    assert errors == [
        "Cannot acquire lock 'k': it costs 60, and the rate in force, 50/h, allows at most 50."
    ]
    assert not store.inspect("k").waiting
    first.release()


def test_a_parked_task_ends_when_its_rate_becomes_lower_than_its_cost(redis_client):
    """It is delivered with the reason, and not granted; the next one is."""
    store = RedisStore(redis_client)
    store.worker_heartbeat("w", "R", ["q"], 30.0, 9)
    tried(store, sliding(60))
    tokens = [new_token(), new_token()]
    for token, cost in zip(tokens, (60, 3), strict=True):
        claim = Claim("k", 30.0, 9, flow=packed((sliding(cost),)))
        to_park = MessageToPark(b"body", "R", "q", None)
        assert store.park(Owner(token, token, "t", "w"), claim, to_park).verdict is Verdict.WAITING
    assert not store.receive("w", 0.01), "the cheaper one behind it does not pass"
    tried(store, sliding(1, number=99))
    assert store.inspect("k").waiting == 2
    tried(store, sliding(1, number=55))
    found = store.receive("w", 1.0)
    assert (found.token, found.verdict, found.excess) == (
        tokens[0],
        "too_costly",
        "60 55 3600000000 0",
    )
    store.release("k", tokens[0], Ending.FINAL)
    assert store.inspect("k").counters["too_costly"] == 1


def test_a_parked_message_above_the_rate_is_not_stored(redis_client):
    store = RedisStore(redis_client)
    tried(store, sliding(1, number=5))
    claim = Claim("k", 30.0, 9, flow=packed((sliding(6),)))
    reply = store.park(Owner("t.0", "a/0/0", "t", "w"), claim, MessageToPark(b"b", "R", "q", None))
    assert (reply.verdict, reply.excess) == (Verdict.TOO_COSTLY, "6 5 3600000000 0")
    assert not store.inspect("k").bodies


@BOTH
def test_what_was_given_back_can_be_used_at_once(redis_client, rate):
    """A waiter is granted by the charge itself."""
    store = RedisStore(redis_client)
    lock = tried(store, rate(90))
    started = threading.Event()

    def wait():
        with Lock(store, "k", rate=rate(50), limit=9):
            started.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: store.inspect("k").waiting == 1)
    lock.charge(-50)
    assert started.wait(10)
    thread.join(10)


def test_a_late_charge_is_not_forgotten_before_its_period_ends(redis_client):
    """The sum expired before the entries that it counts, and more started than the rate allows."""
    lock = tried(redis_client, sliding(40))
    redis_client.pexpire(KEYS.flow, 60_000)
    lock.charge(50)
    (entries,) = redis_client.keys(f"{KEYS.flow}:log:*")
    assert redis_client.pttl(KEYS.flow) >= redis_client.pttl(entries) > 3_600_000
    assert not tried(redis_client, sliding(20)).held


def test_usage_leaves_with_its_period_in_virtual_time():
    client = memory_client("costs in virtual time")
    client.flushdb()
    time = LockTime(client.server)
    with time.frozen():
        first = tried(client, Rate("100/m", cost=60), lease=600, renew=False)
        time.advance(30)
        first.charge(30)
        assert not tried(client, Rate("100/m", cost=20)).held
        time.advance(31)
        assert used(client) == 30
        first.charge(-60)
        assert used(client) == 30, "its start does not count any more, so nothing is given back"
        time.advance(30)
        assert used(client) == 0


@BOTH
def test_a_task_that_runs_again_costs_as_much_as_before_whatever_it_gave_back(redis_client, rate):
    """It may use all of it this time."""
    store = RedisStore(redis_client)
    store.worker_heartbeat("w", "R", ["q"], 60.0, 9)
    claim = Claim("k", limit=9, flow=packed((rate(60),)))
    store.park(Owner("t.0", "t/0/0", "t", "w"), claim, MessageToPark(b"body", "R", "q"))
    store.claim(Owner("t.0", worker="w"), "k", 30.0)
    store.charge("k", "t.0", "first run", -50, [rate(60).key])
    assert used(redis_client) in {9, 10}
    store.release("k", "t.0", Ending.AGAIN)
    store.claim(Owner("t.1", worker="w"), "k", 30.0)
    assert used(redis_client) in {69, 70}
    store.charge("k", "t.1", "second run", -50, [rate(60).key])
    store.charge("k", "t.1", "second run, again", -50, [rate(60).key])
    assert used(redis_client) in {9, 10}


@BOTH
def test_a_charge_counts_also_if_the_task_has_run_for_much_longer_than_the_period(rate):
    """Nobody else declares the rate meanwhile."""
    client = memory_client("charges of long tasks")
    client.flushdb()
    time = LockTime(client.server)
    with time.frozen():
        lock = tried(client, rate(10), lease=1800, renew=False)
        for _ in range(9):
            time.advance(900)
            lock.extend(1800, replace_ttl=True)
        lock.charge(95)
        lock.release()
        assert not tried(client, rate(10)).held


def test_what_was_charged_above_a_smooth_rate_is_not_forgotten_while_the_lock_is_idle():
    client = memory_client("charges above a smooth rate")
    client.flushdb()
    time = LockTime(client.server)
    rate = Rate("60/m", kind="smooth", burst=10, cost=1)
    with time.frozen():
        lock = tried(client, rate)
        lock.charge(600)
        lock.release()
        time.advance(580)
        assert not tried(client, rate).held
        time.advance(20)
        assert tried(client, rate).held


def test_grants_count_before_they_are_claimed_if_an_operator_adds_a_cost(redis_client):
    """The lock has counted starts before."""
    store = RedisAdminStore(redis_client)
    store.worker_heartbeat("w", "R", ["q"], 60.0, 9)
    for number in range(5):
        if number == 2:
            store.set_rates("k", [Rate("3/h", cost=1)], Operator("test"))
        claim = Claim("k", limit=9, flow=packed(rates_of("100/h")))
        store.park(Owner(f"t{number}.0", task="t"), claim, MessageToPark(b"body", "R", "q"))
    assert len(store.inspect("k").holders) == 3


def start(store, *rates):
    """Whether a new task starts at once."""
    claim = Claim("k", limit=99, flow=packed(rates_of(rates)))
    return store.acquire(Owner(new_token()), claim).verdict is Verdict.GRANTED


def of_operator(store):
    return [(str(rate), rate.by_operator) for rate in store.inspect("k").rates]


COSTED = Rate("100/h", cost=40)


@pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
def test_an_operators_rate_of_starts_leaves_the_budget_of_the_tasks(make_store):
    """It is not meant to let a fleet spend more than it pays for."""
    store = make_store()
    assert start(store, "1/h", COSTED)
    assert not start(store, "1/h", COSTED)
    store.set_rates("k", [Rate("50/h")], Operator("test"))
    assert start(store, "1/h", COSTED)
    assert not start(store, "1/h", COSTED)
    assert of_operator(store) == [("50/h", True), ("100/h, 80 used", False)]
    store.set_rates("k", [], Operator("test"))
    assert of_operator(store) == [("1/h", False), ("100/h, 80 used", False)]


@pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
def test_an_operators_rate_of_costs_leaves_the_rates_of_starts(make_store):
    """It replaces those of costs, with what was used."""
    store = make_store()
    assert start(store, "3/h", COSTED)
    assert start(store, "3/h", COSTED)
    assert not start(store, "3/h", COSTED)
    store.set_rates("k", [Rate("1000/h", cost=1)], Operator("test"))
    assert start(store, "3/h", COSTED)
    assert not start(store, "3/h", COSTED)
    assert of_operator(store) == [("1000/h, 120 used", True), ("3/h", False)]
    store.set_rates("k", [Rate("1000/h", cost=1), Rate("9/h")], Operator("test"))
    assert of_operator(store) == [("1000/h, 120 used", True), ("9/h", True)]
    assert start(store, "3/h", COSTED)


def test_a_task_that_costs_more_than_the_budget_ends_beside_an_operators_rate(redis_client):
    store = RedisAdminStore(redis_client)
    assert start(store, COSTED)
    store.set_rates("k", [Rate("50/h")], Operator("test"))
    costly = Claim("k", limit=99, flow=packed(rates_of([Rate("1000/h", cost=101)])))
    assert store.acquire(Owner(new_token()), costly).verdict is Verdict.TOO_COSTLY


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if not units[counts_costs(rate)] then", "if false then"),
        ("if not units[counts_costs(rate)] then", "if true then"),
        ("units[counts_costs(rate)] = true", "units[false] = true"),
        ("rate[5] and 1 or 0, set and i <= #set and 1 or 0", "rate[5] and 1 or 0, 0"),
        ("rate[5] and 1 or 0, set and i <= #set and 1 or 0", "rate[5] and 1 or 0, set and 1 or 0"),
    ],
)
def test_a_wrong_line_about_an_operators_rates_is_noticed(make_store, old, new):
    store = make_store()
    scripts = store.operations.scripts
    changed = {
        verb: dataclasses.replace(each, text=each.text.replace(old, new))
        for verb, each in scripts.items()
        if old in each.text
    }
    assert changed
    scripts |= changed
    for verb in ("acquire", "claim", "release"):
        setattr(store.operations, f"_{verb}", scripts[verb])
    with pytest.raises(AssertionError):
        play_operators_rates(store)


def play_operators_rates(store):
    test_an_operators_rate_of_starts_leaves_the_budget_of_the_tasks(lambda: store)
    store.client.flushall()
    test_an_operators_rate_of_costs_leaves_the_rates_of_starts(lambda: store)


@on_all_stores
def test_locked_computes_the_cost_of_each_call(lock_client):
    """From a template, and from a callable; a wrong one raises in that call only."""

    @locked("k", lock_client, limit=None, on_conflict="skip", rate=Rate("100/h", cost="{tokens}"))
    def ask(tokens):
        return tokens

    assert ask(60) == 60
    assert ask(60) is None
    assert ask(40) == 40
    with pytest.raises(LockCostError, match="is 101, and above the rate, 100"):
        ask(101)
    with pytest.raises(LockCostError, match="is 'many': give a whole number"):
        ask("many")

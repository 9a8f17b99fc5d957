"""The order of waiters with priority, on every store."""

from __future__ import annotations

import asyncio
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import redis.asyncio

from celery_singleton_lock import AsyncLock, ConfigurationError, Lock, locked
from celery_singleton_lock.admin.export_parked import export, restore
from celery_singleton_lock.admin.lock_views import show_lock
from celery_singleton_lock.admin.select_parked import Filter
from celery_singleton_lock.admin.why import why
from celery_singleton_lock.cli.render import detail
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed, rates_of
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import ClusterAdminStore, RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import assemble, file_of
from support.passing_time import let_pass
from support.waiting import eventually

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
ROOT = Path(__file__).parents[2]
KEYS = Keyspace().lock("k")
REALM = "f" * 16
MINUTE = 60_000_000
BY = Operator("test")
BEFORE_PRIORITIES = "d40eb74"
"""A commit whose scripts know no priorities."""


@pytest.fixture
def store(lock_client, kind):
    return store_of(lock_client, kind)


def store_of(client, kind="redis"):
    if kind == "cluster":
        return ClusterAdminStore(client, claim_lease=60.0)
    store = RedisAdminStore(client, claim_lease=60.0)
    store.worker_heartbeat("w", REALM, ["q"], 600.0, 9)
    return store


def claim(head_start=0, **options):
    return Claim("k", flow=packed((), head_start), **options)


def hold(store, lease=30.0):
    holder = Owner("holder")
    assert store.acquire(holder, Claim("k", lease)).verdict is Verdict.GRANTED
    return holder


def wait(store, who, head_start=0, **options):
    return store.acquire(Owner(who, f"{who}/0/0"), claim(head_start, **options), wait=600.0)


def park(store, who, head_start=0, queue="q", task="app.task", **options):
    owner = Owner(f"{who}.0", f"{who}/0/0", task, "w")
    return store.park(owner, claim(head_start, **options), MessageToPark(b"body", REALM, queue))


def order(store):
    """Return who waits, the next one first."""
    page, _ = store.list_waiters("k", "queue")
    return [each.attempt.partition("/")[0] for each in page]


def holders(store):
    records = [store.locate_token("k", each.token).waiting for each in store.inspect("k").holders]
    return [each.attempt.partition("/")[0] for each in records]


# --- the order ------------------------------------------------------------------------------------


@on_all_stores
def test_an_urgent_task_passes_those_that_arrived_less_than_its_head_start_before_it(store):
    hold(store)
    now = store.time() * 1e6
    wait(store, "old", place=round(now - 3 * MINUTE))
    wait(store, "young", place=round(now - MINUTE))
    assert wait(store, "urgent", 2 * MINUTE).rank == 2
    assert order(store) == ["old", "urgent", "young"]


@on_all_stores
def test_a_task_that_can_wait_lets_later_ones_pass(store):
    hold(store)
    wait(store, "patient", -MINUTE)
    wait(store, "usual")
    assert order(store) == ["usual", "patient"]
    wait(store, "usual too")
    assert order(store) == ["usual", "usual too", "patient"]


@on_all_stores
def test_a_lock_without_priorities_keeps_its_order_and_its_records(store, lock_client):
    hold(store)
    for who in ("a", "b", "c"):
        wait(store, who)
    assert order(store) == ["a", "b", "c"]
    records = [json.loads(raw) for raw in lock_client.hvals(KEYS.record)]
    assert not [rec for rec in records if "arrived" in rec]


@on_all_stores
def test_of_equal_head_starts_the_first_goes_first(store):
    hold(store)
    for who in ("a", "b", "c"):
        wait(store, who, MINUTE)
    assert order(store) == ["a", "b", "c"]


@on_all_stores
def test_a_task_with_priority_takes_a_free_permit_before_the_waiters(store):
    """The pause keeps a permit free while a task waits."""
    store.pause("k", BY)
    wait(store, "usual")
    wait(store, "urgent", MINUTE)
    store.resume("k", BY)
    assert holders(store) == ["urgent"]


@pytest.mark.parametrize("kind", ["redis", "in_memory"], indirect=True)
def test_a_parked_urgent_message_is_granted_next(store):
    holder = hold(store)
    for number in range(50):
        park(store, f"usual {number}")
    assert park(store, "urgent", MINUTE).rank == 1
    store.release("k", holder.token, Ending.FINAL)
    assert holders(store) == ["urgent"]
    assert store.receive("w", 1.0).token == "urgent.0"


@on_all_stores
def test_a_rate_and_a_priority_come_in_one_call(store):
    options = packed(rates_of("1/h"), MINUTE)
    store.acquire(Owner("a"), Claim("k", flow=options))
    store.release("k", "a", Ending.FINAL)
    wait(store, "usual")
    store.acquire(Owner("b", "urgent/0/0"), Claim("k", flow=options), wait=60.0)
    assert order(store) == ["urgent", "usual"]
    assert store.inspect("k").waits_for is WaitsFor.RATE


# --- what keeps its place, and what loses it ------------------------------------------------------


def test_a_delivery_that_returns_keeps_its_head_start(redis_client):
    store = store_of(redis_client)
    holder = hold(store)
    park(store, "usual")
    park(store, "urgent", MINUTE)
    store.release("k", holder.token, Ending.FINAL)
    got = store.receive("w", 1.0)
    store.release("k", got.token, Ending.AGAIN)
    assert holders(store) == ["urgent"]
    assert 0 <= store.receive("w", 1.0).waited < 30, "it waited since its arrival"


def test_a_message_that_returns_again_and_again_loses_its_head_start(redis_client):
    """Its delay lets the others pass; its head start must not end that."""
    store = store_of(redis_client)
    store.park(
        Owner("bad.0", "bad/0/0", "app.task", "w"),
        claim(MINUTE),
        MessageToPark(b"body", REALM, "q", returns=5),
    )
    got = store.receive("w", 1.0)
    assert store.claim(Owner(got.token), "k", 30.0).verdict is Verdict.GRANTED
    store.release("k", got.token, Ending.AGAIN)
    holder = hold(store, 600.0)
    park(store, "usual")
    wait(store, "patient", -MINUTE)
    let_pass(store, 120)
    store.sweep_and_grant("k", worker="w", realm=REALM)
    assert order(store) == ["usual", "patient", "bad"]
    store.release("k", holder.token, Ending.FINAL)


@on_all_stores
def test_promote_goes_before_all_priorities(store):
    hold(store)
    wait(store, "urgent", 1440 * MINUTE)
    wait(store, "usual")
    store.promote("k", "usual", BY)
    assert order(store) == ["usual", "urgent"]
    (first, _) = store.list_waiters("k", "queue")[0]
    assert first.age < 30, "its time of arrival stays"


def test_promote_goes_before_urgent_messages_without_a_worker(redis_client):
    store = store_of(redis_client)
    hold(store)
    park(store, "urgent", 60 * MINUTE, queue="nobody's")
    park(store, "usual")
    store.release("k", "holder", Ending.FINAL)  # urgent becomes adrift
    assert holders(store) == ["usual"]
    park(store, "later")
    store.promote("k", "later.0", BY)
    store.worker_heartbeat("w2", REALM, ["nobody's"], 600.0, 9)
    store.sweep_and_grant("k", worker="w2", realm=REALM)
    assert order(store) == ["later", "urgent"]


def test_urgent_messages_without_a_worker_queue_again_first(redis_client):
    store = store_of(redis_client)
    for number in range(20):
        park(store, f"usual {number}", queue="nobody's")
    park(store, "urgent", MINUTE, queue="nobody's")
    assert order(store) == []
    store.worker_heartbeat("w2", REALM, ["nobody's"], 600.0, 9)
    store.sweep_and_grant("k", worker="w2", realm=REALM)
    assert holders(store) == ["urgent"]


def test_a_retry_with_a_reserved_permit_goes_before_all(redis_client):
    store = store_of(redis_client)
    park(store, "task")
    got = store.receive("w", 1.0)
    store.claim(Owner(got.token), "k", 30.0)
    wait(store, "urgent", 1440 * MINUTE)
    store.release("k", got.token, Ending.KEEP, reserve=Reservation("task/1/0", 60.0))
    store.pause("k", BY)
    store.acquire(Owner("retry", "task/1/0"), Claim("k"), wait=60.0)
    assert order(store) == ["task", "urgent"]


@pytest.mark.parametrize("kind", ["redis", "in_memory"], indirect=True)
@pytest.mark.parametrize("urgent_first", [True, False])
def test_the_oldest_by_arrival_is_replaced_and_not_the_most_urgent(store, urgent_first):
    hold(store)
    both = ["urgent", "usual"] if urgent_first else ["usual", "urgent"]
    for who in both:
        park(store, who, MINUTE if who == "urgent" else 0)
    park(store, "newest", max_waiting=2, replace=True)
    assert sorted(order(store)) == sorted([both[1], "newest"])


def test_the_oldest_by_arrival_is_replaced_among_those_without_a_worker(redis_client):
    store = store_of(redis_client)
    hold(store)
    park(store, "usual", queue="nobody's")
    park(store, "urgent", MINUTE, queue="nobody's")
    store.release("k", "holder", Ending.FINAL)
    hold(store)
    park(store, "newest", queue="nobody's", max_waiting=2, replace=True)
    waiting = {each.attempt: each.state for each in store.list_waiters("k", "overdue")[0]}
    assert waiting == {"usual/0/0": "replaced"}


def test_a_forced_release_sends_an_urgent_message_to_the_end(redis_client):
    store = store_of(redis_client)
    park(store, "urgent", MINUTE)
    got = store.receive("w", 1.0)
    park(store, "usual")
    wait(store, "patient", -MINUTE)
    store.force_release("k", got.token, BY, keep=True)
    assert holders(store) == ["usual"]
    assert order(store) == ["patient", "urgent"]


# --- times that users see -------------------------------------------------------------------------


@on_all_stores
def test_a_head_start_is_no_waiting_time(store):
    hold(store)
    wait(store, "urgent", 60 * MINUTE)
    (waiter,), _ = store.list_waiters("k", "queue")
    assert waiter.age < 30
    assert waiter.head_start == 3600
    (view,) = store.summarise_named(["k"])
    assert view.oldest < 30


@on_all_stores
def test_a_negative_head_start_hides_no_waiting_time(store):
    hold(store)
    arrived = round((store.time() - 100) * 1e6)
    wait(store, "patient", -60 * MINUTE, place=arrived)
    (waiter,), _ = store.list_waiters("k", "queue")
    assert 99 <= waiter.age < 130
    assert waiter.head_start == -3600
    (view,) = store.summarise_named(["k"])
    assert view.oldest >= 99


@on_all_stores
def test_a_task_that_can_wait_does_not_make_later_ones_wait_for_its_place(store):
    """Clients have no clock of the server: they queue behind the last waiter, if that is later."""
    hold(store)
    wait(store, "patient", -1440 * MINUTE)
    wait(store, "usual")
    let_pass(store, 5)
    wait(store, "urgent", MINUTE)
    assert order(store) == ["urgent", "usual", "patient"]


def test_why_tells_a_head_start_and_who_passed_the_task(redis_client):
    store = store_of(redis_client)
    hold(store)
    park(store, "usual")
    park(store, "patient", -MINUTE)
    park(store, "urgent", MINUTE)
    park(store, "very urgent", 2 * MINUTE)
    told = {who: why(store, who).sentence for who in ("usual", "urgent", "patient")}
    assert told["usual"].endswith("you are 3rd; 2 tasks with priority passed it")
    assert "you are 2nd; it has a head start of 60 s" in told["urgent"]
    assert told["urgent"].endswith("(lock_priority, or promoted); 1 task with priority passed it")
    assert "it lets later tasks pass for 60 s" in told["patient"]
    park(store, "promoted", MINUTE // 10_000)
    assert "head start of less than 0.1 s (lock_priority, or" in why(store, "promoted").sentence
    lines = detail(show_lock(store, "k"))
    assert any(line.endswith("+120 s") for line in lines)
    assert any(line.endswith("-60 s") for line in lines)


def test_show_has_no_column_for_head_starts_that_nobody_has(redis_client):
    store = store_of(redis_client)
    hold(store)
    park(store, "usual")
    assert not [line for line in detail(show_lock(store, "k")) if "HEAD START" in line]


@pytest.mark.parametrize("head_start", [MINUTE, -MINUTE])
def test_an_import_gives_a_task_its_place_and_its_age(redis_client, head_start):
    store = store_of(redis_client)
    hold(store)
    park(store, "task", head_start)
    (before,), _ = store.list_waiters("k", "queue")
    lines = list(export(store, Filter("k"), BY))
    store.drop_waiters("k", ["task.0"], BY, done_for=None)
    assert order(store) == []
    restore(store, lines, BY)
    (after,), _ = store.list_waiters("k", "queue")
    assert (after.place, after.arrived) == (before.place, before.arrived)


# --- locks in code --------------------------------------------------------------------------------


@on_all_stores
def test_a_lock_in_code_has_a_priority(lock_client):
    first = Lock(lock_client, "k")
    first.acquire()
    order = []

    def wait(name, priority):
        with Lock(lock_client, "k", priority=priority):
            order.append(name)

    with ThreadPoolExecutor(3) as pool:
        ends = []
        for number, (name, priority) in enumerate({"usual": 0, "late": -60, "urgent": 60}.items()):
            ends.append(pool.submit(wait, name, priority))
            eventually(lambda n=number: first._store.inspect("k").waiting == n + 1)
        first.release()
        for end in ends:
            end.result()
    assert order == ["urgent", "usual", "late"]


def _has_waiters(client, number):
    return client.zcard(KEYS.queue) == number


def test_a_coroutine_has_a_priority(redis_url, redis_client):
    order = []

    async def play():
        async with redis.asyncio.Redis.from_url(redis_url) as client:

            async def wait(name, priority):
                async with AsyncLock(client, "k", priority=priority):
                    order.append(name)

            async with AsyncLock(client, "k"):
                tasks = []
                for name, priority in (("usual", 0), ("urgent", 60)):
                    tasks.append(asyncio.create_task(wait(name, priority)))
                    wanted = partial(_has_waiters, redis_client, len(tasks))
                    await asyncio.to_thread(eventually, wanted)
            await asyncio.gather(*tasks)

    asyncio.run(play())
    assert order == ["urgent", "usual"]


@pytest.mark.parametrize("key", ["k", lambda who, urgency=0: "k"], ids=["template", "callable"])
@pytest.mark.parametrize(
    "priority", ["{urgency}", lambda who, urgency=0: urgency], ids=["template", "callable"]
)
def test_a_decorated_function_computes_its_priority(redis_client, key, priority):
    order = []

    @locked(key, redis_client, priority=priority)
    def function(who, urgency=0):
        order.append(who)

    with ThreadPoolExecutor(2) as pool, Lock(redis_client, "k"):
        for number, call in enumerate((("usual",), ("urgent", 60))):
            pool.submit(function, *call)
            eventually(lambda n=number: redis_client.zcard(KEYS.queue) == n + 1)
    assert order == ["urgent", "usual"]


def test_a_method_computes_its_priority_from_its_arguments(redis_client):
    class Shop:
        @locked("k", redis_client, priority="{urgency}")
        def settle(self, urgency):
            return urgency

    assert Shop().settle(7) == 7
    with pytest.raises(ConfigurationError, match="priority is 'soon', from the template"):
        Shop().settle("soon")


def test_a_wrong_priority_is_refused_where_it_is_written(redis_client):
    with pytest.raises(ConfigurationError, match="priority is 90000: give the seconds"):
        Lock(redis_client, "k", priority=90_000)
    with pytest.raises(ConfigurationError, match="a lock in code has no arguments"):
        AsyncLock(redis.asyncio.Redis(), "k", priority="{urgency}")
    with pytest.raises(ConfigurationError, match="which names no argument"):
        locked("k", redis_client, priority="high")


def test_a_quorum_refuses_a_priority(three_servers):
    with pytest.raises(ConfigurationError, match="QuorumStore has no queue"):
        Lock([server.url for server in three_servers], "k", priority=1)


# --- observe mode ---------------------------------------------------------------------------------


def test_a_run_with_priority_is_not_recorded_as_waiting_behind_those_that_it_would_pass(
    redis_client,
):
    """The first runs; one waits for it; the urgent one would be next, and wait for less."""
    store = store_of(redis_client)

    def begin(who, flow=""):
        store.record_observation(
            Owner(who, f"{who}/0/0", f"app.{who}"), Claim("o", flow=flow), waits=True, took=None
        )

    def end(who, took):
        store.record_observation(
            Owner(who, f"{who}/0/0", f"app.{who}"), Claim("o"), waits=True, took=took
        )

    begin("first")
    begin("usual")
    begin("urgent", packed((), MINUTE))
    end("usual", 100.0)
    end("urgent", 10.0)
    end("first", 5.0)
    waited = {seen.name: seen.longest for seen in store.observations().tasks}
    assert 4 <= waited["app.urgent"] <= 5
    assert waited["app.usual"] >= 14


# --- an older version beside this one -------------------------------------------------------------


def scripts_of(commit):
    """Return the scripts of an older version."""

    def text(file):
        path = f"{commit}:celery_singleton_lock/store/lua/{file}"
        shown = subprocess.run(
            ["git", "-C", str(ROOT), "show", path], capture_output=True, text=True, check=False
        )
        return shown.stdout or pytest.skip(f"needs commit {commit}: {shown.stderr.strip()}")

    def with_flow_key(shared):
        """Return the shared text for callers that pass the key of flow control, too."""
        assert shared.count("done, due") == 2
        return shared.replace("done, due", "done, flow, due").replace("11)", "12)")

    clock, shared = text("_clock.lua"), with_flow_key(text("_lock.lua"))
    verbs = ("acquire", "park", "claim", "release", "sweep_and_grant", "extend", "identify")
    texts = {verb: text(file_of(verb)) for verb in verbs}
    texts["claim"] = (  # its arguments have other names since, and one more
        texts["claim"]
        .replace("settle ", "delete_message ")
        .replace("pid claim_ms\n", "pid claim_ms limit_arg\n")
    )
    return {verb: assemble(verb, clock, shared, body) for verb, body in texts.items()}


def test_an_older_worker_keeps_the_order_of_priorities(redis_client):
    """Its scripts queue a message at its place, in and out of the messages without a worker."""
    new = store_of(redis_client)
    park(new, "usual", queue="nobody's")
    park(new, "urgent", MINUTE, queue="nobody's")
    old = RedisStore(redis_client, claim_lease=60.0, scripts=scripts_of(BEFORE_PRIORITIES))
    new.worker_heartbeat("w2", REALM, ["nobody's"], 600.0, 9)
    old.sweep_and_grant("k", worker="w2", realm=REALM)
    assert holders(new) == ["urgent"]
    got = new.receive("w2", 1.0)
    old.release("k", got.token, Ending.AGAIN)
    assert holders(new) == ["urgent"]
    assert not redis_client.zcard(KEYS.adrift)


def test_a_head_start_does_not_shorten_the_wait_of_a_task_that_runs_again_later(lock_client):
    """Its wait counts from its arrival. Else it would end as overdue at once."""
    store = store_of(lock_client)
    first = Owner("a.0", "m/0/0", "app.task", "w")
    assert store.acquire(first, claim(60 * MINUTE)).verdict is Verdict.GRANTED
    copy = Owner("b.0", "m/0/0", "app.task", "w")
    to_park = MessageToPark(b"body", REALM, "q", deadline=600.0)
    assert store.park(copy, claim(60 * MINUTE, copy=1), to_park).verdict is Verdict.TWIN
    store.release("k", first.token, Ending.LATER, reserve=Reservation("429", 30.0))
    store.sweep_and_grant_many(["k"], worker="w", realm=REALM, patience=60.0)
    assert [waiter.state for waiter in store.list_waiters("k", "queue")[0]] == ["parked"]

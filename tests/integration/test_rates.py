"""Rates of tasks, in real workers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockConflict, Rate
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually
from support.workers import CeleryWorker


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    return request.param


@pytest.fixture
def send(sending_app):
    """Send a task by its name: ``send("daily", 1)``."""
    return lambda name, n: sending_app.send_task(f"integration.rates_app.{name}", (n,))


@pytest.fixture
def worker(redis_url, pool):
    return CeleryWorker("integration.rates_app", redis_url, pool=pool, concurrency=3).start()


def starts(client, name):
    """Return the times at which the lock was started, in seconds."""
    found = client.zrange(f"{Keyspace().lock(name).flow}:log", 0, -1, withscores=True)
    return [at / 1e6 for _, at in found]


def test_tasks_above_a_rate_are_parked_and_start_when_it_allows(send, worker, redis_client):
    """No slot waits: a plain task runs meanwhile. The next start is not up to a second late."""
    results = [send("sliding", n) for n in range(12)]
    plain = send("plain", 7)
    assert plain.get(timeout=30) == 7
    assert [each.get(timeout=60) for each in results] == list(range(12))
    began = sorted(float(at) for at in redis_client.lrange("began:sliding", 0, -1))
    assert len(began) == 12
    logged = starts(redis_client, "sliding")
    assert all(late - early >= 2 for early, late in zip(logged, logged[4:]))  # noqa: B905


@pytest.mark.full
@pytest.mark.parametrize("name", ["smooth", "spaced"])
def test_a_smooth_rate_is_not_slowed_down_to_a_sweep_a_second(send, worker, redis_client, name):
    """Ten a second, with one permit and with any number. A late claim moves the next start."""
    results = [send(name, n) for n in range(60)]
    assert [each.get(timeout=60) for each in results] == list(range(60))
    began = sorted(float(at) for at in redis_client.lrange(f"began:{name}", 0, -1))
    gaps = [late - early for early, late in pairwise(began)]
    assert len([gap for gap in gaps if gap > 0.4]) <= 2, gaps


@pytest.mark.full
def test_long_tasks_start_when_the_rate_allows_it(send, redis_url, redis_client, pool):
    """Nobody releases the lock meanwhile: the worker learns of the next start from the claim."""
    with CeleryWorker("integration.rates_app", redis_url, pool=pool, concurrency=6):
        results = [send("long", n) for n in range(6)]
        assert [each.get(timeout=60) for each in results] == list(range(6))
        logged = starts(redis_client, "long")
        assert logged[-1] - logged[0] < 6.5  # 5.0, and up to a second later each without that


def test_a_task_waits_for_the_rate_and_why_says_so(send, worker, redis_client):
    first, second = send("daily", 1), send("daily", 2)
    assert first.get(timeout=30) == 1
    store = RedisStore(redis_client)
    view = eventually(
        lambda: (v := store.inspect("daily")).waits_for is WaitsFor.RATE and v.waiting and v,
        message="it waits for the rate",
    )
    assert [str(rate) for rate in view.rates] == ["1/d"]
    assert redis_client.pttl(Keyspace().lock("daily").flow) == -1
    second.revoke()
    eventually(lambda: not store.inspect("daily").waiting, message="it is revoked")


@pytest.mark.full
@pytest.mark.parametrize("stopped", ["prefork", "threads", "solo"])
def test_a_worker_that_waits_for_a_rate_stops_at_once(send, redis_url, redis_client, stopped):
    """It has a timer for the next start, in a day. What it has parked runs in another worker."""
    with CeleryWorker("integration.rates_app", redis_url, pool=stopped) as first:
        assert send("daily", 1).get(timeout=30) == 1
        waits = send("daily", 2)
        store = RedisAdminStore(redis_client)
        eventually(lambda: store.inspect("daily").waiting == 1, message="it is parked")
        first.terminate()
        assert first.wait(15) == 0
    assert store.inspect("daily").waiting == 1
    assert not waits.ready()
    with CeleryWorker("integration.rates_app", redis_url):
        store.set_rates("daily", [Rate("9/s")], Operator("test"))
        assert waits.get(timeout=30) == 2
    assert len(starts(redis_client, "daily")) == 2


def test_a_cool_down_skips_and_a_failing_rate_fails(send, worker):
    assert send("cool_down", 1).get(timeout=30) == 1
    skipped = send("cool_down", 2)
    with pytest.raises(TaskRevokedError, match="has reached its rate"):
        skipped.get(timeout=30)
    assert send("failing", 1).get(timeout=30) == 1
    failed = send("failing", 2)
    with pytest.raises(LockConflict, match="has reached its rate") as error:
        failed.get(timeout=30)
    assert (failed.state, error.value.waits_for) == (states.FAILURE, "rate")


def test_a_task_above_its_rate_fails_while_the_lock_is_held(send, worker, redis_client):
    """It would be parked until the rate allows the next start: here for a day."""
    first = send("busy", 1)
    eventually(lambda: redis_client.llen("began:busy"), message="the first runs")
    with pytest.raises(LockConflict, match="has reached its rate"):
        send("busy", 2).get(timeout=30)
    redis_client.rpush("go", 1)
    assert first.get(timeout=30) == 1


def test_each_attempt_of_a_retried_task_is_a_start(send, worker, redis_client):
    assert send("retrying", 1).get(timeout=60) == 1
    began = sorted(float(at) for at in redis_client.lrange("began:retrying", 0, -1))
    assert len(began) == 3
    assert began[2] - began[0] >= 1.9


def test_the_first_worker_with_a_rate_raises_the_schema(redis_url, redis_client):
    redis_client.set("csl:schema", "1")
    with CeleryWorker("integration.rates_app", redis_url):
        assert redis_client.get("csl:schema") == b"2"


@pytest.mark.full
def test_a_worker_stands_aside_when_a_newer_version_raises_the_schema(
    send, redis_url, redis_client
):
    """It does not guess what the new keys mean. Tasks without locks run."""
    with CeleryWorker("integration.rates_app", redis_url) as worker:
        assert send("daily", 1).get(timeout=30) == 1
        redis_client.set("csl:schema", "99")
        eventually(lambda: "holds data of schema 99" in worker.log(), 30, "it has noticed")
        waits = send("sliding", 1)
        assert send("plain", 7).get(timeout=30) == 7
        assert not waits.ready()
        redis_client.set("csl:schema", "2")
        assert waits.get(timeout=30) == 1

"""Limits and rates that arguments give, and that an operator sets for a time, in real workers."""

from __future__ import annotations

import pytest

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiting import eventually
from support.workers import CeleryWorker

JANE = Operator("jane")


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    return request.param


@pytest.fixture
def send(sending_app):
    return lambda name, *args: sending_app.send_task(f"integration.limits_app.{name}", args)


@pytest.fixture
def worker(redis_url, pool):
    return CeleryWorker("integration.limits_app", redis_url, pool=pool, concurrency=4).start()


@pytest.fixture
def store(redis_client):
    return RedisAdminStore(redis_client)


def test_a_raised_limit_starts_waiting_tasks_while_the_lock_is_held(
    send, worker, redis_client, store
):
    results = [send("by_plan", n, 1) for n in range(3)]
    eventually(lambda: store.inspect("plan").waiting == 2, 30, "one runs, two wait")
    results.append(send("by_plan", 3, 3))
    eventually(lambda: redis_client.get("running") == b"3", 30, "three run")
    view = store.inspect("plan")
    assert (view.limit, view.limit_computed) == (3, True)
    redis_client.set("go", 1)
    assert [each.get(timeout=60) for each in results] == [0, 1, 2, 3]


def test_a_value_that_cannot_be_used_fails_that_one_task(send, worker, redis_client):
    redis_client.set("go", 1)
    failed = send("by_plan", 1, 0)
    with pytest.raises(ConfigurationError, match="lock_limit is '0': it was computed from the arg"):
        failed.get(timeout=30)
    failed = send("by_rate", 1, "fast")
    with pytest.raises(ConfigurationError, match="Rate 'fast' cannot be read"):
        failed.get(timeout=30)
    assert send("by_plan", 2, "2").get(timeout=30) == 2


def test_a_raised_rate_starts_waiting_tasks(send, worker, store):
    assert send("by_rate", 1, "1/d").get(timeout=30) == 1
    waits = send("by_rate", 2, "1/d")
    eventually(lambda: store.inspect("rated").waiting == 1, 30, "it waits")
    assert send("by_rate", 3, "3/d").get(timeout=30) == 3
    assert waits.get(timeout=30) == 2


def test_tasks_start_when_a_pause_ends_by_itself(send, worker, store):
    store.pause("usual", JANE, seconds=2.0)
    waits = send("usual", 1)
    eventually(lambda: store.inspect("usual").waiting == 1, 30, "it waits")
    assert waits.get(timeout=30) == 1
    assert not store.inspect("usual").paused


def test_a_rate_of_an_operator_holds_tasks_that_declare_none(send, worker, store):
    store.set_rates("usual", [Rate("1/d")], JANE)
    assert send("usual", 1).get(timeout=30) == 1
    waits = send("usual", 2)
    eventually(lambda: store.inspect("usual").waiting == 1, 30, "it waits")
    store.set_rates("usual", [], JANE)
    assert waits.get(timeout=30) == 2

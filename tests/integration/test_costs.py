"""Rates that count costs, and charges, in real workers."""

from __future__ import annotations

from contextlib import closing

import pytest
from celery import states

from celery_singleton_lock import ConfigurationError, Lock, LockCostError, Rate
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually
from support.workers import CeleryWorker


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    return request.param


@pytest.fixture
def send(sending_app):
    """Send a task by its name: ``send("ask", 900)``."""
    return lambda name, *args: sending_app.send_task(f"integration.costs_app.{name}", args)


@pytest.fixture
def worker(redis_url, pool):
    return CeleryWorker("integration.costs_app", redis_url, pool=pool, concurrency=3).start()


@pytest.fixture
def store(redis_client):
    with closing(RedisStore(redis_client)) as store:
        yield store


def used(store, name):
    return {rate.rate: rate.started for rate in store.inspect(name).rates}


def waiting(store, name, number=1):
    eventually(lambda: store.inspect(name).waiting == number, message=f"{number} wait")


def test_a_task_counts_what_its_argument_says_and_a_cheaper_one_does_not_pass(send, worker, store):
    assert send("ask", 900).get(timeout=30) == 900
    waits = send("ask", 200)
    waiting(store, "llm")
    cheap = send("ask", 1)
    waiting(store, "llm", 2)
    assert used(store, "llm") == {"500/h": 1, "1000/h": 900}
    assert not waits.ready()
    assert not cheap.ready()


def test_a_charge_makes_room_for_a_parked_task(send, worker, store):
    assert send("ask", 900, 950).get(timeout=30) == 900
    waits = send("ask", 200)
    waiting(store, "llm")
    assert used(store, "llm")["1000/h"] == 950
    other = RedisStore(store.client)
    other.charge("llm", "nobody.0", "late", 100, ["sliding 3600 cost"])
    assert used(store, "llm")["1000/h"] == 1050
    assert not waits.ready()


def test_a_task_that_used_less_lets_the_next_one_start(send, worker, store):
    assert send("ask", 900, 100).get(timeout=30) == 900
    assert used(store, "llm")["1000/h"] == 100
    assert send("ask", 800).get(timeout=30) == 800


def test_a_callable_computes_the_cost(send, worker, store):
    assert send("translate", "x" * 40).get(timeout=30) == "X" * 40
    view = store.inspect("words")
    assert 60 <= view.rates[0].started <= 80


WRONG = [
    (1001, "is 1001, and above the rate, 1000"),
    ("many", "is 'many': give a whole number"),
    (-5, "is '-5': give a whole number"),
    (1.5, "is '1.5': give a whole number, from 0 to 1000"),
    (True, "give a whole number"),
    (None, "argument 'tokens' is None"),
]


def test_a_cost_that_is_no_number_or_above_the_rate_fails_that_task(send, worker, store):
    results = [(send("ask", argument), told) for argument, told in WRONG]
    for failed, told in results:
        with pytest.raises(LockCostError, match=told):
            failed.get(timeout=30)
        assert failed.state == states.FAILURE
    assert send("plain").get(timeout=30) == 7


def test_a_parked_task_fails_when_its_rate_becomes_lower_than_its_cost(send, worker, store):
    assert send("ask", 900).get(timeout=30) == 900
    waits = send("ask", 200)
    waiting(store, "llm")
    lower = send("lower")
    with pytest.raises(LockCostError, match="it costs 200, and the rate in force, 5/h, allows"):
        waits.get(timeout=30)
    assert waits.state == states.FAILURE
    assert store.inspect("llm").counters["too_costly"] == 1
    eventually(lambda: "can never start under the lock 'llm'" in worker.log())
    assert not lower.ready()


def test_a_task_whose_rate_is_lower_than_its_cost_fails_at_once(send, worker, store):
    lower = Lock(store, "llm", limit=9, rate=Rate("5/h", cost=1))
    refused = pytest.raises(LockCostError, match="the rate in force, 5/h, allows at most 5")
    with lower, refused:
        send("ask", 200).get(timeout=30)
    assert not store.inspect("llm").bodies


def test_a_charge_of_several_locks_needs_a_name(send, worker):
    with pytest.raises(ConfigurationError, match="Give name=, one of 'a', 'b'"):
        send("pair").get(timeout=30)

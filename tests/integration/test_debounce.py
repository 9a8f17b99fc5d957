"""Bursts of calls, in real workers."""

from __future__ import annotations

import re

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock.admin.why import why
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiting import eventually
from support.workers import CeleryWorker


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    return request.param


@pytest.fixture
def send(sending_app):
    """Send a task by its name: ``send("index", "a", 1)``."""
    return lambda name, *args: sending_app.send_task(f"integration.debounce_app.{name}", args)


@pytest.fixture
def worker(redis_url, pool):
    return CeleryWorker("integration.debounce_app", redis_url, pool=pool, concurrency=2).start()


def ran(redis_client):
    return [int(each) for each in redis_client.lrange("ran", 0, -1)]


def test_of_a_burst_the_newest_call_runs_and_the_others_are_revoked(send, worker, redis_client):
    results = [send("index", "a", version) for version in range(20)]
    assert results[-1].get(timeout=60) == 19
    for each in results[:-1]:
        with pytest.raises(TaskRevokedError, match="came before it had settled at the lock"):
            each.get(timeout=60)
    assert ran(redis_client) == [19]


@pytest.mark.full
def test_bursts_of_several_keys_do_not_replace_each_other(send, worker, redis_client):
    results = [(send("index", f"d{n % 3}", n)) for n in range(30)]
    assert [each.get(timeout=60) for each in results[-3:]] == [27, 28, 29]
    assert sorted(ran(redis_client)) == [27, 28, 29]


def test_observe_mode_counts_the_calls_that_a_later_one_would_have_replaced(
    send, worker, redis_client
):
    results = [send("seen", "a", version) for version in range(4)]
    assert [each.get(timeout=60) for each in results] == [0, 1, 2, 3]
    (task,) = RedisAdminStore(redis_client).observations().tasks
    assert (task.runs, task.replaced, task.blocked) == (4, 3, 0)
    worker.await_log("would have replaced task ")


def settling(store, result):
    """Return the record of a task that settles; None if it does not yet."""
    for name, token in store.locate_tasks([result.id]):
        found = store.locate_token(name, token).waiting
        if found is not None and found.state == "settling":
            return found
    return None


def test_calls_that_settle_occupy_no_slot_and_are_explained(send, worker, redis_client):
    store = RedisAdminStore(redis_client)
    results = [send("slow", version) for version in range(4)]
    eventually(lambda: settling(store, results[-1]), message="the newest one settles")
    assert send("collect", [1]).get(timeout=60) == [1]  # both slots are free
    told = why(store, results[-1].id)
    assert told.state == "settling"
    assert re.search(r"queues for 'slow' in (9|10) min", told.sentence)
    assert told.waits_for == WaitsFor.SETTLING.value


@pytest.mark.full
def test_a_revoked_call_that_settles_does_not_run(send, sending_app, worker, redis_client):
    store = RedisAdminStore(redis_client)
    result = send("slow", 1)
    eventually(lambda: settling(store, result), message="it settles")
    sending_app.control.revoke(result.id)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=60)
    eventually(lambda: not store.inspect("slow").bodies, message="its message is gone")


def test_a_chord_hears_of_a_call_that_was_replaced(send, worker, redis_client):
    """Else its body would never be called."""
    send("send_chord")
    body = eventually(lambda: redis_client.get("body"), 60, "the chord is sent").decode()
    meta = eventually(
        lambda: b"FAILURE" in (m := redis_client.get(f"celery-task-meta-{body}") or b"") and m,
        60,
        "the body has failed",
    )
    assert b"came before it had settled" in meta
    worker.await_log("has a chord, and was replaced before it had settled")


@pytest.mark.full
def test_the_first_call_after_a_quiet_time_runs_at_once(send, worker, redis_client):
    """Then the newest of those that came meanwhile."""
    assert send("first", "a", 1).get(timeout=60) == 1
    second, third = send("first", "a", 2), send("first", "a", 3)
    assert third.get(timeout=60) == 3
    with pytest.raises(TaskRevokedError):
        second.get(timeout=60)
    assert ran(redis_client) == [1, 3]


@pytest.mark.full
def test_a_retry_does_not_settle_again(send, worker):
    assert send("flaky").get(timeout=60) == 2


@pytest.mark.full
def test_a_task_that_runs_later_does_not_settle_again(send, worker):
    assert send("later").get(timeout=60) == 2

"""Tasks with several locks that have rates, in real workers."""

from __future__ import annotations

from contextlib import closing

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import Lock
from celery_singleton_lock.admin import why
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from integration.book import needs_pool, pools
from support.waiting import eventually
from support.workers import CeleryWorker

APP = "integration.rate_sets_app"


@pytest.fixture(params=pools("prefork", "threads", "gevent", "solo"))
def pool(request):
    needs_pool(request.param)
    return request.param


@pytest.fixture
def send(sending_app):
    return lambda name, *args: sending_app.send_task(name, args)


@pytest.fixture
def store(redis_client):
    with closing(RedisStore(redis_client)) as store:
        yield store


@pytest.fixture
def busy(redis_client):
    """The lock b, which another client holds."""
    lock = Lock(redis_client, "b", lease=60, thread_local=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


def starts(client, name):
    """Return the times at which a lock was started, in seconds."""
    found = client.zrange(f"{Keyspace().lock(name).flow}:log", 0, -1, withscores=True)
    return [at / 1e6 for _, at in found]


def spaced(times, number, period):
    return all(late - early >= period for early, late in zip(times, times[number:], strict=False))


@pytest.mark.parametrize("task", ["early", "late"])
def test_tasks_with_several_rates_all_run_and_no_period_has_more(
    send, redis_url, redis_client, pool, task
):
    """Of each tenant, and of all; however they are acknowledged."""
    with CeleryWorker(APP, redis_url, pool=pool, concurrency=4):
        results = [send(task, n % 2, n) for n in range(7)]
        assert [each.get(timeout=60) for each in results] == list(range(7))
    assert len(redis_client.lrange("began", 0, -1)) == 7
    logged = [starts(redis_client, name) for name in ("1:tenant:0", "1:tenant:1", "3:llm")]
    assert all(at < 9e15 / 1e6 for times in logged for at in times)
    assert spaced(logged[0], 3, 2)
    assert spaced(logged[1], 3, 2)
    assert spaced(logged[2], 4, 2)


def unclaimed(store):
    view = store.inspect("a")
    return view.rates and view.rates[0].started == 1 and view.holders[0].state != "running"


@pytest.mark.full
def test_a_worker_that_is_killed_between_two_locks_gives_the_start_back(
    send, redis_url, redis_client, store, busy
):
    """Its task waits for the second lock; the next one starts when the lease has ended."""
    with CeleryWorker(APP, redis_url) as worker:
        first = send("waits", 1)
        eventually(lambda: unclaimed(store) and store.inspect("b").waiting, 30, "it waits at b")
        second = send("quick", 2)
        eventually(lambda: store.inspect("a").waiting, 30, "it waits for the rate")
        told = why(RedisAdminStore(redis_client), second.id)
        assert (told.lock, told.waits_for) == ("a", "rate")
        assert "'a' has reached its rate (1/h)" in told.sentence
        held = why(RedisAdminStore(redis_client), first.id)
        assert (held.lock, held.keeps) == ("b", ("a",))
        worker.kill()
    with CeleryWorker(APP, redis_url):
        assert second.get(timeout=60) == 2
        assert len(starts(redis_client, "a")) == 1
        first.revoke()


def test_a_task_above_the_rate_of_one_of_its_locks_is_skipped_and_keeps_none(
    send, redis_url, store
):
    with CeleryWorker(APP, redis_url):
        assert send("cool_down", 1).get(timeout=30) == 1
        with pytest.raises(TaskRevokedError, match="'e' has reached its rate"):
            send("cool_down", 2).get(timeout=30)
        eventually(lambda: not store.inspect("d").holders, 5, "it keeps no lock")

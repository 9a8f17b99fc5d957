"""RetryLater, and self.lock.pause, in real workers."""

from __future__ import annotations

import itertools
import time

import pytest
from celery import Celery, chord, states

from celery_singleton_lock import ConfigurationError, Lock, LockWaitTimeout
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import PATIENCE, eventually
from support.workers import CeleryWorker


@pytest.fixture(params=["prefork", "threads", "solo", "gevent"])
def pool(request):
    return request.param


@pytest.fixture
def send(sending_app):
    """Send a task by its name: ``send("late", 1)``."""
    return lambda name, *args: sending_app.send_task(name, args)


@pytest.fixture
def worker(redis_url, pool):
    return CeleryWorker("integration.later_app", redis_url, pool=pool, concurrency=2).start()


@pytest.fixture
def prefork_worker(redis_url):
    return CeleryWorker("integration.later_app", redis_url, pool="prefork", concurrency=2).start()


def order(client):
    return [int(line.split()[0]) for line in client.lrange("began", 0, -1)]


def gaps(client):
    times = [float(line.split()[1]) for line in client.lrange("began", 0, -1)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("name", ["early", "late"])
def test_the_task_runs_again_at_its_place_when_the_lock_opens(name, send, worker, redis_client):
    """It costs no retry, and no hook of a failure is called. Who came later waits as well."""
    first = send(name, 1, 2.0)
    eventually(lambda: redis_client.llen("began"), message="the first runs")
    second = send(name, 2, 0.1, 0)
    assert first.get(timeout=60) == [1, 0, 2]
    assert second.get(timeout=60) == [2, 0, 1]
    assert order(redis_client) == [1, 1, 2]
    assert gaps(redis_client)[0] >= 1.9
    assert not redis_client.lrange("hooks", 0, -1)


def test_a_parked_task_may_say_so_repeatedly(send, worker, redis_client):
    """The returns of such a message are neither counted nor delayed."""
    first = send("late", 1, 0.5, 0)
    second = send("late", 2, 0.3, 4)
    assert first.get(timeout=60) == [1, 0, 1]
    assert second.get(timeout=60) == [2, 0, 5]
    assert redis_client.get("celery-task-meta-" + second.id)


def test_meanwhile_the_lock_says_by_whom_it_is_closed_and_no_result_is_stored(
    send, prefork_worker, redis_client
):
    result = send("late", 1, 3600.0)
    store = RedisStore(redis_client)
    view = eventually(lambda: (v := store.inspect("late")).waiting and v, message="it is parked")
    assert (view.waits_for, view.holders) == (WaitsFor.PAUSE, ())
    assert view.closed == f"by late[{result.id}]: 429 from the API"
    assert 3500 < view.closed_for <= 3600
    assert result.state == states.PENDING
    for told in (
        "runs again later: it has closed the lock 'late' for 3600 s: 429 from the API",
        "which is paused, or closed for a time",
    ):
        prefork_worker.await_log(told, PATIENCE)


def test_a_chord_waits_for_the_run_that_succeeds(sending_app, send, prefork_worker):
    member = [sending_app.signature("early", (n, 0.5, n - 1)) for n in (1, 2)]
    assert chord(member)(sending_app.signature("add")).get(timeout=60) == 3


@pytest.mark.parametrize("name", ["unlocked", "observed"])
def test_without_a_lock_the_task_is_sent_again(name, send, prefork_worker, redis_client):
    result = send(name, 1)
    assert result.get(timeout=60) == [1, 0, 2]
    assert gaps(redis_client)[0] >= 0.9
    assert "is sent again, to run in 1 s" in prefork_worker.log()


def test_a_task_that_is_no_locked_task_fails_with_the_remedy(send, prefork_worker):
    """Celery would drop its message silently."""
    with pytest.raises(ConfigurationError, match=r"use self\.retry\(countdown=30\)"):
        send("plain", 1).get(timeout=60)


def test_the_wait_of_a_task_goes_on(send, prefork_worker):
    """lock_wait_timeout counts from the arrival, not anew."""
    with pytest.raises(LockWaitTimeout):
        send("in_time", 1, 3600.0).get(timeout=60)


def test_a_task_that_would_skip_a_busy_lock_is_parked(send, prefork_worker):
    """It had its lock, so its message is not thrown away."""
    assert send("skips", 1).get(timeout=60) == [1, 0, 2]


def test_a_full_queue_does_not_end_a_task_that_runs_again(send, prefork_worker):
    """The task had the lock. It returns to its place, and needs no room in the queue."""
    assert send("full", 1).get(timeout=60) == [1, 0, 2]


def test_a_task_that_closes_its_lock_runs_to_its_end_and_is_reported(send, worker, redis_client):
    first, second = send("pausing", 1), send("pausing", 2)
    assert (first.get(timeout=60), second.get(timeout=60)) == (1, 2)
    assert gaps(redis_client)[0] >= 1.9
    closed = eventually(lambda: redis_client.lrange("closed", 0, -1), message="the event")
    (task_id, seconds, why, lock), *others = [line.decode().split() for line in closed]
    assert (task_id, why, lock, others) == (first.id, "429", "pausing", [])
    assert 1.9 < float(seconds) <= 2


def test_with_several_locks_the_task_names_the_one_to_close(send, prefork_worker, redis_client):
    for name, wrong in (("", "Say which one to close"), ("c", "the task has no such lock")):
        with pytest.raises(ConfigurationError, match=wrong):
            send("both", name or "none", name).get(timeout=60)
    for name in ("a", "b"):
        assert send("both", name, name).get(timeout=60) == name
        closed = RedisStore(redis_client).keyspace.lock(name).flow
        assert redis_client.hexists(closed, "closed")
    told = redis_client.lrange("closed", 0, -1)
    assert [line.split()[-1] for line in told] == [b"a", b"b"]


@pytest.mark.parametrize("name", ["early", "both"])
def test_a_task_runs_again_though_its_id_was_used_before(
    name, sending_app, prefork_worker, redis_client
):
    """The first call was parked, so that its end is remembered for an hour."""
    store, last = RedisStore(redis_client), {"early": "early", "both": "b"}[name]

    def parked(*args, ran):
        """Not by its result: Celery may take that of the first call for the second one."""
        with Lock(redis_client, last):
            sending_app.send_task(name, args, task_id="used-again")
            eventually(lambda: store.inspect(last).bodies, message="it is parked")
        eventually(lambda: order(redis_client) == ran, message=f"runs: {ran}")
        eventually(lambda: not store.inspect(last).holders, message="it has ended")
        return time.monotonic()

    redis_client.set("times:1", 5)
    ended = parked(1, ran=[1])
    eventually(lambda: time.monotonic() > ended + 1.5, message="the clocks differ by less")
    parked(2, *({"both": ["a"]}.get(name, [])), ran=[1, 2, 2])


def test_a_process_that_dies_after_closing_the_lock_loses_no_task(
    send, prefork_worker, redis_client
):
    """Late acknowledgement: the broker, or Redis if it was parked, has the message."""
    redis_client.set("die", 1)
    assert send("late", 1).get(timeout=60)[:2] == [1, 0]
    redis_client.delete("began")
    busy = send("late", 2, 0.1, 0)
    redis_client.set("die", 1)
    parked = send("late", 3)
    assert busy.get(timeout=60)
    assert parked.get(timeout=60)[:2] == [3, 0]
    assert not redis_client.get("die")


@pytest.mark.full("early")
@pytest.mark.parametrize("name", ["early", "late"])
def test_a_message_of_rabbitmq_runs_again_once(name, rabbit_url, redis_url, redis_client):
    """It is acknowledged when Redis has it, and not delivered a second time."""
    worker = CeleryWorker(
        "integration.later_app", rabbit_url, backend=redis_url, pool="prefork", concurrency=2
    )
    with worker, Celery(broker=rabbit_url, backend=redis_url, set_as_current=False) as app:
        first = app.send_task(name, (1, 1.0, 2))
        second = app.send_task(name, (2, 0.1, 0))
        assert first.get(timeout=60) == [1, 0, 3]
        assert second.get(timeout=60) == [2, 0, 1]
        assert order(redis_client).count(1) == 3

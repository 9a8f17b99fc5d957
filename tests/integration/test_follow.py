"""Duplicates that end with the result of the first task, with real workers."""

from __future__ import annotations

import gc
import os
import re
import signal
import warnings
from collections import Counter

import pytest
from billiard.exceptions import WorkerLostError
from celery import chain, chord, states
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockWaitTimeout
from celery_singleton_lock.admin.why import why
from celery_singleton_lock.store.factory import admin_of
from integration.follow_app import OutOfStock, make_app
from support.versions import TELLS_REVOKED
from support.waiting import eventually
from support.workers import CeleryWorker


@pytest.fixture(autouse=True)
def _collect_what_celery_leaves_open():
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.full)])
def broker(request, redis_url):
    return redis_url if request.param == "redis" else request.getfixturevalue("rabbit_url")


@pytest.fixture
def app(broker, redis_url):
    with make_app(broker, redis_url) as app:
        yield app
        app.backend.result_consumer.stop()
        store = app.tasks["report"]._lock_extension.store()
        store.close()
        store.client.connection_pool.disconnect()
        app.backend.client.connection_pool.disconnect()


@pytest.fixture
def client(redis_client):
    return redis_client


@pytest.fixture(params=["prefork", "threads", "solo"])
def pool(request):
    return request.param


@pytest.fixture
def worker(broker, redis_url, pool):
    concurrency = 1 if pool == "solo" else 2
    with CeleryWorker(
        "integration.follow_app", broker, backend=redis_url, pool=pool, concurrency=concurrency
    ) as worker:
        yield worker


def ran(client):
    return [each.decode() for each in client.lrange("ran", 0, -1)]


def start(app, client, task="report", **options):
    """Let the first task run."""
    first = app.tasks[task].apply_async(("may", "first"), **options)
    eventually(lambda: ran(client) == ["first"], timeout=60)
    return first


def sent(app, result, task="report"):
    """Wait until the message of a follower is parked; return what ``locks why`` says of it."""
    store = admin_of(app.tasks[task]._lock_extension.store())

    def told():
        answer = why(store, result.id)
        return answer if answer.state == "following" else None

    return eventually(told, timeout=60)


def go(client, said="on"):
    client.rpush("go", said)


def test_a_duplicate_has_the_result_of_the_first_task(app, client, worker, pool):
    """It takes no slot while it waits: one process or thread is free for other tasks."""
    first = start(app, client)
    second = app.tasks["report"].delay("may", "second")
    assert (first.duplicate, second.duplicate) == (False, True)
    assert second.id != first.id
    if pool != "solo":  # its only slot is busy
        assert app.tasks["other"].delay("x").get(timeout=60) == "x"
        assert f"follows {first.id}" in sent(app, second).sentence
        (told,) = app.control.inspect(timeout=20, limit=1)._request("locks").values()
        assert [(each["id"], each["unique"], each["follows"]) for each in told["locks"]] == [
            (first.id, "report", "")
        ]
    go(client)
    assert second.get(timeout=60) == first.get(timeout=60) == {"from": "first"}
    assert ran(client) == ["first"]
    eventually(lambda: f"ended with the result of task {first.id}" in worker.log(), timeout=60)


def test_what_comes_after_a_duplicate_goes_on(app, client, worker, pool):
    """Links, chains and chords."""
    first = start(app, client)
    task, after, collect = (app.tasks[name] for name in ("report", "after", "collect"))
    linked = task.apply_async(("may", "linked"), link=after.s())
    chained = chain(task.si("may", "chained"), after.s())()
    counted = chord([task.si("may", str(n)) for n in range(3)], collect.s())()
    go(client)
    result = {"from": "first"}
    assert counted.get(timeout=60) == [result] * 3
    assert chained.get(timeout=60) == result
    assert linked.get(timeout=60) == first.get(timeout=60) == result
    eventually(lambda: client.llen("linked") == 2, timeout=60)
    assert ran(client) == ["first"]


def test_a_duplicate_fails_as_the_first_task_does(app, client, worker, pool):
    first = start(app, client)
    second = app.tasks["report"].apply_async(
        ("may", "second"), link_error=app.signature("after_error")
    )
    go(client, "fail")
    for each in (first, second):
        with pytest.raises(OutOfStock) as raised:
            each.get(timeout=60)
        assert raised.value.args == ("may", 7)
    eventually(lambda: client.llen("errors") == 1, timeout=60)
    assert ran(client) == ["first"]


def test_a_duplicate_waits_while_the_first_task_is_retried(app, client, worker, pool):
    first = start(app, client, "retried")
    second = app.tasks["retried"].delay("may", "second")
    go(client)
    eventually(lambda: ran(client) == ["first", "first"], timeout=60)
    assert second.state == states.PENDING
    go(client)
    assert second.get(timeout=60) == first.get(timeout=60) == {"from": "first"}


@pytest.mark.skipif(not TELLS_REVOKED, reason="nothing is stored, so the duplicate runs")
def test_a_duplicate_is_revoked_if_the_first_task_is_before_it_starts(app, client, worker, pool):
    task = app.tasks["report"]
    first = task.apply_async(("may", "first"), countdown=3)
    second = task.delay("may", "second")
    sent(app, second)
    app.control.revoke(first.id)
    with pytest.raises(TaskRevokedError):
        second.get(timeout=60)
    assert ran(client) == []


def test_a_duplicate_runs_if_the_first_task_leaves_no_result(app, client, worker, pool):
    """Such as one that raises Ignore."""
    start(app, client)
    second = app.tasks["report"].delay("may", "second")
    go(client, "ignore")
    eventually(lambda: ran(client) == ["first", "second"], timeout=60)
    go(client)
    assert second.get(timeout=60) == {"from": "second"}
    eventually(lambda: "queues to run itself" in worker.log(), timeout=60)


def test_a_duplicate_runs_if_the_message_of_the_first_task_is_lost(app, client, worker, pool):
    task = app.tasks["report"]
    task.apply_async(("may", "first"), queue="nobody")
    second = task.delay("may", "second")
    sent(app, second)
    assert task.forget_call(("may", "x"))
    go(client)
    assert second.get(timeout=60) == {"from": "second"}


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
@pytest.mark.parametrize("task", ["report", "late"])
def test_a_duplicate_ends_if_the_process_of_the_first_task_is_killed(app, client, worker, task):
    """Its first task fails, or runs again."""
    start(app, client, task)
    second = app.tasks[task].delay("may", "second")
    sent(app, second, task)
    os.kill(int(client.lindex("pid", 0)), signal.SIGKILL)
    eventually(lambda: second.ready() or client.llen("ran") == 2, timeout=60)
    go(client)
    if task == "late":
        assert second.get(timeout=60) == {"from": "first"}
    else:
        with pytest.raises(WorkerLostError):
            second.get(timeout=60)


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_a_duplicate_of_a_killed_task_calls_its_error_callbacks_once(app, client, worker):
    """The worker does not take the error of the first task for the end of the pool process."""
    start(app, client)
    second = app.tasks["report"].apply_async(
        ("may", "second"), link_error=app.signature("after_error")
    )
    sent(app, second)
    os.kill(int(client.lindex("pid", 0)), signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        second.get(timeout=60)
    eventually(lambda: not client.keys("csl:*:bodies"), timeout=60)
    assert app.tasks["other"].delay("x").get(timeout=60) == "x"
    assert client.llen("errors") == 1


@pytest.mark.parametrize("pool", ["threads"], indirect=True)
def test_a_revoked_duplicate_ends_at_once(app, client, worker):
    first = start(app, client)
    second = app.tasks["report"].delay("may", "second")
    sent(app, second)
    app.control.revoke(second.id)
    with pytest.raises(TaskRevokedError):
        second.get(timeout=60)
    go(client)
    assert first.get(timeout=60) == {"from": "first"}


@pytest.mark.parametrize("pool", ["threads"], indirect=True)
def test_a_duplicate_waits_no_longer_than_its_timeout(app, client, worker):
    first = start(app, client, "impatient")
    second = app.tasks["impatient"].delay("may", "second")
    with pytest.raises(LockWaitTimeout):
        second.get(timeout=60)
    go(client)
    assert first.get(timeout=60) == {"from": "first"}


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_one_of_the_duplicates_runs_if_the_worker_of_the_first_task_dies(
    app, client, worker, broker, redis_url
):
    """The first task was acknowledged, so it does not run again."""
    start(app, client, "brief")
    many = [app.tasks["brief"].delay("may", str(number)) for number in range(30)]
    for each in many:
        sent(app, each, "brief")
    worker.kill()
    with CeleryWorker("integration.follow_app", broker, backend=redis_url, concurrency=2):
        eventually(lambda: client.llen("ran") == 2, timeout=120)
        second = ran(client)[1]
        client.rpush("go", *["on"] * 3)  # a child of the killed worker may take one
        assert [each.get(timeout=60) for each in many] == [{"from": second}] * len(many)
        assert ran(client) == ["first", second]


@pytest.mark.full
@pytest.mark.parametrize("pool", ["threads"], indirect=True)
def test_a_worker_that_stops_lets_each_duplicate_end_once(app, client, worker, broker, redis_url):
    """What it gives back, its threads may begin at this moment: links would be called twice."""
    start(app, client)
    after = app.tasks["after"].s()
    many = [app.tasks["report"].apply_async(("may", str(n)), link=after) for n in range(200)]
    for each in many:
        sent(app, each)
    go(client)
    eventually(lambda: "has ended with the result" in worker.log(), timeout=60)
    worker.terminate()
    eventually(lambda: worker.returncode is not None, timeout=60)
    with CeleryWorker("integration.follow_app", broker, backend=redis_url, pool="threads") as other:
        for each in many:
            assert each.get(timeout=60) == {"from": "first"}
        wanted = dict.fromkeys([each.id for each in many], 1)
        eventually(lambda: sum(ends(worker, other).values()) >= len(many), timeout=60)
        eventually(lambda: client.llen("linked") >= len(many), timeout=60)
        assert ends(worker, other) == wanted
        assert client.llen("linked") == len(many)


def ends(*workers):
    """Return how often each duplicate has ended."""
    lines = "".join(worker.log() for worker in workers)
    return Counter(re.findall(r"report\[(.*?)\] has ended with the result", lines))


@pytest.mark.full
@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_a_thousand_duplicates_end(app, client, worker):
    start(app, client)
    many = [app.tasks["report"].delay("may", str(number)) for number in range(1000)]
    go(client)
    for each in many:
        assert each.get(timeout=120) == {"from": "first"}
    assert ran(client) == ["first"]

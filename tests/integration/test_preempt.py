"""The newest call replaces the one that runs, in real workers."""

from __future__ import annotations

import json

import pytest
from celery import Celery, states
from celery.exceptions import TaskRevokedError

from celery_singleton_lock.admin.why import why
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiting import eventually
from support.workers import CeleryWorker

only_prefork = pytest.mark.parametrize("pool", ["prefork"], indirect=True)
where_it_must_look = pytest.mark.parametrize("pool", ["threads", "gevent"], indirect=True)


@pytest.fixture(params=["prefork"])
def pool(request):
    if request.param == "gevent":
        pytest.importorskip("gevent")
    return request.param


@pytest.fixture
def send(sending_app):
    """Send a task by its name: ``send("build", "main", 1)``."""
    return lambda name, *args: sending_app.send_task(f"integration.preempt_app.{name}", args)


@pytest.fixture
def worker(redis_url, pool):
    with CeleryWorker("integration.preempt_app", redis_url, pool=pool, concurrency=2) as worker:
        yield worker


@pytest.fixture
def began(redis_client):
    """Wait until a version has begun."""

    def began(version):
        def found():
            return [e for e in listed(redis_client, "began") if e.startswith(f"{version}:")]

        return eventually(found, 60, f"{version} has begun")

    return began


def listed(redis_client, key):
    return [each.decode() for each in redis_client.lrange(key, 0, -1)]


def assert_alone(redis_client):
    """Assert that never two bodies ran at the same time."""
    assert {each.partition(":")[2] for each in listed(redis_client, "began")} == {"1"}


def assert_revoked_for(result, newer):
    with pytest.raises(TaskRevokedError, match=f"{newer.id} is newer"):
        result.get(timeout=60)
    assert result.state == states.REVOKED


def end(redis_client, result, version):
    redis_client.set(f"go:{version}", 1)
    assert result.get(timeout=60) == version


@only_prefork
@pytest.mark.parametrize("task", ["build", "late", "auto"])
def test_the_newest_call_interrupts_the_run_and_starts_after_it(
    send, worker, redis_client, began, task
):
    first = send(task, "main", 1)
    began(1)
    second = send(task, "main", 2)
    assert_revoked_for(first, second)
    began(2)
    assert listed(redis_client, "preempted") == [f"1:{second.id}"]
    end(redis_client, second, 2)
    assert_alone(redis_client)
    assert listed(redis_client, "ended") == ["1", "2"]
    assert redis_client.get("attempts") in {None, b"2"}
    worker.await_log(f"must end: task {second.id} is newer")


@only_prefork
def test_of_many_calls_the_newest_runs_and_all_others_are_revoked(
    send, worker, redis_client, began
):
    results = [send("build", "main", 0)]
    began(0)
    results += [send("build", "main", version) for version in range(1, 30)]
    began(29)
    end(redis_client, results[-1], 29)
    for each in results[:-1]:
        with pytest.raises(TaskRevokedError, match="is newer and replaces"):
            each.get(timeout=60)
    assert_alone(redis_client)
    store = RedisAdminStore(redis_client)
    eventually(lambda: not store.inspect("build:main").holders, message="the lock is free")
    eventually(lambda: not store.inspect("build:main").bodies, message="no message is left")


@only_prefork
def test_runs_of_other_keys_go_on(send, worker, redis_client, began):
    first, second = send("build", "a", 1), send("build", "b", 2)
    began(1)
    began(2)
    third = send("build", "a", 3)
    assert_revoked_for(first, third)
    end(redis_client, second, 2)
    end(redis_client, third, 3)


@only_prefork
def test_another_task_that_waits_before_it_runs_first_and_nothing_is_interrupted(
    send, worker, redis_client, began
):
    first = send("build", "main", 1)
    began(1)
    between = send("other", "main", 2)
    store = RedisAdminStore(redis_client)
    eventually(lambda: store.inspect("build:main").waiting == 1, message="the other one waits")
    third = send("build", "main", 3)
    eventually(lambda: store.inspect("build:main").waiting == 2, message="the newest one waits")
    end(redis_client, first, 1)
    assert between.get(timeout=60) == 2
    end(redis_client, third, 3)
    assert [e.partition(":")[0] for e in listed(redis_client, "began")] == ["1", "2", "3"]


@only_prefork
@pytest.mark.parametrize("task", ["stubborn", "stubborn_late"])
def test_a_run_that_goes_on_after_the_grace_is_killed_and_ends_as_revoked(
    send, worker, redis_client, began, task
):
    """Also with ``reject_on_worker_lost``: the broker does not deliver it again."""
    first = send(task, 1)
    began(1)
    second = send(task, 2)
    assert_revoked_for(first, second)
    assert listed(redis_client, "preempted") == ["1"]
    worker.await_log("(lock_preempt_grace) after it had been preempted: its process")
    began(2)
    end(redis_client, second, 2)
    assert [e.partition(":")[0] for e in listed(redis_client, "began")] == ["1", "2"]


@only_prefork
def test_a_run_in_c_code_is_killed(send, worker, redis_client, began):
    first = send("native", 1)
    began(1)
    second = send("native", 2)
    assert_revoked_for(first, second)
    assert second.get(timeout=60) == 2


@only_prefork
def test_a_task_may_clean_up_and_return_a_result(send, worker, redis_client, began):
    first = send("clean", "main", 1)
    began(1)
    second = send("clean", "main", 2)
    assert first.get(timeout=60) == "cleaned up"
    redis_client.set("go:2", 1)
    assert second.get(timeout=60) == "ran"
    assert_alone(redis_client)


@only_prefork
def test_a_retry_that_the_body_sends_because_of_it_ends_behind_the_newer_call(
    send, worker, redis_client, began
):
    first = send("again", "main", 1)
    began(1)
    second = send("again", "main", 2)
    assert_revoked_for(first, second)
    end(redis_client, second, 2)
    assert [e.partition(":")[0] for e in listed(redis_client, "began")] == ["1", "2"]


@only_prefork
def test_a_chord_hears_of_a_run_that_was_preempted(send, worker, redis_client, began):
    send("send_chord")
    began(1)
    second = send("build", "c", 2)
    body = redis_client.get("body").decode()
    meta = eventually(
        lambda: b"FAILURE" in (m := redis_client.get(f"celery-task-meta-{body}") or b"") and m,
        60,
        "the body has failed",
    )
    assert b"is newer and replaces this run" in meta
    end(redis_client, second, 2)


@only_prefork
def test_a_lost_notice_is_found_by_the_next_renewal(send, worker, redis_client, began):
    first = send("short", 1)
    began(1)
    keys = Keyspace().lock("short")
    token, record = next(iter(redis_client.hgetall(keys.record).items()))
    preempted = {**json.loads(record), "preempted_by": "newer/0/0"}
    with redis_client.pipeline() as pipe:
        pipe.hset(keys.flow, "preempts", "1")
        pipe.hset(keys.record, token, json.dumps(preempted, separators=(",", ":")))
        pipe.execute()
    with pytest.raises(TaskRevokedError, match="newer is newer"):
        first.get(timeout=60)
    assert listed(redis_client, "preempted") == ["1:newer"]


@only_prefork
def test_while_the_run_cleans_up_why_and_the_views_tell(
    send, sending_app, worker, redis_client, began
):
    store = RedisAdminStore(redis_client)
    first = send("slow", 1)
    began(1)
    second = send("slow", 2)
    eventually(
        lambda: [h.state for h in store.inspect("slow").holders] == ["preempted"],
        message="it must end",
    )
    told = why(store, first.id)
    assert told.state == "preempted"
    assert "and must end, since a newer call of its task waits for 'slow'" in told.sentence
    assert why(store, second.id).rank == 1
    (report,) = sending_app.control.inspect(timeout=20, limit=1)._request("locks").values()
    assert (report["preempted"], report["killed"]) == (1, 0)
    redis_client.set("clean", 1)
    assert_revoked_for(first, second)
    end(redis_client, second, 2)


@pytest.fixture
def with_rabbitmq(rabbit_url, redis_url, monkeypatch):
    """A worker whose broker is RabbitMQ, and an app that sends to it."""
    app = Celery(broker=rabbit_url, backend=redis_url)
    with CeleryWorker("integration.preempt_app", rabbit_url, backend=redis_url) as worker:
        yield app, worker
    app.close()


@pytest.mark.parametrize("task", ["late", "stubborn_late"])
def test_rabbitmq_has_no_message_of_a_preempted_run(
    with_rabbitmq, rabbit_vhost, redis_client, began, task
):
    """It is acknowledged, also if its process was killed with ``reject_on_worker_lost``."""
    app, _ = with_rabbitmq
    key = () if task == "stubborn_late" else ("main",)
    first = app.send_task(f"integration.preempt_app.{task}", (*key, 1))
    began(1)
    second = app.send_task(f"integration.preempt_app.{task}", (*key, 2))
    assert_revoked_for(first, second)
    began(2)
    end(redis_client, second, 2)

    def left():
        return {(depth.ready, depth.unacked) for depth in rabbit_vhost.depths().values()}

    eventually(lambda: left() == {(0, 0)}, message="RabbitMQ has no message")
    assert [e.partition(":")[0] for e in listed(redis_client, "began")] == ["1", "2"]


@where_it_must_look
def test_a_run_in_a_thread_reads_that_it_must_end(send, worker, redis_client, began):
    first = send("watch", 1)
    began(1)
    second = send("watch", 2)
    assert_revoked_for(first, second)
    end(redis_client, second, 2)
    assert listed(redis_client, "preempted") == ["1"]
    assert_alone(redis_client)


@where_it_must_look
def test_a_run_in_a_thread_that_does_not_look_ends_by_itself(send, worker, redis_client, began):
    first = send("build", "main", 1)
    began(1)
    second = send("build", "main", 2)
    worker.await_log(f"must end: task {second.id} is newer")
    end(redis_client, first, 1)
    end(redis_client, second, 2)
    assert_alone(redis_client)


def test_in_solo_workers_a_run_reads_that_it_must_end(redis_url, send, redis_client, began):
    """The newer call comes to another worker, since a solo worker receives nothing meanwhile."""
    options = {"pool": "solo", "concurrency": 1}
    with (
        CeleryWorker("integration.preempt_app", redis_url, **options),
        CeleryWorker("integration.preempt_app", redis_url, **options),
    ):
        first = send("watch", 1)
        began(1)
        second = send("watch", 2)
        assert_revoked_for(first, second)
        end(redis_client, second, 2)
    assert_alone(redis_client)

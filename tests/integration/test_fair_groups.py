"""Groups of tasks, in real workers."""

from __future__ import annotations

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually
from support.workers import CeleryWorker


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    return request.param


@pytest.fixture
def send(sending_app):
    """Send a task by its name: ``send("call", "acme", 1)``."""
    return lambda name, *args: sending_app.send_task(f"integration.fair_app.{name}", args)


@pytest.fixture
def worker(redis_url, pool):
    return CeleryWorker("integration.fair_app", redis_url, pool=pool, concurrency=3).start()


def waits(store, lock, number):
    eventually(lambda: store.inspect(lock).waiting == number, 60, f"{number} wait")


def test_a_tenant_does_not_wait_for_the_backlog_of_another(send, worker, redis_client):
    """Three tasks come behind forty of another tenant; they start at every second start."""
    store = RedisStore(redis_client)
    first = send("call", "large", 0, "open")
    eventually(lambda: store.inspect("api").holders, message="the first one runs")
    results = [send("call", "large", n) for n in range(40)]
    waits(store, "api", 40)
    results += [send("call", "small", n) for n in range(3)]
    waits(store, "api", 43)
    redis_client.set("open", 1)
    for each in [first, *results]:
        each.get(timeout=90)
    order = [name.decode() for name in redis_client.lrange("order", 0, -1)]
    assert order[:7].count("small") == 3
    assert order.count("large") == 41


def test_no_group_holds_more_than_its_limit_and_others_pass(send, worker, redis_client):
    results = [send("limited", tenant, n) for n in range(6) for tenant in "abc"]
    for each in results:
        each.get(timeout=90)
    for tenant in "abc":
        most = [int(n) for n in redis_client.lrange(f"most:{tenant}", 0, -1)]
        assert most == [1] * 6


def test_a_task_waits_for_its_group_while_another_group_starts(
    send, worker, redis_client, sending_app
):
    store = RedisStore(redis_client)
    results = [send("held", "a", "open"), send("held", "a", "open")]
    view = eventually(
        lambda: (v := store.inspect("shared2")).waiting == 1 and v.holders and v, message="waits"
    )
    assert view.waits_for.value == "group"
    assert [(group.name, group.waiting, group.held) for group in view.groups] == [("a", 1, 1)]
    asked = sending_app.control.inspect(timeout=20, limit=1)._request("locks")
    (told,) = asked.values()
    assert {each["group"] for each in told["locks"]} == {"a"}
    results.append(send("held", "b", "open"))
    eventually(lambda: len(store.inspect("shared2").holders) == 2, message="b runs")
    redis_client.set("open", 1)
    for each in results:
        each.get(timeout=60)


def test_a_task_is_skipped_if_its_group_is_at_its_limit(send, worker, redis_client):
    store = RedisStore(redis_client)
    first = send("skipping", "a", "open")
    eventually(lambda: store.inspect("skipping").holders, message="the first one runs")
    skipped, other = send("skipping", "a", "open"), send("skipping", "b", "open")
    with pytest.raises(TaskRevokedError, match="its group holds as many permits"):
        skipped.get(timeout=60)
    redis_client.set("open", 1)
    first.get(timeout=60)
    other.get(timeout=60)


def test_a_message_without_a_group_fails_alone(send, worker):
    """Its error names the argument."""
    with pytest.raises(ConfigurationError, match="argument 'tenant' is None"):
        send("call", None, 1).get(timeout=60)
    assert send("call", "a", 2).get(timeout=60) == 2

"""Behaviour on every broker: Redis, and RabbitMQ with classic and quorum queues."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from celery import VERSION, states
from kombu.common import Broadcast

from integration.book import only_kind
from support.waiting import eventually

TENANT = {"x-tenant": "acme"}


@pytest.mark.full("redis-1", "classic-1", "quorum")
@pytest.mark.parametrize("prefetch", [1, 4])
def test_contended_keys_run_one_at_a_time_in_order(make_book, pool, prefetch):
    """60 tasks of three keys, acknowledged early, late, and late with reject: each runs once."""
    book = make_book(conf={"worker_prefetch_multiplier": prefetch})
    keys = {"early": "act", "late": "act_late", "lost": "act_lost"}
    sent = [
        (book.send(task, key, n, headers=TENANT, hold=0.002 * (n % 3)), n)
        for n in range(20)
        for key, task in keys.items()
    ]
    with book.worker(pool=pool, concurrency=2):
        for result, n in sent:
            assert book.value(result, 30) == n
        book.await_settled(*keys)
    for key in keys:
        assert book.order(key) == list(range(20))
        assert book.peak(key) == 1
    assert all(start["headers"] == TENANT for start in book.starts())
    assert not any(start["leaks"] for start in book.starts())


def test_all_parts_of_a_message_survive_parking(make_book, pool):
    """Priority, headers, pickle and compression: the task sees the same, parked or not."""
    book = make_book(conf={"task_serializer": "pickle"})
    options = {
        "headers": TENANT,
        "priority": 3,
        "compression": "zlib",
        "expires": 300,
        "correlation_id": "mine",
        "reply_to": "there",
    }
    with book.worker(pool=pool, concurrency=2):
        free = book.send("act", "free", 7, **options)
        assert book.value(free) == 7
        first = book.start_holder("a")
        parked = [book.send(task, "a", 7, **options) for task in ("act", "act_late")]
        book.await_waiting("a", 2)
        eventually(lambda: book.unacked() == 0, message="acknowledged")
        book.open("a-0")
        for result in parked:
            assert book.value(result) == 7
        book.await_settled("a", "free")
    seen, *others = [
        {name: start[name] for name in ("headers", "priority", "props")}
        for start in book.starts()
        if start["id"] != first
    ]
    assert seen["headers"] == TENANT
    assert seen["priority"] == 3
    assert others == [seen, seen]


def test_countdown_comes_before_the_lock(make_book, pool):
    """A task with a countdown neither holds nor waits for its lock before its time."""
    book = make_book()
    with book.worker(pool=pool, concurrency=2):
        holder = book.start_holder("a")
        sent = book.store.time()
        later = book.send("act", "a", 1, countdown=1.5)
        book.await_waiting("a", 1)
        line = book.store.keyspace.lock("k:a").queue
        (place,) = (score for _, score in book.client.zrange(line, 0, -1, withscores=True))
        assert place / 1e6 > sent + 1.4
        book.open("a-0")
        assert [book.value(holder), book.value(later)] == [0, 1]
        book.await_settled("a")
    assert book.order("a") == [0, 1]


@pytest.mark.full
def test_a_rate_limited_task_keeps_its_order_and_its_lock(make_book, pool):
    """Ten tasks of one key at 5 a second: one at a time, in order, no faster than that."""
    book = make_book(conf={"task_annotations": {"act": {"rate_limit": "5/s"}}})
    with book.worker(pool=pool, concurrency=2):
        began = time.monotonic()
        sent = [book.send("act", "a", n) for n in range(10)]
        assert [book.value(result) for result in sent] == list(range(10))
        book.await_settled("a")
    starts = [start["t"] for start in book.starts("a")]
    assert book.order("a") == list(range(10))
    assert book.peak("a") == 1
    assert starts[-1] - began > 1.7


@pytest.mark.full
def test_a_task_whose_process_dies_is_redelivered(make_book):
    """task_reject_on_worker_lost: the killed task and the waiting ones all run, one at a time."""
    book = make_book()
    with book.worker(concurrency=2):
        sent = [book.send("act_lost", "a", n, end="die" if n < 2 else "return") for n in range(4)]
        assert [book.value(result, 20) for result in sent] == list(range(4))
        book.await_settled("a")
    assert sorted(book.order("a")) == [0, 0, 1, 1, 2, 3]
    assert book.peak("a") == 1


@pytest.mark.full
@pytest.mark.skipif(VERSION < (5, 7), reason="a setting of Celery 5.7")
def test_a_task_whose_process_dies_is_retried(make_book):
    """task_retry_on_worker_lost: a new attempt is sent; it takes the lock like any other."""
    soon = {"*": {"default_retry_delay": 1}}
    book = make_book(conf={"task_retry_on_worker_lost": True, "task_annotations": soon})
    with book.worker(concurrency=2):
        sent = [
            book.send(task, "a", n, end="die" if n < 2 else "return")
            for n, task in enumerate(["act", "act_lost", "act", "act_lost"])
        ]
        assert [book.value(result, 20) for result in sent] == list(range(4))
        book.await_settled("a")
    assert sorted(book.order("a")) == [0, 0, 1, 1, 2, 3]
    assert {(s["n"], s["retries"]) for s in book.starts("a")} >= {(0, 1), (1, 1)}
    assert book.peak("a") == 1


@pytest.mark.full
def test_a_worker_of_several_queues(make_book, pool):
    """One worker, three queues, one key: one at a time; nothing is left in any queue."""
    names = ("one", "two", "three")
    book = make_book(*names)
    with book.worker(pool=pool, concurrency=3, queues=names):
        first = book.send("act", "a", -1, hold="a-0", queue="one")
        book.started(first)
        sent = [book.send("act", "a", n, queue=names[n % 3]) for n in range(12)]
        book.await_waiting("a", 12)
        book.open("a-0")
        assert [book.value(result) for result in sent] == list(range(12))
        book.await_settled("a")
    assert len(book.order("a")) == 13
    assert book.peak("a") == 1
    assert {s["queue"] for s in book.starts("a")} == set(names)


@pytest.mark.full
def test_workers_of_different_queues(make_book):
    """Two workers with different queues share a key.

    Each runs the tasks of its queue, one at a time.
    """
    book = make_book("one", "two")
    with book.worker(queues="one", name="w-one"), book.worker(queues="two", name="w-two"):
        first = book.send("act", "a", -1, hold="a-0", queue="one")
        book.started(first)
        sent = []
        for n in range(10):
            sent.append(book.send("act_late", "a", n, queue=("one", "two")[n % 2]))
            book.await_waiting("a", n + 1)
        book.open("a-0")
        assert [book.value(result) for result in sent] == list(range(10))
        book.await_settled("a")
    assert book.order("a") == list(range(-1, 10))
    assert book.peak("a") == 1
    ran = {s["n"]: (s["queue"], s["worker"].partition("@")[0]) for s in book.starts("a")}
    for n in range(10):
        assert ran[n] == ((("one", "w-one"), ("two", "w-two"))[n % 2])


@pytest.mark.full
def test_parked_tasks_of_a_stopped_worker_are_republished_and_the_next_is_granted(make_book):
    """Copies go to the broker; a worker that starts later runs each task once."""
    book = make_book("held", "far")
    holder = book.worker(queues="held").start()
    with book.worker(queues="far"):
        first = book.start_holder("a", queue="held")
        options = {"queue": "far", "headers": TENANT, "priority": 3, "expires": 300}
        parked = [book.send("act", "a", n, compression="zlib", **options) for n in (1, 2, 3)]
        book.await_waiting("a", 3)
    book.open("a-0")
    book.value(first)
    eventually(lambda: book.queued("far") >= 1, 15, "a copy is published")
    with book.worker(queues="far"):
        assert [book.value(result) for result in parked] == [1, 2, 3]
        book.await_settled("a")
    assert book.order("a") == [0, 1, 2, 3]
    assert all(s["headers"] == TENANT and s["priority"] == 3 for s in book.starts("a")[1:])
    holder.stop()


def test_T36_a_rejected_and_requeued_task_runs_again(make_book, pool):
    """Reject(requeue=True) of a task that was parked, and of one that was not: neither is lost."""
    book = make_book()
    with book.worker(pool=pool, concurrency=2):
        first = book.send("act_late", "a", 0, end="requeue", hold="a-0")
        book.started(first)
        second = book.send("act_late", "a", 1, end="requeue")
        third = book.send("act_late", "a", 2)
        book.await_waiting("a", 2)
        book.open("a-0")
        assert [book.value(result) for result in (first, second, third)] == [0, 1, 2]
        book.await_settled("a")
    assert sorted(book.order("a")) == [0, 0, 1, 1, 2]
    assert book.peak("a") == 1


@pytest.mark.full
def test_locks_in_another_redis_than_broker_and_results(make_book, make_redis, pool):
    """``singleton_lock_backend``: two workers exclude each other through a Redis of its own."""
    locks = make_redis()
    book = make_book(lock_url=locks.url, conf={"singleton_lock_backend": locks.url})
    with book.worker(pool=pool, concurrency=2), book.worker(pool=pool, concurrency=2):
        sent = [
            book.send(task, "a", n)
            for n, task in zip(range(20), itertools.cycle(["act", "act_late"]))
        ]
        assert [book.value(result, 20) for result in sent] == list(range(20))
        book.await_settled("a")
        assert book.client.keys("csl:*")
        assert not book.app.backend.client.keys("csl:*")
    assert sorted(book.order("a")) == list(range(20))
    assert book.peak("a") == 1


def test_a_broadcast_task_may_not_be_locked(make_book, pool):
    """A route of a locked task to a Broadcast queue is refused at start.

    Every worker would run it.
    """
    book = make_book()
    env = {"BOOK_BROADCAST": json.dumps({"act": "everybody"})}
    worker = book.worker(pool=pool, env=env).start(wait=False)
    assert worker.wait() != 0
    assert "act" in worker.log()
    assert "everybody" in worker.log()
    assert "Broadcast" in worker.log()


@pytest.mark.full
def test_a_locked_task_that_arrives_by_broadcast_fails(make_book, pool):
    """A plain task may be broadcast to the same worker; a locked one fails, and says why."""
    book = make_book()
    env = {"BOOK_BROADCAST": json.dumps({"plain": "everybody"})}
    everybody = book.app.amqp.queues.add(Broadcast("everybody"))
    with book.app.producer_pool.acquire() as producer:  # Celery does not; Redis' sender must know
        everybody.exchange(producer.channel).declare()
    with book.worker(pool=pool, env=env):
        # Redis keeps nothing for who subscribes later, which a worker does about when it is ready.
        eventually(lambda: book.send("plain", "p", 1, queue="everybody") and book.starts("p"))
        plain = book.send("plain", "p", 2, queue="everybody")
        assert book.value(plain) == 2
        locked = book.send("act", "a", 1, queue="everybody")
        state, error = book.outcome(locked)
        assert state == states.FAILURE
        assert "Broadcast" in str(error)
        assert book.value(book.send("act", "a", 2)) == 2
        book.await_settled("a")
    assert book.order("a") == [2]


@pytest.mark.full
@only_kind("redis")
def test_a_parked_task_runs_behind_the_key_prefix_of_its_broker(make_book, tmp_path):
    """Two deployments share the broker's Redis and the locks, and have queues of their own."""

    def deployment(prefix):
        folder = tmp_path / prefix
        folder.mkdir()
        return make_book(
            folder=folder, conf={"broker_transport_options": {"global_keyprefix": prefix}}
        )

    one, two = deployment("one"), deployment("two")
    with one.worker(), two.worker():
        holder = one.start_holder("a", 0)
        parked = two.send("act", "a", 1)
        one.await_waiting("a", 1)
        one.open("a-0")
        assert [one.value(result) for result in (holder, parked)] == [0, 1]
        one.await_free("a")
    assert [one.order("a"), two.order("a")] == [[0], [1]]

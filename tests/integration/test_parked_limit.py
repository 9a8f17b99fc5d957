"""A queue with many parked messages is not consumed for a time; other queues go on."""

from __future__ import annotations

import pytest
import redis

from celery_singleton_lock.admin.doctor import Health, examine
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from integration.book import LONG_LEASE, SAFE_LEASE, only, only_kind
from support.waiting import eventually

MOST = 20
PREFETCHED = 8
"""Messages that a worker of four slots may have received before it stops."""
MANY = 150
LIMITS = {"singleton_lock_max_parked": MOST, "worker_prefetch_multiplier": 1}
STOPPED = "stopped consuming the queue 'one'"
RESUMED = "the queue 'one' is no longer stopped"


@pytest.fixture(scope="module")
def lease():
    """No lease ends here."""
    return LONG_LEASE


@pytest.fixture
def book(make_book):
    """Two queues, and at most :data:`MOST` parked messages of each."""
    return make_book("one", "two", conf=LIMITS)


def send_many(book, key, number=MANY, **options):
    """Send tasks to the queue ``one`` while the lock of the key is held."""
    return [book.send("act", key, n, queue="one", **options) for n in range(number)]


def stopped(book):
    """The queues that the only worker has stopped; None if it does not answer now."""
    try:
        found = book.app.control.inspect(timeout=2).stats() or {}
    except (OSError, redis.ConnectionError):  # the test has cut all connections
        return None
    return next((sorted(each["singleton_lock"]["stopped_queues"]) for each in found.values()), None)


def await_stopped(book, worker, key):
    """Wait until the worker has stopped, and what it had received is parked."""
    worker.await_log(STOPPED, 30)
    eventually(lambda: book.unacked() <= 1 and book.view(key).waiting >= MOST, 30)
    return book.view(key).waiting


@only("prefork", "threads")
def test_a_worker_stops_a_queue_above_the_limit_and_goes_on_with_the_other(book, pool):
    """The rest stays in the broker. When the lock is free, all run once."""
    with book.worker(pool=pool, concurrency=4, args=("-Q", "one,two")) as worker:
        book.start_holder("a", -1, queue="two")
        sent = send_many(book, "a")
        parked = await_stopped(book, worker, "a")
        assert parked + book.queued("one") == MANY
        assert book.queued("one") > 0
        for n in range(10):
            assert book.value(book.send("act", f"free{n}", n, queue="two")) == n
        assert book.view("a").waiting == parked
        eventually(lambda: stopped(book) == ["one"])
        book.open("a--1")
        assert [book.value(each, 90) for each in sent] == list(range(MANY))
        assert sorted(book.order("a")) == [-1, *range(MANY)]
        assert book.peak("a") == 1
        book.await_settled("a")
        eventually(lambda: stopped(book) == [])
        worker.await_log(RESUMED)


@pytest.mark.full
@only("prefork", "threads", "gevent", "solo")
@only_kind("redis")
def test_every_pool_stops_and_resumes(make_book, pool):
    """A solo worker receives nothing while it runs a task, so the holder is a worker of its own."""
    book = make_book("one", "two", conf={**LIMITS, "singleton_lock_max_parked": 1000})
    size = {"singleton_lock_max_parked_bytes": 20_000}
    with (
        book.worker(args=("-Q", "two")),
        book.worker(pool=pool, conf=size, concurrency=4, args=("-Q", "one")) as worker,
    ):
        book.start_holder("a", -1, queue="two")
        sent = send_many(book, "a")
        worker.await_log(STOPPED, 60)
        book.open("a--1")
        assert [book.value(each, 120) for each in sent] == list(range(MANY))
        book.await_settled("a")


@pytest.mark.full
@only("prefork")
@only_kind("redis", "classic")
def test_a_stop_outlives_a_lost_connection_and_a_restart_of_the_worker(book, pool):
    """Neither the new connection nor the new worker receives more than it has in hand."""
    options = {"pool": pool, "concurrency": 4, "args": ("-Q", "one,two")}
    with book.worker(**options) as worker:
        book.start_holder("a", -1, queue="two")
        sent = send_many(book, "a")
        parked = await_stopped(book, worker, "a")
        book.cut()
        assert book.value(book.send("act", "free", 1, queue="two"), 60) == 1
        eventually(lambda: stopped(book) == ["one"], 30)
        assert book.view("a").waiting == parked
        with book.worker(**options) as second:
            second.await_log(STOPPED, 30)
            eventually(lambda: book.unacked() <= 1)
            assert parked <= book.view("a").waiting <= parked + MOST + PREFETCHED
            assert book.queued("one") > 0
        book.open("a--1")
        assert [book.value(each, 120) for each in sent] == list(range(MANY))
        book.await_settled("a")


@only("threads")
@only_kind("redis", "classic")
def test_a_stopped_queue_that_an_operator_adds_is_consumed(book, pool):
    """Although the limit is reached."""
    with book.worker(pool=pool, concurrency=4, args=("-Q", "one,two")) as worker:
        book.start_holder("a", -1, queue="two")
        sent = send_many(book, "a")
        await_stopped(book, worker, "a")
        book.app.control.add_consumer("one", reply=True)
        book.await_waiting("a", MANY, timeout=60)
        assert book.queued("one") == 0
        book.open("a--1")
        assert [book.value(each, 60) for each in sent] == list(range(MANY))
        book.await_settled("a")


@pytest.mark.full
@only("threads")
@only_kind("redis", "classic")
def test_a_stopped_queue_that_an_operator_cancels_stays_cancelled(book, pool):
    """Until they add it again."""
    with book.worker(pool=pool, concurrency=4, args=("-Q", "one,two")) as worker:
        book.start_holder("a", -1, queue="two")
        sent = send_many(book, "a")
        await_stopped(book, worker, "a")
        book.app.control.cancel_consumer("one", reply=True)
        book.open("a--1")
        eventually(lambda: stopped(book) == [], 30)
        worker.await_log("an operator has added or cancelled it", 30)
        assert book.queued("one") > 0
        book.app.control.add_consumer("one", reply=True)
        assert [book.value(each, 60) for each in sent] == list(range(MANY))
        book.await_settled("a")


@pytest.mark.full
@only("threads")
@only_kind("redis", "classic")
def test_a_retry_behind_the_backlog_blocks_its_lock_no_longer_than_its_reservation(make_book, pool):
    """Its lock is reserved for it, and the queue that has it is stopped: others are granted."""
    book = make_book("one", "two", conf={**LIMITS, "singleton_lock_lease": SAFE_LEASE})
    with book.worker(pool=pool, concurrency=4, args=("-Q", "one,two")) as worker:
        first = book.start_holder("a", -1, "act_keep", queue="one", end="retry", extra=1.0)
        sent = send_many(book, "a", 60)
        await_stopped(book, worker, "a")
        book.open("a--1")
        assert [book.value(each, 120) for each in sent] == list(range(60))
        assert book.value(first, 60) == -1
        assert book.peak("a") == 1
        book.await_settled("a")


@only("threads")
@only_kind("redis")
def test_doctor_and_why_say_that_a_queue_is_stopped(book, pool):
    """Also that nothing of it runs while its lock is paused."""
    with book.worker(pool=pool, concurrency=4, args=("-Q", "one,two")) as worker:
        book.start_holder("a", -1, queue="two")
        send_many(book, "a")
        await_stopped(book, worker, "a")
        store = RedisAdminStore(book.client)
        about = eventually(lambda: [a for a in store.workers().values() if "stopped" in a])
        assert [*about[0]["stopped"]] == ["one"]
        (found,) = [each for each in examine(store) if each.name == "backlog"]
        assert found.health is Health.WARN
        assert "'one'" in found.told
        book.open("a--1")
        eventually(lambda: book.view("a").waiting == 0, 60)

"""The broker goes away while tasks hold locks, wait for them, and are granted them.

The locks are in a Redis of their own, which stays.
"""

from __future__ import annotations

import pytest

from celery_singleton_lock import Lock
from celery_singleton_lock.demo.redis_server import RedisServer
from integration.book import Book, needs_pool, pools
from support.waiting import eventually, never

LEASE = 3.0
AWAY = 2 * LEASE

pytestmark = pytest.mark.needs_real_redis("a broker that ends and starts again")


@pytest.fixture(params=pools("prefork", "threads", "gevent"))
def pool(request):
    needs_pool(request.param)
    return request.param


@pytest.fixture
def broker(make_redis) -> RedisServer:
    """A Redis that keeps all that it has confirmed."""
    return make_redis("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def book(broker, redis_url, tmp_path):
    conf = {"singleton_lock_backend": redis_url, "singleton_lock_lease": LEASE}
    with Book(broker.url, tmp_path, backend=redis_url, lock_url=redis_url, conf=conf) as book:
        yield book


def counts(book, worker):
    told = book.app.control.inspect(timeout=3).stats() or {}
    return next(
        (each["singleton_lock"] for name, each in told.items() if name.startswith(worker.name)), {}
    )


@pytest.mark.full_run_plays("threads", "gevent")
def test_a_task_that_ends_while_the_broker_is_away_has_not_lost_its_lock(book, broker, pool):
    """Its end is heard of when the broker is back: no loss is logged, counted or told."""
    with book.worker(pool=pool, args=("-E",)) as worker:
        first = book.send("act", "a", 1, hold="a-1")
        book.started(first)
        eventually(lambda: book.unacked() == 0, 5, "acknowledged")
        broker.stop()
        worker.await_log("Connection to broker lost", 10)
        book.open("a-1")
        book.await_free("a")
        never(lambda: "was lost" in worker.log(), AWAY)
        broker.start()
        assert book.value(first, 30) == 1
        told = eventually(lambda: counts(book, worker), 30)
        assert told["lost"] == 0
        never(lambda: "was lost" in worker.log(), 1.5)


@pytest.mark.full_run_plays("threads", "gevent")
def test_a_grant_goes_to_a_worker_that_has_its_broker(book, broker, pool):
    """One whose main loop looks for the broker begins nothing; a store plays the other worker."""
    lock = Lock(book.client, "k:a", lease=60, thread_local=False)
    lock.acquire()
    with book.worker(pool=pool) as cut_off:
        parked = book.send("act", "a", 1)
        book.await_waiting("a", 1)
        broker.stop()
        cut_off.await_log("Connection to broker lost", 10)
        store, (route,) = book.store, book.client.keys("csl:fleet:route:*")
        realm, queue = route.decode().split(":")[-2:]
        store.beat("other#1", realm, [queue], 30.0, 1)
        lock.release()
        delivery = eventually(lambda: store.receive("other#1", 0.5), 5)
        assert delivery.verdict == "granted"
        store.leave("other#1", realm, [queue])
        broker.start()
        assert book.value(parked, 30) == 1
        book.await_free("a")
        assert len(book.starts("a")) == 1

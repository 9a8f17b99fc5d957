"""The exceptions in docs/guarantees.md, reproduced with real workers."""

from __future__ import annotations

import threading

import pytest
from celery import Celery

from celery_singleton_lock import LockedTask
from celery_singleton_lock.store.redis.sync import RedisStore
from integration.book import LONG_LEASE
from support.versions import THREADS_ACK_LAST
from support.waiting import eventually, never


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


@pytest.fixture
def two_workers(own_book):
    """Start two workers with a slot each, at once: of the queue ``one``, and of ``two``."""

    def start(app_of_two="integration.worker_app"):
        workers = [
            own_book.worker(queues=["one"], concurrency=1),
            own_book.worker(queues=["two"], concurrency=1, app=app_of_two),
        ]
        for worker in workers:
            worker.start(wait=False)
        for worker in workers:
            worker.await_ready()

    return start


def test_a_task_received_by_another_worker_may_pass_one_that_waits_for_a_slot(
    own_book, two_workers
):
    """The first message is in a worker without a free slot; the second, elsewhere, begins."""
    two_workers()
    busy = own_book.send("plain", "p", 0, hold="p", queue="one")
    own_book.started(busy)
    first = own_book.send("act", "a", 1, queue="one")
    eventually(lambda: own_book.queued("one") == 0, 10, "the first worker has it")
    second = own_book.send("act", "a", 2, queue="two")
    assert own_book.value(second) == 2
    own_book.open("p")
    assert own_book.value(first) == 1
    assert own_book.order("a") == [2, 1]
    assert own_book.peak("a") == 1


def test_a_worker_to_which_the_task_is_a_plain_one_runs_it_beside_a_holder(own_book, two_workers):
    """An older deployment takes no lock: roll out to all workers first."""
    two_workers(app_of_two="integration.unlocked_app")
    first = own_book.start_holder("a", 1, queue="one")
    assert own_book.value(own_book.send("act", "a", 2, queue="two")) == 2
    own_book.open("a-1")
    assert own_book.value(first) == 1
    assert own_book.peak("a") == 2
    assert [start["held"] for start in own_book.starts("a")] == [True, False]


def test_a_thread_that_the_task_leaves_behind_goes_on_without_the_lock(redis_url, redis_client):
    """The lock ends with the task; who is to be covered has to be waited for."""
    app = Celery("eager", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_backend=redis_url, singleton_lock_eager=True)
    store, go, seen = RedisStore(redis_client), threading.Event(), []

    def write():
        go.wait(60)
        seen.append(len(store.inspect("k:a").holders))

    @app.task(base=LockedTask, lock_key="k:{key}", shared=False)
    def leave(key):
        thread = threading.Thread(target=write)
        thread.start()
        return thread, len(store.inspect("k:a").holders)

    thread, during = leave.apply(("a",)).get()
    go.set()
    thread.join(60)
    assert (during, seen) == (1, [0])
    app.close()
    store.close()


@pytest.mark.skipif(not THREADS_ACK_LAST, reason="older versions acknowledge each")
def test_threads_that_end_during_a_shutdown_are_acknowledged_with_the_last_of_them(own_book):
    """Celery's own, shown with plain tasks that are acknowledged late (docs/pools.md)."""
    with own_book.worker(pool="threads", concurrency=2) as worker:
        short, long = (own_book.send("plain_late", "p", n, hold=n) for n in ("short", "long"))
        for task in (short, long):
            own_book.started(task)
        worker.terminate()
        eventually(lambda: "Warm shutdown" in worker.log())
        own_book.open("short")
        assert own_book.value(short) == "short"
        never(lambda: own_book.unacked() < 2, 1.0)
        own_book.open("long")
        eventually(lambda: own_book.unacked() == 0)

"""lock_on_conflict="wait": blocked tasks wait in their pool slots, and leave no waiter behind."""

from __future__ import annotations

import time

import pytest
from celery import states
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from celery_singleton_lock.errors import LockQueueFull, LockWaitTimeout
from celery_singleton_lock.lock.wait_for_turn import LIVENESS
from integration.book import SAFE_LEASE, Book, only
from support.redelivery import redelivery_after
from support.waiting import eventually, in_time, in_time_once, seconds_until

LEASE = SAFE_LEASE


@pytest.fixture(scope="module")
def lease():
    """It does not end while a process stands still."""
    return LEASE


def await_line(book, key, count):
    """Wait until the queue has so many waiters, with or without a message."""
    return eventually(
        lambda: (view := book.view(key)).waiting == count and view,
        message=lambda: f"{count} in line: {book.view(key)}",
    )


def test_waiting_tasks_keep_no_message_and_run_in_order(book, worker, key):
    """Three tasks wait in their slots, without a parked message; they run in order."""
    first = book.start_holder(key, task="act_wait")
    waiting = []
    for n in (1, 2, 3):
        waiting.append(book.send("act_wait", key, n))
        await_line(book, key, n)
    view = book.view(key)
    assert {waiter.state for waiter in view.waiters} == {"waiting"}
    assert view.bodies == 0
    book.open(f"{key}-0")
    assert [book.value(r) for r in (first, *waiting)] == [0, 1, 2, 3]
    assert book.order(key) == [0, 1, 2, 3]
    assert book.peak(key) == 1
    book.await_free(key)


def test_a_waiting_task_goes_on_at_once_when_the_lock_is_free(book, worker, key):
    """Without polling: it starts less than 0.3 s after the end of the holder."""
    took = []
    for n in range(4):
        each = f"{key}-{n}"
        first = book.start_holder(each, task="act_wait")
        second = book.send("act_wait", each, 1)
        await_line(book, each, 1)
        book.open(f"{each}-0")
        begun = book.started(second)["t"]
        book.value(first)
        took.append(begun - book.events("end", id=first)[0]["t"])
    in_time_once(took, 0.3)


def test_waiting_and_parked_tasks_share_one_queue(book, worker, key):
    """A parked task that came first runs first, then the task that waits in a slot."""
    first = book.start_holder(key)
    sent = []
    for n, task in enumerate(("act", "act_wait"), 1):
        sent.append(book.send(task, key, n))
        await_line(book, key, n)
    book.open(f"{key}-0")
    assert [book.value(r) for r in (first, *sent)] == [0, 1, 2]
    assert book.order(key) == [0, 1, 2]
    book.await_free(key)


def test_the_deadline_ends_the_wait_with_an_error(book, worker, key):
    """After lock_wait_timeout (1 s) the task fails with LockWaitTimeout, within half a second."""
    first = book.start_holder(key, task="act_wait")
    began = time.monotonic()
    state, error = book.outcome(book.send("act_wait_brief", key, 1))
    took = time.monotonic() - began
    assert took >= 1.0
    assert state == states.FAILURE
    assert isinstance(error, LockWaitTimeout)
    assert f"k:{key}" in str(error)
    assert book.view(key).waiting == 0
    book.open(f"{key}-0")
    assert book.value(first) == 0
    assert book.order(key) == [0]
    in_time(took, 1.7)


def test_a_full_queue_is_handled_by_lock_on_full(book, worker, key):
    """lock_max_waiting also counts tasks that wait in a slot."""
    first = book.start_holder(key, task="act_wait")
    second = book.send("act_wait_bounded", key, 1)
    await_line(book, key, 1)
    assert isinstance(book.outcome(book.send("act_wait_bounded", key, 2))[1], LockQueueFull)
    book.open(f"{key}-0")
    assert [book.value(first), book.value(second)] == [0, 1]


def test_the_lease_of_one_that_has_waited_is_renewed(book, worker, key):
    """It runs after a wait, and its lease is extended."""
    first = book.start_holder(key, task="act_wait")
    second = book.send("act_wait", key, 1, hold=f"{key}-1")
    await_line(book, key, 1)
    book.open(f"{key}-0")
    book.started(second)
    book.await_renewal(key)
    book.open(f"{key}-1")
    assert [book.value(first), book.value(second)] == [0, 1]
    book.await_free(key)


@only("prefork")
def test_a_soft_time_limit_ends_the_wait_and_leaves_no_waiter(book, worker, key):
    """The task fails with SoftTimeLimitExceeded, and leaves the queue."""
    first = book.start_holder(key, task="act_wait")
    soft = book.send("act_wait_soft", key, 1)
    state, error = book.outcome(soft)
    assert (state, type(error)) == (states.FAILURE, SoftTimeLimitExceeded)
    await_line(book, key, 0)
    book.open(f"{key}-0")
    assert book.value(first) == 0
    book.await_free(key)
    assert book.order(key) == [0]


@only("prefork")
def test_a_hard_time_limit_ends_the_wait_and_leaves_no_waiter(book, worker, key):
    """The child is killed while it waits: its waiter is removed within 2 s."""
    first = book.start_holder(key, task="act_wait")
    state, error = book.outcome(book.send("act_wait_hard", key, 1))
    assert (state, type(error)) == (states.FAILURE, TimeLimitExceeded)
    took = seconds_until(lambda: book.view(key).waiting == 0)
    book.open(f"{key}-0")
    assert book.value(first) == 0
    book.await_free(key)
    in_time(took, 2)


@only("prefork")
def test_T17_terminate_during_the_wait_leaves_no_waiter(book, worker, key):
    """It ends as REVOKED, its waiter is removed within 2 s, and the worker keeps running."""
    first = book.start_holder(key, task="act_wait")
    second = book.send("act_wait", key, 1)
    await_line(book, key, 1)
    book.app.control.revoke(second, terminate=True, signal="SIGKILL")
    assert book.outcome(second)[0] == states.REVOKED
    took = seconds_until(lambda: book.view(key).waiting == 0)
    book.open(f"{key}-0")
    assert book.value(first) == 0
    assert book.value(book.send("act_wait", key, 2)) == 2
    assert book.order(key) == [0, 2]
    in_time(took, 2)


REDELIVERY = redelivery_after(3)


@pytest.mark.full
@pytest.mark.parametrize("task", ["act_wait", "act_wait_late"])
def test_a_worker_that_dies_with_a_waiting_task_loses_nothing(redis_url, tmp_path, key, task):
    """The message is acknowledged only with the lock: another worker runs the task."""
    conf = {"broker_transport_options": REDELIVERY, "singleton_lock_lease": LEASE}
    with Book(redis_url, tmp_path, conf=conf) as book:
        holder = book.worker(concurrency=1, queues="other").start()
        one = book.worker(concurrency=1).start()
        first = book.start_holder(key, queue="other")
        second = book.send(task, key, 1)
        await_line(book, key, 1)
        book.kill_worker(one)
        with book.worker(concurrency=1):
            book.open(f"{key}-0")
            assert [book.value(first), book.value(second, 25)] == [0, 1]
            assert book.order(key) == [0, 1]
            book.await_free(key)
        holder.stop()


def test_a_cold_shutdown_leaves_no_waiter(own_book, pool, key):
    """SIGQUIT to a worker with waiting tasks: the queue is empty when the waiters expire."""
    worker = own_book.worker(pool=pool, concurrency=2).start()
    holder = own_book.worker(concurrency=1, queues="other").start()
    first = own_book.start_holder(key, task="act_wait", queue="other")
    own_book.send("act_wait", key, 1)
    await_line(own_book, key, 1)
    worker.signal(3)
    if pool == "threads":
        worker.end()  # it waits for its threads, whatever they do
    else:
        worker.wait()
    own_book.send("act_wait", f"{key}-x", 1, queue="other")
    eventually(
        lambda: (
            own_book.store.sweep_and_grant(f"k:{key}") is not None
            and own_book.view(key).waiting == 0
        ),
        LIVENESS + 2,
    )
    own_book.open(f"{key}-0")
    assert own_book.value(first) == 0
    holder.stop()


def test_a_warm_shutdown_lets_waiting_tasks_finish(own_book, pool, key):
    """SIGTERM: the waiting task gets its lock and ends, like any started task."""
    worker = own_book.worker(pool=pool, concurrency=2).start()
    first = own_book.start_holder(key, task="act_wait")
    second = own_book.send("act_wait", key, 1)
    await_line(own_book, key, 1)
    worker.terminate()
    worker.await_log("Warm shutdown")
    own_book.open(f"{key}-0")
    assert [own_book.value(first), own_book.value(second)] == [0, 1]
    worker.wait()
    own_book.await_free(key)

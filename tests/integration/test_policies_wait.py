"""lock_on_conflict="wait": blocked tasks wait in their pool slots, and leave no waiter behind."""

from __future__ import annotations

import time

import pytest
from celery import states
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from celery_singleton_lock.errors import LockQueueFull, LockWaitTimeout
from celery_singleton_lock.lock.wait_for_turn import LIVENESS
from integration.book import Book, only
from support.waiting import eventually, in_time, never, seconds_until


def held(book, key, task="act_wait"):
    """Let a task hold the key's lock until its gate opens."""
    first = book.send(task, key, 0, hold=f"{key}-0")
    book.started(first)
    return first


def await_line(book, key, count):
    """Wait until so many stand in the queue, with or without a message."""
    return eventually(
        lambda: (view := book.view(key)).waiting == count and view,
        message=lambda: f"{count} in line: {book.view(key)}",
    )


def test_waiting_tasks_keep_no_message_and_run_in_order(book, worker, key):
    """Three wait in their slots, as waiters without a body; each runs when its turn has come."""
    first = held(book, key)
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
    """Woken, not by polling: from the end of the holder to its start it takes under 0.3 s."""
    first = held(book, key)
    second = book.send("act_wait", key, 1)
    await_line(book, key, 1)
    book.open(f"{key}-0")
    begun = book.started(second)["t"]
    book.value(first)
    in_time(begun - book.events("end", id=first)[0]["t"], 0.3)


def test_waiting_and_parked_tasks_share_one_line(book, worker, key):
    """A parked task that came first goes first; who waits in a slot is next."""
    first = held(book, key, "act")
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
    first = held(book, key)
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


def test_a_full_line_ends_as_lock_on_full_says(book, worker, key):
    """lock_max_waiting counts who waits in a slot too."""
    first = held(book, key)
    second = book.send("act_wait_bounded", key, 1)
    await_line(book, key, 1)
    assert isinstance(book.outcome(book.send("act_wait_bounded", key, 2))[1], LockQueueFull)
    book.open(f"{key}-0")
    assert [book.value(first), book.value(second)] == [0, 1]


@pytest.mark.full_run_plays("threads")
def test_the_lease_of_one_that_has_waited_is_renewed(book, worker, key):
    """It runs for two leases after a wait, and holds its lock throughout."""
    first = held(book, key)
    second = book.send("act_wait", key, 1, hold=f"{key}-1")
    await_line(book, key, 1)
    book.open(f"{key}-0")
    token = book.started(second) and book.view(key).holders[0].token
    never(lambda: [h.token for h in book.view(key).holders] != [token], 6)
    book.open(f"{key}-1")
    assert [book.value(first), book.value(second)] == [0, 1]
    book.await_free(key)


@only("prefork")
def test_a_soft_time_limit_ends_the_wait_and_leaves_nobody_in_line(book, worker, key):
    """The task fails with SoftTimeLimitExceeded, and the next in line is not behind a ghost."""
    first = held(book, key)
    soft = book.send("act_wait_soft", key, 1)
    state, error = book.outcome(soft)
    assert (state, type(error)) == (states.FAILURE, SoftTimeLimitExceeded)
    await_line(book, key, 0)
    book.open(f"{key}-0")
    assert book.value(first) == 0
    book.await_free(key)
    assert book.order(key) == [0]


@only("prefork")
def test_a_hard_time_limit_ends_the_wait_and_leaves_nobody_in_line(book, worker, key):
    """The child is killed as it waits: its place in line goes within 2 s."""
    first = held(book, key)
    state, error = book.outcome(book.send("act_wait_hard", key, 1))
    assert (state, type(error)) == (states.FAILURE, TimeLimitExceeded)
    took = seconds_until(lambda: book.view(key).waiting == 0)
    book.open(f"{key}-0")
    assert book.value(first) == 0
    book.await_free(key)
    in_time(took, 2)


@only("prefork")
def test_T17_terminate_while_it_waits_leaves_nobody_in_line(book, worker, key):
    """revoke(terminate=True): REVOKED, its place goes within 2 s, and the worker serves on."""
    first = held(book, key)
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


REDELIVERY = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,  # kombu looks every 10 s, and each tenth look counts
    "unacked_restore_throttle": 1,
}


@pytest.mark.full_run_plays("act_wait]")
@pytest.mark.parametrize("task", ["act_wait", "act_wait_late"])
def test_a_worker_that_dies_with_a_waiting_task_loses_nothing(redis_url, tmp_path, key, task):
    """The acknowledgement is withheld until the lock is taken: another worker runs the task."""
    with Book(redis_url, tmp_path, conf={"broker_transport_options": REDELIVERY}) as book:
        holder = book.worker(concurrency=1, queues="other").start()
        one = book.worker(concurrency=1).start()
        first = book.send("act", key, 0, hold=f"{key}-0", queue="other")
        book.started(first)
        second = book.send(task, key, 1)
        await_line(book, key, 1)
        book.kill_worker(one)
        with book.worker(concurrency=1):
            book.open(f"{key}-0")
            assert [book.value(first), book.value(second, 25)] == [0, 1]
            assert book.order(key) == [0, 1]
            book.await_free(key)
        holder.stop()


@pytest.mark.full_run_plays("threads")
def test_a_cold_shutdown_leaves_nobody_in_line(own_book, pool, key):
    """SIGQUIT to a worker whose tasks wait: the line is empty within the liveness of a waiter."""
    worker = own_book.worker(pool=pool, concurrency=2).start()
    holder = own_book.worker(concurrency=1, queues="other").start()
    first = own_book.send("act_wait", key, 0, hold=f"{key}-0", queue="other")
    own_book.started(first)
    own_book.send("act_wait", key, 1)
    await_line(own_book, key, 1)
    worker.signal(3)
    if pool == "threads":
        worker.end()  # it waits for its threads, whatever they do
    else:
        worker.wait()
    own_book.send("act_wait", f"{key}-x", 1, queue="other")
    eventually(
        lambda: own_book.store.kick(f"k:{key}") is not None and own_book.view(key).waiting == 0,
        LIVENESS + 2,
    )
    own_book.open(f"{key}-0")
    assert own_book.value(first) == 0
    holder.stop()


def test_a_warm_shutdown_lets_who_waits_go_on(own_book, pool, key):
    """SIGTERM: the waiting task gets its lock and ends, as any task that has begun does."""
    worker = own_book.worker(pool=pool, concurrency=2).start()
    first = own_book.send("act_wait", key, 0, hold=f"{key}-0")
    own_book.started(first)
    second = own_book.send("act_wait", key, 1)
    await_line(own_book, key, 1)
    worker.terminate()
    worker.await_log("Warm shutdown")
    own_book.open(f"{key}-0")
    assert [own_book.value(first), own_book.value(second)] == [0, 1]
    worker.wait()
    own_book.await_free(key)

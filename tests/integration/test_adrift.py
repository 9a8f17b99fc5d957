"""Parked messages that no live worker consumes are republished."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from celery_singleton_lock.cli.commands import locks
from support.waiting import eventually, never


def adrift(book, count=1):
    """Park tasks of a queue, then stop its only worker; return the parked tasks."""
    holder = book.worker(queues="held", name="holder").start()
    with book.worker(queues="far", name="gone"):
        first = book.start_holder("a", queue="held")
        parked = [book.send("act", "a", n, queue="far") for n in range(1, count + 1)]
        book.await_waiting("a", count)
    return holder, first, parked


@pytest.mark.full
def test_a_worker_that_starts_later_runs_them(own_book):
    """They were granted while no worker consumed their queue.

    The next worker runs them in order.
    """
    holder, first, parked = adrift(own_book, 3)
    own_book.open("a-0")
    assert own_book.value(first) == 0
    eventually(lambda: own_book.view("a").adrift == 3, 10, lambda: str(own_book.view("a")))
    never(lambda: len(own_book.starts("a")) > 1, during=0.5)
    with own_book.worker(queues="far", name="late"):
        assert [own_book.value(r) for r in parked] == [1, 2, 3]
        assert own_book.order("a") == [0, 1, 2, 3]
        assert own_book.peak("a") == 1
        own_book.await_free("a", 10)
    holder.stop()


@pytest.mark.full
def test_those_that_others_consume_are_not_held_up(own_book):
    """A task behind an adrift one runs on the remaining worker."""
    holder, first, _ = adrift(own_book)
    behind = own_book.send("act", "a", 9, queue="held")
    own_book.await_waiting("a", 2)
    own_book.open("a-0")
    assert [own_book.value(first), own_book.value(behind)] == [0, 9]
    holder.stop()


@pytest.mark.full
def test_T34_copies_of_a_finished_task_end_quietly(own_book):
    """The message is republished; duplicates in the broker do not run again."""
    holder, first, parked = adrift(own_book)
    own_book.open("a-0")
    own_book.value(first)
    eventually(lambda: own_book.queued("far") >= 1, 15, "it is with the broker")
    copy = own_book.broker.lindex("far", 0)
    for _ in range(3):
        own_book.broker.lpush("far", copy)
    with own_book.worker(queues="far", name="late"):
        assert own_book.value(parked[0]) == 1
        own_book.await_free("a", 10)
        for _ in range(3):
            own_book.broker.lpush("far", copy)
        own_book.await_drained("far")
        assert own_book.value(own_book.send("act", "a", 5, queue="far")) == 5
    assert own_book.order("a") == [0, 1, 5]
    own_book.await_free("a", 10)
    holder.stop()


@pytest.mark.full
def test_T34_a_copy_that_comes_after_the_end_of_the_first_one_does_not_run(own_book):
    """The broker took the message twice. Nobody saw the copy while the first one ran."""
    holder, first, parked = adrift(own_book)
    own_book.open("a-0")
    own_book.value(first)
    eventually(lambda: own_book.queued("far") == 1, 15, "it is with the broker")
    eventually(lambda: own_book.view("a").bodies == 0, 10, lambda: str(own_book.view("a")))
    copy = own_book.broker.lindex("far", 0)
    with own_book.worker(queues="far", name="late"):
        assert own_book.value(parked[0]) == 1
        own_book.await_free("a", 10)
        own_book.broker.lpush("far", copy)
        own_book.await_drained("far")
        assert own_book.value(own_book.send("act", "a", 5, queue="far")) == 5
    assert own_book.order("a") == [0, 1, 5]
    own_book.await_free("a", 10)
    holder.stop()


ROLLED_BACK = ("integration.plain_app", "integration.unlocked_app")
"""No task takes a lock; or others do, so that the worker tells the fleet that it lives."""


@pytest.mark.full
@pytest.mark.parametrize("app", ROLLED_BACK)
def test_after_a_rollback_each_parked_task_runs_once_in_a_worker_without_locks(own_book, app):
    """Also an early-acknowledged one: Redis keeps nothing of it."""
    holder, first, parked = adrift(own_book, 5)
    with own_book.worker(queues="far", name="plain", app=app):
        own_book.open("a-0")
        own_book.value(first)
        assert [own_book.value(each, 30) for each in parked] == [1, 2, 3, 4, 5]
        eventually(lambda: own_book.view("a").bodies == 0, 10, lambda: str(own_book.view("a")))
        own_book.await_drained("far")
        never(lambda: len(own_book.starts("a")) > 6 or own_book.queued("far"), during=1.0)
    own_book.await_free("a", 10)
    holder.stop()


def test_a_worker_that_stops_under_load_leaves_no_message_both_parked_and_with_the_broker(own_book):
    """After a rollback to plain workers the task ran twice: for each message, by each way."""
    sent, stop = [], threading.Event()

    def send():
        while not stop.is_set():
            sent.append(own_book.send("act", "a", len(sent) + 1))

    with own_book.worker() as worker:
        own_book.start_holder("a")
        sender = threading.Thread(target=send)
        sender.start()
        try:
            eventually(lambda: own_book.view("a").waiting >= 20, 20, "it parks them")
            worker.terminate()
            eventually(lambda: own_book.queued() > 20, 20, "the worker consumes no more")
        finally:
            stop.set()
            sender.join()
        own_book.open("a-0")
        worker.wait()
    assert len(own_book.starts("a")) == 1
    assert own_book.queued() + own_book.view("a").bodies == len(sent)


def test_parked_tasks_wait_for_a_worker_that_has_the_task(own_book):
    """After a deployment that had renamed it, all of them ended as NotRegistered."""
    holder, first, parked = adrift(own_book, 2)
    with own_book.worker(queues="far", name="renamed", app="integration.renamed_app") as renamed:
        own_book.open("a-0")
        own_book.value(first)
        renamed.await_log("They stay parked until a worker that has it starts")
    assert own_book.view("a").bodies == 2
    with own_book.worker(queues="far", name="mended"):
        assert [own_book.value(each, 30) for each in parked] == [1, 2]
    own_book.await_free("a", 10)
    holder.stop()


@pytest.mark.full
def test_tasks_with_several_locks_run_once_where_another_worker_takes_them(own_book):
    """Parked at the second lock while they keep the first: they start again at the first."""
    holder = own_book.worker(queues="held", name="holder").start()
    with own_book.worker(queues="far", name="gone"):
        first = own_book.start_holder("b", queue="held")
        pair = own_book.send("pair", "a", "b", queue="far")
        own_book.await_waiting("b", 1)
    own_book.open("b-0")
    own_book.value(first)
    eventually(lambda: own_book.queued("far") == 1, 20, "it is with the broker")
    eventually(lambda: own_book.view("b").bodies == 0, 10, lambda: str(own_book.view("b")))
    with own_book.worker(queues="far", name="late"):
        assert own_book.value(pair, 30) == "b"
    assert len(own_book.starts("a")) == 1
    holder.stop()


def test_a_drain_beside_a_worker_that_locks_loses_no_task(own_book):
    """It receives them, and they stay parked: each runs once."""
    with own_book.worker():
        own_book.start_holder("a")
        parked = [own_book.send("act", "a", n) for n in range(1, 21)]
        own_book.await_waiting("a", 20)
        told = drained(own_book)
        own_book.open("a-0")
        assert [own_book.value(each, 30) for each in parked] == list(range(1, 21)), told
        assert sorted(own_book.order("a")) == list(range(21))
        assert own_book.peak("a") == 1
        own_book.await_free("a", 10)


def drained(book):
    """Run ``locks drain``; return its output."""
    obj = SimpleNamespace(app=book.app)
    result = CliRunner().invoke(locks, ["drain", "--all", "--rate", "0", "--yes"], obj=obj)
    assert result.exit_code == 0, result.output
    return result.output

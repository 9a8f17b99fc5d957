"""lock_on_conflict="requeue" on RabbitMQ: messages in the broker are safe."""

from __future__ import annotations

import itertools

import pytest
from celery import states

from celery_singleton_lock.errors import LockWaitTimeout
from integration.book import LONG_LEASE
from integration.brokers import BrokerBook, queues
from support.events import EventLog
from support.waiting import eventually, never


@pytest.fixture(params=["classic", "quorum"])
def kind(request):
    """The type of the queues."""
    return request.param


@pytest.fixture
def make_book(kind, redis_url, rabbit_vhost, tmp_path):
    """Return a function that makes the task book on a RabbitMQ, with two queues."""
    books = []

    def make(**arguments) -> BrokerBook:
        declared = queues(kind, ["celery", "held"])
        declared["celery"]["queue_arguments"].update(arguments)
        conf = {
            "task_queues": declared,
            "task_default_queue": "celery",
            "singleton_lock_lease": LONG_LEASE,
        }
        books.append(BrokerBook(kind, redis_url, tmp_path, vhost=rabbit_vhost, conf=conf))
        return books[-1]

    yield make
    for book in books:
        book.__exit__()


def held(book):
    """Let a worker of its own hold the lock until the gate opens."""
    holder = book.worker(concurrency=1, queues="held").start()
    first = book.start_holder("a", queue="held")
    return holder, first


@pytest.mark.full
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_blocked_tasks_come_back_until_they_run_and_each_time_later(make_book, pool):
    """As they were sent; their delays double, so the count of requeues survives the broker."""
    book = make_book()
    holder, first = held(book)
    worker = book.worker(pool=pool, queues="celery", args=("-E",))
    with worker, EventLog(book.app) as events:
        sent = [book.send("act_requeue", "a", n, headers={"x-mine": str(n)}) for n in (1, 2, 3)]
        eventually(lambda: events.counts(sent[0]).get("task-blocked", 0) >= 6)
        blocked = [
            event["timestamp"]
            for event in events.seen
            if event["type"] == "task-blocked" and event["uuid"] == sent[0]
        ]
        pauses = [later - earlier for earlier, later in itertools.pairwise(blocked)]
        # An event that is sent late shortens the pause behind it.
        assert max(pauses) > 0.8 * 0.75
        assert not book.view("a").bodies
        book.open("a-0")
        assert [book.value(result) for result in (first, *sent)] == [0, 1, 2, 3]
        book.await_settled("a")
    assert {s["n"]: s["headers"] for s in book.starts("a")[1:]} == {
        n: {"x-mine": str(n)} for n in (1, 2, 3)
    }
    assert {s["retries"] for s in book.starts("a")} == {0}
    assert not any(start["leaks"] for start in book.starts())
    assert book.peak("a") == 1
    holder.stop()


@pytest.mark.full
def test_the_deadline_of_a_requeued_task_counts_from_its_first_arrival(make_book):
    """The time of its first arrival survives the broker, too."""
    book = make_book()
    holder, first = held(book)
    with book.worker(queues="celery"):
        state, error = book.outcome(book.send("act_requeue_brief", "a", 1), 8)
        assert state == states.FAILURE
        assert isinstance(error, LockWaitTimeout)
    book.open("a-0")
    assert book.value(first) == 0
    holder.stop()


@pytest.mark.full
def test_a_message_that_is_held_back_by_a_worker_that_is_killed_goes_to_the_next(make_book):
    """It was not acknowledged yet: RabbitMQ gives it to another at once."""
    book = make_book()
    holder, first = held(book)
    one = book.worker(queues="celery", concurrency=1).start()
    second = book.send("act_requeue_slow", "a", 1)
    eventually(lambda: book.unacked() == 1)
    book.kill_worker(one)
    book.open("a-0")
    with book.worker(queues="celery"):
        assert [book.value(first), book.value(second)] == [0, 1]
        book.await_settled("a")
    assert book.order("a") == [0, 1]
    holder.stop()


@pytest.mark.full
def test_a_message_that_the_broker_refuses_to_take_back_is_not_lost(make_book):
    """A full queue that rejects what is published: the first is kept, and tried again."""
    book = make_book(**{"x-max-length": 1, "x-overflow": "reject-publish"})
    holder, first = held(book)
    with book.worker(queues="celery", concurrency=1) as worker:
        second = book.send("act_requeue_slow", "a", 1)
        eventually(lambda: book.unacked() == 1)
        fill(book)
        worker.await_log("could not be requeued", 10)
        assert book.unacked() >= 2
        book.open("b-0")
        book.open("a-0")
        assert [book.value(first), book.value(second, 30)] == [0, 1]
        book.await_settled("a")
    assert book.order("a") == [0, 1]
    holder.stop()


def fill(book):
    """Occupy the worker's slot with a task that holds, and its queue with others."""
    book.started(book.send("plain_late", "b", 0, hold="b-0"))

    def full():
        if book.queued() == 0:
            book.send("plain_late", "b", 1)
        return book.queued() >= 1

    eventually(full)
    for _ in range(2):  # a quorum queue accepts one more before it refuses; others refuse these
        book.send("plain_late", "b", 1)
    never(lambda: book.queued() == 0, 0.5)

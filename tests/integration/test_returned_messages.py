"""A parked message that is requeued, rejected, or cannot be received."""

from __future__ import annotations

import json

import pytest
from celery import states
from kombu import Connection, Exchange, Queue

from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import MaxReturnsExceeded
from celery_singleton_lock.worker.redelivery import REJECT, rejection_of
from integration.book import LONG_LEASE, only_kind
from integration.brokers import queues
from support.waiting import eventually


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


def blocked(book, task, n=1, **options):
    """Have a task parked behind another one of its key."""
    book.start_holder("a")
    sent = book.send(task, "a", n, **options)
    book.await_waiting("a", 1)
    return sent


def dead_letters(book, name="dead"):
    """Declare a queue for dead letters, which no worker consumes."""
    with Connection(book.url) as connection:
        Queue(name, Exchange(""), name)(connection.default_channel).queue_declare()


def take(book, queue):
    """Take a message out of a queue."""
    with Connection(book.url) as connection:
        return eventually(lambda: connection.default_channel.basic_get(queue, no_ack=True), 10)


# -- that keeps coming back ------------------------------------------------------------------------


@only_kind("redis")
def test_a_message_that_is_always_requeued_fails_and_does_not_block_others(make_book, pool):
    """The next task of its key does not wait for it, and its sender gets a result."""
    book = make_book(conf={"singleton_lock_max_returns": 2})
    with book.worker(pool=pool) as worker:
        stubborn = blocked(book, "act_lost", end="requeue-always")
        other = book.send("act", "a", 2)
        book.open("a-0")
        assert book.value(other) == 2
        state, error = book.outcome(stubborn)
        book.await_settled("a")
    assert (state, type(error)) == (states.FAILURE, MaxReturnsExceeded)
    assert len(book.starts(id=stubborn)) == 3
    assert book.order("a") == [0, 1, 1, 2, 1]
    assert "raised unexpected" in worker.log()


@pytest.mark.full
@only_kind("redis")
def test_a_message_whose_process_always_dies_fails_and_does_not_block_others(make_book):
    """A task that kills its process is started a bounded number of times."""
    book = make_book(conf={"singleton_lock_max_returns": 1})
    with book.worker(pool="prefork"):
        deadly = blocked(book, "act_lost", end="die-always")
        other = book.send("act", "a", 2)
        book.open("a-0")
        state, error = book.outcome(deadly)
        assert book.value(other) == 2
        book.await_settled("a")
    assert (state, type(error)) == (states.FAILURE, MaxReturnsExceeded)
    assert len(book.starts(id=deadly)) == 2


@pytest.mark.full
@only_kind("redis")
@pytest.mark.parametrize("waits_for", ["a", "b"])
def test_a_task_of_two_locks_that_is_always_requeued_fails_in_the_end(make_book, waits_for):
    """Its returns are counted over all of its locks, whichever of them keeps its message."""
    book = make_book(conf={"singleton_lock_max_returns": 2})
    with book.worker():
        first = book.send("act", waits_for, 0, hold="gate")
        book.started(first)
        stubborn = book.send("pair_lost", "a", "b", end="requeue-always")
        book.await_waiting(waits_for, 1)
        other = book.send("act", "b", 2)
        book.open("gate")
        state, error = book.outcome(stubborn)
        assert book.value(other) == 2
        book.await_settled("a", "b")
    assert (state, type(error)) == (states.FAILURE, MaxReturnsExceeded)
    assert len(book.starts(id=stubborn)) == 3


@pytest.mark.full
@only_kind("quorum")
def test_a_message_that_keeps_coming_back_reaches_the_dead_letters_of_its_queue(make_book):
    """The limit that its queue declares counts for a parked message, too."""
    declared = queues("quorum", ["celery"])
    declared["celery"]["queue_arguments"] |= {
        "x-delivery-limit": 1,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "dead",
    }
    book = make_book(conf={"task_queues": declared, "task_default_queue": "celery"})
    dead_letters(book)
    with book.worker():
        stubborn = blocked(book, "act_lost", end="requeue-always")
        book.open("a-0")
        message = take(book, "dead")
        book.await_settled("a")
    assert message.headers["id"] == stubborn
    assert len(book.starts(id=stubborn)) == 2
    assert [death["queue"] for death in message.headers["x-death"]] == ["celery"]


# -- that is rejected ------------------------------------------------------------------------------


def with_dead_letters(kind, to):
    """Return a queue whose dead letters go to another one."""
    declared = queues(kind, ["celery"])
    declared["celery"]["queue_arguments"] |= {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": to,
    }
    return {"task_queues": declared, "task_default_queue": "celery"}


@pytest.mark.full
@only_kind("classic", "quorum")
def test_a_parked_task_that_is_rejected_is_tried_again_by_the_delayed_retry_idiom(
    make_book, kind, pool
):
    """RabbitMQ sends dead letters back after a while: no retry is lost."""
    book = make_book(conf=with_dead_letters(kind, "later"))
    back = {
        "x-message-ttl": 300,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "celery",
    }
    with Connection(book.url) as connection:
        later = Queue("later", Exchange(""), "later", queue_arguments=back)
        later(connection.default_channel).queue_declare()
    with book.worker(pool=pool):
        sent = blocked(book, "act_late", end="reject-twice", headers={"x-mine": "yes"})
        book.open("a-0")
        book.started(sent, times=3)
        book.await_settled("a")
    starts = book.starts(id=sent)
    assert [start["deaths"] for start in starts] == [0, 2, 4]
    assert {start["headers"]["x-mine"] for start in starts} == {"yes"}
    assert not any(start["leaks"] for start in starts)
    assert len(starts) == 3


@pytest.mark.full
@only_kind("classic")
@pytest.mark.parametrize(("task", "end"), [("act_late", "reject"), ("act_unforgiving", "raise")])
def test_a_parked_task_that_is_rejected_reaches_the_dead_letters(make_book, kind, task, end):
    """For the reason that is true, and with the task's message as it was sent."""
    book = make_book(conf=with_dead_letters(kind, "dead"))
    dead_letters(book)
    with book.worker():
        sent = blocked(book, task, end=end, expires=300)
        book.open("a-0")
        message = take(book, "dead")
        book.await_settled("a")
    (death,) = message.headers["x-death"]
    assert (message.headers["id"], death["reason"], death["count"]) == (sent, "rejected", 1)
    assert len(book.starts(id=sent)) == 1


@only_kind("redis")
def test_a_rejected_task_is_dropped_where_the_broker_has_no_dead_letters(make_book):
    """As Celery does on Redis; nothing is left behind, and the next task runs."""
    book = make_book()
    with book.worker():
        sent = blocked(book, "act_late", end="reject")
        other = book.send("act", "a", 2)
        book.open("a-0")
        assert book.value(other) == 2
        book.await_settled("a")
        eventually(lambda: not book.view("a").bodies)
    assert len(book.starts(id=sent)) == 1


@only_kind("redis")
def test_a_retry_runs_that_carries_the_mark_of_its_rejected_attempt(make_book):
    """A worker of an older version runs what is to be rejected, and its retry keeps the header."""
    book = make_book()
    rejected = {"id": "twice", "retries": 0}
    marks = {REJECT: rejection_of(rejected)}
    with book.worker():
        book.send("act_late", "a", 0, task_id="twice", headers=marks)
        retried = book.send("act_late", "a", 1, task_id="twice", retries=1, headers=marks)
        assert book.value(retried) == 1
        book.await_settled("a")
    assert book.order("a") == [1]
    assert not book.starts("a")[0]["leaks"]


# -- that cannot be received -----------------------------------------------------------------------


def change(book, edit):
    """Change the one message that is kept for the key, as its head and its body."""
    bodies = Keyspace().lock("k:a").bodies
    ((base, kept),) = book.client.hgetall(bodies).items()
    head, _, body = kept.partition(b"\n")
    head, body = edit(json.loads(head), body)
    book.client.hset(bodies, base, json.dumps(head).encode() + b"\n" + body)


@pytest.mark.full
@only_kind("redis")
@pytest.mark.parametrize("wrong", ["content-type", "json"])
def test_a_parked_task_that_cannot_be_decoded_does_not_block_its_key(make_book, wrong):
    """It is rejected and logged, as Celery does, and the next task runs."""
    book = make_book()
    with book.worker() as worker:
        blocked(book, "act_late")
        if wrong == "json":
            change(book, lambda head, body: (head, b"no json"))
        else:
            change(book, lambda head, body: ({**head, "content_type": "application/x-no"}, body))
        other = book.send("act", "a", 2)
        book.open("a-0")
        assert book.value(other) == 2
        book.await_settled("a")
        told = "Can't decode message body" if wrong == "json" else "Received invalid task message"
        worker.await_log(told)
    assert book.order("a") == [0, 2]


@pytest.mark.full
@only_kind("redis")
def test_a_parked_task_of_which_no_request_can_be_made_fails_in_the_end(make_book):
    """It is tried again while others run; then its sender gets the cause."""
    book = make_book(conf={"singleton_lock_max_returns": 1})
    with book.worker() as worker:
        sent = blocked(book, "act_late")
        change(book, lambda head, body: (head, b"[1, 2]"))
        other = book.send("act", "a", 2)
        book.open("a-0")
        assert book.value(other) == 2
        state, error = book.outcome(sent)
        book.await_settled("a")
        worker.await_log("it is tried again later")
    assert (state, type(error)) == (states.FAILURE, MaxReturnsExceeded)
    assert "unpack" in str(error)
    assert book.order("a") == [0, 2]


# -- that has the id of another --------------------------------------------------------------------


@only_kind("redis", "classic")
def test_a_second_call_with_a_task_id_in_use_runs(make_book, pool):
    """As in Celery, be the first running or parked, and even if the arguments are equal."""
    book = make_book()
    with book.worker(pool=pool):
        first = book.start_holder("a", task="act_late", task_id="mine")
        for _ in range(2):
            book.send("act_late", "a", 1, task_id="mine")
        book.await_waiting("a", 2)
        book.open("a-0")
        book.started(first, times=3)
        book.await_settled("a")
    assert book.order("a") == [0, 1, 1]
    assert book.peak("a") == 1


@pytest.mark.full
@only_kind("redis")
def test_a_revoke_reaches_all_calls_with_one_task_id(make_book):
    """Both are parked, and neither runs."""
    book = make_book()
    with book.worker():
        book.start_holder("a", task="act_late")
        for n in (1, 2):
            book.send("act_late", "a", n, task_id="mine")
        book.await_waiting("a", 2)
        book.app.control.revoke("mine")
        eventually(lambda: not book.view("a").waiting, 10)
        book.open("a-0")
        book.await_settled("a")
    assert book.order("a") == [0]

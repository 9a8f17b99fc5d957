"""Parked messages that no live worker consumes, and copies in the broker."""

from __future__ import annotations

from support.waiting import eventually, never


def adrift(book, count=1):
    """Park tasks of a queue, then leave none that consumes it; return the parked."""
    holder = book.worker(queues="held", name="holder").start()
    with book.worker(queues="far", name="gone"):
        first = book.send("act", "a", 0, hold="a-0", queue="held")
        book.started(first)
        parked = [book.send("act", "a", n, queue="far") for n in range(1, count + 1)]
        book.await_waiting("a", count)
    return holder, first, parked


def test_a_worker_that_comes_later_runs_them(own_book):
    """Their turn came while nobody consumed their queue: who does now runs them in order."""
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


def test_those_that_others_consume_are_not_held_up(own_book):
    """A task behind one that is adrift runs on the worker that is there."""
    holder, first, _ = adrift(own_book)
    behind = own_book.send("act", "a", 9, queue="held")
    own_book.await_waiting("a", 2)
    own_book.open("a-0")
    assert [own_book.value(first), own_book.value(behind)] == [0, 9]
    holder.stop()


def test_T34_copies_of_a_finished_task_end_quietly(own_book):
    """A copy goes to the broker once and again at most a few times; none runs a second time."""
    holder, first, parked = adrift(own_book)
    own_book.open("a-0")
    own_book.value(first)
    eventually(lambda: own_book.queued("far") >= 1, 15, "a copy is published")
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

"""lock_on_conflict="requeue": blocked tasks go back to the broker, and Redis keeps nothing."""

from __future__ import annotations

import pytest
from celery import states

from celery_singleton_lock.errors import LockWaitTimeout
from integration.book import LONG_LEASE
from support.waiting import eventually, never


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


def held_back(book, worker):
    """Return how many messages a worker holds back, by its statistics."""
    name = worker.node_name
    stats = book.app.control.inspect([name], timeout=20).stats()
    return stats[name]["singleton_lock"]["held_back"]


def requeued(book, worker):
    """Return how many messages a worker has requeued, by its statistics."""
    name = worker.node_name
    stats = book.app.control.inspect([name], timeout=20).stats()
    return stats[name]["singleton_lock"]["requeued"]


@pytest.mark.parametrize("task", ["act_requeue", "act_requeue_late"])
def test_a_requeued_task_runs_with_what_it_was_sent_with(book, worker, key, task):
    """With the same id, retries, headers and priority, and without a lock header."""
    first = book.start_holder(key, task="act_requeue")
    second = book.send(task, key, 1, headers={"x-mine": "1"}, priority=3, compression="zlib")
    never(lambda: book.starts(id=second) or book.view(key).bodies, 2)
    assert not book.view(key).waiting
    book.open(f"{key}-0")
    assert [book.value(first), book.value(second)] == [0, 1]
    (start,) = book.starts(id=second)
    assert (start["retries"], start["headers"], start["priority"]) == (0, {"x-mine": "1"}, 3)
    assert start["leaks"] == []
    assert book.peak(key) == 1
    book.await_free(key)


def test_ten_requeued_tasks_run_one_at_a_time_and_occupy_no_slots(book, worker, key):
    """In any order; a task with another key starts at once."""
    first = book.start_holder(key, task="act_requeue")
    sent = [book.send("act_requeue", key, n) for n in range(1, 11)]
    assert book.value(book.send("act_requeue", f"{key}-x", 1), 3) == 1
    book.open(f"{key}-0")
    assert [book.value(r, 30) for r in (first, *sent)] == list(range(11))
    assert sorted(book.order(key)) == list(range(11))
    assert book.peak(key) == 1
    book.await_free(key)
    eventually(lambda: book.unacked() == 0 and book.queued() == 0)


def requeued_and_run(book, worker, key, number):
    """Send a call with an id that is used twice; it is requeued, and then runs."""
    holder = book.start_holder(key, 10 * number, task="act_requeue")
    requeues = requeued(book, worker)
    book.send("act_requeue", key, number, task_id=f"{key}-again")
    eventually(lambda: requeued(book, worker) > requeues, 10, "it is requeued")
    book.open(f"{key}-{10 * number}")
    book.value(holder)
    eventually(lambda: number in book.order(key), 15, lambda: str(book.order(key)))
    book.await_free(key)
    eventually(lambda: book.unacked() == 0 and book.queued() == 0)


def test_a_call_whose_id_is_used_again_runs_although_it_was_requeued(book, worker, key):
    """It was taken for a copy of the ended one, and acknowledged unrun."""
    requeued_and_run(book, worker, key, 1)
    never(lambda: book.view(key).holders, 1.1)  # more than clocks may differ
    requeued_and_run(book, worker, key, 2)


def test_the_deadline_counts_from_the_first_arrival(book, worker, key):
    """lock_wait_timeout of 1 s: LockWaitTimeout at the first try after it."""
    first = book.start_holder(key, task="act_requeue")
    state, error = book.outcome(book.send("act_requeue_brief", key, 1), 8)
    assert state == states.FAILURE
    assert isinstance(error, LockWaitTimeout)
    book.open(f"{key}-0")
    assert book.value(first) == 0


def test_a_revoked_task_is_not_requeued_for_ever(book, worker, key):
    """Revoked while the broker or a worker has it: REVOKED at its next arrival."""
    first = book.start_holder(key, task="act_requeue")
    second = book.send("act_requeue", key, 1)
    never(lambda: book.starts(id=second), 0.5)
    book.app.control.revoke(second)
    assert book.outcome(second)[0] == states.REVOKED
    book.open(f"{key}-0")
    assert book.value(first) == 0
    assert book.order(key) == [0]


@pytest.mark.full
def test_the_death_of_a_worker_that_holds_back_a_task_loses_nothing(own_book, key):
    """The message is not acknowledged meanwhile: a warm shutdown returns it to the broker."""
    holder = own_book.worker(concurrency=1, queues="other").start()
    first = own_book.start_holder(key, queue="other")
    one = own_book.worker(concurrency=1).start()
    second = own_book.send("act_requeue_slow", key, 1)
    eventually(lambda: held_back(own_book, one) == 1 and own_book.unacked() == 1)
    one.terminate()
    one.wait()
    own_book.open(f"{key}-0")
    with own_book.worker(concurrency=1):
        assert [own_book.value(first), own_book.value(second)] == [0, 1]
    assert own_book.order(key) == [0, 1]
    holder.stop()

"""lock_on_conflict="requeue": blocked tasks go back to the broker; nothing is kept in Redis."""

from __future__ import annotations

import socket

import pytest
from celery import states

from celery_singleton_lock.errors import LockWaitTimeout
from support.waiting import eventually, never


def held(book, key, task="act_requeue"):
    """Let a task hold the key's lock until its gate opens."""
    first = book.send(task, key, 0, hold=f"{key}-0")
    book.started(first)
    return first


def held_back(book, worker):
    """Return how many messages a worker holds back, as it says itself."""
    name = f"{worker.name}@{socket.gethostname()}"
    stats = book.app.control.inspect([name], timeout=20).stats()
    return stats[name]["singleton_lock"]["held_back"]


@pytest.mark.parametrize("task", ["act_requeue", "act_requeue_late"])
def test_a_requeued_task_runs_with_what_it_was_sent_with(book, worker, key, task):
    """Same id, no retry burnt, its headers and priority; no header of ours is left."""
    first = held(book, key)
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


def test_ten_requeued_tasks_all_run_alone_and_leave_the_slots_to_others(book, worker, key):
    """In whatever order; another key's task starts at once meanwhile."""
    first = held(book, key)
    sent = [book.send("act_requeue", key, n) for n in range(1, 11)]
    assert book.value(book.send("act_requeue", f"{key}-x", 1), 3) == 1
    book.open(f"{key}-0")
    assert [book.value(r, 30) for r in (first, *sent)] == list(range(11))
    assert sorted(book.order(key)) == list(range(11))
    assert book.peak(key) == 1
    book.await_free(key)
    eventually(lambda: book.unacked() == 0 and book.queued() == 0)


def test_the_deadline_counts_from_the_first_arrival(book, worker, key):
    """lock_wait_timeout of 1 s: LockWaitTimeout at the first try after it."""
    first = held(book, key)
    state, error = book.outcome(book.send("act_requeue_brief", key, 1), 8)
    assert state == states.FAILURE
    assert isinstance(error, LockWaitTimeout)
    book.open(f"{key}-0")
    assert book.value(first) == 0


def test_a_revoked_task_is_not_requeued_for_ever(book, worker, key):
    """Revoked while the broker or a worker has it: REVOKED at its next arrival."""
    first = held(book, key)
    second = book.send("act_requeue", key, 1)
    never(lambda: book.starts(id=second), 0.5)
    book.app.control.revoke(second)
    assert book.outcome(second)[0] == states.REVOKED
    book.open(f"{key}-0")
    assert book.value(first) == 0
    assert book.order(key) == [0]


def test_a_worker_that_dies_while_it_holds_a_task_back_loses_nothing(own_book, key):
    """The message is unacknowledged meanwhile: warm shutdown gives it back to the broker."""
    holder = own_book.worker(concurrency=1, queues="other").start()
    first = own_book.send("act", key, 0, hold=f"{key}-0", queue="other")
    own_book.started(first)
    one = own_book.worker(concurrency=1).start()
    second = own_book.send("act_requeue_slow", key, 1)
    eventually(lambda: held_back(own_book, one) == 1)
    assert own_book.unacked() == 1
    one.terminate()
    one.wait(10)
    own_book.open(f"{key}-0")
    with own_book.worker(concurrency=1):
        assert [own_book.value(first), own_book.value(second)] == [0, 1]
    assert own_book.order(key) == [0, 1]
    holder.stop()

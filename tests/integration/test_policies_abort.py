"""lock_on_lost="abort": a task that has lost its lock is interrupted where the pool can do it."""

from __future__ import annotations

import time

import pytest
from celery import states

from celery_singleton_lock.errors import LockLost
from integration.book import only
from support.waiting import in_time

LEASE = 15.0


@pytest.fixture(scope="module")
def lease():
    """None ends while a process stands still; a loss is noticed at the next renewal."""
    return LEASE


@only("prefork")
@pytest.mark.parametrize("task", ["act_abort", "act_abort_late"])
def test_T10_a_task_that_lost_its_lock_is_interrupted(book, worker, key, task):
    """Within a renewal period the task ends as FAILURE with LockLost; the next task runs."""
    first = book.send(task, key, 0, hold=f"{key}-0")
    book.started(first)
    taken = time.monotonic()
    assert book.store.reset(f"k:{key}") == 1
    state, error = book.outcome(first)
    took = time.monotonic() - taken
    assert (state, type(error)) == (states.FAILURE, LockLost)
    assert error.name == f"k:{key}"
    worker.await_log(f"The lock 'k:{key}' was lost")
    assert book.value(book.send(task, key, 1)) == 1
    assert book.order(key) == [0, 1]
    book.await_free(key)
    in_time(took, LEASE / 3 + 1.5)


@pytest.mark.full
@only("prefork")
def test_a_parked_task_is_interrupted_too(book, worker, key):
    """Also a task that was parked before."""
    book.start_holder(key)
    second = book.send("act_abort", key, 1, hold=f"{key}-1")
    book.await_waiting(key, 1)
    book.open(f"{key}-0")
    book.started(second)
    assert book.store.reset(f"k:{key}") == 1
    state, error = book.outcome(second)
    assert (state, type(error)) == (states.FAILURE, LockLost)
    book.await_free(key)


@only("prefork")
def test_the_child_process_survives_and_other_tasks_are_not_interrupted(book, worker, key):
    """The tasks of other locks run to their end, and the children are the same as before."""
    others = [book.send("act_abort", f"{key}-{n}", n, hold=f"{key}-all") for n in range(2)]
    first = book.send("act_abort", key, 7, hold=f"{key}-0")
    for result in (*others, first):
        book.started(result)
    children = set(worker.child_pids())
    book.store.reset(f"k:{key}")
    assert book.outcome(first)[0] == states.FAILURE
    book.open(f"{key}-all")
    assert [book.value(r) for r in others] == [0, 1]
    assert set(worker.child_pids()) == children


@pytest.mark.full
@only("threads")
def test_in_threads_ensure_held_raises_after_a_loss(book, worker, key):
    """A thread cannot be interrupted: ``lost`` is True, and ``ensure_held()`` raises."""
    first = book.send("act_abort", key, 1, end="watch", extra=f"{key}-go")
    book.started(first)
    assert book.store.reset(f"k:{key}") == 1
    book.open(f"{key}-go")
    assert book.value(first)["error"] == "LockLost"

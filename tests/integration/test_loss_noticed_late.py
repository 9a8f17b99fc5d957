"""A lost lock whose loss is noticed only after the end of its task."""

from __future__ import annotations

import fcntl
import signal

import pytest
from celery import states

from support.events import EventLog
from support.waiting import eventually, never

LEASE = 3.0


def lost_count(book):
    (stats,) = book.app.control.inspect(timeout=20, limit=1).stats().values()
    return stats["singleton_lock"]["lost"]


def loses(book, worker, key):
    """Run a task whose lock is taken away while its watchdog stands still, until it has ended.

    A child's watchdog lives in the worker's main process, which is stopped. A thread's stands still
    while the task keeps the interpreter to itself.
    """
    if worker.pool == "threads":
        frozen = book.journal.folder / f"frozen-{key}"
        with frozen.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            task = book.send("act", key, 1, end="freeze", extra=str(frozen))
            book.started(task)
            lapse(book, key)
    else:
        task = book.start_holder(key, 1)
        worker.signal(signal.SIGSTOP)
        lapse(book, key)
        book.open(f"{key}-1")
    eventually(lambda: book.events("end", id=task))
    worker.signal(signal.SIGCONT)
    return task


def lapse(book, key):
    """Let the lease expire, and another client acquire the lock."""
    eventually(lambda: all(holder.expires_in <= 0 for holder in book.view(key).holders))
    book.store.sweep_and_grant(f"k:{key}")
    assert not book.view(key).holders


@pytest.mark.full
def test_a_loss_noticed_at_the_end_of_the_task_is_counted_and_reported_once(own_book, pool, key):
    """One event, with the task's id, and one more in the worker's statistics; the task succeeds."""
    with own_book.worker(pool=pool, args=("-E",)) as worker, EventLog(own_book.app) as events:
        task = loses(own_book, worker, key)
        assert own_book.outcome(task)[0] == states.SUCCESS
        eventually(lambda: "lock-lost" in events.of(task), 10, lambda: events.of(task))
        never(lambda: events.counts(task)["lock-lost"] > 1, 2)
        assert lost_count(own_book) == 1
        (event,) = (e for e in events.seen if e["type"] == "lock-lost")
        assert event["lock"] == f"k:{key}"
        worker.await_log(f"The lock 'k:{key}' was lost")


@pytest.mark.full
def test_a_loss_noticed_while_the_task_runs_is_reported_once(own_book, pool, key):
    """By the watchdog, and not a second time at the end of the task."""
    with own_book.worker(pool=pool, args=("-E",)) as worker, EventLog(own_book.app) as events:
        task = own_book.start_holder(key, 1)
        assert own_book.store.reset(f"k:{key}") == 1
        worker.await_log(f"The lock 'k:{key}' was lost")
        eventually(lambda: "lock-lost" in events.of(task))
        own_book.open(f"{key}-1")
        assert own_book.value(task) == 1
        never(lambda: events.counts(task)["lock-lost"] > 1, 1)
        assert lost_count(own_book) == 1

"""Events of two workers, one of them late: the final state is right."""

from __future__ import annotations

import pytest
from celery.events.state import State

from celery_singleton_lock import Lock
from support.events import EventLog
from support.waiting import eventually, never


def shown(log, task_id):
    """Return what Celery's State makes of the events so far."""
    state = State()
    for event in list(log.seen):
        state.event(event)
    task = state.tasks.get(task_id)
    return task.state if task else ""


@pytest.mark.full
@pytest.mark.parametrize("ends", ["revoked", "waits"])
def test_a_worker_that_stood_still_does_not_show_a_task_as_blocked_that_was_revoked(
    own_book, key, ends
):
    """It parked the task, and its main loop halted before it could say so; another one ended it.

    If the task still waits then, it is shown as blocked, by the late worker.
    """
    book = own_book
    halts, goes_on = (book.journal.folder / name for name in ("halts", "goes-on"))
    lock = Lock(book.client, f"k:{key}", lease=300)
    lock.acquire()
    conf = {"imports": ["integration.halted_loop"]}
    with book.worker(concurrency=1, conf=conf, args=("-E",)), EventLog(book.app) as log:
        task = book.send("act", key, 0)
        eventually(halts.exists, 20, "it halts")
        book.await_waiting(key, 1)
        if ends == "revoked":
            with book.worker(concurrency=1, args=("-E",)) as other:
                eventually(
                    lambda: book.app.control.ping([other.node_name]), 20, "it hears of revokes"
                )
                book.app.control.revoke(task)
                eventually(lambda: shown(log, task) == "REVOKED", 20, lambda: log.of(task))
                goes_on.touch()
                eventually(lambda: book.unacked() == 0, 20, "the late one has come to it")
                never(lambda: shown(log, task) != "REVOKED", 2, "it is shown as blocked")
        else:
            never(lambda: shown(log, task) == "BLOCKED", 1.5, "the loop goes on")
            goes_on.touch()
            eventually(lambda: shown(log, task) == "BLOCKED", 20, lambda: log.of(task))
        lock.release()


@pytest.mark.full
def test_a_late_worker_does_not_show_a_task_as_blocked_that_started_right_after_it_was_parked(
    own_book, key
):
    """It says that the task is blocked, which is out of date; the event of the run comes later."""
    book = own_book
    halts, goes_on, steps_back, parks = (
        book.journal.folder / name for name in ("halts", "goes-on", "steps-back", "parks")
    )
    steps_back.touch()
    lock = Lock(book.client, f"k:{key}", lease=300)
    lock.acquire()
    late = {"imports": ["integration.halted_loop"]}
    with book.worker(concurrency=1, conf=late, args=("-E",)), EventLog(book.app) as log:
        task = book.send("act", key, 0, hold="ends")
        eventually(halts.exists, 20, "it halts")
        with book.worker(concurrency=1, args=("-E",)) as other:
            book.await_consumers(other)
            parks.touch()
            book.await_waiting(key, 1)
            lock.release()
            eventually(lambda: book.starts(key), 10, "it runs")
            goes_on.touch()
            eventually(lambda: shown(log, task) == "STARTED", 20, lambda: log.of(task))
            eventually(lambda: book.unacked() == 0, 20, "the late one has come to it")
            never(lambda: shown(log, task) != "STARTED", 2, lambda: log.of(task))
            assert "task-blocked" in log.of(task)
            book.open("ends")
            eventually(lambda: shown(log, task) == "SUCCESS", 20, lambda: log.of(task))

"""A lock that is taken away while its task runs: the task is notified, its end releases nothing."""

from __future__ import annotations

import time

import pytest

from integration.book import only
from support.waiting import eventually, in_time

LEASE = 15.0


def watching(book, key):
    """Start a task that checks its lock; return it when it holds the lock."""
    first = book.send("act", key, 1, end="watch", extra=f"{key}-go")
    book.started(first)
    book.open(f"{key}-go")
    return first


@pytest.mark.parametrize("how", ["reset", "deleted"])
def test_T10_the_task_is_notified_within_a_renewal_period(book, worker, key, how):
    """The lock is reset, or its keys are deleted: ``self.lock.lost`` within a third of a lease."""
    first = watching(book, key)
    if how == "reset":
        assert book.store.reset(f"k:{key}") == 1
    else:
        book.client.delete(*book.store.keyspace.lock(f"k:{key}"))
    taken = time.monotonic()
    told = eventually(lambda: book.events("told", key=key), 10)[0]
    assert told["lost"]
    assert book.value(first)["error"] == "LockLost"
    in_time(told["t"] - taken, LEASE / 3 + 1)


def test_T10_the_worker_reports_the_loss(book, worker, key):
    """A reset while the task runs is an error in the worker's log within about a lease."""
    first = book.start_holder(key, 1)
    assert book.store.reset(f"k:{key}") == 1
    worker.await_log(f"The lock 'k:{key}' was lost")
    (report,) = book.app.control.inspect(timeout=20, limit=1)._request("locks").values()
    assert [each["state"] for each in report["locks"] if each["lock"] == f"k:{key}"] == ["lost"]
    assert report["held"] == 0
    book.open(f"{key}-1")
    assert book.value(first) == 1


def test_T28_a_reset_lock_goes_to_the_next_through_the_normal_path(book, worker, key):
    """After a reset the next waiter is granted, with a higher fence.

    The former holder releases nothing.
    """
    first = book.send("act", key, 1, hold=f"{key}-1")
    fence = book.started(first)["fence"]
    second, third = book.send("act", key, 2, hold=f"{key}-2"), book.send("act", key, 3)
    book.await_waiting(key, 2)
    assert book.store.reset(f"k:{key}") == 1
    assert book.started(second)["fence"] > fence
    book.open(f"{key}-1")
    eventually(lambda: book.events("end", key=key, n=1), 5)
    book.value(first)
    assert book.order(key) == [1, 2]
    assert [h.task_id for h in book.view(key).holders] == [second]
    book.open(f"{key}-2")
    assert [book.value(second), book.value(third)] == [2, 3]
    book.await_free(key)


@pytest.mark.full
def test_T9_nothing_is_renewed_after_its_release(book, worker, key):
    """After 50 tasks no holder is left, and none reappears while the worker renews."""
    for result in [book.send("act", f"{key}-{n % 5}", n) for n in range(50)]:
        book.value(result)
    for n in range(5):
        book.await_free(f"{key}-{n}")
    first = book.start_holder(key)
    book.await_renewal(key)
    book.open(f"{key}-0")
    book.value(first)
    for n in range(5):
        assert book.view(f"{key}-{n}").holders == ()


@pytest.mark.full
def test_a_task_longer_than_its_lease_keeps_its_lock(book, worker, key):
    """The watchdog renews: no other task gets the lock."""
    first = book.start_holder(key, 1)
    second = book.send("act", key, 2)
    book.await_renewal(key)
    book.open(f"{key}-1")
    assert [book.value(first), book.value(second)] == [1, 2]
    assert book.peak(key) == 1
    assert f"The lock 'k:{key}' was lost" not in worker.log()


@only("prefork")
def test_T11_a_child_that_hogs_its_interpreter_is_renewed(book, worker, key):
    """A child computes: the main process renews, and no other task gets the lock."""
    first = book.send("act", key, 1, end="hog", extra=f"{key}-1")
    book.started(first)
    second = book.send("act", key, 2)
    book.await_renewal(key)
    book.open(f"{key}-1")
    assert book.value(second, 20) == 2
    assert book.peak(key) == 1
    book.value(first)

"""A lock that is taken away in mid-run: the task is told, and its late end frees nothing."""

from __future__ import annotations

import time

import pytest

from integration.book import only
from support.waiting import eventually, in_time

LEASE = 3.0


def watching(book, key):
    """Start a task that looks at its lock; return it once it holds."""
    first = book.send("act", key, 1, end="watch", extra=f"{key}-go")
    book.started(first)
    book.open(f"{key}-go")
    return first


@pytest.mark.parametrize("how", ["reset", "deleted"])
def test_T10_the_task_is_told_within_a_renewal_period(book, worker, key, how):
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
    """A lock that is reset in mid-run is an error in the worker's log, within a lease or so."""
    first = book.send("act", key, 1, hold=f"{key}-1")
    book.started(first)
    assert book.store.reset(f"k:{key}") == 1
    worker.await_log(f"The lock 'k:{key}' was lost", LEASE / 3 + 3)
    book.open(f"{key}-1")
    assert book.value(first) == 1


def test_T28_a_reset_lock_goes_to_the_next_through_the_normal_path(book, worker, key):
    """After a reset the next in line is granted, with a higher fence; the loser frees nothing."""
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


def test_T9_nothing_is_renewed_after_its_release(book, worker, key):
    """When 50 tasks have run, no holder is left, and none comes back while the worker renews."""
    for result in [book.send("act", f"{key}-{n % 5}", n) for n in range(50)]:
        book.value(result)
    for n in range(5):
        book.await_free(f"{key}-{n}")
    first = book.send("act", key, 1, hold=LEASE + 0.5)
    book.value(first)
    for n in range(5):
        assert book.view(f"{key}-{n}").holders == ()


def test_a_task_longer_than_its_lease_keeps_its_lock(book, worker, key):
    """The watchdog renews: a task of 1.5 leases is not overtaken, and was never lost."""
    first = book.send("act", key, 1, hold=LEASE * 1.5)
    book.started(first)
    second = book.send("act", key, 2)
    assert [book.value(first), book.value(second)] == [1, 2]
    assert book.peak(key) == 1
    assert f"The lock 'k:{key}' was lost" not in worker.log()


@only("prefork")
def test_T11_a_child_that_hogs_its_interpreter_is_renewed(book, worker, key):
    """Busy for 1.5 leases in a child: the main process renews, nobody overtakes."""
    first = book.send("act", key, 1, end="hog", extra=LEASE * 1.5)
    book.started(first)
    second = book.send("act", key, 2)
    assert book.value(second, 20) == 2
    assert book.peak(key) == 1
    book.value(first)

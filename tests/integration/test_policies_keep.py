"""lock_on_retry="keep": a retried task keeps its permit for the next attempt (T15, T42)."""

from __future__ import annotations

import pytest

from support.waiting import eventually

LEASE = 15.0


@pytest.fixture(scope="module")
def lease():
    """It does not end while a process stands still."""
    return LEASE


def retrying(book, key, countdown, task="act_keep"):
    """Start a task that retries, and another one of the same key; return both."""
    first = book.send(task, key, 0, end="retry", extra=countdown)
    book.started(first)
    return first, book.send("act", key, 1)


def reserved(book, key):
    """Wait until the key's lock is reserved; return the holder."""
    return eventually(
        lambda: [h for h in book.view(key).holders if h.state == "reserved"],
        message=lambda: f"reserved: {book.view(key)}",
    )[0]


@pytest.mark.parametrize("task", ["act_keep", "act_keep_late"])
def test_T15_no_other_task_runs_between_the_attempts(book, worker, key, task):
    """The retry runs before a task that was sent after the first attempt; they do not overlap."""
    first, behind = retrying(book, key, 2.0, task)
    assert [book.value(first), book.value(behind)] == [0, 1]
    assert [(s["n"], s["retries"]) for s in book.starts(key)] == [(0, 0), (0, 1), (1, 0)]
    assert book.peak(key) == 1
    book.await_free(key)


@pytest.mark.full
def test_T42_a_countdown_longer_than_the_lease_is_kept_throughout(book, worker, key):
    """Neither waiting nor new tasks run before the retry."""
    first, behind = retrying(book, key, LEASE + 4)
    assert reserved(book, key).task_id == first
    late = book.send("act", key, 2)
    assert [book.value(r) for r in (first, behind, late)] == [0, 1, 2]
    assert book.order(key) == [0, 0, 1, 2]
    book.await_free(key)


def test_T42_a_revoke_during_the_countdown_grants_the_next(book, worker, key):
    """Revoked in mid-countdown: the reservation ends soon, not with its ETA."""
    first, behind = retrying(book, key, 600.0)
    reserved(book, key)
    book.app.control.revoke(first)
    assert book.value(behind) == 1
    assert book.order(key) == [0, 1]
    book.await_free(key)


def test_a_retry_without_countdown_runs_next(book, worker, key):
    """Also if the retry arrives before its first attempt has released the lock."""
    for n in range(5):
        first = book.send("act_keep", f"{key}-{n}", 0, end="retry", extra=0.001)
        behind = [book.send("act", f"{key}-{n}", m) for m in (1, 2)]
        assert [book.value(r) for r in (first, *behind)] == [0, 1, 2]
        assert book.peak(f"{key}-{n}") == 1
        book.await_free(f"{key}-{n}")


def test_a_task_that_ends_otherwise_keeps_nothing(book, worker, key):
    """Success, failure and a rejected message free the lock at once."""
    for end in ("return", "raise", "reject", "ignore"):
        book.send("act_keep", key, 0, end=end)
        assert book.value(book.send("act_keep", key, 1), 3) == 1
    book.await_free(key)


@pytest.mark.full
def test_release_lets_others_run_between_the_attempts(book, worker, key):
    """The default: the other task runs during the countdown."""
    first, behind = retrying(book, key, 10.0, "act")
    assert [book.value(behind), book.value(first)] == [1, 0]
    assert book.order(key) == [0, 1, 0]

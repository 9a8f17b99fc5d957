"""lock_on_retry="keep": a retried task's permit is kept for its next attempt (T15, T42)."""

from __future__ import annotations

import pytest
from celery import states

from support.waiting import eventually, never


def retrying(book, key, countdown, task="act_keep"):
    """Let a task retry, with another one behind it; return both."""
    first = book.send(task, key, 0, end="retry", extra=countdown)
    book.started(first)
    return first, book.send("act", key, 1)


def reserved(book, key):
    """Wait until the key's lock is reserved; return by whom."""
    return eventually(
        lambda: [h for h in book.view(key).holders if h.state == "reserved"],
        message=lambda: f"reserved: {book.view(key)}",
    )[0]


@pytest.mark.parametrize("task", ["act_keep", "act_keep_late"])
def test_T15_nobody_passes_between_the_attempts(book, worker, key, task):
    """The retry runs before who came after its first attempt; both have the lock alone."""
    first, behind = retrying(book, key, 1.0, task)
    assert reserved(book, key).task_id == first
    assert [book.value(first), book.value(behind)] == [0, 1]
    assert [(s["n"], s["retries"]) for s in book.starts(key)] == [(0, 0), (0, 1), (1, 0)]
    assert book.peak(key) == 1
    book.await_free(key)


def test_T42_a_countdown_longer_than_the_lease_is_kept_throughout(book, worker, key):
    """8 s with a lease of 3 s: who waits, and who comes, does not pass."""
    first, behind = retrying(book, key, 8.0)
    reserved(book, key)
    late = book.send("act", key, 2)
    never(lambda: len(book.starts(key)) > 1, 6)
    assert [book.value(r) for r in (first, behind, late)] == [0, 1, 2]
    assert book.order(key) == [0, 0, 1, 2]
    book.await_free(key)


def test_T42_a_revoke_meanwhile_lets_the_next_go_on(book, worker, key):
    """Revoked in mid-countdown: the reservation ends within about a second, not with its ETA."""
    first, behind = retrying(book, key, 20.0)
    reserved(book, key)
    book.app.control.revoke(first)
    assert book.value(behind, 5) == 1
    assert book.order(key) == [0, 1]
    book.await_free(key)


def test_a_retry_without_countdown_keeps_its_turn(book, worker, key):
    """The retry may be here before its first attempt has released; it is next all the same."""
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


def test_release_lets_others_run_between_the_attempts(book, worker, key):
    """The default: the other task runs during the countdown."""
    first, behind = retrying(book, key, 1.5, "act")
    assert book.value(behind) == 1
    assert book.state(first) == states.RETRY
    assert book.value(first) == 0
    assert book.order(key) == [0, 1, 0]

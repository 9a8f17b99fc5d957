"""Tasks with several locks while the locks' Redis is away."""

from __future__ import annotations

import pytest
from celery import states

from celery_singleton_lock.errors import BackendUnreachable
from integration.book import Book
from support.waiting import eventually, never

pytestmark = pytest.mark.chaos

LEASE = 15.0


@pytest.fixture
def locks(make_redis):
    return make_redis()


@pytest.fixture
def book(redis_url, locks, tmp_path):
    conf = {"singleton_lock_backend": locks.url, "singleton_lock_lease": LEASE}
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        yield book


@pytest.mark.full
def test_tasks_that_come_while_redis_is_away_take_all_locks_when_it_is_back(book, locks):
    """They are held, unacknowledged, and then run one at a time; or do what they declare."""
    locks.kill()
    with book.worker(concurrency=3):
        state, error = book.outcome(book.send("pair_failing", "a", "b"))
        assert (state, type(error)) == (states.FAILURE, BackendUnreachable)
        unlocked = book.send("pair_running", "c", "d")
        book.value(unlocked)
        assert book.started(unlocked)["locks"] == []
        pairs = [book.send("pair", *names) for names in ("ab", "ba", "ab", "ba")]
        never(lambda: book.starts(task="pair"), 0.5)
        locks.restart(keep_data=False)
        for pair in pairs:
            book.value(pair, LEASE + 12)
        assert all(len(start["locks"]) == 2 for start in book.starts(task="pair"))
        book.await_free("a", LEASE + 3)
        book.await_free("b", LEASE + 3)


@pytest.mark.full
@pytest.mark.needs_real_redis("data over a restart")
def test_a_task_that_keeps_a_lock_survives_an_outage_longer_than_its_lease(book, locks):
    """What it kept has lapsed: it begins again, after who has got that lock meanwhile."""
    with book.worker(concurrency=3):
        first = book.start_holder("b", 1)
        pair = book.send("pair", "a", "b")
        book.await_waiting("b", 1)
        eventually(lambda: len(book.view("a").holders) == 1)
        behind = book.send("act", "a", 2)
        book.await_waiting("a", 1)
        with locks.client() as client:
            client.save()
        locks.kill()
        lapsed = book.broker.time()[0] + LEASE + 1
        eventually(lambda: book.broker.time()[0] > lapsed, 10, "its leases have ended")
        locks.restart(keep_data=True)
        book.value(behind, LEASE + 15)
        book.open("b-1")
        for task in (first, pair):
            book.value(task, LEASE + 15)
        assert [start["id"] for start in book.starts("a")] == [behind, pair]
        assert book.peak("a") == 1
        book.await_free("a", LEASE + 3)
        book.await_free("b", LEASE + 3)


@pytest.mark.full
@pytest.mark.needs_real_redis("data over a restart")
def test_a_task_that_ended_after_the_last_snapshot_does_not_block_its_locks(book, locks):
    """Redis delivers it under another token than that of its message. It is ended under that."""
    with book.worker(concurrency=3):
        book.start_holder("a", 1)
        pair = book.send("pair_lost", "a", "b", hold="ran")
        book.await_waiting("a", 1)
        book.open("a-1")
        book.started(pair)
        with locks.client() as client:
            client.save()
        book.open("ran")
        book.value(pair)
        book.await_free("a")
        locks.kill()
        lapsed = book.broker.time()[0] + LEASE + 1
        eventually(lambda: book.broker.time()[0] > lapsed, LEASE + 5, "its leases have ended")
        locks.restart(keep_data=True)
        book.value(book.send("act", "a", 2), 8)
        assert len(book.starts(id=pair)) == 1

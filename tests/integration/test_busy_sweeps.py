"""Sweeps of workers with few slots, or with more granted tasks than they can soon run."""

from __future__ import annotations

import pytest

from celery_singleton_lock import Lock
from integration.book import LONG_LEASE
from support.waiting import eventually

LEASE = LONG_LEASE
KEYS = [f"busy{n}" for n in range(8)]
EACH = 15


@pytest.mark.full
def test_leases_and_waits_end_during_a_backlog_of_granted_tasks(own_book):
    """Eight locks grant to the one slot, which is busy with them for two minutes."""
    with own_book.worker(pool="prefork", concurrency=1):
        own_book.park_backlog(KEYS, EACH, 1.0)
        eventually(own_book.starts, 20, "the locks are granted")
        dead = Lock(own_book.client, "k:dead", lease=4, renew=False, thread_local=False)
        alive = Lock(own_book.client, "k:alive", lease=120, thread_local=False)
        assert dead.acquire()
        assert alive.acquire()
        waits = own_book.send("act", "dead")
        patient = own_book.send("act_patient", "alive")
        own_book.started(waits, 60)
        assert own_book.outcome(patient, 60)[0] == "FAILURE"
        assert len(own_book.starts()) < len(KEYS) * EACH, "the backlog is not over"
        alive.release()


@pytest.mark.full
@pytest.mark.parametrize("small", ["prefork", "solo"])
def test_the_waiters_of_many_dead_holders_begin_in_time_on_one_slot(own_book, small):
    """The tasks are short, but four locks a second were swept: the last began after 15 s."""
    keys = [f"dead{n}" for n in range(60)]
    with own_book.worker(pool=small, concurrency=1):
        for key in keys:
            lock = Lock(own_book.client, f"k:{key}", lease=8, renew=False, thread_local=False)
            assert lock.acquire()
        sent = [own_book.send("act", key) for key in keys]
        for key in keys:
            own_book.await_waiting(key, 1)
        assert not own_book.starts()
        begun = [own_book.started(each, 30)["t"] for each in sent]
    assert max(begun) - min(begun) < 8

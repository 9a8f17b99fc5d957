"""Sweeps of workers in which more granted tasks wait for a slot than they can soon run."""

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

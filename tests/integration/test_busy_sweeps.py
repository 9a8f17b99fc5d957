"""Sweeps of workers in which more granted tasks wait for a slot than they can soon run."""

from __future__ import annotations

from contextlib import ExitStack

from celery_singleton_lock import Lock
from integration.book import LONG_LEASE
from support.waiting import eventually

LEASE = LONG_LEASE
KEYS = [f"busy{n}" for n in range(8)]
EACH = 15


def test_leases_and_waits_end_during_a_backlog_of_granted_tasks(own_book):
    """Eight locks grant to the one slot, which is busy with them for half a minute."""
    with own_book.worker(pool="prefork", concurrency=1):
        with ExitStack() as held:
            for key in KEYS:
                held.enter_context(Lock(own_book.client, f"k:{key}", lease=60))
            for n in range(EACH):
                for key in KEYS:
                    own_book.send("act", key, n, hold=0.3)
            for key in KEYS:
                own_book.await_waiting(key, EACH)
        eventually(lambda: len(own_book.starts()) > len(KEYS), 10, "each lock grants")
        dead = Lock(own_book.client, "k:dead", lease=4, renew=False, thread_local=False)
        alive = Lock(own_book.client, "k:alive", lease=60, thread_local=False)
        assert dead.acquire()
        assert alive.acquire()
        waits = own_book.send("act", "dead")
        patient = own_book.send("act_patient", "alive")
        own_book.started(waits, 4 + 2 + 4)
        assert own_book.outcome(patient, 8)[0] == "FAILURE"
        assert len(own_book.starts()) < len(KEYS) * EACH, "the backlog is not over"
        alive.release()

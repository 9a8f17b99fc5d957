"""A cold shutdown (SIGQUIT) of gevent and eventlet, whose pools are full."""

from __future__ import annotations

import signal

import pytest

from celery_singleton_lock.worker.pools import GREEN
from integration.book import LONG_LEASE, needs_pool, only_kind
from support.waiting import eventually

LEASE = LONG_LEASE
TASKS = 5


@pytest.mark.parametrize("pool", GREEN)
@only_kind("classic")
def test_a_task_that_waits_for_a_slot_runs_on_another_worker(make_book, pool):
    """Celery's signal handler fails in the event loop; its error is not one of that task."""
    needs_pool(pool)
    book = make_book(conf={"worker_prefetch_multiplier": TASKS})
    with book.worker(pool=pool, concurrency=2) as worker:
        sent = [book.send("act_late", f"k{n}", n, hold=4.0) for n in range(TASKS)]
        eventually(lambda: worker.log().count("] received") == 3)
        worker.signal(signal.SIGQUIT)
        worker.wait()
    with book.worker(pool=pool, concurrency=TASKS):
        assert [book.value(result) for result in sent] == [*range(TASKS)]

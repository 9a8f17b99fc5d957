"""A granted task does not wait behind tasks that hold no lock: its lock would be idle meanwhile."""

from __future__ import annotations

import pytest

from celery_singleton_lock import Lock
from integration.book import needs_pool, pools
from support.waiting import eventually

PLUGS = 6


@pytest.fixture(params=pools("prefork", "threads", "gevent"))
def pool(request):
    """The pool of the worker."""
    needs_pool(request.param)
    return request.param


def granted_in_worker(book):
    """Return the number of granted tasks that have not begun in the only worker."""
    (stats,) = book.app.control.inspect(timeout=20, limit=1).stats().values()
    return stats["singleton_lock"]["granted"]


def test_a_granted_task_starts_before_tasks_that_were_prefetched(own_book, pool):
    """One slot; each task holds it until its gate is opened."""
    book = own_book
    lock = Lock(book.client, "k:a", lease=60, thread_local=False)
    lock.acquire()
    with book.worker(pool=pool, concurrency=1):
        book.send("act", "a", 1)
        book.await_waiting("a", 1)
        plugs = [book.send("plain", "plug", n, hold=f"plug-{n}") for n in range(PLUGS)]
        book.started(plugs[0])
        lock.release()
        eventually(lambda: granted_in_worker(book) == 1)
        for number in range(PLUGS):
            book.open(f"plug-{number}")
            book.value(plugs[number])
    started = [start["key"] for start in book.starts()]
    assert started.index("a") <= 2, started

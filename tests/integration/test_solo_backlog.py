"""A solo worker with many granted tasks, or with many that have waited for the locks' Redis."""

from __future__ import annotations

import pytest

from integration.book import LONG_LEASE, Book
from support.proxy import Proxy
from support.waiting import eventually

LEASE = LONG_LEASE
KEYS, EACH = ("a", "b", "c"), 20


@pytest.fixture
def backlog(own_book):
    """A solo worker, and tasks for a minute that are granted one after another."""
    with own_book.worker(pool="solo") as worker:
        own_book.park_backlog(KEYS, EACH, 1.0)
        eventually(lambda: len(own_book.starts()) > 1, 20, "they are granted")
        yield worker


@pytest.mark.full
def test_a_solo_worker_runs_other_tasks_during_a_backlog_of_grants(own_book, backlog):
    """It reads from its broker between two granted tasks."""
    own_book.started(own_book.send("plain", "other"), 20)
    assert own_book.app.control.ping([backlog.node_name], timeout=20)


def test_a_solo_worker_stops_during_a_backlog_of_grants(own_book, backlog):
    """It ends the task that it runs, and leaves the others parked."""
    backlog.terminate()
    assert backlog.wait(20) == 0
    assert len(own_book.starts()) < len(KEYS) * EACH


@pytest.mark.full
def test_a_solo_worker_stops_although_many_tasks_have_waited_for_redis(
    redis_server, redis_url, tmp_path
):
    """The others stay with the broker."""
    with Proxy(redis_server.port) as proxy:
        conf = {"singleton_lock_backend": proxy.url, "singleton_lock_lease": LONG_LEASE}
        with (
            Book(redis_url, tmp_path, lock_url=redis_url, conf=conf) as book,
            book.worker(pool="solo") as worker,
        ):
            proxy.stalled = True
            for n in range(60):
                book.send("act", f"key-{n}", n, hold=1.0)
            worker.await_log("Locked tasks wait", 20)
            eventually(lambda: worker.log().count("received") == 60, 30)
            proxy.cut()
            proxy.stalled = False
            eventually(lambda: len(book.starts()) > 1, 30, "they run")
            worker.terminate()
            assert worker.wait(20) == 0
            assert len(book.starts()) < 60

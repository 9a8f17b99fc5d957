"""A worker that acknowledges a parked message only when a replica has it (WAIT)."""

from __future__ import annotations

import time

import pytest

from integration.book import Book
from support.replication import is_replicated
from support.waiting import eventually, in_time

pytestmark = [pytest.mark.integration, pytest.mark.needs_real_redis("replication")]


def test_a_message_that_no_replica_has_stays_with_the_broker(redis_url, make_redis, tmp_path):
    """It is parked and unacknowledged; when the replica follows again, the broker forgets it."""
    master = make_redis("--repl-diskless-sync-delay", "0")
    replica = make_redis("--replicaof", f"127.0.0.1 {master.port}")
    with master.client() as client:
        eventually(lambda: is_replicated(client), 10, "the replica follows")
    conf = {"singleton_lock_backend": master.url, "singleton_lock_replicas_wait": 1}
    conf["singleton_lock_replicas_timeout"] = 0.1
    with Book(redis_url, tmp_path, lock_url=master.url, conf=conf) as book, book.worker() as worker:
        first = book.send("act", "a", 1, hold="a-1")
        book.started(first)
        replica.pause()
        second = book.send("act", "a", 2)
        book.await_waiting("a", 1)
        worker.await_log("Fewer than 1 replicas of the lock's Redis have it", 10)
        assert book.unacked() == 1
        replica.resume()
        eventually(lambda: book.unacked() == 0, 10, "the parked one is acknowledged")
        book.open("a-1")
        assert [book.value(each) for each in (first, second)] == [1, 2]
        assert book.order("a") == [1, 2]
        book.await_free("a")


def test_a_missing_replica_delays_no_other_task_of_the_worker(redis_url, make_redis, tmp_path):
    """Only the messages that it lacks stay with the broker; all others go on."""
    master = make_redis("--repl-diskless-sync-delay", "0")
    replica = make_redis("--replicaof", f"127.0.0.1 {master.port}")
    with master.client() as client:
        eventually(lambda: is_replicated(client), 10, "the replica follows")
    conf = {"singleton_lock_backend": master.url, "singleton_lock_replicas_wait": 1}
    conf["singleton_lock_replicas_timeout"] = 1.5
    with Book(redis_url, tmp_path, lock_url=master.url, conf=conf) as book, book.worker() as worker:
        running = [book.send("act", key, 0, hold=f"{key}-0") for key in "ab"]
        for each in running:
            book.started(each)
        parked = [book.send("act", "b", n) for n in range(1, 7)]
        eventually(lambda: book.view("b").bodies == 6 and book.unacked() == 0, 10)
        replica.pause()
        late = [book.send("act", "a", n) for n in range(1, 4)]
        worker.await_log("Fewer than 1 replicas of the lock's Redis have it", 10)
        book.open("b-0")
        began = time.monotonic()
        assert [book.value(each) for each in parked] == list(range(1, 7))
        in_time(time.monotonic() - began, 2.0)
        assert book.unacked() == 3
        assert worker.log().count("Fewer than 1 replicas") == 1
        replica.resume()
        eventually(lambda: book.unacked() == 0, 10, "the parked ones are acknowledged")
        book.open("a-0")
        assert [book.value(each) for each in late] == [1, 2, 3]

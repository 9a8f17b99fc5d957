"""A worker that acknowledges a parked message only when a replica has it (WAIT)."""

from __future__ import annotations

import time

import pytest

from integration.book import LONG_LEASE, Book
from support.proxy import Proxy
from support.replication import is_replicated
from support.waiting import eventually, in_time

pytestmark = [pytest.mark.integration, pytest.mark.needs_real_redis("replication")]


@pytest.fixture
def master(make_redis):
    """The Redis of the locks."""
    return make_redis("--repl-diskless-sync-delay", "0")


@pytest.fixture
def replica(make_redis, master):
    """A replica of it, which has its data."""
    replica = make_redis("--replicaof", f"127.0.0.1 {master.port}")
    with master.client() as client:
        eventually(lambda: is_replicated(client), 10, "the replica follows")
    return replica


@pytest.fixture
def make_book(redis_url, master, tmp_path):
    """Make a task book whose workers wait so many seconds for the replica."""

    def make(timeout):
        conf = {
            "singleton_lock_backend": master.url,
            "singleton_lock_replicas_wait": 1,
            "singleton_lock_replicas_timeout": timeout,
            "singleton_lock_lease": LONG_LEASE,
        }
        return Book(redis_url, tmp_path, lock_url=master.url, conf=conf)

    return make


@pytest.mark.full
def test_a_message_that_no_replica_has_stays_with_the_broker(make_book, replica):
    """It is parked and unacknowledged; when the replica follows again, the broker forgets it."""
    with make_book(timeout=0.1) as book, book.worker() as worker:
        first = book.start_holder("a", 1)
        replica.pause()
        second = book.send("act", "a", 2)
        book.await_waiting("a", 1)
        worker.await_log("Fewer than 1 replicas of the locks' Redis have it", 10)
        eventually(lambda: book.unacked() == 1)
        replica.resume()
        eventually(lambda: book.unacked() == 0, 10, "the parked one is acknowledged")
        book.open("a-1")
        assert [book.value(each) for each in (first, second)] == [1, 2]
        assert book.order("a") == [1, 2]
        book.await_free("a")


@pytest.mark.full
def test_a_missing_replica_delays_no_other_task_of_the_worker(make_book, replica):
    """Only the messages that it lacks stay with the broker; all others go on."""
    with make_book(timeout=1.5) as book, book.worker() as worker:
        running = [book.send("act", key, 0, hold=f"{key}-0") for key in "ab"]
        for each in running:
            book.started(each)
        parked = [book.send("act", "b", n) for n in range(1, 13)]
        eventually(lambda: book.view("b").bodies == 12 and book.unacked() == 0, 10)
        replica.pause()
        late = [book.send("act", "a", n) for n in range(1, 4)]
        worker.await_log("Fewer than 1 replicas of the locks' Redis have it", 10)
        book.open("b-0")
        began = time.monotonic()
        assert [book.value(each) for each in parked] == list(range(1, 13))
        in_time(time.monotonic() - began, 2.0)
        assert book.unacked() == 3
        assert worker.log().count("Fewer than 1 replicas") == 1
        replica.resume()
        eventually(lambda: book.unacked() == 0, 10, "the parked ones are acknowledged")
        book.open("a-0")
        assert [book.value(each) for each in late] == [1, 2, 3]


def calls_of(client, command):
    """Return how often clients have called a command."""
    return client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


@pytest.mark.full
def test_a_message_that_is_parked_just_before_a_failover_runs(
    redis_url, make_redis, master, replica, tmp_path
):
    """The former master alone has it, and the replicas of the new one confirm it."""
    make_redis("--repl-diskless-sync-delay", "0", "--replicaof", f"127.0.0.1 {replica.port}")
    with Proxy(master.port) as proxy, replica.client(decode_responses=True) as new:
        conf = {
            "singleton_lock_backend": proxy.url,
            "singleton_lock_replicas_wait": 1,
            "singleton_lock_lease": LONG_LEASE,
        }
        book = Book(redis_url, tmp_path, lock_url=replica.url, conf=conf)
        with book, book.worker():
            first = book.start_holder("a", 1)
            eventually(lambda: new.keys("*k:a:holders"), 10, "the new master has the lock")
            new.replicaof("NO", "ONE")
            eventually(lambda: is_replicated(new), 10, "it has a replica")
            before = calls_of(new, "wait")
            proxy.target = replica.port  # of new connections, such as the one that confirms
            second = book.send("act", "a", 2)
            eventually(lambda: calls_of(new, "wait") >= before + 2, 10, "it is parked again")
            master.kill()
            proxy.cut()
            book.open("a-1")
            assert [book.value(each) for each in (first, second)] == [1, 2]

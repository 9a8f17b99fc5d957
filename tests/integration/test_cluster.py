"""Workers with their locks in a Redis Cluster with three masters."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, closing

import pytest

from celery_singleton_lock import Lock
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.factory import admin_of
from integration.book import Book
from support.events import EventLog
from support.redis_cluster import RedisCluster
from support.replication import is_replicated
from support.waiting import eventually, never

pytestmark = [pytest.mark.integration, pytest.mark.needs_real_redis("a Cluster")]

KEYS = ("a", "b", "c", "d", "e", "f")
"""Their locks live on different masters."""


@pytest.fixture
def book(redis_url, redis_cluster, cluster_client, tmp_path):
    """The broker is one server, the locks are in the Cluster."""
    conf = {"singleton_lock_backend": redis_cluster.url, "singleton_lock_lease": 10.0}
    with Book(redis_url, tmp_path, conf=conf) as book:
        book.store = ClusterStore(cluster_client)
        yield book


@pytest.mark.full
def test_tasks_of_many_locks_run_in_order_and_one_at_a_time(book, redis_cluster):
    """Six locks on three masters, 50 tasks, four slots: none overlaps, none is lost, in order."""
    owners = {redis_cluster.owner(book.store.keyspace.lock(f"k:{key}").meta).port for key in KEYS}
    assert len(owners) > 1
    with book.worker(concurrency=4) as worker:
        gates = {key: book.send("act", key, 0, hold=f"{key}-0") for key in KEYS[:2]}
        for result in gates.values():
            book.started(result)
        sent = [book.send("act", key, n) for n in range(1, 9) for key in KEYS]
        for key in KEYS[:2]:
            book.await_waiting(key, 8, timeout=20)
            book.open(f"{key}-0")
        for result in sent:
            book.value(result)
        assert {key: book.peak(key) for key in KEYS} == dict.fromkeys(KEYS, 1)
        for key in KEYS:
            assert [n for n in book.order(key) if n] == list(range(1, 9))
        for key in KEYS:
            book.await_free(key)
        assert "locks live in Redis" in worker.log()
        assert admin_of(book.store).workers()


def test_the_lock_of_a_killed_child_goes_to_the_next_task(book):
    """Kill -9 in mid-run: the parked task starts, and the lock is free at the end."""
    with book.worker():
        first = book.send("act", "a", 1, hold="a-1")
        pid = book.started(first)["pid"]
        second = book.send("act", "a", 2)
        book.await_waiting("a", 1)
        os.kill(pid, signal.SIGKILL)
        assert book.value(second) == 2
        assert [start["n"] for start in book.starts("a")] == [1, 2]
        book.await_free("a")


@pytest.mark.full
def test_a_parked_task_is_shown_as_blocked_by_a_worker_that_stood_still(book):
    """It looks again whether the task still waits: in the bucket of its lock."""
    folder = book.journal.folder
    lock = Lock(book.store, "k:a", lease=300)
    conf = {"imports": ["integration.halted_loop"]}
    with lock, book.worker(concurrency=1, conf=conf, args=("-E",)), EventLog(book.app) as log:
        task = book.send("act", "a", 0)
        eventually((folder / "halts").exists, 20, "it halts")
        book.await_waiting("a", 1)
        never(lambda: "task-blocked" in log.of(task), 1.2, "the loop goes on")
        (folder / "goes-on").touch()
        eventually(lambda: "task-blocked" in log.of(task), 20, lambda: log.of(task))


def test_a_url_that_is_no_cluster_stops_the_worker(redis_url, tmp_path):
    """The error names what to write instead."""
    url = redis_url.replace("redis://", "redis+cluster://").removesuffix("/0")
    with Book(redis_url, tmp_path) as book:
        worker = book.worker(conf={"singleton_lock_backend": url}).start(wait=False)
        assert worker.wait() != 0
        assert "write redis:// instead of redis+cluster://" in worker.log()


@pytest.mark.full
def test_t24_after_the_death_of_a_master_each_task_runs(redis_url, redis_provider, tmp_path):
    """Its replica is promoted while a task runs.

    The holder keeps running, parked tasks follow in order.
    """
    with ExitStack() as stack:
        cluster = stack.enter_context(RedisCluster(redis_provider, replicas=1))
        client = stack.enter_context(closing(cluster.client()))
        conf = {"singleton_lock_backend": cluster.url, "singleton_lock_lease": 30.0}
        book = stack.enter_context(Book(redis_url, tmp_path, conf=conf))
        book.store = ClusterStore(client)
        worker = stack.enter_context(book.worker())
        first = book.start_holder("a", 1)
        parked = [book.send("act", "a", n) for n in (2, 3)]
        book.await_waiting("a", 2)
        old = cluster.owner(book.store.keyspace.lock("k:a").meta)
        new = cluster.partner(old)
        with old.client() as admin:
            mark = book.store.keyspace.waited("k:a")
            eventually(lambda: is_replicated(admin, mark), 5, "replicated")
        cluster.set_patience(1000)  # so that the replica is promoted well within the lease
        old.kill()
        assert book.value(book.send("plain", "p", 1)) == 1
        with new.client(decode_responses=True) as admin:
            eventually(lambda: admin.info()["role"] == "master", 20, "the replica is promoted")
        book.open("a-1")
        assert [book.value(each, 30) for each in (first, *parked)] == [1, 2, 3]
        assert book.value(book.send("act", "a", 4), 30) == 4
        assert (book.order("a"), book.peak("a")) == ([1, 2, 3, 4], 1)
        fences = [start["fence"] for start in book.starts("a")]
        assert fences == sorted(set(fences))
        assert "was lost" not in worker.log()

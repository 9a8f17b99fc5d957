"""Addresses of the locks: Valkey, sockets, ACL users, a Redis other than the broker's."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from celery_singleton_lock.cli import main
from integration.book import LONG_LEASE, Book

LONG = {"singleton_lock_lease": LONG_LEASE}
SECRET = "p@ss:w/rd"
QUOTED = "p%40ss%3Aw%2Frd"


def works(book, key="a", pool="prefork"):
    """Run three tasks of one key on a worker of its own; return the worker's log."""
    with book.worker(concurrency=2, pool=pool) as worker:
        first = book.start_holder(key)
        rest = [book.send("act", key, n) for n in (1, 2)]
        book.await_waiting(key, 2)
        book.open(f"{key}-0")
        assert [book.value(r) for r in (first, *rest)] == [0, 1, 2]
        assert book.order(key) == [0, 1, 2]
        book.await_free(key)
        return worker.log()


def test_locks_live_in_another_redis_than_the_brokers(redis_url, make_redis, tmp_path):
    """``singleton_lock_backend``: the broker's Redis has no keys of locks."""
    locks = make_redis()
    conf = LONG | {"singleton_lock_backend": locks.url, "singleton_lock_prefix": "mine"}
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        works(book)
        assert book.client.keys("mine:*")
        assert not book.client.keys("csl:*")
        assert not book.broker.keys("mine:*")


def test_a_worker_and_a_command_take_a_url_of_valkey(redis_url, make_redis, tmp_path):
    """``valkey://`` is ``redis://``: Valkey speaks the same protocol."""
    locks = make_redis()
    url = locks.url.replace("redis://", "valkey://")
    conf = LONG | {"singleton_lock_backend": url}
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        works(book)
        listed = CliRunner().invoke(main, ["--backend", url, "list", "--idle"])
    assert "k:a" in listed.output


@pytest.mark.full
@pytest.mark.needs_real_redis
def test_unix_socket(redis_url, make_redis, tmp_path):
    """``unix://`` with a database."""
    path = tmp_path / "redis.sock"
    locks = make_redis("--unixsocket", str(path))
    conf = LONG | {"singleton_lock_backend": f"unix://{path}?db=3"}
    lock_url = locks.url.rpartition("/")[0] + "/3"
    with Book(redis_url, tmp_path, lock_url=lock_url, conf=conf) as book:
        works(book)
        assert book.client.keys("csl:*")


@pytest.mark.full
@pytest.mark.needs_real_redis
def test_an_acl_user_of_its_own_needs_only_the_prefix(redis_url, make_redis, tmp_path):
    """The permissions in the error text are enough; the password is not shown."""
    locks = make_redis()
    with locks.client() as client:
        allowed = "~csl:* resetchannels +@read +@write +eval +evalsha +time"
        client.execute_command("ACL", "SETUSER", "locker", "on", f">{SECRET}", *allowed.split())
    url = f"redis://locker:{QUOTED}@127.0.0.1:{locks.port}/0"
    conf = LONG | {"singleton_lock_backend": url}
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        log = works(book)
    for word in (SECRET, QUOTED):
        assert word not in log


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_each_pool_serves(redis_url, tmp_path, pool):
    """prefork, threads and solo run the tasks of a key one at a time, in order, and free it."""
    with Book(redis_url, tmp_path, conf=LONG) as book:
        sent = [book.send("act", "a", n) for n in range(20)]
        with book.worker(pool=pool, concurrency=2):
            assert [book.value(r) for r in sent] == list(range(20))
        assert book.order("a") == list(range(20))
        assert book.peak("a") == 1
        book.await_free("a")

"""A call that is interrupted, as by a soft time limit, spoils no connection for the next calls."""

from __future__ import annotations

import threading
from contextlib import closing, suppress

import pytest
import redis
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock import Lock, get_or_set, locked
from celery_singleton_lock.lock import decorator, running_calls
from celery_singleton_lock.lock import get_or_set as value_module
from celery_singleton_lock.store.factory import store_on
from celery_singleton_lock.store.redis.counted import POOL_WANTS
from celery_singleton_lock.store.redis.sync import RedisStore
from support.interruption import Injected
from support.older_pool import OlderBlockingPool

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("a second database")]


class Interrupted(Exception):
    """As a soft time limit, which comes from a signal handler, anywhere."""


def redis_py(pool):
    return redis.Redis(connection_pool=pool)


def valkey_py(kind):
    valkey = pytest.importorskip("valkey")
    return getattr(valkey, kind), lambda pool: valkey.Valkey(connection_pool=pool)


POOLS = {
    "redis-py": lambda: (redis.ConnectionPool, redis_py),
    "redis-py, blocking": lambda: (redis.BlockingConnectionPool, redis_py),
    "redis-py, blocking, before 7": lambda: (OlderBlockingPool, redis_py),
    "valkey-py": lambda: valkey_py("ConnectionPool"),
    "valkey-py, blocking": lambda: valkey_py("BlockingConnectionPool"),
}


class Interruption:
    """Interrupts a call before the n-th sending, or after the reading of a reply.

    Args:
        at: at which of these; counted from one.
    """

    def __init__(self, at):
        self.left = at

    def strike(self):
        self.left -= 1
        if self.left == 0:
            raise Interrupted

    def around(self, kind):
        """Return the class of connections `kind`, with the interruption."""
        here = self

        class Connection(kind):
            def send_packed_command(self, *args, **options):
                here.strike()
                super().send_packed_command(*args, **options)

            def read_response(self, *args, **options):
                try:
                    return super().read_response(*args, **options)
                finally:
                    here.strike()

        return Connection


@pytest.mark.parametrize("kind", POOLS)
def test_a_lock_after_an_interrupted_handshake_is_in_the_database_of_its_client(
    redis_url, redis_client, kind
):
    """The connection must not be used as it is: its database may not be selected yet."""
    pool_kind, client_on = POOLS[kind]()
    url, store = redis_url.removesuffix("/0") + "/1", RedisStore(redis_client)
    at, interrupted = 0, True
    while interrupted:
        at += 1
        interruption = Interruption(at)
        with closing(pool_kind.from_url(url)) as pool:
            pool.connection_class = interruption.around(pool.connection_class)
            client = client_on(pool)
            with suppress(Interrupted), Lock(client, "lock"):
                pass
            interrupted, interruption.left = interruption.left <= 0, 0
            with Lock(client, "other", blocking_timeout=20):
                assert store.inspect("other").holders == (), at
    assert at > 8, "two each for the name, the version, the database, the lock"


@pytest.mark.parametrize("kind", POOLS)
def test_an_interrupted_handshake_closes_no_connection_that_another_thread_uses(redis_url, kind):
    pool_kind, client_on = POOLS[kind]()
    with closing(pool_kind.from_url(redis_url)) as pool:
        client = client_on(pool)
        used = pool.get_connection(*(("PING",) if "valkey" in kind else POOL_WANTS))
        pool.connection_class = Interruption(1).around(pool.connection_class)
        with pytest.raises(Interrupted):
            Lock(client, "lock").acquire()
        used.send_command("PING")
        assert used.read_response() == b"PONG"
        pool.release(used)


def with_a_lock(client):
    with Lock(client, "lock", blocking_timeout=20) as lock:
        lock.ensure_held()


def with_a_value(client):
    get_or_set(client, "value", lambda: 1, expire=60, wait_timeout=20)


class TimedOut(BaseException):
    """As gevent.Timeout, which is no Exception."""


@pytest.mark.parametrize("work", [with_a_lock, with_a_value])
@pytest.mark.parametrize("error", [Interrupted, TimedOut])
@pytest.mark.parametrize(
    ("kind", "single"), [("redis", False), ("redis", True), ("cluster", False)]
)
def test_a_call_after_an_interrupted_one_reads_its_own_reply(
    lock_client, monkeypatch, single, error, work
):
    """The interrupted call leaves no connection on which its reply arrives later."""
    strike = Strike(error)
    monkeypatch.setattr(redis.Connection, "read_response", strike.around(redis.Connection))
    monkeypatch.setattr(redis.Connection, "can_read", lambda *_, **__: False)  # it arrives later
    at, struck = 0, True
    while struck:
        at += 1
        with closing(another(lock_client, single=single)) as client:
            strike.left = at
            with suppress(error):
                work(client)
            struck, strike.left = strike.left <= 0, 0
            lock_client.delete("value")
            work(client)
            with Lock(client, "lock", blocking_timeout=20) as lock:
                holders = store_on(lock_client, None).inspect("lock").holders
                assert [each.token for each in holders] == [lock.token], at
        lock_client.delete("value")
    assert at > 3  # it did strike


def another(client, *, single):
    """Return a client of the same server or Cluster, with connections of its own."""
    if isinstance(client, redis.RedisCluster):
        node = client.get_primaries()[0]
        return redis.RedisCluster(node.host, node.port)  # which has no single connection
    return redis.Redis(port=client.get_connection_kwargs()["port"], single_connection_client=single)


class Strike:
    """Interrupts a call before the n-th reading of a reply in this thread.

    Args:
        error: what is raised.
    """

    def __init__(self, error):
        self.error, self.left, self.thread = error, 0, threading.get_ident()

    def around(self, kind):
        read, here = kind.read_response, self

        def read_response(*args, **options):
            if threading.get_ident() == here.thread:
                here.left -= 1
                if here.left == 0:
                    raise here.error
            return read(*args, **options)

        return read_response


def a_function(client):
    return locked("name", client)(lambda: "done")


def a_value(client):
    return lambda: get_or_set(client, "value", lambda: "done", expire=60)


@pytest.mark.parametrize(("work", "module"), [(a_function, decorator), (a_value, value_module)])
def test_a_thread_may_call_again_after_it_was_interrupted_at_any_line(redis_client, work, module):
    """The interrupted call does not count as one that still runs, for which this would wait."""
    call = work(redis_client)
    at, interrupted = 0, True
    while interrupted:
        at += 1
        with Injected(at, module, running_calls) as injected, suppress(SoftTimeLimitExceeded):
            call()
        interrupted = injected.where is not None
        redis_client.delete("value")
        assert call() == "done"
        redis_client.delete("value")
    assert at > 5  # it did interrupt

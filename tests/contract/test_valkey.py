"""Clients of the package valkey-py: the same locks and errors as with redis-py."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from celery_singleton_lock import (
    AsyncLock,
    BackendRefused,
    BackendUnreachable,
    ConfigurationError,
    Lock,
    LockNotOwned,
    LockTimeout,
    async_get_or_set,
    async_reset_all,
    get_or_set,
    locked,
    reset_all,
)
from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.core import loop_tasks
from celery_singleton_lock.store.quorum.sync import QuorumStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.redis.valkey import as_redis_error
from support.proxy import Proxy
from support.renewals import await_renewals
from support.waiting import eventually

valkey = pytest.importorskip("valkey")
valkey_asyncio = pytest.importorskip("valkey.asyncio")

pytestmark = pytest.mark.contract


@pytest.fixture(params=[False, True], ids=["bytes", "decoded"])
def client(redis_url, request):
    with valkey.Valkey.from_url(redis_url, decode_responses=request.param) as client:
        yield client


@pytest.fixture
def store(redis_client):
    """The same locks, by redis-py's client."""
    store = RedisStore(redis_client)
    yield store
    store.close()


def in_loop(url, scene):
    async def play():
        async with valkey_asyncio.Valkey.from_url(url) as client:
            await asyncio.wait_for(scene(client), 120)

    asyncio.run(play())


async def until(fact):
    """Wait for a condition without an asyncio event."""
    await asyncio.to_thread(eventually, fact)


def holders(store, name="lock"):
    return [holder.token for holder in store.inspect(name).holders]


@pytest.mark.usefixtures("renew_often")
def test_a_lock_is_held_renewed_handed_over_and_released(client, store, redis_client):
    """Clients of both packages wait in the same queue."""
    lock = Lock(client, "lock", lease=20)
    with ThreadPoolExecutor(1) as pool, lock:
        assert holders(store) == [lock.token]
        waiting = pool.submit(Lock(redis_client, "lock", thread_local=False).acquire)
        eventually(lambda: store.inspect("lock").waiting == 1)
        await_renewals(store)
        assert lock.owned()
        assert lock.extend(5)
        with pytest.raises(LockTimeout, match="'lock' is busy"):
            Lock(client, "lock", blocking=False).__enter__()
        lock.release()
        assert waiting.result(60)
        store.reset("lock")
        assert lock.acquire(blocking_timeout=60)
    assert holders(store) == []
    assert lock.owner() is None


@pytest.mark.usefixtures("no_heartbeat")
def test_a_waiter_is_woken_by_the_release(client, store):
    holder = Lock(client, "lock", thread_local=False)
    holder.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Lock(client, "lock", thread_local=False).acquire)
        eventually(lambda: store.inspect("lock").waiting == 1)
        holder.release()
        assert waiting.result(20), "and not when the lease would have ended"


def test_a_lost_lock_and_a_full_queue_of_errors_are_those_of_redis_py(client, redis_client):
    lock = Lock(client, "lock", lease=0.2, renew=False)
    lock.acquire()
    eventually(lambda: lock.lost)
    with pytest.raises(LockNotOwned):
        lock.release()
    with Lock(client, "other"):
        (key,) = redis_client.keys("csl:*:other:holders")
    redis_client.set(key, "another program's")
    with pytest.raises(BackendRefused, match=r"refused \(WRONGTYPE\)"):
        Lock(client, "other").acquire()


def test_scripts_that_the_server_has_forgotten_are_sent_again(client, redis_client):
    with Lock(client, "lock"):
        redis_client.script_flush()


def test_an_unreachable_server_raises_an_error_without_its_address(redis_url):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        valkey.Valkey(port=port) as client,
        pytest.raises(BackendUnreachable, match="Connection refused") as caught,
    ):
        Lock(client, "lock").acquire()
    assert str(port) not in str(caught.value)

    async def scene():
        async with valkey_asyncio.Valkey(port=port) as away:
            with pytest.raises(BackendUnreachable, match="did not answer"):
                await AsyncLock(away, "lock").acquire()

    asyncio.run(scene())


def test_a_lost_reply_to_a_release_is_no_lost_lock(redis_server, redis_client, store):
    with Lock(redis_client, "lock"):
        pass  # the scripts are known
    with Proxy(redis_server.port) as proxy, valkey.Valkey(port=proxy.port) as client:
        lock = Lock(client, "lock")
        lock.acquire()
        proxy.lose_reply = 1
        lock.release()
    assert holders(store) == []


@pytest.mark.usefixtures("redis_client")  # else a lock of the test before may be held
@pytest.mark.parametrize("single", [False, True])
def test_a_lost_reply_to_a_release_that_valkey_py_repeats_is_no_lost_lock(redis_server, single):
    """With retries of its own, and with a single connection, too."""
    retry = valkey.retry.Retry(valkey.backoff.NoBackoff(), 3)
    options = {"retry": retry, "single_connection_client": single}
    with Proxy(redis_server.port) as proxy, valkey.Valkey(port=proxy.port, **options) as client:
        with Lock(client, "lock"):  # from now on the server knows the scripts
            pass
        with Lock(client, "lock"):
            proxy.lose_reply = 1

        async def work():
            retry = valkey_asyncio.retry.Retry(valkey.backoff.NoBackoff(), 3)
            options = {"retry": retry, "single_connection_client": single}
            client = valkey_asyncio.Valkey(port=proxy.port, **options)
            async with client, AsyncLock(client, "lock"):
                proxy.lose_reply = 1

        asyncio.run(work())


@pytest.mark.usefixtures("renew_often")
@pytest.mark.parametrize("kind", [valkey.Valkey, redis.Redis], ids=["valkey", "redis"])
def test_a_single_connection_answers_its_caller_while_a_lock_is_renewed(redis_url, store, kind):
    """valkey-py and redis-py before 5.3 let a renewal read the answers, and the lock was lost.

    Newer versions let the renewal wait while the caller's command blocked.
    """
    with kind.from_url(redis_url, single_connection_client=True, socket_timeout=90) as client:
        with Lock(client, "lock", lease=20) as lock, ThreadPoolExecutor(1) as threads:
            renewed = threads.submit(await_renewals, store)
            while not renewed.done():
                assert client.echo("mine") == b"mine"
            renewed.result()
            blocked = threads.submit(client.blpop, ["list"], 60)
            eventually(lambda: store.client.info("clients")["blocked_clients"])
            await_renewals(store)
            store.client.rpush("list", "go")
            assert blocked.result()[1] == b"go"
            assert lock.held
        assert client.echo("mine") == b"mine"


@pytest.mark.usefixtures("renew_often")
def test_tasks_of_a_loop_take_turns(redis_url, store):
    async def scene(client):
        served = []

        async def enter(number):
            async with AsyncLock(client, "lock", lease=20) as lock:
                assert holders(store) == [lock.token]
                if number == 0:
                    await asyncio.to_thread(await_renewals, store)
                assert await lock.owned()
                served.append(number)

        await asyncio.gather(*(enter(number) for number in range(4)))
        assert sorted(served) == [0, 1, 2, 3]
        lock = AsyncLock(client, "lock", lease=0.2, renew=False)
        await lock.acquire()
        await until(lambda: not holders(store))
        await asyncio.sleep(
            lock.expires_in
        )  # the client's clock decides, and the server's may be ahead
        with pytest.raises(LockNotOwned):
            await lock.release()

    in_loop(redis_url, scene)


def test_a_cancelled_waiter_leaves_the_queue(redis_url, store):
    async def scene(client):
        async with AsyncLock(client, "lock"):
            waiter = asyncio.create_task(AsyncLock(client, "lock").acquire())
            await until(lambda: store.inspect("lock").waiting)
            waiter.cancel()
            await asyncio.wait({waiter})
            assert waiter.cancelled()
            await until(lambda: not loop_tasks.tasks)
            assert store.inspect("lock").waiting == 0

    in_loop(redis_url, scene)


def test_values_functions_and_resets_take_such_a_client(client, redis_url, redis_client):
    assert get_or_set(client, "v", lambda: [1], expire=60) == [1]
    assert get_or_set(client, "v", lambda: [2], expire=60) == [1]
    assert locked("fn", client)(lambda: "done")() == "done"
    redis_client.lpush("list", 1)
    with pytest.raises(BackendRefused, match="WRONGTYPE"):
        get_or_set(client, "list", lambda: 1, expire=9)
    Lock(client, "a").acquire()
    assert reset_all(client, "a") == 1

    async def scene(there):
        async def compute():
            return 7

        assert await async_get_or_set(there, "w", compute, expire=9) == 7
        assert await locked("fn", there)(compute)() == 7
        await AsyncLock(there, "b").acquire()
        assert await async_reset_all(there, "b") == 1

    in_loop(redis_url, scene)


def test_a_client_for_the_other_world_is_refused_with_a_hint(client, redis_url):
    with pytest.raises(ConfigurationError, match="For threads use Lock"):
        AsyncLock(client, "lock")
    there = valkey_asyncio.Valkey.from_url(redis_url)
    with pytest.raises(ConfigurationError, match="For asyncio use AsyncLock"):
        Lock(there, "lock")
    with pytest.raises(ConfigurationError, match=r"needs a redis\.Redis client"):
        get_or_set(there, "v", lambda: 1, expire=9)


def test_each_error_of_valkey_py_has_its_twin():
    for name in dir(valkey.exceptions):
        kind = getattr(valkey.exceptions, name)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            continue
        error = kind("1 127.0.0.1:7000" if name in {"AskError", "MovedError"} else "sentence")
        twin = as_redis_error(error)
        assert type(twin).__module__ == "redis.exceptions"
        assert type(twin).__name__ == name.replace("Valkey", "Redis")
        assert twin.__cause__ is error
    odd = KeyError()
    assert as_redis_error(odd) is odd


def test_no_lock_imports_valkey_py():
    code = (
        "import sys, redis, celery_singleton_lock as c; c.Lock(redis.Redis(), 'a'); "
        "sys.exit('valkey' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("valkey://:pw@host:7000/3", "redis://:pw@host:7000/3"),
        ("valkeys://host", "rediss://host:6379/0"),
        ("VALKEY://host:1/0", "redis://host:1/0"),
    ],
)
def test_a_url_of_valkey_is_one_of_redis(url, same):
    """In the settings, in Celery's own URLs, and on the command line."""
    assert parse_backend_url(url, "test").url == same


@pytest.mark.parametrize("scheme", ["valkey", "VALKEY"])
def test_a_quorum_takes_urls_of_valkey(three_servers, scheme):
    urls = [server.url.replace("redis://", f"{scheme}://") for server in three_servers]
    store = QuorumStore(urls, timeout=10)
    for node in store.nodes:
        assert node.client.ping()
    store.close()

"""A reply to a release is lost: the client asks again by itself, and no lock was lost."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from celery_singleton_lock import AsyncLock, Lock, LockNotOwned
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict, new_token
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.cluster_routing import Nodes
from celery_singleton_lock.store.redis.sync import RedisStore
from support.proxy import Proxy
from support.waiting import eventually

pytestmark = pytest.mark.contract

RETRIES = {
    "redis-py's own": {},
    "many": {"retry": (ConstantBackoff(0.01), 5)},
    "none": {"retry": (NoBackoff(), 0)},
}


def make_known(store):
    """Have the server know the scripts, so that what is lost is no question for their text."""
    store.release("lock", take(store), Ending.FINAL)


def take(store):
    """Take a lock; return its token."""
    owner = Owner(new_token())
    assert store.acquire(owner, Claim("lock", 30)).verdict is Verdict.GRANTED
    return owner.token


@pytest.fixture
def proxy(redis_server, redis_client):
    make_known(RedisStore(redis_client))
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture(params=RETRIES)
def retries(request):
    """How often the caller's client asks again."""
    return RETRIES[request.param]


@pytest.fixture
def client(proxy, retries):
    options = {name: Retry(*value) for name, value in retries.items()}
    with redis.Redis(port=proxy.port, **options) as client:
        yield client


@pytest.fixture
def async_client(proxy, retries, loop_thread):
    options = {name: AsyncRetry(*value) for name, value in retries.items()}
    client = redis.asyncio.Redis(port=proxy.port, **options)
    yield client
    loop_thread.run(client.aclose())


def test_a_lost_reply_does_not_make_a_released_lock_a_lost_one(client, proxy):
    """The body was under its lock to its end: the caller must not do the work again."""
    with Lock(client, "lock", lease=30) as lock:
        proxy.lose_reply = 1
    assert not lock.locked()


def test_a_lost_reply_does_not_make_a_released_async_lock_a_lost_one(
    async_client, proxy, loop_thread
):
    async def work():
        async with AsyncLock(async_client, "lock", lease=30) as lock:
            proxy.lose_reply = 1
        return await lock.locked()

    assert not loop_thread.run(work())


def test_a_lock_that_was_taken_away_is_told_as_ever(client, redis_client):
    """No reply was lost, so its absence is what it looks like."""
    lock = Lock(client, "lock", lease=30)
    assert lock.acquire()
    Lock(redis_client, "lock").reset()
    with pytest.raises(LockNotOwned):
        lock.release()


def test_a_lost_reply_hides_no_lease_that_had_ended_before(client, proxy):
    """Only a release that was sent while the lock was certainly held may have done it."""
    lock = Lock(client, "lock", lease=0.1, renew=False)
    assert lock.acquire()
    eventually(lambda: not lock.held)
    proxy.lose_reply = 1
    with pytest.raises(LockNotOwned):
        lock.release()


@pytest.mark.parametrize("direct", [True, False], ids=["short way", "by redis-py"])
def test_a_worker_hears_that_its_release_was_repeated(proxy, direct):
    client = redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 1))
    with client, closing(RedisStore(client, direct=direct)) as store:
        token = take(store)
        proxy.lose_reply = 1
        reply = store.release("lock", token, Ending.FINAL)
        assert (reply.verdict, reply.repeated) == (Verdict.ABSENT, True)
        again = store.release("lock", token, Ending.FINAL)
        assert (again.verdict, again.repeated) == (Verdict.ABSENT, False)


def test_a_refusal_is_no_lost_reply(proxy):
    """The connection goes on, with its answers in step."""
    with redis.Redis(port=proxy.port) as client, closing(RedisStore(client)) as store:
        client.script_flush()
        token = take(store)
        client.script_flush()
        reply = store.release("lock", token, Ending.FINAL)
        assert (reply.verdict, reply.repeated) == (Verdict.RELEASED, False)
        client.set(store.keyspace.lock("other").holders, "text")
        with pytest.raises(Exception, match="WRONGTYPE"):
            store.release("other", token, Ending.FINAL)
        assert client.ping()


def test_a_client_with_a_single_connection_releases(proxy):
    with redis.Redis(port=proxy.port, single_connection_client=True) as client:
        with Lock(client, "lock", lease=30) as lock:
            pass
        assert not lock.locked()


@pytest.fixture
def through_proxies(redis_cluster, cluster_client):
    """Proxies before the masters of a Cluster, the lock's first, and how a client gets to them."""
    store = ClusterStore(cluster_client)
    make_known(store)
    of_lock = cluster_client.get_node_from_key(store.keyspace.lock("lock").holders)
    with ExitStack() as stack:
        proxies = {
            node.port: stack.enter_context(Proxy(node.port)) for node in redis_cluster.masters
        }

        def remap(address):
            found = proxies.get(address[1])
            return address if found is None else ("127.0.0.1", found.port)

        yield proxies[of_lock.port], remap


def test_a_lost_reply_loses_no_lock_on_a_cluster(through_proxies):
    proxy, remap = through_proxies
    client = redis.RedisCluster("127.0.0.1", proxy.port, address_remap=remap)
    with client, Lock(client, "lock", lease=30) as lock:
        proxy.lose_reply = 1
    assert lock.token == ""


def test_a_lost_reply_loses_no_async_lock_on_a_cluster(through_proxies, loop_thread):
    proxy, remap = through_proxies

    async def work():
        client = redis.asyncio.RedisCluster("127.0.0.1", proxy.port, address_remap=remap)
        async with client, AsyncLock(client, "lock", lease=30):
            proxy.lose_reply = 1

    loop_thread.run(work())


def test_a_worker_hears_that_its_release_was_repeated_on_a_cluster(through_proxies):
    proxy, remap = through_proxies
    port = proxy.port
    nodes = Nodes(lambda: redis.RedisCluster("127.0.0.1", port, address_remap=remap))
    with closing(nodes), closing(ClusterStore(nodes)) as store:
        token = take(store)
        proxy.lose_reply = 1
        reply = store.release("lock", token, Ending.FINAL)
        assert (reply.verdict, reply.repeated) == (Verdict.ABSENT, True)


def lose_next(proxies):
    for proxy in proxies:
        proxy.lose_reply = 1


@pytest.fixture
def quorum_proxies(three_servers, quorum_clients):
    with Lock(quorum_clients, "lock", lease=30):  # from now on the servers know the scripts
        pass
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(server.port)) for server in three_servers]


def test_lost_replies_of_all_servers_lose_no_lock_of_a_quorum(quorum_proxies):
    """A network that fails for a moment fails for all of them."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 1)))
            for proxy in quorum_proxies
        ]
        with Lock(clients, "lock", lease=30):
            lose_next(quorum_proxies)


def test_lost_replies_of_all_servers_lose_no_async_lock_of_a_quorum(quorum_proxies, loop_thread):
    async def work():
        clients = [redis.asyncio.Redis(port=proxy.port) for proxy in quorum_proxies]
        async with AsyncLock(clients, "lock", lease=30):
            lose_next(quorum_proxies)
        for client in clients:
            await client.aclose()

    loop_thread.run(work())

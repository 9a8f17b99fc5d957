"""The reply to a release is lost: the client repeats it, and the lock does not count as lost."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from celery_singleton_lock import AsyncLock, BackendRefused, Lock, LockNotOwned
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.cluster_routing import Nodes
from celery_singleton_lock.store.redis.sync import RedisStore
from support.proxy import Proxy
from support.waiting import eventually

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("patient_quorums")]

RETRIES = {
    "redis-py's own": {},
    "many": {"retry": (ConstantBackoff(0.01), 5)},
    "none": {"retry": (NoBackoff(), 0)},
}


def make_known(store):
    """Load the scripts, so that the lost reply is not the one about a missing script."""
    store.release("lock", take(store), Ending.FINAL)


def options_of(client):
    """Where a client connects to."""
    options = client.connection_pool.connection_kwargs
    return {name: options[name] for name in ("host", "port", "db")}


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


class Interrupted(BaseException):
    """Raised in a task from outside, like the error of a soft time limit."""


def interrupt_before_the_next_reply(patch):
    read = redis.Connection.read_response

    def interrupted(*_args, **_options):
        patch.setattr(redis.Connection, "read_response", read)
        raise Interrupted

    patch.setattr(redis.Connection, "read_response", interrupted)


def test_a_late_reply_to_an_interrupted_call_is_not_taken_for_that_of_another_lock(
    client, proxy, redis_client, monkeypatch
):
    """Otherwise a caller would hold, by the grant of one lock, another one that is busy."""
    assert Lock(redis_client, "busy", lease=30).acquire()
    first, free, busy = (
        Lock(client, name, lease=30, renew=False, blocking=False)
        for name in ("first", "free", "busy")
    )
    proxy.delay = 0.1  # no reply is there yet when the connection is used again
    interrupt_before_the_next_reply(monkeypatch)
    with pytest.raises(Interrupted):
        first.acquire()
    assert (free.acquire(), busy.acquire()) == (True, False)
    assert free.owned()


def test_after_an_interrupted_wait_the_next_waiter_is_woken_at_once(redis_client, monkeypatch):
    """It does not read the late reply to the wait before it."""
    with closing(RedisStore(redis_client)) as store:
        assert not store.wait("lock", "before", 0.01)
        interrupt_before_the_next_reply(monkeypatch)
        with pytest.raises(Interrupted):
            store.wait("lock", "interrupted", 1.0)
        redis_client.rpush(store.keyspace.wake("lock", "woken"), 1)
        assert store.wait("lock", "woken", 1.0)


def test_a_lock_that_was_taken_away_is_still_reported(client, redis_client):
    """No reply was lost, so the lock was really lost."""
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
def test_a_worker_gets_the_reply_of_a_repeated_release(proxy, direct):
    client = redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 1))
    with client, closing(RedisStore(client, direct=direct)) as store:
        token = take(store)
        proxy.lose_reply = 1
        reply = store.release("lock", token, Ending.FINAL)
        assert (reply.verdict, reply.repeated) == (Verdict.ABSENT, True)
        again = store.release("lock", token, Ending.FINAL)
        assert (again.verdict, again.repeated) == (Verdict.ABSENT, False)


@pytest.fixture
def one_waits(redis_client):
    """A lock that is held and waited for, and what tells whether the waiter holds it."""
    store = RedisStore(redis_client)
    store.reset("other")  # the server knows the script
    take(store)
    waiter = Owner(new_token())
    assert store.acquire(waiter, Claim("lock", 30), wait=30.0).verdict is Verdict.WAITING

    def holders():
        return [holder.token for holder in store.inspect("lock").holders]

    yield lambda: holders() == [waiter.token]
    store.close()


def test_a_lost_reply_to_a_reset_does_not_take_the_lock_from_the_next(client, proxy, one_waits):
    """The repeated call ended the lease of the waiter that the first one had granted."""
    lock = Lock(client, "lock")
    proxy.lose_reply_to = b"EVALSHA"
    assert lock.reset() == 1
    assert one_waits()
    assert lock.reset() == 1  # another call


def test_a_lost_reply_to_an_async_reset_does_not_take_the_lock_from_the_next(
    async_client, proxy, loop_thread, one_waits
):
    proxy.lose_reply_to = b"EVALSHA"
    assert loop_thread.run(AsyncLock(async_client, "lock").reset()) == 1
    assert one_waits()


def test_a_lost_reply_to_a_reset_takes_no_lock_that_was_free(redis_client):
    """Between the two requests somebody may acquire it."""
    store = RedisStore(redis_client)
    assert store.reset("lock", call="one") == 0
    token = take(store)
    assert store.reset("lock", call="one") == 0
    assert store.release("lock", token, Ending.FINAL).verdict is Verdict.RELEASED


def test_a_refusal_is_no_lost_reply(proxy):
    """The connection stays in use, and replies match their commands."""
    with redis.Redis(port=proxy.port) as client, closing(RedisStore(client)) as store:
        client.script_flush()
        token = take(store)
        client.script_flush()
        reply = store.release("lock", token, Ending.FINAL)
        assert (reply.verdict, reply.repeated) == (Verdict.RELEASED, False)
        client.set(store.keyspace.lock("other").holders, "text")
        with pytest.raises(BackendRefused, match="WRONGTYPE"):
            store.release("other", token, Ending.FINAL)
        assert client.ping()


def test_a_lost_reply_loses_no_lock_of_a_client_with_a_single_connection(proxy, retries):
    """LockNotOwned followed, since such a client was not asked whether it had sent again."""
    options = {name: Retry(*value) for name, value in retries.items()}
    with redis.Redis(port=proxy.port, single_connection_client=True, **options) as client:
        with Lock(client, "lock", lease=30) as lock:
            proxy.lose_reply = 1
        assert not lock.locked()


def test_a_lost_reply_loses_no_async_lock_of_a_client_with_a_single_connection(
    proxy, retries, loop_thread
):
    async def work():
        options = {name: AsyncRetry(*value) for name, value in retries.items()}
        client = redis.asyncio.Redis(port=proxy.port, single_connection_client=True, **options)
        async with client, AsyncLock(client, "lock", lease=30):
            proxy.lose_reply = 1

    loop_thread.run(work())


def test_a_single_connection_forgets_a_script_and_sends_it_again(redis_client):
    """The refusal is an answer: the connection stays."""
    with redis.Redis(**options_of(redis_client), single_connection_client=True) as client:
        with Lock(client, "lock", lease=30):
            redis_client.script_flush()
            number = client.client_id()
        assert client.client_id() == number


@pytest.fixture
def through_proxies(redis_cluster, cluster_client):
    """Proxies of the masters of a Cluster, the lock's master first, and their address mapping."""
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


def test_a_worker_gets_the_reply_of_a_repeated_release_on_a_cluster(through_proxies):
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

"""The store during a failover: calls to the new master, errors of the former one."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import pytest

from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.requests import Batch, Command
from support.proxy import Proxy
from support.sentinel import SentinelSet
from support.waiting import eventually, in_time

pytestmark = [pytest.mark.needs_real_redis("replication"), pytest.mark.chaos]

SECRET = "p-ss-w0rd"


@pytest.fixture
def servers(make_redis, tmp_path):
    # On a busy machine a server may stand still for two seconds.
    with SentinelSet(make_redis, tmp_path, SECRET, down_after=4.0) as servers:
        yield servers


@pytest.fixture
def make_store():
    """Make stores on clients of their own; at the end none has a connection left."""
    with ExitStack() as stack:

        def make(address, options, *, direct=False, patience=10.0):
            client = stack.enter_context(connect(address, options, patience=patience))
            return stack.enter_context(closing(RedisStore(client, direct=direct)))

        yield make


@pytest.fixture
def store_on(make_store):
    """Make a store that asks Sentinels for its master."""

    def make(servers, *, direct=False, patience=10.0, **options):
        address = parse_backend_url(servers.url)
        found = {**servers.options, **options}
        return make_store(address, found, direct=direct, patience=patience)

    return make


def granted(store, name="a", lease=10.0):
    """Take a lock; return the grant, or nothing while Redis does not serve."""
    owner = Owner(new_token())
    try:
        reply = store.acquire(owner, Claim(name, lease))
    except BackendUnreachable:
        return None
    assert reply.verdict is Verdict.GRANTED
    store.release(name, owner.token, Ending.FINAL)
    return reply


@pytest.mark.full
@pytest.mark.parametrize("direct", [False, True], ids=["client", "wire"])
def test_t24_a_failover_is_followed_and_fences_grow(servers, store_on, direct):
    """A planned failover, then a killed master: each kind of connection finds the new master."""
    store = store_on(servers, direct=direct)
    first = eventually(lambda: granted(store))
    servers.await_replicated()
    servers.failover()
    second = eventually(lambda: granted(store))
    servers.await_replica(servers.master(), 30)
    servers.await_replicated()
    old = servers.master()
    old.kill()
    servers.await_promotion(old)
    third = eventually(lambda: granted(store))
    assert first.fencing_token < second.fencing_token < third.fencing_token


@pytest.mark.full
def test_a_blocked_wait_ends_with_its_master(servers, store_on):
    """A Lock that waits over a failover is granted on the new master."""
    holder, waiter = store_on(servers), store_on(servers)
    owner = Owner(new_token())
    holder.acquire(owner, Claim("a", 6.0))
    servers.await_replicated()
    servers.failover()
    with Lock(waiter, "a", lease=30, blocking_timeout=60) as lock:
        assert lock.held


@pytest.mark.parametrize("direct", [False, True], ids=["client", "wire"])
def test_a_demoted_master_is_left_though_it_keeps_the_connection(make_redis, make_store, direct):
    """READONLY: connections are closed, so that a changed address leads to the new master."""
    old, new = make_redis(), make_redis()
    with Proxy(old.port) as proxy:
        store = make_store(parse_backend_url(proxy.url), {}, direct=direct)
        assert eventually(lambda: granted(store))
        with old.client() as admin:
            admin.replicaof("127.0.0.1", new.port)
        proxy.target = new.port
        with pytest.raises(BackendUnreachable, match=r"ReadOnlyError|READONLY"):
            store.acquire(Owner(new_token()), Claim("b", 30.0))
        assert eventually(lambda: granted(store))
        with old.client() as admin:
            admin.replicaof("NO", "ONE")  # else the new master takes five seconds to end


def test_a_renewal_follows_the_master_though_a_replica_keeps_the_connection(make_redis, make_store):
    """The watchdog went on asking the former master until all leases had ended."""
    old = make_redis()
    new = make_redis("--replicaof", f"127.0.0.1 {old.port}", "--repl-diskless-sync-delay", "0")
    with Proxy(old.port) as proxy:
        store = make_store(parse_backend_url(proxy.url), {})
        owner = Owner(new_token())
        assert store.acquire(owner, Claim("a", 60.0)).verdict is Verdict.GRANTED
        with old.client(decode_responses=True) as one, new.client(decode_responses=True) as other:
            eventually(lambda: one.info().get("slave0", {}).get("state") == "online", 30)
            one.execute_command("FAILOVER", "TO", "127.0.0.1", new.port)
            eventually(lambda: one.info()["role"] == "slave", 10, "the former master is a replica")
            proxy.target = new.port
            leases = [("a", owner.token, 60.0), ("nobody has it", owner.token, 60.0)]
            with pytest.raises(BackendUnreachable, match=r"ReadOnlyError|READONLY"):
                store.extend(leases)
            assert store.extend(leases) == [True, False]
            other.replicaof("NO", "ONE")


@pytest.mark.parametrize("together", [1, 3])
def test_a_reply_after_the_timeout_is_not_that_of_a_later_call(servers, store_on, together):
    """A worker behind Sentinels read each reply of its connection one call too late, for good."""
    store = store_on(servers, patience=1.0)
    eventually(lambda: asked(store, "ready", together))
    master = servers.master()
    master.pause()
    assert asked(store, "late", together) is None
    master.resume()
    for word in ("one", "two", "three"):
        wanted = [f"{word}{n}" for n in range(together)]
        assert eventually(lambda word=word: asked(store, word, together)) == wanted


def asked(store, word, together):
    """Let the server repeat some words; return nothing while it does not answer."""
    echoes = [Command(("ECHO", f"{word}{n}")) for n in range(together)]
    try:
        replies = store.do(Batch(echoes)) if together > 1 else [store.do(echoes[0])]
    except BackendUnreachable:
        return None
    return [reply.decode() for reply in replies]


def test_too_few_replicas_is_an_outage_and_not_a_refusal(make_redis, make_store):
    """``min-replicas-to-write``: a master that lost its replicas is asked again soon."""
    alone = make_redis("--min-replicas-to-write", "1")
    store = make_store(parse_backend_url(alone.url), {})
    with pytest.raises(BackendUnreachable, match="NOREPLICAS"):
        store.acquire(Owner(new_token()), Claim("a", 3.0))


def test_an_error_says_soon_that_no_sentinel_answers_and_hides_the_password(
    servers, store_on, make_store
):
    """All Sentinels dead, or none knows the name: the error says where to look."""
    address = parse_backend_url(servers.url.replace(str(servers.port), str(servers.dead_port)))
    dead = make_store(address, servers.options, patience=0.5)
    wrong = store_on(servers, patience=0.5, master_name="nobody")
    for store in (dead, wrong):
        began = time.monotonic()
        with pytest.raises(BackendUnreachable, match="master_name") as caught:
            store.time()
        assert SECRET not in f"{caught.value}{caught.value.__cause__}"
        in_time(time.monotonic() - began, 15)

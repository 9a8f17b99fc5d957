"""What concerns Redis Cluster alone; that it keeps the contract is in the tests of all stores."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis.asyncio
from click.testing import CliRunner
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.credentials import CredentialProvider

from celery_singleton_lock import AsyncLock, Lock
from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.admin.doctor import Health, examine
from celery_singleton_lock.cli.main import main
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.core.redis_keys import BUCKETS, Keyspace, bucket_of
from celery_singleton_lock.core.model import Claim, Ending, Owner, Parcel, Verdict, new_token
from celery_singleton_lock.lock.reset import async_reset_all, reset_all
from celery_singleton_lock.store.cluster.sync import sync as module
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.factory import admin_of, open_store
from support.redis_cluster import RedisCluster
from support.replication import is_replicated
from support.waiting import eventually

pytestmark = pytest.mark.contract

NAME = "account:42"
REDIS_PAGE = Path(__file__).parents[2] / "docs" / "redis.md"


@pytest.fixture
def store(cluster_client):
    store = ClusterStore(cluster_client, claim_lease=0.5)
    yield store
    store.close()


def opened(url, **options):
    return open_store(parse_backend_url(url), options, "csl", patience=1.0)


def owner(attempt="", **more):
    return Owner(new_token(), attempt, "app.task", **more)


def hold(store, name=NAME, lease=30.0):
    who = owner()
    assert store.acquire(who, Claim(name, lease)).verdict is Verdict.GRANTED
    return who


def park(store, attempt, name=NAME):
    who = owner(attempt)
    assert store.park(who, Claim(name), Parcel(b"body", "R", "q")).verdict is Verdict.WAITING
    return who.token


def names_of_all_masters(store, like="lock {}"):
    """Return a name for each master, of a lock that lives there."""
    names = [like.format(number) for number in range(8 * BUCKETS)]
    return list(store.nodes.each(names, lambda name: store.keyspace.lock(name).meta))


# -- one slot --------------------------------------------------------------------------------------


def test_all_that_scripts_write_lies_in_the_slot_of_the_lock(store, cluster_client):
    """Whatever a worker, a waiter or an operator does; only the schema and the switches do not."""
    admin = admin_of(store)
    store.schema()
    store.switch("*", "observe")
    store.beat("w", "R", ["q"], 30.0)
    for name in names_of_all_masters(store):
        holder, token = hold(store, name), park(store, "id1/0/0", name)
        store.acquire(owner(), Claim(name), wait=5.0)
        store.observe(owner(), Claim(name), waits=True)
        admin.force_release(name, holder.token, Operator("jane"))
        assert store.receive("w", 5.0).token == token
    keys = cluster_client.keys("*", target_nodes="primaries")
    loose = {key for key in keys if b"{b" not in key}
    assert loose == {b"csl:schema", b"csl:fleet:mode"}
    assert len(keys) > 20


# -- all masters at once ---------------------------------------------------------------------------


def test_grants_come_from_every_master_at_once(store):
    """The bell wakes the worker, wherever the lock lives: none waits for a look around."""
    store.beat("w", "R", ["q"], 30.0)
    assert store.receive("w", 0.01) is None
    for name in names_of_all_masters(store):
        holder = hold(store, name)
        token = park(store, f"{name}/0/0", name)
        began = time.monotonic()
        threading.Timer(0.1, store.release, (name, holder.token, Ending.FINAL)).start()
        assert store.receive("w", 10.0).token == token
        assert time.monotonic() - began < module.LOOK / 2


def test_a_bell_that_was_lost_is_made_up_for(store, cluster_client, monkeypatch):
    monkeypatch.setattr(module, "LOOK", 0.3)
    store.beat("w", "R", ["q"], 30.0)
    assert store.receive("w", 0.01) is None
    head = (
        '{"lock":"account:42","token":"t","fence":"1","verdict":"granted","whole":"1","waited":"0"}'
    )
    cluster_client.rpush(store.keyspace.inbox("w", bucket_of(NAME)), f"{head}\nbody")
    assert store.receive("w", 3.0).token == "t"


def test_two_grants_of_one_bucket_come_one_after_the_other(store):
    store.beat("w", "R", ["q"], 30.0)
    tokens = {park(store, f"id{n}/0/0") for n in range(2)}
    first = store.receive("w", 3.0).token
    store.release(NAME, first, Ending.FINAL)
    assert {first, store.receive("w", 3.0).token} == tokens


def test_what_concerns_all_locks_is_asked_of_all_masters(store, cluster_client):
    """Lists, counts, due locks, audits and resets."""
    admin = admin_of(store)
    names = names_of_all_masters(store)
    assert len(names) == 3
    for name in names:
        hold(store, name)
        park(store, f"{name}/0/0", name)
    assert {found.name for found in admin.glances()} == set(names)
    assert store.parked("R")["q"].waiting == 3
    assert set(store.waited_for()) == set(names)
    assert len(store.find(names)) == 3
    assert (
        store.extend([(n, h.token, 30.0) for n in names for h in store.inspect(n).holders])
        == [True] * 3
    )
    assert reset_all(cluster_client) == 3


def test_the_doctor_looks_at_every_master(store, redis_cluster):
    store.schema()
    found = list(examine(admin_of(store)))
    versions = [check for check in found if check.name == "version"]
    assert {check.told.split(": ")[0] for check in versions} == {
        f"127.0.0.1:{server.port}" for server in redis_cluster.masters
    }
    assert {check.health for check in versions} == {Health.OK}
    assert not [check for check in found if check.health is Health.FAIL]
    assert store.describe()["eviction"] == "noeviction"


def test_operators_see_and_mend_a_cluster_from_the_shell(store, redis_cluster):
    """The same commands, with the URL of a Cluster."""
    for name in names_of_all_masters(store):
        hold(store, name)
    listed = run(redis_cluster, "list")
    assert all(name in listed for name in names_of_all_masters(store))
    run(redis_cluster, "pause", NAME, "--force", "--why", "repair")
    assert store.inspect(NAME).paused
    assert "repair" in run(redis_cluster, "audit")


def run(cluster, *args):
    found = CliRunner().invoke(main, ["--backend", cluster.url, *args])
    assert found.exit_code == 0, found.output
    return found.output


# -- locks for threads -----------------------------------------------------------------------------


def test_threads_take_turns_without_polling(cluster_client):
    """Sixteen threads, one lock: never two at once, and each is woken by the one before."""
    inside, most, total = [0], [0], [0]

    def work(_):
        with Lock(cluster_client, "turn", lease=10):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            total[0] += 1
            inside[0] -= 1

    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(48)))
    assert (most[0], total[0]) == (1, 48)
    assert time.monotonic() - began < 10


# -- a Cluster that changes ------------------------------------------------------------------------


@pytest.fixture
def changing(replicated_cluster):
    store = opened(replicated_cluster.url)
    replicated_cluster.flush(store.nodes.cluster)
    yield replicated_cluster, store
    store.hang_up()


def test_a_lock_outlives_the_move_of_its_slot(changing):
    """Holder, line and parked message move along; the lock is held at every moment."""
    cluster, store = changing
    store.beat("w", "R", ["q"], 30.0)
    holder, token = hold(store), park(store, "id1/0/0")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(store.wait, NAME, "somebody", 1.0)
        key = store.keyspace.lock(NAME).meta
        old = cluster.owner(key)
        new = cluster.another(old)
        cluster.move(key_slot(key.encode()), old, new)
        assert waits.result() is False
    assert store.extend([(NAME, holder.token, 30.0)]) == [True]
    assert store.acquire(owner(), Claim(NAME)).verdict is Verdict.BLOCKED
    assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.RELEASED
    assert store.receive("w", 10.0).token == token
    cluster.move(key_slot(key.encode()), new, old)


def test_all_locks_of_a_cluster_are_reset_by_threads_and_by_asyncio(store, redis_cluster):
    """On each master, by name, and counted."""
    port = redis_cluster.masters[0].port

    async def reset_in_task(pattern):
        async with redis.asyncio.RedisCluster("127.0.0.1", port) as client:
            return await async_reset_all(client, pattern)

    names = [*names_of_all_masters(store), "account:1", "x" * 3000]
    for reset in (
        lambda pattern: reset_all(store.nodes.cluster, pattern),
        lambda pattern: asyncio.run(reset_in_task(pattern)),
    ):
        for name in names:
            hold(store, name)
        assert reset("account:*") == 1
        assert reset("") == 4
        assert reset("") == 0


def test_a_task_that_waits_follows_its_slot(changing):
    """AsyncLock: its wait ends where the slot was, and goes on where it is."""
    cluster, store = changing
    key = store.keyspace.lock(NAME).meta
    old = cluster.owner(key)
    new = cluster.another(old)

    async def scene():
        async with redis.asyncio.RedisCluster("127.0.0.1", new.port) as client:
            holder, other = AsyncLock(client, NAME), AsyncLock(client, NAME, blocking_timeout=20)
            async with holder:
                waits = asyncio.ensure_future(other.acquire())
                await asyncio.to_thread(eventually, lambda: store.inspect(NAME).waiting == 1)
                await asyncio.to_thread(cluster.move, key_slot(key.encode()), old, new)
                await holder.ensure_held()
            assert await waits
            assert await other.owned()
            await other.release()

    asyncio.run(scene())
    cluster.move(key_slot(key.encode()), new, old)


def test_a_batch_that_is_sent_again_follows_a_slot_that_moved(changing):
    """Connections were closed, so it is sent once more: every lease is renewed where it is now."""
    cluster, store = changing
    key = store.keyspace.lock(NAME).meta
    old = cluster.owner(key)
    names = (f"lock {number}" for number in range(8 * BUCKETS))
    stays = next(
        name
        for name in names
        if bucket_of(name) != bucket_of(NAME)
        and cluster.owner(store.keyspace.lock(name).meta) is old
    )
    leases = [(name, hold(store, name).token, 30.0) for name in (stays, NAME)]
    new = cluster.another(old)
    cluster.move(key_slot(key.encode()), old, new)
    with old.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert store.extend(leases) == [True, True]
    cluster.move(key_slot(key.encode()), new, old)


def test_while_its_slot_moves_a_lock_is_out_of_reach_and_others_are_not(changing):
    """Half of its keys here, half there: it says so, and nothing is granted twice."""
    cluster, store = changing
    holder = hold(store)
    other = next(n for n in names_of_all_masters(store) if bucket_of(n) != bucket_of(NAME))
    key = store.keyspace.lock(NAME).meta
    old = cluster.owner(key)
    new = cluster.another(old)
    slot = key_slot(key.encode())
    with old.client() as one, new.client() as two:
        old_id, new_id = (c.execute_command("CLUSTER", "MYID").decode() for c in (one, two))
        two.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
        one.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
        with pytest.raises(BackendUnreachable):
            store.acquire(owner(), Claim(NAME))
        hold(store, other)
        one.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
        two.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
    assert store.extend([(NAME, holder.token, 30.0)]) == [True]
    assert store.acquire(owner(), Claim(NAME)).verdict is Verdict.BLOCKED


def test_t24_a_failover_of_one_master_loses_nothing_that_was_replicated(changing):
    """The holder keeps its lock, fences grow, and who waits is woken by the new master."""
    cluster, store = changing
    first, second = owner(), owner()
    fence = store.acquire(first, Claim(NAME)).fencing_token
    store.acquire(second, Claim(NAME), wait=30.0)
    old = cluster.owner(store.keyspace.lock(NAME).meta)
    with old.client() as client:
        eventually(lambda: is_replicated(client, store.keyspace.waited(NAME)), 5)
    with ThreadPoolExecutor(1) as pool:
        woken = pool.submit(Waiter(store, second.token).wait, 10.0)
        cluster.failover(old)
        assert store.extend([(NAME, first.token, 30.0)]) == [True]
        assert store.release(NAME, first.token, Ending.FINAL).verdict is Verdict.RELEASED
        assert woken.result()
    assert store.acquire(second, Claim(NAME)).fencing_token > fence


def test_t24_a_task_keeps_its_lock_through_a_failover(changing):
    """AsyncLock: it is still held at the new master, and given back there."""
    cluster, store = changing
    old = cluster.owner(store.keyspace.lock(NAME).meta)
    mark = store.keyspace.waited(NAME)

    async def scene():
        port = cluster.another(old).port
        async with (
            redis.asyncio.RedisCluster("127.0.0.1", port) as client,
            AsyncLock(client, NAME) as lock,
        ):
            with old.client() as admin:
                await asyncio.to_thread(eventually, lambda: is_replicated(admin, mark), 5)
            await asyncio.to_thread(cluster.failover, old)
            await lock.ensure_held()

    asyncio.run(scene())
    assert store.inspect(NAME).holders == ()


class Waiter:
    """Waits on through the failover: a call that the old master ended is made again."""

    def __init__(self, store, token):
        self.store, self.token = store, token

    def wait(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(BackendUnreachable):
                if self.store.wait(NAME, self.token, 1.0):
                    return True
        return False


def test_one_dead_master_ends_no_lease_on_the_others(redis_provider):
    """Renewals go on where a master answers; where none does, that is told apart from a loss."""
    args = ("--cluster-require-full-coverage", "no")
    with RedisCluster(redis_provider, args=args) as cluster:
        store = opened(cluster.url)
        names = names_of_all_masters(store)
        leases = [(name, hold(store, name).token, 30.0) for name in names]
        assert store.extend(leases) == [True] * 3
        cluster.owner(store.keyspace.lock(names[1]).meta).kill()
        assert store.extend(leases) == [True, None, True]
        with pytest.raises(BackendUnreachable):
            store.extend([leases[1]])
        with pytest.raises(BackendUnreachable):
            store.probe()
        assert store.acquire(owner(), Claim(names[0])).verdict is Verdict.BLOCKED
        store.hang_up()


def test_a_master_that_stands_still_ends_no_lease_on_the_others(store, redis_cluster):
    """Of threads and of asyncio, although their clients wait for an answer longer than a lease."""
    threads, tasks = names_of_all_masters(store), names_of_all_masters(store, "task's lock {}")
    owners = [redis_cluster.owner(store.keyspace.lock(n).meta) for n in (*threads, *tasks)]
    silent, first = owners[0], redis_cluster.masters[0].port

    async def scene(locks):
        async with redis.asyncio.RedisCluster("127.0.0.1", first) as client:
            later = [AsyncLock(client, name, lease=2) for name in tasks]
            for lock in later:
                assert await lock.acquire()
            silent.pause()
            try:
                await until_lost(later)
                await until_lost(locks)
                await asyncio.sleep(1.5)  # by now the others would have ended, too
                held = [lock.held for lock in (*locks, *later)]
            finally:
                silent.resume()
            for lock in later:
                await asyncio.wait([asyncio.ensure_future(lock.release())])
            return held

    with redis.RedisCluster("127.0.0.1", first) as client:
        locks = [Lock(client, name, lease=2) for name in threads]
        assert all(lock.acquire() for lock in locks)
        assert asyncio.run(scene(locks)) == [owner is not silent for owner in owners]
        for lock in locks[1:]:
            lock.release()


async def until_lost(locks):
    """Return when the lease of one of them has ended; only this task and thread see that."""
    until = time.monotonic() + 20
    while not any(lock.lost for lock in locks):  # locks have no event
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


def test_a_lock_on_a_client_of_the_callers_does_not_wait_for_redis_py_to_give_up(
    redis_cluster, cluster_client
):
    """While a master stands still redis-py's own eleven tries, with pauses, would take a minute."""
    nodes = [ClusterNode("127.0.0.1", server.port) for server in redis_cluster.masters]
    with redis.RedisCluster(startup_nodes=nodes, socket_timeout=0.3) as client:
        lock = Lock(client, NAME, blocking_timeout=0.5)
        with lock:
            pass
        master = redis_cluster.owner(Keyspace(spread=True).lock(NAME).meta)
        master.pause()
        try:
            began = time.monotonic()
            with pytest.raises(BackendUnreachable):
                lock.acquire()
            assert time.monotonic() - began < 3.0
        finally:
            master.resume()


# -- who may -------------------------------------------------------------------------------------


RULES = (
    "+@read +@write +@connection +eval +evalsha +time +info +config|get "
    "+subscribe +unsubscribe +publish +cluster|slots +command"
)
"""Of docs/redis.md."""


class Jane(CredentialProvider):
    """As a vault would be asked."""

    def get_credentials(self):
        return ("jane", "s3cret")


@pytest.fixture
def jane(redis_cluster, cluster_client):
    """A user of the shared Cluster with the documented rights, and no more."""
    for client in (cluster_client.get_redis_connection(n) for n in cluster_client.get_primaries()):
        client.execute_command(
            "ACL", "SETUSER", "jane", "reset", "on", ">s3cret", "~csl:*", "&csl:*", *RULES.split()
        )
    yield
    for client in (cluster_client.get_redis_connection(n) for n in cluster_client.get_primaries()):
        client.execute_command("ACL", "DELUSER", "jane")


def test_a_user_with_the_documented_rights_can_do_all_with_a_credential_provider(
    jane, redis_cluster, cluster_client
):
    """The provider is asked by every connection: of commands, blocking calls, and the bell."""
    assert RULES in re.sub(r"\s+", " ", REDIS_PAGE.read_text(encoding="utf-8"))
    store = opened(redis_cluster.url, credential_provider=Jane())
    try:
        store.probe()
        assert store.describe()["eviction"] == "noeviction"
        store.beat("w", "R", ["q"], 30.0)
        assert store.receive("w", 0.01) is None
        holder, token = hold(store), park(store, "id1/0/0")
        assert store.wait(NAME, "nobody", 0.05) is False
        began = time.monotonic()
        store.release(NAME, holder.token, Ending.FINAL)
        assert store.receive("w", 10.0).token == token
        assert time.monotonic() - began < module.LOOK / 2
        assert [found.name for found in admin_of(store).glances(NAME)] == [NAME]
        clients = (cluster_client.get_redis_connection(n) for n in cluster_client.get_primaries())
        users = [each["user"] for client in clients for each in client.client_list()]
        assert users.count("jane") >= 5
    finally:
        store.hang_up()


# -- the wrong address -----------------------------------------------------------------------------


def test_a_node_of_a_cluster_that_is_taken_for_a_server_names_the_remedy(redis_cluster):
    store = opened(redis_cluster.masters[0].url)
    with pytest.raises(BackendRefused, match=r"redis\+cluster://"):
        store.acquire(owner(), Claim(NAME))


def test_one_node_of_a_cluster_shows_no_locks_as_if_they_were_all(store, redis_cluster):
    """SCAN works there, and finds what this node has: an operator would see no lock, or a few."""
    hold(store)
    alone = redis_cluster.masters[0].url
    for words in (["list"], ["list", "--json"], ["report"]):
        done = CliRunner().invoke(main, ["--backend", alone, *words])
        assert done.exit_code == 3, done.output
        assert "this is one node of a Cluster; write redis+cluster://" in done.output
    with (
        redis.Redis.from_url(alone) as client,
        pytest.raises(BackendRefused, match=r"redis\+cluster://"),
    ):
        reset_all(client)
    assert reset_all(store.nodes.cluster) == 1


def test_a_server_that_is_taken_for_a_cluster_names_the_remedy(redis_url):
    store = opened(redis_url.replace("redis://", "redis+cluster://"))
    with pytest.raises(BackendRefused, match="write redis://"):
        store.probe()


def test_a_cluster_that_does_not_answer_is_an_outage():
    """Nothing is sent before the first verb, so that a worker may start before it."""
    with socket.socket() as first, socket.socket() as second:
        for taken in (first, second):  # by who does not listen, so that no other server gets it
            taken.bind(("127.0.0.1", 0))
        places = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second))
        store = opened(f"redis+cluster://{places}")
        with pytest.raises(BackendUnreachable):
            store.probe()
        store.hang_up()

"""Only for Redis Cluster. The contract of all stores is tested in test_store.py."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import redis.asyncio
from click.testing import CliRunner
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.credentials import CredentialProvider

from celery_singleton_lock import AsyncLock, Lock
from celery_singleton_lock.admin.bulk_parked import Pace, drain
from celery_singleton_lock.admin.doctor import Health, examine
from celery_singleton_lock.admin.export_parked import export, refuse_drained
from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.select_parked import Filter
from celery_singleton_lock.cli.main import main
from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import Rate, packed, rates_of
from celery_singleton_lock.core.redis_keys import BUCKETS, Keyspace, bucket_of
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.lock.reset import async_reset_all, reset_all
from celery_singleton_lock.store.cluster import inboxes as module
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.factory import admin_of, open_store
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.requests import Command, Confirm, Replicas
from support.redis_cluster import RedisCluster
from support.renewals import await_renewals
from support.replication import is_replicated
from support.waiting import eventually

pytestmark = pytest.mark.contract

NAME = "account:42"
REDIS_PAGE = Path(__file__).parents[2] / "docs" / "redis.md"


def test_a_client_from_a_url_with_a_database_waits_in_redis(redis_cluster):
    """Its copy for blocking calls was refused, so that the waiting client asked again and again."""
    url = f"redis://127.0.0.1:{redis_cluster.masters[0].port}/0"
    asked = []

    def remap(address):
        asked.append(address)
        return address

    with redis.RedisCluster.from_url(url, address_remap=remap) as client:
        blocking = ClusterStore(client).nodes.for_blocking(1.0)
        asked.clear()
        assert blocking.send_once(Command(("BLPOP", "csl:nothing", 0.01))) is None
        assert asked, "it goes to the addresses at which the client reaches the nodes"
        blocking.cluster.close()


def test_waiters_outnumber_the_connections_of_a_client(redis_cluster):
    """Those without a connection to wait on asked again and again."""
    port = redis_cluster.masters[0].port
    with redis.RedisCluster(host="127.0.0.1", port=port, max_connections=2) as client:
        blocking = ClusterStore(client).nodes.for_blocking(1.0)
        wait = Command(("BLPOP", "csl:nothing", 0.5))
        with ThreadPoolExecutor(5) as threads:
            assert list(threads.map(blocking.send_once, [wait] * 5)) == [None] * 5
        blocking.cluster.close()


@pytest.fixture
def store(cluster_client):
    store = ClusterStore(cluster_client, claim_lease=30)
    yield store
    store.close()


def opened(url, patience=10.0, **options):
    return open_store(parse_backend_url(url), options, "csl", patience=patience)


def owner(attempt="", **more):
    return Owner(new_token(), attempt, "app.task", **more)


def hold(store, name=NAME, lease=120.0):
    who = owner()
    assert store.acquire(who, Claim(name, lease)).verdict is Verdict.GRANTED
    return who


def park(store, attempt, name=NAME):
    who = owner(attempt)
    assert store.park(who, Claim(name), MessageToPark(b"body", "R", "q")).verdict is Verdict.WAITING
    return who.token


def names_of_all_masters(store, like="lock {}"):
    """Return a name for each master, of a lock that lives there."""
    names = [like.format(number) for number in range(8 * BUCKETS)]
    return list(store.nodes.each(names, lambda name: store.keyspace.lock(name).meta))


# -- one slot --------------------------------------------------------------------------------------


def test_scripts_write_only_in_the_slot_of_the_lock(store, cluster_client):
    """Whatever a worker, a waiter or an operator does; only the schema and the switches do not."""
    admin = admin_of(store)
    store.schema()
    store.switch("*", "observe")
    store.worker_heartbeat("w", "R", ["q"], 300.0)
    for name in names_of_all_masters(store):
        holder, token = hold(store, name), park(store, "id1/0/0", name)
        store.acquire(owner(), Claim(name), wait=5.0)
        store.record_observation(owner(), Claim(name), waits=True)
        admin.force_release(name, holder.token, Operator("jane"))
        assert store.receive("w", 5.0).token == token
    keys = cluster_client.keys("*", target_nodes="primaries")
    loose = {key for key in keys if b"{b" not in key}
    assert loose == {b"csl:schema", b"csl:fleet:mode"}
    assert len(keys) > 20


# -- all masters at once ---------------------------------------------------------------------------


def test_grants_come_from_every_master_at_once(store, monkeypatch):
    """Any master wakes the worker that waits: no grant is found by a later look only."""
    monkeypatch.setattr(module, "LOOK", 120.0)
    store.worker_heartbeat("w", "R", ["q"], 300.0)
    assert store.receive("w", 0.01) is None
    for name in names_of_all_masters(store):
        holder = hold(store, name)
        token = park(store, f"{name}/0/0", name)
        later = threading.Timer(0.1, store.release, (name, holder.token, Ending.FINAL))
        later.start()
        assert store.receive("w", 60.0).token == token
        later.join()


def test_a_message_whose_wake_up_was_lost_is_found(store, cluster_client, monkeypatch):
    monkeypatch.setattr(module, "LOOK", 0.3)
    store.worker_heartbeat("w", "R", ["q"], 300.0)
    assert store.receive("w", 0.01) is None
    head = (
        '{"lock":"account:42","token":"t","fence":"1","verdict":"granted","whole":"1","waited":"0"}'
    )
    cluster_client.rpush(store.keyspace.inbox("w", bucket_of(NAME)), f"{head}\nbody")
    assert store.receive("w", 60.0).token == "t"


def test_two_grants_of_one_bucket_come_one_after_the_other(store):
    store.worker_heartbeat("w", "R", ["q"], 300.0)
    tokens = {park(store, f"id{n}/0/0") for n in range(2)}
    first = store.receive("w", 60.0).token
    store.release(NAME, first, Ending.FINAL)
    assert {first, store.receive("w", 60.0).token} == tokens


def test_what_concerns_all_locks_is_asked_of_all_masters(store, cluster_client):
    """Lists, counts, due locks, audits and resets."""
    admin = admin_of(store)
    names = names_of_all_masters(store)
    assert len(names) == 3
    for name in names:
        hold(store, name)
        park(store, f"{name}/0/0", name)
    assert {found.name for found in admin.summarise_locks()} == set(names)
    assert store.parked("R")["q"].waiting == 3
    assert set(store.waited_for()) == set(names)
    assert len(store.locate_tasks(names)) == 3
    assert (
        store.extend([(n, h.token, 30.0) for n in names for h in store.inspect(n).holders])
        == [True] * 3
    )
    assert reset_all(cluster_client) == 3


def test_an_import_knows_of_drains_on_every_master(store):
    """Each bucket has its own record of drains."""
    admin, sent = admin_of(store), []
    drainer = Operator("jane", action="drain")
    for name in names_of_all_masters(store):
        hold(store, name)
        park(store, f"{name}/0/0", name)
        (line,) = export(admin, Filter(name, exact=True), Operator("jane"))
        drain(
            admin, Filter(name, exact=True), drainer, realm="R", publish=sent.append, pace=Pace(0)
        )
        assert list(admin.drains()) == ["R:q"]
        with pytest.raises(Refused):
            refuse_drained(admin, [line])
    assert len(sent) == 3


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


def test_operators_show_and_change_locks_of_a_cluster_by_the_commands(store, redis_cluster):
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


@pytest.mark.usefixtures("no_heartbeat")
def test_a_look_up_of_the_layout_closes_no_connection_that_another_thread_uses(
    store, cluster_client
):
    """redis-py 5.1 to 6.4 closes all connections of the node that it has asked."""
    keys = [store.keyspace.lock(name).meta for name in names_of_all_masters(store)]
    masters = {key: cluster_client.get_node_from_key(key).redis_connection for key in keys}

    def waiting():
        lists = [master.client_list() for master in masters.values()]
        return {each["addr"] for found in lists for each in found if each["cmd"] == "blpop"}

    with ThreadPoolExecutor(len(keys)) as threads:
        popped = [threads.submit(master.blpop, key, 60) for key, master in masters.items()]
        eventually(lambda: len(waiting()) == len(keys))
        before = waiting()
        for _ in keys:
            store.nodes.refresh_layout()
        after = waiting()
        for key in keys:
            cluster_client.rpush(key, "done")
        assert [each.result() for each in popped]
        assert after == before


def test_threads_take_turns_without_polling(cluster_client):
    """Sixteen threads, one lock: never two at once, and each release grants the next."""
    inside, most, total = [0], [0], [0]

    def work(_):
        with Lock(cluster_client, "turn", lease=120):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            total[0] += 1
            inside[0] -= 1

    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(48)))
    assert (most[0], total[0]) == (1, 48)
    assert time.monotonic() - began < 60, "less than one wait without being woken"


# -- a Cluster that changes ------------------------------------------------------------------------


@pytest.fixture
def changing(replicated_cluster):
    store = opened(replicated_cluster.url)
    replicated_cluster.flush(store.nodes.cluster)
    yield replicated_cluster, store
    store.hang_up()


def test_a_lock_outlives_the_move_of_its_slot(changing):
    """Holder, queue and parked message move too; the lock is held at every moment."""
    cluster, store = changing
    store.worker_heartbeat("w", "R", ["q"], 300.0)
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
    assert store.receive("w", 60.0).token == token
    cluster.move(key_slot(key.encode()), new, old)


@pytest.fixture
def moving_to_new_node(make_redis):
    """Make a Cluster whose slot of a key is moving to a node without slots; and end the move."""
    new = make_redis("--cluster-enabled", "yes", "--cluster-node-timeout", "15000")
    with contextlib.ExitStack() as stack:

        def move(cluster, key):
            old = cluster.owner(key)
            clients = [each.client(decode_responses=True) for each in (old, new)]
            one, other = map(stack.enter_context, clients)
            old_id, new_id = (each.execute_command("CLUSTER", "MYID") for each in clients)
            other.execute_command("CLUSTER", "MEET", "127.0.0.1", old.port)
            eventually(lambda: new_id in str(one.execute_command("CLUSTER NODES")), 10)
            eventually(lambda: old_id in str(other.execute_command("CLUSTER NODES")), 10)
            slot = key_slot(key.encode())
            other.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
            one.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)

        yield move


@pytest.mark.needs_real_redis("a Cluster")
def test_locks_whose_slot_moves_to_a_new_node_wait_and_others_are_renewed(
    moving_to_new_node, redis_provider
):
    """redis-py followed to a node that it did not know: tasks failed with an AttributeError."""
    with RedisCluster(redis_provider) as cluster:
        store = opened(cluster.url)
        names = names_of_all_masters(store)
        owners = [hold(store, name) for name in names[1:]]
        moving_to_new_node(cluster, store.keyspace.lock(names[0]).meta)
        with pytest.raises(BackendUnreachable, match="TRYAGAIN"):
            store.acquire(owner(), Claim(names[0]))
        leases = [(name, who.token, 30.0) for name, who in zip(names[1:], owners, strict=True)]
        assert store.extend([(names[0], "nobody", 30.0), *leases]) == [None, True, True]

        async def scene():
            async with redis.asyncio.RedisCluster("127.0.0.1", cluster.masters[0].port) as client:
                await AsyncLock(client, names[0]).acquire()

        with pytest.raises(BackendUnreachable, match="TRYAGAIN"):
            asyncio.run(scene())
        store.hang_up()


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
    """AsyncLock: its wait moves to the new master of the slot."""
    cluster, store = changing
    key = store.keyspace.lock(NAME).meta
    old = cluster.owner(key)
    new = cluster.another(old)

    async def scene():
        async with redis.asyncio.RedisCluster("127.0.0.1", new.port) as client:
            holder, other = AsyncLock(client, NAME), AsyncLock(client, NAME, blocking_timeout=60)
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
    """Connections were closed, so it is sent again: each lease is renewed at its present server."""
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


@contextlib.contextmanager
def moving(slot, old, new):
    """Move a slot, but none of its keys; at the end it stays where it was."""
    with old.client() as one, new.client() as two:
        old_id, new_id = (c.execute_command("CLUSTER", "MYID").decode() for c in (one, two))
        two.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
        one.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
        try:
            yield
        finally:
            for each in (one, two):
                each.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")


def test_while_its_slot_moves_a_lock_is_out_of_reach_and_others_are_not(changing):
    """During the move half of its keys are on each server.

    Calls fail, and nothing is granted twice.
    """
    cluster, store = changing
    holder = hold(store)
    other = next(n for n in names_of_all_masters(store) if bucket_of(n) != bucket_of(NAME))
    key = store.keyspace.lock(NAME).meta
    old = cluster.owner(key)
    new = cluster.another(old)
    with moving(key_slot(key.encode()), old, new):
        with pytest.raises(BackendUnreachable):
            store.acquire(owner(), Claim(NAME))
        hold(store, other)
    assert store.extend([(NAME, holder.token, 30.0)]) == [True]
    assert store.acquire(owner(), Claim(NAME)).verdict is Verdict.BLOCKED


def test_while_its_slot_moves_a_lock_is_not_taken_for_another_programs(changing):
    """The doctor's advice was to delete a key of the lock."""
    cluster, store = changing
    holder, admin = hold(store), admin_of(store)
    key = store.keyspace.lock(NAME).meta
    old = cluster.owner(key)
    new = cluster.another(old)
    with moving(key_slot(key.encode()), old, new):
        with pytest.raises(BackendUnreachable):
            list(admin.summarise_locks())
        (drift,) = (check for check in examine(admin) if check.name == "drift")
        assert "is moving" in drift.told
    (lock,) = admin.summarise_locks(NAME)
    assert (lock.name, lock.holders[0].token) == (NAME, holder.token)


def test_the_slot_of_a_lock_can_be_moved_while_workers_send_heartbeats(changing):
    """Heartbeats left keys at the new master, so the move failed (BUSYKEY), and stayed open."""
    cluster, store = changing
    beat = partial(store.worker_heartbeat, "w", "R", ["q"], 300.0)
    beat()
    before = store.identify()
    key = store.keyspace.lock(NAME).meta
    slot, old = key_slot(key.encode()), cluster.owner(key)
    new = cluster.another(old)
    with moving(slot, old, new):
        beat()
        beat(light=True)
        during = store.identify()
        with new.client() as client:
            assert client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == 0
    assert not during.has_lost(before)
    assert during.completed(before).markers == before.markers
    cluster.move(slot, old, new)
    beat()
    assert not store.identify().has_lost(before)
    cluster.move(slot, new, old)


def test_while_a_slot_moves_other_leases_of_its_master_are_renewed_in_time(changing):
    """Each lease of the moving slot took 0.4 s: redis-py repeats what Redis refuses for a time."""
    cluster, store = changing
    numbers = (f"lock {number}" for number in range(64 * BUCKETS))
    moves = list(islice((n for n in numbers if bucket_of(n) == bucket_of(NAME)), 20))
    key = store.keyspace.lock(NAME).meta
    old = cluster.owner(key)
    stays = next(
        name
        for name in names_of_all_masters(store, "stays {}")
        if cluster.owner(store.keyspace.lock(name).meta) is old
    )
    leases = [(name, hold(store, name).token, 12.0) for name in (*moves, stays)]
    with moving(key_slot(key.encode()), old, cluster.another(old)):
        assert store.extend(leases) == [*[None] * len(moves), True]
    assert store.extend(leases) == [True] * len(leases)


def test_t24_a_failover_of_one_master_loses_nothing_that_was_replicated(changing):
    """The holder keeps its lock, fences grow, and who waits is woken by the new master."""
    cluster, store = changing
    first, second = owner(), owner()
    fence = store.acquire(first, Claim(NAME, 120.0)).fencing_token
    store.acquire(second, Claim(NAME), wait=120.0)
    old = cluster.owner(store.keyspace.lock(NAME).meta)
    with old.client() as client:
        eventually(lambda: is_replicated(client, store.keyspace.waited(NAME)), 5)
    with ThreadPoolExecutor(1) as pool:
        woken = pool.submit(Waiter(store, second.token).wait, 60.0)
        cluster.failover(old)
        assert store.extend([(NAME, first.token, 30.0)]) == [True]
        assert store.release(NAME, first.token, Ending.FINAL).verdict is Verdict.RELEASED
        assert woken.result()
    assert store.acquire(second, Claim(NAME)).fencing_token > fence


def test_replicas_are_asked_of_the_new_master_after_a_failover(changing):
    """The former one refuses. Parked messages stayed unacknowledged, though a replica had them."""
    cluster, store = changing
    key = store.keyspace.waited(NAME)
    request = Confirm([key], Replicas(1, 0.2))
    eventually(lambda: store.do(request) == [True], 20)
    cluster.failover(cluster.owner(key))
    eventually(lambda: store.do(request) == [True], 20)


def test_t24_rates_groups_and_a_pause_outlive_a_failover(changing):
    """The starts still count, the quiet group is next, and the lock stays paused until then."""
    cluster, store = changing
    admin, by = admin_of(store), Operator("test")
    store.worker_heartbeat("w", "R", ["q"], 300.0, 9)

    def flow(group):
        return packed(rates_of(["3/h", Rate("100/h", cost=30)]), group=Group(group))

    def parked(group):
        me, message = owner(), MessageToPark(b"body", "R", "q")
        store.park(me, Claim(NAME, flow=flow(group)), message)
        return me.token

    first = owner()
    store.acquire(first, Claim(NAME, 120.0, flow=flow("large")))
    large, small = [parked("large") for _ in range(3)], parked("small")
    admin.pause(NAME, by)
    old = cluster.owner(store.keyspace.lock(NAME).meta)
    with old.client() as client:
        eventually(lambda: client.wait(1, 100) == 1, 10, "it is replicated")
    before = admin.inspect(NAME)
    cluster.failover(old)
    after = admin.inspect(NAME)
    for what in ("rates", "groups", "groups_waiting", "paused", "waiting", "waits_for"):
        assert getattr(after, what) == getattr(before, what), what
    store.release(NAME, first.token, Ending.FINAL, worker="w")
    assert admin.inspect(NAME).holders == ()
    admin.resume(NAME, by)
    started = []
    for _ in range(2):
        delivery = store.receive("w", 5.0)
        started.append(delivery.token)
        assert store.claim(Owner(delivery.token, worker="w"), NAME, 60.0).fencing_token
        store.release(NAME, delivery.token, Ending.FINAL, worker="w")
    assert started == [small, large[0]]
    view = admin.inspect(NAME)
    assert (view.waits_for, view.waiting) == (WaitsFor.RATE, 2)
    assert [rate.started for rate in view.rates] == [3, 90]


def test_t24_a_task_keeps_its_lock_through_a_failover(changing):
    """AsyncLock: it is still held at the new master, and released there."""
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


def test_a_lock_of_asyncio_can_be_closed_for_a_time(store, redis_cluster):
    """It raised AttributeError."""

    async def scene():
        port = redis_cluster.masters[0].port
        async with (
            redis.asyncio.RedisCluster("127.0.0.1", port) as client,
            AsyncLock(client, NAME) as lock,
        ):
            assert await lock.pause(60, "busy")

    asyncio.run(scene())
    assert store.inspect(NAME).closed_for > 50


class Waiter:
    """The wait survives the failover: a call that the old master ended is repeated."""

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
    """Masters that answer renew leases; a missing reply is not a loss."""
    args = ("--cluster-require-full-coverage", "no")
    with RedisCluster(redis_provider, args=args) as cluster:
        store = opened(cluster.url)
        names = names_of_all_masters(store)
        leases = [(name, hold(store, name).token, 60.0) for name in names]
        assert store.extend(leases) == [True] * 3
        cluster.owner(store.keyspace.lock(names[1]).meta).kill()
        assert store.extend(leases) == [True, None, True]
        with pytest.raises(BackendUnreachable):
            store.extend([leases[1]])
        with pytest.raises(BackendUnreachable):
            store.probe()
        assert store.acquire(owner(), Claim(names[0])).verdict is Verdict.BLOCKED
        store.hang_up()


@pytest.mark.full
@pytest.mark.usefixtures("renew_often")
def test_a_stopped_master_ends_no_lease_on_the_others(store, redis_cluster):
    """Of threads and of asyncio, although their clients wait for an answer longer than a lease."""
    threads, tasks = names_of_all_masters(store), names_of_all_masters(store, "task's lock {}")
    owners = [redis_cluster.owner(store.keyspace.lock(n).meta) for n in (*threads, *tasks)]
    silent, first = owners[0], redis_cluster.masters[0].port
    leases = [3 if owner is silent else 12 for owner in owners]

    async def scene(locks):
        async with redis.asyncio.RedisCluster("127.0.0.1", first) as client:
            pairs = zip(tasks, leases[len(threads) :], strict=True)
            later = [AsyncLock(client, name, lease=lease) for name, lease in pairs]
            for lock in later:
                assert await lock.acquire()
            silent.pause()
            try:
                await until_lost(later)
                await until_lost(locks)
                for name, owner in zip((*threads, *tasks), owners, strict=True):
                    if owner is not silent:
                        await asyncio.to_thread(await_renewals, store, name)
                held = [lock.held for lock in (*locks, *later)]
            finally:
                silent.resume()
            for lock in later:
                await asyncio.wait([asyncio.ensure_future(lock.release())])
            return held

    with redis.RedisCluster("127.0.0.1", first) as client:
        pairs = zip(threads, leases[: len(threads)], strict=True)
        locks = [Lock(client, name, lease=lease) for name, lease in pairs]
        assert all(lock.acquire() for lock in locks)
        assert asyncio.run(scene(locks)) == [owner is not silent for owner in owners]
        for lock in locks[1:]:
            lock.release()


@pytest.mark.full
@pytest.mark.usefixtures("renew_often")
def test_a_master_that_stands_still_ends_no_lease_of_a_worker_on_the_others(store, redis_cluster):
    """A worker's store waits 2 s for an answer, and then asks for the layout of the Cluster."""
    patient, store = store, opened(redis_cluster.url, patience=2.0)
    names, dog, lost = names_of_all_masters(store), Watchdog(store), []
    silent = redis_cluster.owner(store.keyspace.lock(names[0]).meta)
    leases = [
        (name, new_token(), lease) for name, lease in zip(names, (4.0, 12.0, 12.0), strict=True)
    ]
    for name, token, lease in leases:
        assert patient.acquire(Owner(token), Claim(name, lease)).verdict is Verdict.GRANTED
        dog.watch(name, token, lease, on_lost=lambda name, _token: lost.append(name))
    eventually(lambda: dog.renewed >= 6, message="it is connected to each master")
    silent.pause()
    try:
        eventually(lambda: lost, 10)
        for name in names[1:]:
            await_renewals(patient, name)
    finally:
        silent.resume()
        dog.stop()
        store.hang_up()
    assert lost == [names[0]]


@pytest.mark.parametrize("late", [False, True], ids=["held by then", "acquired later"])
@pytest.mark.usefixtures("cluster_client")
def test_a_long_lease_on_a_silent_master_ends_no_short_one_on_another(redis_cluster, store, late):
    """Although the watchdog waits for the silent master, for a sixth of the long lease."""
    patient, store = store, opened(redis_cluster.url, patience=30.0)
    (silent, other, _), dog, lost = names_of_all_masters(store), Watchdog(store), []
    master, token = redis_cluster.owner(store.keyspace.lock(silent).meta), hold(store, silent).token

    def watch_short():
        short = hold(patient, other, 8.0).token
        dog.watch(other, short, 8.0, on_lost=lambda name, _token: lost.append(name))

    master.pause()
    try:
        if not late:
            watch_short()
        dog.watch(silent, token, 60.0, valid_until=time.monotonic() + 40.0)  # due at once
        if late:
            eventually(lambda: dog.failed and dog._in_flight, 10, "the master is asked again")
            watch_short()
        await_renewals(patient, other)
        assert not lost
    finally:
        master.resume()
        dog.stop()
        store.hang_up()


async def until_lost(locks):
    """Return when the lease of one of them has ended; only this task and thread see that."""
    until = time.monotonic() + 60
    while not any(lock.lost for lock in locks):  # locks have no event
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


def test_a_lock_on_a_client_of_the_callers_does_not_wait_for_redis_py_to_give_up(
    redis_cluster, cluster_client
):
    """With a stopped master redis-py's own eleven attempts would take a minute."""
    nodes = [ClusterNode("127.0.0.1", server.port) for server in redis_cluster.masters]
    with redis.RedisCluster(startup_nodes=nodes, socket_timeout=0.3) as client:
        lock = Lock(client, NAME, blocking_timeout=0.5)
        eventually(lambda: is_used(lock), message="it is connected")
        master = redis_cluster.owner(Keyspace(spread=True).lock(NAME).meta)
        master.pause()
        try:
            began = time.monotonic()
            with pytest.raises(BackendUnreachable):
                lock.acquire()
            assert time.monotonic() - began < 20
        finally:
            master.resume()


def is_used(lock):
    """Acquire and release a lock; return whether its impatient client got all answers."""
    with contextlib.suppress(BackendUnreachable), lock:
        return True
    return False


# -- who may ---------------------------------------------------------------------------------------


RULES = (
    "+@read +@write +@connection +eval +evalsha +time +info +config|get "
    "+subscribe +unsubscribe +publish +cluster|slots +command"
)
"""Of docs/redis.md."""


class Jane(CredentialProvider):
    """As from a secret store."""

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
    jane, redis_cluster, cluster_client, monkeypatch
):
    """The provider is asked by every connection: of commands, blocking calls, and the bell."""
    assert RULES in re.sub(r"\s+", " ", REDIS_PAGE.read_text(encoding="utf-8"))
    monkeypatch.setattr(module, "LOOK", 120.0)
    store = opened(redis_cluster.url, credential_provider=Jane())
    try:
        store.probe()
        assert store.describe()["eviction"] == "noeviction"
        store.worker_heartbeat("w", "R", ["q"], 300.0)
        assert store.receive("w", 0.01) is None
        holder, token = hold(store), park(store, "id1/0/0")
        assert store.wait(NAME, "nobody", 0.05) is False
        store.release(NAME, holder.token, Ending.FINAL)
        assert store.receive("w", 60.0).token == token
        assert [found.name for found in admin_of(store).summarise_locks(NAME)] == [NAME]
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

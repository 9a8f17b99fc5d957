"""What becomes of a lock whose server was replaced by one that does not know it (L30, L31).

The replica is promoted with its link cut, so what the master granted last is gone. Time is what a
client counts: it owns the lock for one lease from when it asked, unless it hears otherwise.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import pytest

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.core.model import Claim, Ending, Owner, Parcel, Verdict, new_token
from celery_singleton_lock.config.settings import parse_settings
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.store.redis.sync import RedisStore
from support.replication import is_replicated
from support.waiting import eventually

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("replication")]

LEASE = 3.0


@pytest.fixture
def stores():
    """Make stores on clients of their own."""
    with ExitStack() as stack:

        def make(server, *, quarantine=True):
            client = stack.enter_context(server.client())
            return stack.enter_context(closing(RedisStore(client, quarantine=quarantine)))

        yield make


def acquire(store, name="a", lease=LEASE, **more):
    who = Owner(new_token())
    return who, store.acquire(who, Claim(name, lease), **more)


def granted_at(store, name="a"):
    """Ask until the lock is granted; return when."""
    who = Owner(new_token())
    eventually(lambda: store.acquire(who, Claim(name, LEASE)).verdict is Verdict.GRANTED, 3 * LEASE)
    return time.monotonic()


def let_serve(server, longest=LEASE):
    """Note in a server what one that has served for a while has noted."""
    with server.client() as client:
        run = client.info("server")["run_id"]
        noted = {"run": run, "since": 0, "till": 0, "longest": round(longest * 1000)}
        client.hset("csl:fleet:server", mapping=noted)


@pytest.fixture
def pair(make_redis):
    """A master that has served for a while, and its replica."""
    master = make_redis("--repl-diskless-sync-delay", "0")
    replica = make_redis("--replicaof", f"127.0.0.1 {master.port}")
    let_serve(master)
    with replica.client() as client:
        eventually(lambda: client.exists("csl:fleet:server"), 10, "the replica follows")
    return master, replica


def cut(master, replica):
    """Cut the link: what the master writes from now on is lost with it."""
    replica.pause()
    with master.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "replica")


def promote(master, replica):
    master.kill()
    replica.resume()
    with replica.client() as client:
        client.replicaof("NO", "ONE")


@pytest.mark.parametrize("quarantine", [False, True])
def test_l30_after_a_promotion_two_hold_a_lock_unless_in_quarantine(pair, stores, quarantine):
    """Without it the second is granted within the first one's lease; with it only after its end."""
    master, replica = pair
    old, new = (stores(server, quarantine=quarantine) for server in pair)
    cut(master, replica)
    began = time.monotonic()
    _, first = acquire(old)
    assert first.verdict is Verdict.GRANTED
    promote(master, replica)
    second = granted_at(new)
    overlap = began + LEASE - second
    assert (overlap < 0) is quarantine, f"both held it for {overlap:.2f} s"


def test_l30_what_was_replicated_goes_on_in_quarantine(pair, stores):
    """Holders renew and release; nobody is granted, until the gate opens by itself."""
    master, replica = pair
    old, new = map(stores, pair)
    holder, _ = acquire(old)
    waiter, reply = acquire(old, wait=30.0)
    assert reply.verdict is Verdict.WAITING
    with master.client() as client:
        eventually(lambda: is_replicated(client), 5)
    cut(master, replica)
    promote(master, replica)
    assert new.extend([("a", holder.token, LEASE)]) == [True]
    assert new.release("a", holder.token, Ending.FINAL).verdict is Verdict.RELEASED
    assert acquire(new, "free")[1].verdict is Verdict.BLOCKED
    assert new.inspect("a").holders == ()
    assert new.wait("a", waiter.token, 0.1) is False
    admin = admin_of(new)
    assert [found.held for found in admin.glances("a")] == [0]
    began = time.monotonic()
    eventually(lambda: new.kick_many(new.take_due()) == [] and new.inspect("a").holders, 3 * LEASE)
    assert [each.token for each in new.inspect("a").holders] == [waiter.token]
    assert time.monotonic() - began < 2 * LEASE
    assert acquire(new, "free")[1].verdict is Verdict.GRANTED


def test_l31_a_restart_that_lost_its_data_is_one_too(make_redis, stores):
    """It knows of no lease, so it waits for the default, or a longer one that it is asked for."""
    server = make_redis()
    store = stores(server)
    _, reply = acquire(store, lease=45.0)
    assert reply.verdict is Verdict.BLOCKED
    with server.client(decode_responses=True) as client:
        noted = client.hgetall("csl:fleet:server")
        assert float(noted["till"]) - float(noted["since"]) == 45_000
        client.hset("csl:fleet:server", "till", 0)
    assert acquire(store)[1].verdict is Verdict.GRANTED
    server.restart(keep_data=True)
    assert acquire(stores(server), "b")[1].verdict is Verdict.BLOCKED


def test_a_parked_message_waits_for_the_end_of_the_quarantine(make_redis, stores):
    """It is kept, and granted by the sweep that comes when the gate opens."""
    server = make_redis()
    store = stores(server)
    with server.client() as client:
        now = store.time() * 1000
        run = client.info("server")["run_id"]
        noted = {"run": run, "since": round(now), "till": round(now + 600), "longest": 600}
        client.hset("csl:fleet:server", mapping=noted)
    store.beat("w", "R", ["q"], 30.0)
    who = Owner(new_token(), "id/0/0")
    assert store.park(who, Claim("a", 0.5), Parcel(b"x", "R", "q")).verdict is Verdict.WAITING
    assert store.receive("w", 0.05) is None
    eventually(lambda: store.kick_many(store.take_due()) or store.receive("w", 0.05), 3)


def test_on_a_cluster_each_bucket_has_its_own(cluster_client):
    """It may live on any master, and move: what one knows, another need not."""
    with closing(ClusterStore(cluster_client, quarantine=True)) as store:
        assert acquire(store)[1].verdict is Verdict.BLOCKED
        cluster_client.hset(f"{store.keyspace.fleet_of('a')}:server", "till", 0)
        assert acquire(store)[1].verdict is Verdict.GRANTED
        assert acquire(store, "another")[1].verdict is Verdict.BLOCKED


def test_without_quarantine_nothing_is_noted(redis_client):
    """Who has not asked for it pays nothing."""
    acquire(RedisStore(redis_client))
    assert not redis_client.exists("csl:fleet:server")


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_setting_is_true_or_false(value):
    with pytest.raises(ConfigurationError, match="singleton_lock_quarantine"):
        parse_settings({"singleton_lock_quarantine": value}.get)

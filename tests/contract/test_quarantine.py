"""A lock whose server was replaced by one without its data (L30, L31).

The replica is promoted while its link is cut, so the last grants of the master are lost. Clients
count the time: each assumes that it holds the lock for one lease after its request.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, closing

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_singleton_lock.admin import why
from celery_singleton_lock.cli import main
from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.flower.changes import ChangeRequest, Target
from celery_singleton_lock.flower.handler_base import AppLocks
from celery_singleton_lock.metrics import export
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.redis.sync import RedisStore
from support.passing_time import let_pass
from support.replication import is_replicated
from support.waiting import eventually

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("replication")]

LEASE = 60.0


@pytest.fixture
def stores():
    """Make stores on clients of their own."""
    with ExitStack() as stack:

        def make(server, *, quarantine=True):
            client = stack.enter_context(server.client())
            return stack.enter_context(
                closing(RedisStore(client, quarantine=quarantine, claim_lease=600.0))
            )

        yield make


def acquire(store, name="a", lease=LEASE, **more):
    who = Owner(new_token())
    return who, store.acquire(who, Claim(name, lease), **more)


def let_serve(server, longest=LEASE):
    """Write the marks of a server that has been in use for a while."""
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
    _, first = acquire(old)
    assert first.verdict is Verdict.GRANTED
    promote(master, replica)
    within_the_lease = Verdict.BLOCKED if quarantine else Verdict.GRANTED
    assert acquire(new)[1].verdict is within_the_lease
    if quarantine:
        let_pass(new, int(LEASE) - 25)
        assert acquire(new)[1].verdict is Verdict.BLOCKED
        let_pass(new, 30)
        assert acquire(new)[1].verdict is Verdict.GRANTED


def test_l30_what_was_replicated_goes_on_in_quarantine(pair, stores):
    """Holders renew and release; nothing is granted until the quarantine ends."""
    master, replica = pair
    old, new = map(stores, pair)
    holder, _ = acquire(old)
    waiter, reply = acquire(old, wait=3000.0)
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
    assert [found.held for found in admin.summarise_locks("a")] == [0]
    let_pass(new, int(LEASE) + 5)
    assert new.sweep_and_grant_many(new.take_due_locks()) == []
    assert [each.token for each in new.inspect("a").holders] == [waiter.token]
    assert acquire(new, "free")[1].verdict is Verdict.GRANTED


def test_l31_a_restart_that_lost_its_data_is_one_too(make_redis, stores):
    """It knows no lease, so it waits for the default, or for a longer configured one."""
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
    """It stays parked, and the sweep at the end of the quarantine grants it."""
    server = make_redis()
    store = stores(server)
    with server.client() as client:
        now = store.time() * 1000
        run = client.info("server")["run_id"]
        noted = {"run": run, "since": round(now), "till": round(now + 60_000), "longest": 60_000}
        client.hset("csl:fleet:server", mapping=noted)
    store.worker_heartbeat("w", "R", ["q"], 3000.0)
    who = Owner(new_token(), "id/0/0")
    assert (
        store.park(who, Claim("a", 30.0), MessageToPark(b"x", "R", "q")).verdict is Verdict.WAITING
    )
    assert store.receive("w", 0.05) is None
    let_pass(store, 65)
    assert store.sweep_and_grant_many(store.take_due_locks()) == []
    assert store.receive("w", 30.0).token == who.token


def test_l30_a_lease_that_grew_with_its_claim_is_waited_for(make_redis, stores):
    """A worker of a newer release claims a message that an older one has parked: two would hold."""
    server = make_redis()
    let_serve(server)
    store = stores(server)
    store.worker_heartbeat("w", "R", ["q"], 30.0)
    store.park(Owner(new_token(), "id/0/0"), Claim("a", LEASE), MessageToPark(b"x", "R", "q"))
    granted = store.receive("w", 1.0)
    assert store.claim(Owner(granted.token), "a", 3 * LEASE).verdict is Verdict.GRANTED
    with server.client() as client:
        client.hset("csl:fleet:server", "run", "another")  # as if it had been replaced
        client.delete(*client.keys("*:a:*"))  # and had not replicated the grant
    _, reply = acquire(stores(server))
    assert reply.verdict is Verdict.BLOCKED
    assert reply.next_look > 2 * LEASE


def test_on_a_cluster_each_bucket_has_its_own(cluster_client):
    """It may be on any master, and move, so each master has different data."""
    with closing(ClusterStore(cluster_client, quarantine=True)) as store:
        assert acquire(store)[1].verdict is Verdict.BLOCKED
        cluster_client.hset(f"{store.keyspace.fleet_of('a')}:server", "till", 0)
        assert acquire(store)[1].verdict is Verdict.GRANTED
        assert acquire(store, "another")[1].verdict is Verdict.BLOCKED


def test_without_quarantine_nothing_is_noted(redis_client):
    """Without the setting it costs nothing."""
    acquire(RedisStore(redis_client))
    assert not redis_client.exists("csl:fleet:server")


@pytest.mark.parametrize(
    "command",
    [
        ["sweep"],
        ["resume", "a"],
        ["limit", "a", "2"],
        ["promote", "a", "WAITER"],
        ["drop", "a", "OTHER", "--yes"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("replaced", [True, False])
def test_a_command_for_a_url_grants_nothing_while_a_new_server_waits(
    make_redis, stores, command, replaced
):
    """The URL does not say that the workers have the setting, and the operator may not know it."""
    server = make_redis()
    store, (waiter, other) = lose_the_holder(server, stores, replaced=replaced)
    named = {"WAITER": waiter.token, "OTHER": other.token}
    env = {"CELERY_SINGLETON_LOCK_BACKEND": server.url}
    ran = CliRunner().invoke(main, [named.get(word, word) for word in command], env=env)
    assert ran.exit_code == 0, ran.output
    assert bool(store.inspect("a").holders) is not replaced


@pytest.mark.parametrize("replaced", [True, False])
def test_a_scrape_grants_nothing_while_a_new_server_waits(make_redis, stores, replaced):
    """It sweeps while no worker lives, and its program may not have the workers' settings."""
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    server = make_redis()
    store, _ = lose_the_holder(server, stores, replaced=replaced)
    with Celery("exporter", broker=server.url, set_as_current=False) as app:
        export(app, registry)
        assert registry.get_sample_value("celery_lock_fleet_up") == 1
    assert bool(store.inspect("a").holders) is not replaced


@pytest.mark.parametrize("replaced", [True, False])
def test_the_page_in_flower_grants_nothing_while_a_new_server_waits(make_redis, stores, replaced):
    """Flower often has the URL of the broker only."""
    server = make_redis()
    store, (waiter, _) = lose_the_holder(server, stores, replaced=replaced)
    with Celery("flower", broker=server.url, set_as_current=False) as app:
        locks = AppLocks(app)
        rows = locks.rows()
        (row,) = rows.page()["locks"]
        change = ChangeRequest("promote", (Target(row["id"], waiter.token),), sure=True)
        assert rows.changes(locks.actions()).carry_out(change, Operator("jane")).done == {"a": 1}
    assert bool(store.inspect("a").holders) is not replaced


def lose_the_holder(server, stores, *, replaced):
    """Let two wait for a lock whose holder is gone, on a server that may have been replaced."""
    let_serve(server)
    store = stores(server)
    (holder, _), (first, _), (second, _) = (acquire(store, wait=3000.0) for _ in range(3))
    with server.client() as client:
        client.zrem(store.keyspace.lock("a").holders, holder.token)
        client.zadd(store.keyspace.lock("a").due, {"a": 0})
        if replaced:  # and had not replicated the grant
            client.hset("csl:fleet:server", "run", "another")
    return store, (first, second)


def test_a_command_for_a_url_starts_no_quarantine_of_its_own(make_redis):
    """Without the setting nobody waits for the end of one."""
    server = make_redis()
    with server.client() as client:
        acquire(RedisStore(client))
        env = {"CELERY_SINGLETON_LOCK_BACKEND": server.url}
        assert CliRunner().invoke(main, ["limit", "a", "2"], env=env).exit_code == 0
        assert not client.exists("csl:fleet:server")


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_setting_is_true_or_false(value):
    with pytest.raises(ConfigurationError, match="singleton_lock_quarantine"):
        parse_settings({"singleton_lock_quarantine": value}.get)


def test_a_retry_does_not_start_while_a_new_server_grants_nothing(make_redis, stores):
    """Not even a retry whose permit is reserved: another task may hold the lock."""
    server = make_redis()
    let_serve(server)
    store = stores(server)
    store.worker_heartbeat("w", "R", ["q"], 3000.0)
    first = Owner(new_token(), "task/0/0")
    retry = Owner(new_token(), "task/1/0")
    assert store.acquire(first, Claim("a", LEASE)).verdict is Verdict.GRANTED
    store.park(retry, Claim("a", LEASE), MessageToPark(b"body", "R", "q"))
    with server.client() as client:
        client.hset("csl:fleet:server", "run", "another")
    store.release("a", first.token, Ending.KEEP, reserve=Reservation("task/1/0", LEASE))
    seen = store.inspect("a")
    assert (seen.holders, seen.waits_for) == ((), WaitsFor.REDIS)
    assert 0 < seen.next_look <= LEASE
    assert re.search("grants nothing for another .* s", why(admin_of(store), "task").sentence)


def test_a_new_server_keeps_no_permit_that_is_not_there(make_redis, stores):
    """Two ran, and another task declared a limit of one: who retries then has no permit to keep."""
    server = make_redis()
    let_serve(server)
    store = stores(server)
    retried, other = Owner(new_token(), "a/0/0"), Owner(new_token())
    for who in (retried, other):
        assert store.acquire(who, Claim("a", LEASE, limit=2)).verdict is Verdict.GRANTED
    acquire(store)
    with server.client() as client:
        client.hset("csl:fleet:server", "run", "another")
    store.release("a", retried.token, Ending.KEEP, reserve=Reservation("a/1/0", LEASE))
    assert [each.token for each in store.inspect("a").holders] == [other.token]


def test_nobody_passes_a_retry_whose_permit_was_kept_when_a_new_server_grants(make_redis, stores):
    """It comes while the server grants nothing yet; those who wait are behind it."""
    server = make_redis()
    let_serve(server)
    store = stores(server)
    first, retry = Owner(new_token(), "task/0/0"), Owner(new_token(), "task/1/0")
    assert store.acquire(first, Claim("a", LEASE)).verdict is Verdict.GRANTED
    acquire(store, wait=3000.0)
    store.release("a", first.token, Ending.KEEP, reserve=Reservation("task/1/0", LEASE))
    with server.client() as client:
        client.hset("csl:fleet:server", "run", "another")
        assert store.acquire(retry, Claim("a", LEASE), wait=3000.0).verdict is Verdict.WAITING
        client.hset("csl:fleet:server", "till", 0)
    store.sweep_and_grant("a")
    assert [each.token for each in store.inspect("a").holders] == [retry.token]


def test_a_new_server_lets_no_message_start_or_leave_for_the_broker(make_redis, stores):
    """Neither one whose task keeps no lock now, nor one that no worker takes."""
    server = make_redis()
    let_serve(server)
    store = stores(server)
    store.worker_heartbeat("w", "R", ["q"], 3000.0)
    acquire(store, "held")
    for name, queue in (("held", "q"), ("free", "nobody's")):
        who = Owner(new_token(), f"{name}/0/0", "app.task")
        store.park(who, Claim(name, LEASE), MessageToPark(b"body", "R", queue))
    with server.client() as client:
        for opens, moved in ((False, 0), (True, 1)):
            client.hset("csl:fleet:server", "till" if opens else "run", "0")
            assert store.deliver_unlocked(["held"], ["app.task"], 9, worker="w", realm="R") == moved
            assert len(store.sweep_and_grant("free", realm="R")) == moved


def test_a_lock_is_shown_by_a_new_server_that_cannot_write_yet(make_redis, stores):
    """Operators read during outages: a read must not depend on a permission to write."""
    server = make_redis()
    let_serve(server)
    store = stores(server)
    holder, _ = acquire(store)
    with server.client() as client:
        client.hset("csl:fleet:server", "run", "another")
        client.config_set("min-replicas-to-write", 1)
        seen = store.inspect("a")
        assert [each.token for each in seen.holders] == [holder.token]
        assert seen.waits_for is WaitsFor.REDIS
        client.config_set("min-replicas-to-write", 0)
    store.release("a", holder.token, Ending.FINAL)
    assert acquire(store)[1].verdict is Verdict.BLOCKED


def test_a_replica_shows_a_lock_as_its_master_does(pair, stores):
    """It is not taken for a promoted replica, although it has another run id."""
    master, replica = map(stores, pair)
    acquire(master)
    with pair[0].client() as client:
        eventually(lambda: is_replicated(client), 5)
    assert replica.inspect("a").waits_for is master.inspect("a").waits_for is WaitsFor.HOLDER

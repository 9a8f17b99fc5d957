"""What doctor finds: a sentence for each state of a server; nothing is green that it cannot see."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin import doctor
from celery_singleton_lock.admin.doctor import Check, Health, examine
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.core.model import SCHEMA, Claim, Ending, Owner, Parcel, new_token
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = pytest.mark.contract

ALL = [
    "connection", "scripts", "version", "eviction", "memory", "replicas", "persistence",
    "clock", "schema", "workers", "sweeping", "lost", "drift",
]  # fmt: skip
MIB = 2**20


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client)
    yield store
    store.close()


def park(store, name, queue="q"):
    who = Owner(token := new_token(), f"{token}/0/0", "app.task")
    store.park(who, Claim(name), Parcel(b"body", "R", queue))
    return who.token


@pytest.mark.parametrize(
    ("name", "info", "health", "told"),
    [
        ("version", {"redis_version": "6.2.0"}, "ok", "6.2.0"),
        ("version", {"redis_version": "10.0.1"}, "ok", "10.0.1"),
        ("version", {"redis_version": "7"}, "ok", "7"),
        (
            "version",
            {"redis_version": "6.0.16"},
            "fail",
            "6.0.16: use Redis 6.2 or later, or Valkey",
        ),
        ("version", {}, "unknown", "the server does not tell it"),
        ("eviction", {"maxmemory_policy": "noeviction"}, "ok", "noeviction"),
        (
            "eviction",
            {"maxmemory_policy": "allkeys-lru"},
            "fail",
            "allkeys-lru: parked tasks and locks can vanish; set maxmemory-policy noeviction",
        ),
        ("eviction", {}, "unknown", "the server does not tell its maxmemory-policy"),
        (
            "memory",
            {"used_memory": 3000 * MIB, "maxmemory": 0},
            "ok",
            "3,000 MiB used, no maxmemory",
        ),
        (
            "memory",
            {"used_memory": 79 * MIB, "maxmemory": 100 * MIB},
            "ok",
            "79 MiB used, 79% of maxmemory",
        ),
        (
            "memory",
            {"used_memory": 80 * MIB, "maxmemory": 100 * MIB},
            "warn",
            "80 MiB used, 80% of maxmemory: when it is full, tasks stay with the broker",
        ),
        ("memory", {"used_memory": 1}, "unknown", "the server does not tell it"),
        ("memory", {"maxmemory": 1}, "unknown", "the server does not tell it"),
        ("replicas", {"role": "master", "connected_slaves": 0}, "ok", "0 connected"),
        ("replicas", {"role": "master"}, "unknown", "the server does not tell them"),
        (
            "replicas",
            {"role": "slave", "connected_slaves": 1},
            "fail",
            "this is a replica, and locks need the master: correct the address",
        ),
    ],
)
def test_what_a_server_tells_of_itself_is_judged(name, info, health, told):
    assert doctor._OF_INFO[name](info) == Check(name, Health(health), told)


@pytest.mark.parametrize(
    ("offset", "health", "told"),
    [
        (-0.34, "ok", "differs by 0.3 s from this machine's"),
        (5.0, "ok", "differs by 5.0 s from this machine's"),
        (-7.4, "warn", "differs by 7 s from this machine's: locks use the server's alone"),
        (5.1, "warn", "differs by 5 s"),
    ],
)
def test_a_clock_that_is_wrong_either_way_is_told_of(offset, health, told):
    found = doctor._clock(offset)
    assert (found.name, found.health) == ("clock", health)
    assert found.told.startswith(told)


def test_the_servers_clock_is_compared_with_ours(store):
    assert abs(doctor._server_offset(store)) < 1


@pytest.mark.needs_real_redis("answers to CONFIG")
def test_how_a_restart_is_survived_is_told_of_each_kind(make_redis):
    """A crash loses nothing, or something, or all; and a disk that is full is told of first."""
    server = make_redis()
    with server.client(decode_responses=False) as client:
        store = RedisAdminStore(client)

        def found(**info):
            return doctor._persistence(store, {**client.info(), **info})

        assert found() == Check(
            "persistence",
            Health.WARN,
            "none: a restart loses all that is parked; set appendonly yes",
        )
        client.config_set("save", "3600 1")
        assert found() == Check(
            "persistence",
            Health.WARN,
            "snapshots: a crash loses what was parked since the last; set appendonly yes",
        )
        failed = "the last write failed; see its log"
        assert found(rdb_last_bgsave_status="err").told == f"snapshots: {failed}"
        assert found(aof_last_write_status="err").told.startswith("snapshots: a crash")
        client.config_set("appendonly", "yes")
        assert found() == Check("persistence", Health.OK, "append-only file")
        assert found(aof_last_write_status="err") == Check(
            "persistence", Health.FAIL, f"append-only file: {failed}"
        )
        assert found(rdb_last_bgsave_status="err").health is Health.OK
        info = client.info()
        del info["aof_last_write_status"]
        assert doctor._persistence(store, info).health is Health.OK
        assert doctor._persistence(store, None).health is Health.UNKNOWN
        store.close()


def test_a_server_that_is_away_is_all_that_is_told(store):
    """What else is wrong cannot be known."""
    store.client.connection_pool.connection_kwargs["port"] = 1
    store.client.connection_pool.disconnect()
    (found,) = examine(store)
    assert (found.name, found.health) == ("connection", "fail")
    assert "did not answer" in found.told


def test_a_healthy_server_passes_every_check_and_each_is_named(store):
    store.beat("worker-1", "R", ["b", "a"], 30)
    store.beat("worker-2", "R", ["b"], 30)
    found = {check.name: check for check in examine(store)}
    assert list(found) == ALL
    assert [each.name for each in examine(store, deep=False)] == ALL[:-1]
    wrong = {name for name, each in found.items() if each.health is not Health.OK}
    assert wrong <= {"persistence"}
    assert found["connection"].told == "answers"
    assert found["scripts"].told == "may be run, and all keys be looked through"
    assert found["workers"].told == "2 live, for a, b"
    assert found["sweeping"].told == "no lock waits for a look"
    assert found["drift"].told == "1 locks agree with their records", "the one of the probe"


@pytest.mark.needs_real_redis("users and their rights")
def test_what_the_user_may_not_ask_is_unknown_and_never_green(make_redis):
    server = make_redis()
    with server.client() as admin:
        rights = ("on", ">pw", "~*", "&*", "+@all", "-info", "-config", "-get", "-mget", "-scan")
        admin.execute_command("ACL", "SETUSER", "half", *rights)
        with server.client(username="half", password="pw") as client:
            store = RedisAdminStore(client)
            found = {check.name: check for check in examine(store)}
            store.close()
    told = "this user may not run INFO: allow it, or ask who runs this Redis"
    for name in ("version", "eviction", "memory", "replicas"):
        assert found[name] == Check(name, Health.UNKNOWN, told)
    assert found["persistence"].told.startswith("this user may not run INFO or CONFIG GET save:")
    for name in ("scripts", "schema"):
        assert found[name] == Check(name, Health.UNKNOWN, "not told: NoPermissionError")
    for name in ("workers", "drift"):
        assert found[name].health is Health.FAIL, "the library asks, and is refused"
    assert list(found) == ALL


def test_data_of_another_version_is_told_with_both(store):
    def found():
        return doctor._schema(store)

    assert found() == Check("schema", Health.OK, "no worker has been here yet")
    store.client.set(store.keyspace.schema, SCHEMA)
    assert found() == Check("schema", Health.OK, SCHEMA)
    store.client.set(store.keyspace.schema, "999")
    told = f"999, and this version works with {SCHEMA}: use the other version"
    assert found() == Check("schema", Health.FAIL, told)


def test_that_nobody_would_run_what_is_parked_is_told(store):
    told = "none is live that parks tasks: what is parked waits until one starts"
    assert doctor._workers(store) == Check("workers", Health.WARN, told)


def test_locks_that_nobody_has_looked_at_are_named(store):
    """Five at most; and what has been due for ten seconds is no reason to worry yet."""
    now = store.time() * 1000
    for number in range(7):
        due = store.keyspace.due(number)
        store.client.zadd(due, {f"k:late{number}": now - 16_000, f"k:new{number}": now - 14_000})
    found = doctor._sweeping(store)
    assert (found.name, found.health) == ("sweeping", "fail")
    assert found.told.startswith("no worker has looked for 15 s at 'k:late")
    assert found.told.count("late") == 5
    assert "new" not in found.told
    assert found.told.endswith(": start one, or run sweep from cron")


@pytest.mark.parametrize(
    ("reports", "health", "told"),
    [
        ({}, "unknown", "no worker has answered: those of a busy solo pool do not"),
        ({"w@a": {"error": "keeps no locks"}}, "unknown", "no worker has answered: those of"),
        (
            {"w@a": {"threads": {"agent": 0.2, "outbox": None}}, "w@b": {"threads": {"agent": 9}}},
            "ok",
            "all 3 threads of 2 workers make their rounds",
        ),
        (
            {"w@a": {"threads": {"agent": 0.2, "csl-watchdog": 41.2}}},
            "fail",
            "csl-watchdog of w@a: last round 41 s ago: see the log of that worker, or restart it",
        ),
    ],
)
def test_a_thread_of_a_worker_that_has_stopped_its_rounds_is_named(reports, health, told):
    found = doctor.threads_check(reports)
    assert (found.name, found.health) == ("threads", health)
    assert found.told.startswith(told)


def test_a_lock_that_contradicts_itself_is_named_with_what_is_wrong(store):
    for name in ("fine", "wrong"):
        store.acquire(Owner(new_token()), Claim(name))
        store.beat("w", "R", ["q"], 30)
    token = park(store, "wrong")
    store.client.zrem(store.keyspace.lock("wrong").queue, token)
    store.client.set(store.keyspace.lock("other").holders, "x")
    store.client.set(store.keyspace.lock("other").meta, "x")
    found = doctor._drift(store)
    assert (found.name, found.health) == ("drift", "fail")
    told = f"'wrong': {token}: its record says parked, and it is not in the queue"
    assert told in found.told
    assert f"{store.keyspace.lock('other').meta!r} holds another program's data" in found.told
    assert found.told.endswith(". Kick the lock (sweep), or drop that token")
    assert "; " in found.told
    assert "fine" not in found.told


def test_of_much_that_is_wrong_five_examples_are_named(store):
    store.beat("w", "R", ["q"], 30)
    for name in ("a", "b", "c"):
        store.acquire(Owner(new_token()), Claim(name))
        for _ in range(3 if name == "a" else 7):
            store.client.zrem(store.keyspace.lock(name).queue, park(store, name))
    assert doctor._drift(store).told.count("its record says") == 5


def test_how_many_locks_agree_is_told(store):
    for number in range(3):
        store.acquire(Owner(new_token()), Claim(f"a{number}"))
    idle = Owner(new_token())
    store.acquire(idle, Claim("idle"))
    store.release("idle", idle.token, Ending.FINAL)
    assert doctor._drift(store) == Check("drift", Health.OK, "4 locks agree with their records")


def test_a_check_that_finds_no_server_fails_by_its_name():
    def gone():
        raise BackendUnreachable("it is away")

    assert doctor._tried("drift", gone) == Check("drift", Health.FAIL, "it is away")

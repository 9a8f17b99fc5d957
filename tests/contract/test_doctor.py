"""doctor: one sentence for each state of a server; never OK without the facts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.admin import doctor, production_checks
from celery_singleton_lock.admin.backlog import SLACK
from celery_singleton_lock.admin.doctor import Check, Health, examine
from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.core.model import SCHEMAS, Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import Rate, packed
from celery_singleton_lock.core.redis_keys import bucket_of
from celery_singleton_lock.core.settle import Settle
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from support.passing_time import let_pass, stop_time
from support.waiters import hold, park

pytestmark = pytest.mark.contract

ALL = [
    "connection", "scripts", "version", "eviction", "memory", "replicas", "persistence",
    "database", "clock", "schema", "workers", "modes", "sweeping", "lost", "quarantine", "backlog",
    "paused", "closed", "costs", "grants", "parked", "drift",
]  # fmt: skip
MIB = 2**20


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client)
    yield store
    store.close()


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
            "6.0.16 is too old: use Redis 6.2 or later, or Valkey",
        ),
        ("version", {}, "unknown", "INFO has no redis_version"),
        ("eviction", {"maxmemory_policy": "noeviction"}, "ok", "noeviction"),
        (
            "eviction",
            {"maxmemory_policy": "allkeys-lru"},
            "fail",
            "allkeys-lru: Redis may delete locks and parked tasks; set maxmemory-policy noeviction",
        ),
        ("eviction", {}, "unknown", "INFO has no maxmemory_policy"),
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
            (
                "80 MiB used, 80% of maxmemory: when it is full, no task is parked, and blocked "
                "tasks stay in the broker"
            ),
        ),
        ("memory", {"used_memory": 1}, "unknown", "INFO has no used_memory and maxmemory"),
        ("memory", {"maxmemory": 1}, "unknown", "INFO has no used_memory and maxmemory"),
        ("replicas", {"role": "master", "connected_slaves": 0}, "ok", "0 connected"),
        ("replicas", {"role": "master"}, "unknown", "INFO has no connected_slaves"),
        (
            "replicas",
            {"role": "slave", "connected_slaves": 1},
            "fail",
            "this server is a replica, and locks need the master: use the master's address",
        ),
    ],
)
def test_the_facts_of_a_server_are_checked(name, info, health, told):
    assert doctor._OF_INFO[name](info) == Check(name, Health(health), told)


@pytest.mark.parametrize(
    ("offset", "health", "told"),
    [
        (-0.34, "ok", "differs by 0.3 s from this machine's"),
        (5.0, "ok", "differs by 5.0 s from this machine's"),
        (-7.4, "warn", "differs by 7 s from this machine's. Locks use only the server's clock."),
        (5.1, "warn", "differs by 5 s"),
    ],
)
def test_a_clock_that_is_ahead_or_behind_is_reported(offset, health, told):
    found = doctor._clock(offset)
    assert (found.name, found.health) == ("clock", health)
    assert found.told.startswith(told)


def test_the_servers_clock_is_compared_with_ours(store):
    assert abs(doctor._server_offset(store)) < 30


@pytest.mark.full
@pytest.mark.needs_real_redis("answers to CONFIG")
def test_the_effect_of_a_restart_is_reported_for_each_kind_of_persistence(make_redis):
    """A crash loses nothing, some or all data; a full disk is reported first."""
    server = make_redis()
    with server.client(decode_responses=False) as client:
        store = RedisAdminStore(client)

        def found(**info):
            return doctor._persistence(store, {**client.info(), **info})

        assert found() == Check(
            "persistence",
            Health.WARN,
            "none: a restart loses all parked tasks; set appendonly yes",
        )
        client.config_set("save", "3600 1")
        assert found() == Check(
            "persistence",
            Health.WARN,
            "snapshots: a crash loses tasks parked since the last one; set appendonly yes",
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


def test_only_the_connection_is_reported_if_the_server_does_not_answer(store):
    """Other checks are not possible."""
    store.client.connection_pool.connection_kwargs["port"] = 1
    store.client.connection_pool.disconnect()
    (found,) = examine(store)
    assert (found.name, found.health) == ("connection", "fail")
    assert "did not answer" in found.told


def test_a_master_that_is_away_is_not_said_to_forbid_a_command(store, monkeypatch):
    """One master of a Cluster: the operator would look at its users, and not start it."""
    away = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))
    monkeypatch.setattr(store, "servers", lambda: [store.client, away])
    found = [each for each in examine(store) if "localhost:1: " in each.told]
    assert [each.name for each in found] == list(doctor._OF_INFO)
    assert {each.health for each in found} == {Health.FAIL}
    assert all("did not answer (ConnectionError" in each.told for each in found)


def test_a_healthy_server_passes_every_check_and_each_is_named(store):
    store.worker_heartbeat("worker-1", "R", ["b", "a"], 30)
    store.worker_heartbeat("worker-2", "R", ["b"], 30)
    store.schema()
    found = {check.name: check for check in examine(store)}
    assert list(found) == ALL
    assert [each.name for each in examine(store, deep=False)] == ALL[:-6]
    wrong = {name for name, each in found.items() if each.health is not Health.OK}
    assert wrong <= {"persistence"}
    assert found["connection"].told == "answers"
    assert found["scripts"].told == "EVALSHA and SCAN are allowed"
    assert found["workers"].told == "2 live, for a, b"
    assert found["sweeping"].told == "no sweep is overdue"
    assert found["database"].told.startswith("has no keys of other programs, and ")
    assert found["drift"].told == "1 locks are consistent", "the one of the probe"


@pytest.mark.needs_real_redis("users and their rights")
def test_a_check_without_permission_is_unknown_and_never_ok(make_redis):
    server = make_redis()
    with server.client() as admin:
        rights = ("on", ">pw", "~*", "&*", "+@all", "-info", "-config", "-get", "-mget", "-scan")
        admin.execute_command("ACL", "SETUSER", "half", *rights)
        with server.client(username="half", password="pw") as client:
            store = RedisAdminStore(client)
            found = {check.name: check for check in examine(store)}
            store.close()
    told = "the Redis user may not run INFO: allow it, or ask the administrator of this Redis"
    for name in ("version", "eviction", "memory", "replicas"):
        assert found[name] == Check(name, Health.UNKNOWN, told)
    assert found["persistence"].told.startswith(
        "the Redis user may not run INFO or CONFIG GET save:"
    )
    for name in ("scripts", "schema"):
        assert found[name] == Check(name, Health.UNKNOWN, "not known: NoPermissionError")
    for name in ("paused", "closed", "costs", "grants", "parked", "drift"):
        assert found[name].health is Health.FAIL, "the library asks, and is refused"
    assert list(found) == ALL


def test_data_of_another_schema_is_reported_with_both_versions(store):
    def found():
        return doctor._schema(store)

    told = (
        "this Redis has no data of a worker: none has used it, or it has just lost its data, and "
        "live workers write it again within seconds"
    )
    assert found() == Check("schema", Health.OK, told)
    for schema in SCHEMAS:
        store.client.set(store.keyspace.schema, schema)
        assert found() == Check("schema", Health.OK, schema)
    store.client.set(store.keyspace.schema, "999")
    told = (
        "the data has schema 999, and this version needs 1 or 2: use the version of "
        "celery-singleton-lock that wrote the data"
    )
    assert found() == Check("schema", Health.FAIL, told)


def test_doctor_reports_that_redis_has_lost_its_data_though_workers_are_live(store):
    store.worker_heartbeat("w", "R", ["q"], 60.0)
    told = f"workers are live, and {store.keyspace.schema} is gone: this Redis has lost data"
    assert doctor._schema(store) == Check("schema", Health.WARN, told)


def test_doctor_reports_that_no_worker_would_run_parked_tasks(store):
    told = (
        "no live worker uses this Redis: parked tasks wait until one starts. After a rollback to "
        "workers without locks, send them back with locks drain"
    )
    assert doctor._workers(store) == Check("workers", Health.WARN, told)


def test_doctor_names_drain_for_parked_tasks_that_live_workers_know_as_plain_ones(store):
    """After a rollback: the workers check says that workers are live."""
    store.worker_heartbeat("old-1#a1", "R", ["q"], 600, tasks=["app.other"])
    for number in range(3):
        park(store, f"lock:{number}")
    assert doctor._parked(store).health is Health.OK, "a worker sends them back at once"
    let_pass(store, 16)
    told = (
        "3 parked tasks wait for a worker: old-1 consumes the queue 'q' and does not declare "
        "'app.task' as a LockedTask: deploy the version that does, or send 'app.task' back to run "
        "without a lock (locks drain --queue q --task app.task); a worker without the task would "
        "discard it"
    )
    assert doctor._parked(store) == Check("parked", Health.WARN, told)
    store.worker_heartbeat("new-1#a1", "R", ["q"], 600, tasks=["app.task"])
    assert doctor._parked(store).health is Health.OK, "the next sweep queues them again"


def test_doctor_names_workers_that_may_run_locked_tasks_without_their_locks(store):
    """It was content while tasks of one lock ran at the same time."""
    store.worker_heartbeat("good#a1", "R", ["q"], 600, tasks=["app.task"])
    tasks = {"q": {"app.task"}}

    def worker(queue, task="app.task"):
        return doctor.Consumer(frozenset({queue}), frozenset({task}))

    well = {"good": worker("q"), "mail": worker("mails"), "other": worker("q", "app.other")}

    def checked(**more):
        return doctor.consumers_check(store, "R", tasks, {**well, **more})

    assert checked().health is Health.OK, "the others cannot run it, or do not get it"
    found = checked(without=worker("q"))
    assert found.health is Health.WARN
    assert found.told.startswith("without (queue q): no heartbeat in this Redis.")
    store.worker_heartbeat("plain#a1", "R", ["q"], 600, tasks=["app.other"])
    found = checked(plain=worker("q"))
    assert found.told.startswith("plain (app.task): the task is not a LockedTask there.")
    assert found.health is Health.WARN
    assert checked(plain=worker("q", "app.other")).health is Health.OK


def test_doctor_does_not_call_workers_well_that_have_not_said_which_tasks_they_have(store):
    """It answered ok after a lost answer to inspect registered."""
    silent = {"w": doctor.Consumer(frozenset({"q"}), None)}
    found = doctor.consumers_check(store, "R", {"q": {"app.task"}}, silent)
    assert (found.health, found.told) == (
        Health.UNKNOWN,
        "w: no answer to inspect registered. Run doctor again",
    )


def test_doctor_says_whether_the_broker_answers():
    """During its outage a granted task went from worker to worker, and doctor was content."""
    assert doctor.broker_check("amqp://h//", None).health is Health.OK
    found = doctor.broker_check("amqp://h//", OSError("secret"))
    assert found.health is Health.FAIL
    assert "amqp://h// does not answer (OSError)" in found.told


def test_doctor_names_the_queue_of_parked_tasks_that_no_live_worker_consumes(store):
    """Not of a paused lock: these wait for the operator."""
    store.worker_heartbeat("w#a1", "R", ["other"], 600)
    park(store, "free")
    park(store, "paused", queue="p")
    store.pause("paused", Operator("jane"))
    let_pass(store, 16)
    told = (
        "1 parked task waits for a worker: no live worker with locks consumes the queue 'q': start "
        "one, or send 'app.task' back to run without a lock (locks drain --queue q --task app.task)"
        "; a worker without the task would discard it"
    )
    assert doctor._parked(store) == Check("parked", Health.WARN, told)


def test_doctor_names_tasks_that_a_worker_without_them_has_just_put_back(store):
    """After a renaming it was content for 64 of the first 66 seconds: see worker.republish."""
    store.worker_heartbeat("w#a1", "R", ["q"], 600, tasks=["app.renamed"])
    park(store, "k")
    let_pass(store, 9)
    (stray,) = store.sweep_and_grant("k", worker="w#a1", realm="R", patience=5)
    store.record_publish_result("k", stray.seal, [stray.token], sent=False)
    assert doctor._parked(store).health is Health.WARN


def test_doctor_names_tasks_while_a_worker_tries_again_to_send_them_back(store):
    """RabbitMQ had an alarm: doctor was content for the ten seconds of each attempt."""
    store.worker_heartbeat("w#a1", "R", ["other"], 600)
    park(store, "k")
    let_pass(store, 9)
    (stray,) = store.sweep_and_grant("k", worker="w#a1", realm="R", patience=5)
    assert doctor._parked(store).health is Health.OK
    store.record_publish_result("k", stray.seal, [stray.token], sent=False)
    let_pass(store, 9)
    store.sweep_and_grant("k", worker="w#a1", realm="R", patience=5)
    found = doctor._parked(store)
    assert found.health is Health.WARN
    assert "no live worker with locks consumes the queue 'q'" in found.told


def test_doctor_names_the_queue_of_tasks_that_no_live_worker_ends(store):
    """As after a change of the broker: nobody would store their results."""
    store.worker_heartbeat("w#a1", "R", ["other"], 600)
    owner = Owner(new_token(), "t/0/0", "app.task")
    store.park(owner, Claim("k"), MessageToPark(b"body", "R", "q", 5.0))
    let_pass(store, 6)
    store.sweep_and_grant("k")
    let_pass(store, 16)
    told = (
        "1 parked task waits for a worker: no live worker with locks consumes the queue 'q': start "
        "one, to end 'app.task', which is overdue"
    )
    assert doctor._parked(store) == Check("parked", Health.WARN, told)
    store.worker_heartbeat("new-1#a1", "R", ["q"], 600, tasks=["app.task"])
    assert doctor._parked(store).health is Health.OK


def test_doctor_warns_of_tasks_that_a_switch_lets_run_without_their_locks(store):
    """A switch to "enforce", or to a mode of a later version, is none."""
    store.switch("shop.mail", "enforce")
    store.client.hset(store.keyspace.mode, "shop.later", "unheard-of")
    assert doctor._modes(store).health is Health.OK
    store.switch("*", "off")
    store.switch("shop.settle", "observe")
    found = doctor._modes(store)
    assert (found.name, found.health) == ("modes", Health.WARN)
    assert found.told == (
        "switched to run without locks, so tasks may overlap: all tasks (off), task shop.settle "
        "(observe). locks audit says who did it; locks mode declared (for one task with --task) "
        "ends it"
    )


def test_locks_whose_sweep_is_overdue_are_named(store):
    """At most five; a sweep overdue by ten seconds is not reported yet."""
    stop_time(store)
    now = carry_out(store.operations.time(), store.do) * 1000
    for number in range(7):
        due = store.keyspace.due(number)
        store.client.zadd(due, {f"k:late{number}": now - 16_000, f"k:new{number}": now - 14_000})
    found = doctor._sweeping(store)
    assert (found.name, found.health) == ("sweeping", "fail")
    assert found.told.startswith("no worker has swept 'k:late")
    assert found.told.count("late") == 5
    assert "new" not in found.told
    assert found.told.endswith(" for 15 s: start a worker, or run sweep from cron")


def test_doctor_names_queues_that_workers_have_stopped_consuming(store):
    """With the number of workers, and since when."""
    assert doctor._backlog(store) == Check("backlog", Health.OK, "0 messages parked, 0.0 MiB")
    store.worker_heartbeat("w1#a", "R", ["q"], 600, stopped={"q": 1_800_000_000.0})
    park(store, "a")
    found = doctor._backlog(store)
    assert found.health is Health.WARN
    assert found.told.startswith(
        "0 messages parked, 0.0 MiB. Workers have stopped consuming the queue 'q' (by its worker, "
        "since 2027-01-15 08:00:00 UTC): singleton_lock_max_parked or "
    )
    store.worker_heartbeat("w2#b", "R", ["q", "other"], 600)
    assert "(by 1 worker of 2, since" in doctor._backlog(store).told
    store.worker_heartbeat("w2#b", "R", ["q", "other"], 600, stopped={"q": 1_700_000_000.0})
    assert "(by all 2 workers, since 2023-11-14" in doctor._backlog(store).told
    store.worker_heartbeat("w1#a", "R", ["q"], 600)
    store.worker_heartbeat("w2#b", "R", ["q", "other"], 600)
    assert doctor._backlog(store).health is Health.OK


def test_doctor_warns_of_parked_messages_that_need_a_quarter_of_the_memory(store, monkeypatch):
    """Their bytes, and what Redis needs besides."""
    park(store, "a", body=b"x" * 1000)
    for most, health in ((7_601, Health.OK), (7_599, Health.WARN), (0, Health.OK)):
        monkeypatch.setattr(doctor, "_info", lambda _server, most=most: {"maxmemory": most})
        assert doctor._backlog(store).health is health
    assert "singleton_lock_max_parked_bytes" not in doctor._backlog(store).told


def test_doctor_notices_wrong_counters_of_parked_messages(store):
    """After the keys of a lock were deleted by hand; deleting the counters is safe."""
    tokens = [park(store, "a", body=b"x" * 1000) for _ in range(200)]
    assert doctor._drift(store).health is Health.OK
    store.client.hincrby(f"{store.keyspace.fleet}:parked_bytes", "R:q", 10**6)
    found = doctor._drift(store)
    assert found.health is Health.WARN
    assert "1,200,000 bytes are counted, and 200,000 are stored" in found.told
    store.client.delete(*store.client.keys("csl:{*}:a:*"), store.keyspace.due(bucket_of("a")))
    assert "200 messages are counted, and 0 wait" in doctor._drift(store).told
    store.client.delete(*store.client.keys("csl:fleet:parked*"))
    assert doctor._drift(store).health is Health.OK
    assert len(tokens) == 200


def test_doctor_takes_no_message_that_settles_for_a_wrong_counter(store):
    """With lock_debounce, each of many locks may have one."""
    for number in range(2 * SLACK):
        flow = packed((), settle=Settle(50.0))
        who, claim = Owner(new_token(), f"{number}/0/0", "app.task"), Claim(f"k{number}", flow=flow)
        store.park(who, claim, MessageToPark(b"x" * 1000, "R", "q"))
    assert doctor._drift(store).health is Health.OK


def test_keys_of_other_programs_are_counted_and_not_named(store):
    """They may be secrets, such as ids of sessions. The exit status of doctor stays as it is."""
    store.acquire(Owner(new_token()), Claim("mine"))
    assert doctor._database(store).health is Health.OK
    for number in range(3):
        store.client.set(f"session:s3cret{number}", "x")
    found = doctor._database(store)
    assert (found.name, found.health) == ("database", Health.NOTE)
    assert found.told.startswith("3 of ")
    assert "singleton_lock_backend" in found.told
    assert "s3cret" not in found.told


@pytest.mark.parametrize(
    ("reports", "health", "told"),
    [
        ({}, "unknown", "no worker answered; a worker with a busy solo pool does not answer"),
        ({"w@a": {"error": "takes no locks"}}, "unknown", "no worker answered"),
        (
            {f"w{n}@a": {"worker": "w", "version": "1.0.0"} for n in (1, 2)},
            "ok",
            "2 workers and this command have 1.0.0",
        ),
        (
            {"w@b": {"worker": "w"}, "w@a": {"worker": "w", "version": "1.0.1"}},
            "warn",
            "this command: 1.0.0; w@a: 1.0.1; w@b: before 1.0. Versions may differ during an",
        ),
        ({"w@a": {"worker": "w", "version": "1.0.1"}}, "warn", "this command: 1.0.0; w@a: 1.0.1"),
    ],
)
def test_workers_of_another_version_are_named(reports, health, told):
    found = production_checks.versions_check(reports, "1.0.0")
    assert (found.name, found.health) == ("versions", health)
    assert found.told.startswith(told)


@pytest.mark.parametrize(
    ("ports", "told"),
    [
        ({}, "no worker answered whether it serves metrics;"),
        ({"w@a": 9540}, "1 worker serves metrics, on port 9540;"),
        ({"w@b": 9541, "w@a": 9540}, "2 workers serve metrics, on port 9540, 9541;"),
        ({"w@a": 9540, "w@b": None}, "no metrics port is open in w@b: set singleton_lock_metrics"),
    ],
)
def test_alerts_are_never_ok_since_nobody_can_see_them_from_here(ports, told):
    """Each worker of a machine has a port of its own, which the command's settings do not have."""
    found = production_checks.alerts_check(
        {name: {"metrics_port": port} for name, port in ports.items()}
    )
    assert (found.name, found.health) == ("alerts", "note")
    assert found.told.startswith(told)
    assert (Path(__file__).parents[2] / production_checks.ALERTS).is_file()


@pytest.mark.parametrize(
    ("reports", "health", "told"),
    [
        ({}, "unknown", "no worker answered; a worker with a busy solo pool does not answer"),
        ({"w@a": {"error": "takes no locks"}}, "unknown", "no worker answered; a worker"),
        (
            {"w@a": {"threads": {"agent": 0.2, "outbox": None}}, "w@b": {"threads": {"agent": 9}}},
            "ok",
            "all 3 threads of 2 workers are running",
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


def test_a_live_worker_that_does_not_answer_is_named():
    reports = {"w@a": {"threads": {"agent": 0.2}}}
    found = doctor.threads_check(reports, ["w@a#1f", "w@b#2e"])
    assert found.health is Health.UNKNOWN
    assert found.told.startswith("all 1 threads of 1 worker are running. No answer from w@b, of")
    assert doctor.threads_check(reports, ["w@a#1f"]).health is Health.OK


def test_doctor_does_not_deny_workers_that_answer_after_a_loss_of_data(store):
    """It said in one output that no worker used this Redis, and that their threads were running."""
    found = doctor._workers(store)
    assert doctor.with_reports(found, {}) == found
    assert doctor.with_reports(found, {"w@a": {"error": "takes no locks"}}) == found
    told = doctor.with_reports(found, {"w@a": {"threads": {"agent": 0.2}}}).told
    assert told.startswith("1 worker with locks answered at the broker, and this Redis knows none.")
    store.worker_heartbeat("w@a#1", "R", ["q"], 60.0)
    found = doctor._workers(store)
    assert doctor.with_reports(found, {"w@a": {"threads": {"agent": 0.2}}}) == found


def test_a_lock_that_contradicts_itself_is_named_with_what_is_wrong(store):
    for name in ("fine", "wrong"):
        store.acquire(Owner(new_token()), Claim(name))
        store.worker_heartbeat("w", "R", ["q"], 30)
    token = park(store, "wrong")
    store.client.zrem(store.keyspace.lock("wrong").queue, token)
    store.client.set(store.keyspace.lock("other").holders, "x")
    store.client.set(store.keyspace.lock("other").meta, "x")
    found = doctor._drift(store)
    assert (found.name, found.health) == ("drift", "fail")
    told = f"'wrong': {token}: its record says parked, and it is not in the queue"
    assert told in found.told
    assert (
        f"{store.keyspace.lock('other').meta!r}: its key has another program's data" in found.told
    )
    assert "delete that key" in found.told
    assert found.told.endswith(". Run sweep, or drop that token")
    assert "; " in found.told
    assert "fine" not in found.told


def test_a_key_of_another_program_is_to_be_deleted_and_nothing_else_is_advised(store):
    """A sweep does not help, and there is no token to drop."""
    key = store.keyspace.lock("other").meta
    store.client.set(key, "x")
    found = doctor._drift(store)
    assert found.health == "fail"
    assert found.told.startswith(f"{key!r}: its key has another program's data (delete that key")
    assert "sweep" not in found.told


def test_of_many_contradictions_five_examples_are_named(store):
    store.worker_heartbeat("w", "R", ["q"], 30)
    for name in ("a", "b", "c"):
        store.acquire(Owner(new_token()), Claim(name))
        for _ in range(3 if name == "a" else 7):
            store.client.zrem(store.keyspace.lock(name).queue, park(store, name))
    assert doctor._drift(store).told.count("its record says") == 5


def test_the_number_of_consistent_locks_is_reported(store):
    for number in range(3):
        store.acquire(Owner(new_token()), Claim(f"a{number}"))
    idle = Owner(new_token())
    store.acquire(idle, Claim("idle"))
    store.release("idle", idle.token, Ending.FINAL)
    assert doctor._drift(store) == Check("drift", Health.OK, "4 locks are consistent")


@pytest.mark.needs_real_redis("replication")
def test_doctor_says_for_how_long_a_restarted_server_grants_no_lock(store, redis_client):
    """All tasks wait, for as long as the longest lease, and no other check says why."""
    ok = Check("quarantine", Health.OK, "no server of the locks is in quarantine")
    assert doctor._quarantine(store) == ok
    with closing(RedisStore(redis_client, quarantine=True)) as careful:  # the server is new to it
        assert careful.acquire(Owner(new_token()), Claim("a", 90.0)).verdict is Verdict.BLOCKED
    found = doctor._quarantine(store)
    assert found.health is Health.NOTE
    assert found.told.startswith("no lock is granted for another ")
    redis_client.hset(f"{store.keyspace.fleet}:server", "till", int(store.time() * 1000))
    assert doctor._quarantine(store) == ok


# -- flow control ----------------------------------------------------------------------------------


def test_doctor_names_paused_locks_with_who_paused_them_and_how_many_wait(store):
    """Tasks that wait behind a pause that somebody has forgotten wait without an alarm."""
    assert doctor._paused(store) == Check("paused", Health.OK, "no lock is paused")
    for number in range(doctor.NAMED):
        store.pause(f"other:{number}", Operator("ann", why="migration"), seconds=60.0)
    found = doctor._paused(store)
    assert found.health is Health.OK
    assert found.told.startswith(f"{doctor.NAMED} locks paused, with 0 waiting: 'other:")
    assert found.told.count(" for another 60 s with 0 waiting (ann") == doctor.NAMED
    store.pause("crm", Operator("bob"))
    for number in range(3):
        park(store, "crm", f"t{number}")
    found = doctor._paused(store)
    assert found.health is Health.NOTE
    told = f"{doctor.NAMED + 1} locks paused, with 3 waiting: 'crm' with 3 waiting (bob"
    assert found.told.startswith(told)
    assert found.told.count(" waiting (") == doctor.NAMED
    assert found.told.endswith(". locks resume NAME resumes one")


def test_doctor_names_closed_locks_with_who_closed_them_and_alarms_nobody(store):
    assert doctor._closed(store) == Check("closed", Health.OK, "no lock is closed for a time")
    store.close_for("crm", 60.0, "by app.sync[id-1] on w: 429")
    for number in range(doctor.NAMED):
        store.close_for(f"other:{number}", 60.0, "by ann")
    found = doctor._closed(store)
    assert found.health is Health.OK
    assert found.told.startswith(f"{doctor.NAMED + 1} locks closed for a time: ")
    assert found.told.count(" for another 60 s, by ") == doctor.NAMED
    assert found.told.endswith(". locks reopen NAME opens one earlier")
    for number in range(doctor.NAMED):
        store.reopen(f"other:{number}", Operator("ann"))
    assert "closed for a time: 'crm' for another 60 s, by app.sync[id-1] on w: 429." in (
        doctor._closed(store).told
    )


@pytest.mark.parametrize("kind", ["sliding", "smooth"])
def test_doctor_warns_of_parked_tasks_that_will_fail_since_their_rate_was_lowered(store, kind):
    """Each fails only when it is next. While the lock is paused, nobody else learns of it."""

    def rates(number, cost):
        more = {"burst": number} if kind == "smooth" else {}
        return (Rate(f"{number}/h", kind=kind, cost=cost, **more),)

    hold(store, "llm", limit=9, flow=packed(rates(100, 1)))
    store.pause("llm", Operator("ann"))
    for number, cost in enumerate((60, 3, 50, 70)):
        park(store, "llm", f"id-{number}", limit=9, flow=packed(rates(100, cost)))
    hold(store, "plain")
    park(store, "plain")
    fine = Check("costs", Health.OK, "no parked task costs more than the rate of its lock")
    assert doctor._costs(store) == fine
    store.set_rates("llm", rates(50, None), Operator("ann"))
    assert doctor._costs(store) == fine, "these rates count starts"
    store.set_rates("llm", rates(50, 1), Operator("ann"))
    found = doctor._costs(store)
    assert found.health is Health.WARN
    assert found.told.startswith("2 parked tasks cost more than the rate of the lock: ")
    assert "app.task[id-0] for 'llm' costs 60, 50/h" in found.told
    assert "app.task[id-3] for 'llm' costs 70, 50/h" in found.told
    assert found.told.count(" allows 50") == 2
    assert "locks rate NAME --clear" in found.told
    store.set_rates("llm", (), Operator("ann"))
    assert doctor._costs(store) == fine


def test_doctor_warns_of_a_granted_task_whose_slot_callers_in_code_may_occupy(store, monkeypatch):
    """They wait for it, and it waits for them: nothing starts there, and all else looks well."""

    def wait(name):
        store.acquire(Owner(new_token()), Claim(name), wait=600.0)

    monkeypatch.setattr(doctor, "STUCK", 2.5)  # no watchdog renews the grant
    stop_time(store)
    fine = Check("grants", Health.OK, "no caller may keep a granted task from its slot")
    store.worker_heartbeat("w-1#a1", "R", ["q"], 600)
    park(store, "a")
    hold(store, "b")
    assert doctor._grants(store) == fine, "nobody is behind it"
    park(store, "a")
    park(store, "b")
    wait("b")
    assert doctor._grants(store) == fine, "parked tasks occupy no slot, and b runs"
    wait("a")
    assert doctor._grants(store) == fine, "it may start at once"
    let_pass(store, 3)
    found = doctor._grants(store)
    assert found.health is Health.WARN
    told = "1 granted task waits for a pool slot: 'a' on w-1 for 3.0 s, with 1 behind it. "
    assert found.told.startswith(told)
    park(store, "d")
    for _ in range(150):
        park(store, "d")
    wait("d")
    let_pass(store, 3)
    assert "'d' on w-1 for 3.0 s, with 1 behind it" in doctor._grants(store).told
    park(store, "c")
    wait("c")
    assert doctor._grants(store).told.count(" on w-1 ") == 1, "that of c is recent"


def test_a_check_that_finds_no_server_fails_by_its_name():
    def gone():
        raise BackendUnreachable("it is away")

    assert doctor._tried("drift", gone) == Check("drift", Health.FAIL, "it is away")

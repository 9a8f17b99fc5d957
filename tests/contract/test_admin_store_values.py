"""Arguments and results of the operator's calls: names, numbers and defaults."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from celery_singleton_lock.core.lock_view import Holder
from celery_singleton_lock.core.model import ALIVE, DONE_FOR, Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import ConfigurationError, LockUnusable
from celery_singleton_lock.store.operator import listing
from celery_singleton_lock.store.operator import redis as redis_admin
from celery_singleton_lock.store.operator.base import Glance, Operator, Waiting
from celery_singleton_lock.store.operator.redis import (
    RedisAdminStore,
    fits,
    glances_of,
    waiting_of,
)

pytestmark = pytest.mark.contract

NAME = "account:42"
JANE = Operator("jane", "desk")


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client)
    yield store
    store.close()


def hold(store, name=NAME, **claim):
    who = Owner(new_token(), "h/0/0", "app.task")
    store.acquire(who, Claim(name, **claim))
    return who.token


def park(store, task_id="t", name=NAME, **claim):
    who = Owner(new_token(), f"{task_id}/0/0", "app.task")
    store.park(who, Claim(name, **claim), MessageToPark(b"body", "R", "q"))
    return who.token


# -- signs of life ---------------------------------------------------------------------------------


def test_the_age_of_a_workers_last_heartbeat_is_reported(store):
    """For half a minute; not for a stopped or unknown worker."""
    for worker in ("here", "gone"):
        store.worker_heartbeat(worker, "R", ["q"], ALIVE)
    store.worker_heartbeat("gone", "R", ["q"], 0)
    told = store.silences(["here", "gone", "never"])
    assert 0 <= told.pop("here") < ALIVE
    assert told == {"gone": float("inf"), "never": float("inf")}


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pattern", "found"),
    [
        ("account:42", "", True), ("account:42", "unt:4", True), ("account:42", "42:", False),
        ("account:42", "account:*", True), ("account:42", "count:*", False),
        ("account:42", "account:4?", True), ("account:42", "account:[0-9]2", True),
        ("Account", "account", False), ("Account", "account*", False), ("aXb", "X", True),
    ],
)  # fmt: skip
def test_a_part_of_a_name_fits_and_a_pattern_fits_the_whole(name, pattern, found):
    assert fits(name, pattern) is found


@pytest.mark.parametrize("prefix", ["a*b", "a?b", "a[b]c", "a\\b"])
def test_a_prefix_that_looks_like_a_pattern_finds_its_own_locks_alone(redis_client, prefix):
    ours = RedisAdminStore(redis_client, Keyspace(prefix))
    other = RedisAdminStore(redis_client, Keyspace("axb"))
    hold(ours, "mine")
    hold(other, "theirs")
    assert [lock.name for lock in ours.summarise_locks()] == ["mine"]
    ours.worker_heartbeat("w", "R", ["q"], 30)
    other.worker_heartbeat("v", "R", ["q"], 30)
    assert set(ours.workers()) == {"w"}


def test_many_locks_are_found_in_many_short_steps(store, monkeypatch):
    """However few keys one SCAN looks at, and however few locks one script."""
    monkeypatch.setattr(redis_admin, "SCANNED", 5)
    monkeypatch.setattr(listing, "GLANCED", 3)
    names = {f"a{number}" for number in range(40)}
    for name in names:
        hold(store, name)
    found = [lock.name for lock in store.summarise_locks()]
    assert len(found) == 40
    assert set(found) == names


@pytest.mark.parametrize(("holders", "locks"), [(0, 50), (1, 50), (20, 50), (100, 10), (5000, 1)])
def test_one_script_reads_a_bounded_number_of_holders(store, holders, locks):
    """Fifty semaphores of a thousand holders each kept Redis for over ten seconds."""
    calls = listing.glance_calls(store.operations, [f"m{n}" for n in range(120)], holders)
    assert max(len(call.keys) for call in calls) == locks
    assert sum(len(call.keys) for call in calls) == 120


# -- replies ---------------------------------------------------------------------------------------


def test_a_glance_is_read_as_it_is_written():
    records = [json.dumps({"task": "t", "attempt": f"{n}/0/0", "state": "running"}) for n in "ab"]
    lock = [2, 3, 4, 5, 6, 1, 7500, 1, 2500, 8, 9, "name\nof two lines"]
    lock += ["x.0", 1500, json.loads(records[0]), "y.0", 2500, json.loads(records[1])]
    idle = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, "idle"]
    found, *others = glances_of(json.dumps([lock, idle, "key"]).encode())
    assert found[:8] == ("name\nof two lines", 2, 3, 4, 5, 6, True, 7.5)
    assert [(each.token, each.task_id, each.expires_in) for each in found.holders] == [
        ("x.0", "a", 1.5),
        ("y.0", "b", 2.5),
    ]
    assert found.rated
    assert found.closed_for == 2.5
    assert (found.groups, found.aside) == (8, 9)
    assert not found.broken
    assert others == [Glance("idle"), Glance("key", broken=True)]


def test_the_age_of_the_line_is_that_of_its_first(store):
    hold(store)
    park(store, "first", place=int((store.time() - 100) * 1_000_000))
    park(store, "second")
    (lock,) = store.summarise_locks()
    assert lock.oldest == pytest.approx(100, abs=10)


def test_a_waiter_has_all_fields_of_its_record():
    record = {
        "state": "parked", "task": "t", "attempt": "a/0/0", "place": 4_000_000, "since": 7_000,
        "realm": "R", "queue": "q", "worker": "w", "lease": 30_000, "wait": 60_000, "copied": 1,
    }  # fmt: skip
    found = waiting_of("lock", 10_000.0, b"x.0", json.dumps(record), 4, b"body")
    assert found == Waiting(
        "lock", "x.0", "parked", "t", "a/0/0", 6.0, 3.0, 4, "R", "q", "w", 30.0, 4_000_000, 60.0,
        copied=True, message=b"body",
    )  # fmt: skip


def test_what_a_record_leaves_out_is_empty():
    assert waiting_of("lock", 10_000.0, b"x.0", b"{}", 0) == Waiting(
        "lock", "x.0", "", age=10.0, since=10.0, lease=0.0
    )


def test_an_age_needs_a_time_and_is_never_negative():
    record = json.dumps({"place": 20_000_000, "since": 20_000})
    ahead = waiting_of("lock", 10_000.0, b"x.0", record, 0)
    assert (ahead.age, ahead.since) == (0.0, 0.0)
    unknown = waiting_of("lock", 0.0, b"x.0", b"{}", 0)
    assert (unknown.age, unknown.since) == (0.0, 0.0)


# -- stepping in -----------------------------------------------------------------------------------


def remembered(store, task_id):
    """Seconds for which copies of a task end quietly."""
    until = store.client.zscore(store.keyspace.lock(NAME).done, f"{task_id}/0/0")
    return until / 1000 - store.time()


def test_what_is_dropped_is_remembered_for_two_hours(store):
    hold(store)
    store.drop_waiters(NAME, [park(store)], JANE)
    assert remembered(store, "t") == pytest.approx(DONE_FOR, abs=60)


def test_what_is_released_for_good_is_remembered_for_two_hours(store):
    token = hold(store)
    store.force_release(NAME, token, JANE, keep=False)
    assert remembered(store, "h") == pytest.approx(DONE_FOR, abs=60)


@pytest.mark.parametrize("verb", ["force_release", "drop_waiters"])
def test_a_time_that_is_none_is_refused_by_its_name(store, verb):
    tokens = hold(store) if verb == "force_release" else [hold(store)]
    with pytest.raises(ConfigurationError, match=r"^done_for"):
        getattr(store, verb)(NAME, tokens, JANE, done_for=-1.0)


def test_messages_come_with_what_was_dropped_when_they_are_asked_for(store):
    hold(store)
    (quiet,) = store.drop_waiters(NAME, [park(store, "a")], JANE)
    (whole,) = store.drop_waiters(NAME, [park(store, "b")], JANE, whole=True)
    assert (quiet.message, whole.message) == (b"", b"body")


def test_each_step_is_audited_by_its_name(store):
    """Also if one operator takes them all: only repeated calls of one action share an entry."""
    hold(store)
    token = park(store)
    store.promote(NAME, token, JANE)
    store.pause(NAME, JANE)
    store.resume(NAME, JANE)
    store.set_limit(NAME, 2, JANE)
    store.write_audit_entry(NAME, JANE)
    store.write_audit_entry(NAME, replace(JANE, action="terminate"), token=token)
    assert [each["action"] for each in reversed(store.audit())] == [
        "promote", "pause", "resume", "limit", "remark", "terminate",
    ]  # fmt: skip
    newest = store.audit(1)
    assert [(each["action"], each["token"], each["lock"]) for each in newest] == [
        ("terminate", token, NAME)
    ]
    assert abs(newest[0]["at"] - store.time()) < 10


@pytest.mark.parametrize(
    ("by", "told"),
    [
        (Operator("jane", "desk", why="migration"), "jane@desk, DAY: migration"),
        (Operator("jane", why="migration"), "jane, DAY: migration"),
        (Operator("jane", "desk"), "jane@desk, DAY"),
        (Operator(""), "somebody, DAY"),
        (Operator("jane", why="x" * 600), "jane, DAY: x+"),
    ],
)
def test_a_pause_has_its_operator_and_reason(store, by, told):
    assert store.pause(NAME, by)
    assert not store.pause(NAME, by)
    day = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2} UTC"
    assert re.fullmatch(told.replace("DAY", day), store.inspect(NAME).paused)
    assert len(store.inspect(NAME).paused) <= 600
    assert store.resume(NAME, by)
    assert not store.resume(NAME, by)


def test_a_long_reason_is_cut_in_the_audit_too(store):
    store.pause(NAME, Operator("jane", why="x" * 600))
    (entry,) = store.audit()
    assert entry["why"] == "x" * 500


@pytest.mark.parametrize("verb", ["force_release", "drop_waiters", "promote", "pause", "limit"])
def test_a_reason_that_is_no_unicode_leaves_no_lock_half_changed(store, verb):
    """Lua refused it after the holder was removed: nobody got the lock, and the audit was empty."""
    by = Operator("jane", why="caf\udce9")
    holder, waiter = hold(store), Owner(new_token(), "w/0/0")
    store.acquire(waiter, Claim(NAME), wait=60.0)
    steps = {
        "force_release": lambda: store.force_release(NAME, holder, by),
        "drop_waiters": lambda: store.drop_waiters(NAME, [waiter.token], by),
        "promote": lambda: store.promote(NAME, waiter.token, by),
        "pause": lambda: store.pause(NAME, by),
        "limit": lambda: store.set_limit(NAME, 2, by),
    }
    steps[verb]()
    (entry,) = store.audit()
    assert entry["why"] == r"caf\udce9"
    assert verb != "force_release" or store.inspect(NAME).holders[0].token == waiter.token
    assert verb != "pause" or store.inspect(NAME).paused.endswith(r": caf\udce9")


@pytest.mark.parametrize("junk", ["no JSON", "3", "null"])
def test_an_audit_log_of_another_program_leaves_no_lock_half_changed(store, junk):
    holder = hold(store)
    store.client.lpush(store.keyspace.audit, junk)
    with pytest.raises(LockUnusable):
        store.force_release(NAME, holder, Operator("jane"))
    assert [each.token for each in store.inspect(NAME).holders] == [holder]


def test_an_operators_limit_is_taken_back_without_a_trace(store):
    hold(store, limit=2)
    assert store.set_limit(NAME, 5, JANE) == 5
    assert store.inspect(NAME).limit_set
    assert store.set_limit(NAME, None, JANE) == 2
    assert not store.inspect(NAME).limit_set
    assert [lock.limit for lock in store.summarise_locks()] == [2]


def test_without_tokens_nothing_is_asked(store):
    """Nor is anything audited."""
    assert store.drop_waiters(NAME, [], JANE) == []
    assert store.take_out_messages(NAME, [], 60, "seal") == []
    assert store.messages(NAME, []) == []
    assert store.audit() == []


def test_a_worker_that_is_silent_is_not_live(store):
    store.worker_heartbeat("w", "R", ["q"], 30)
    store.worker_heartbeat("silent", "R", ["q"], 30)
    store.client.zadd(f"{store.keyspace.fleet}:route:R:q", {"silent": store.time() * 1000 - 1})
    assert store.workers() == {"w": {"realm": "R", "queues": ["q"]}}


def test_a_light_heartbeat_keeps_a_worker_alive_and_is_whole_if_data_was_lost(store):
    """It also tells the free slots; before a first heartbeat it is whole, too."""

    def beat(free):
        store.worker_heartbeat("w", "R", ["p", "q"], 3, free, tasks=["t"], light=True)
        assert store.client.get(f"{store.keyspace.fleet}:free:w") in {b"%d" % free, str(free)}
        assert set(store.workers()) == {"w"}
        assert store.silences(["w"])["w"] < ALIVE
        assert store.consumers("R", "q", "t") == {"w": True}
        assert store.fleet_size("R", ["q"]) == 1

    beat(1)
    route = f"{store.keyspace.fleet}:route:R:q"
    store.client.zadd(route, {"w": 1})
    beat(2)
    assert store.client.zscore(route, "w") > 1
    for key in ("route:R:q", "worker:w", "routes"):
        store.client.delete(f"{store.keyspace.fleet}:{key}")
        beat(3)
    store.client.flushall()
    beat(4)


@pytest.mark.needs_real_redis("maxmemory")
def test_a_light_heartbeat_is_not_refused_by_a_full_redis(make_redis):
    """Else its worker would get no grants, and its parked tasks would never make room."""
    with make_redis().client(decode_responses=False) as client:
        store = RedisAdminStore(client)
        store.worker_heartbeat("w", "R", ["q"], 3, tasks=["t"])
        route = f"{store.keyspace.fleet}:route:R:q"
        client.zadd(route, {"w": 1})
        client.config_set("maxmemory", 1)
        store.worker_heartbeat("w", "R", ["q"], 3, tasks=["t"], light=True)
        assert client.zscore(route, "w") > 1
        store.close()


@pytest.mark.needs_real_redis("INFO commandstats")
def test_the_workers_of_all_queues_are_found_without_a_scan(store):
    """A page may ask every second, beside any number of locks."""
    assert store.workers() == {}
    store.worker_heartbeat("a", "R", ["p", "q"], 30)
    store.worker_heartbeat("b", "S", ["q"], 30)
    store.client.config_resetstat()
    assert store.workers() == {
        "a": {"realm": "R", "queues": ["p", "q"]},
        "b": {"realm": "S", "queues": ["q"]},
    }
    assert "cmdstat_scan" not in store.client.info("commandstats")
    store.leave("a", "R", ["p", "q"])
    assert set(store.workers()) == {"b"}


def test_a_record_of_no_holder_is_no_holder():
    (found,) = glances_of(b'[[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, "name", "x.0", 1000, {}]]')
    assert found.holders == (Holder("x.0", expires_in=1.0),)

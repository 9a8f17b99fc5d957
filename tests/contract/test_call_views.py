"""Which unique calls count as sent: in ``locks show``, in ``locks why`` and in Flower."""

from __future__ import annotations

import dataclasses

import pytest

from celery_singleton_lock.admin import lock_views, show_lock, why
from celery_singleton_lock.cli import render
from celery_singleton_lock.core.model import Claim, Ending, Owner
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.redis_keys import bucket_of
from celery_singleton_lock.core.unique import EntryState, FirstCall, UniqueCall
from celery_singleton_lock.flower.rows import LockRows
from celery_singleton_lock.store.operator.redis import ClusterAdminStore, RedisAdminStore

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
HOSTILE = "\x1b[2J<b>\u202e"


@pytest.fixture
def store(lock_client, kind):
    made = ClusterAdminStore if kind == "cluster" else RedisAdminStore
    store = made(lock_client, claim_lease=600.0)
    store.worker_heartbeat("w", "R", ["q"], 600.0, 9)
    yield store
    store.close()


def send(store, who, key="report"):
    store.announce("k", key, who)
    store.confirm_sent("k", key, who, 0, 600.0)


def claim(key="report", *, until_start=False, follows="", limit=9):
    unique = UniqueCall("k", key, until_start=until_start, most=60.0, late=False, follows=follows)
    return Claim("k", 600.0, limit=limit, flow=packed((), unique=unique))


def owner(who):
    return Owner(f"{who}.0", f"{who}/0/0", "app.report", "w")


def start(store, who, key="report", **options):
    send(store, who, key)
    store.acquire(owner(who), claim(key, **options))


def park(store, who, key="report", **options):
    store.park(owner(who), claim(key, **options), MessageToPark(b"body", "R", "q"))


def follow(store, first, key="report", number=1):
    for n in range(number):
        park(store, f"{first}-duplicate-{n}", key, follows=first)


def calls(store):
    return {call.key: call._replace(age=0.0) for call in show_lock(store, "k").calls}


@on_all_stores
def test_each_call_that_counts_as_sent_is_shown_with_the_number_of_its_followers(store):
    """Whether it is announced, in the broker, parked, or runs."""
    store.announce("k", "announced", "a")
    send(store, "b", "sent")
    start(store, "c", "running")
    follow(store, "c", "running", 3)
    send(store, "d", "parked")
    park(store, "d", "parked", limit=1)
    found = calls(store)
    left = {key: found[key].expires_in for key in ("announced", "sent")}
    assert 25 < left["announced"] <= 30
    assert 590 < left["sent"] <= 600
    assert list(found.values()) == [
        FirstCall("running", "c", "running", followers=3),
        FirstCall("announced", "a", "pending", expires_in=left["announced"]),
        FirstCall("parked", "d", "parked"),
        FirstCall("sent", "b", "sent", expires_in=left["sent"]),
    ]


@on_all_stores
def test_a_call_is_shown_until_it_does_not_count_any_more(store):
    start(store, "a")
    start(store, "b", "other", until_start=True)
    assert calls(store) == {"report": FirstCall("report", "a", "running")}
    store.release("k", "a.0", Ending.FINAL)
    assert calls(store) == {}


@on_all_stores
def test_of_many_keys_the_calls_of_the_workers_and_of_followers_are_shown(store, monkeypatch):
    """They need no search among all keys of Redis."""
    monkeypatch.setattr(lock_views, "FEW_KEYS", 0)
    start(store, "a", "running")
    park(store, "b", "parked", limit=1)
    send(store, "c", "followed")
    follow(store, "c", "followed")
    send(store, "d", "sent")
    found = calls(store)
    assert set(found) == {"running", "parked", "followed"}
    assert (found["followed"].state, found["followed"].followers) == ("sent", 1)


def test_a_parked_message_without_a_worker_is_a_call_too(store, monkeypatch):
    """It is not in the queue."""
    monkeypatch.setattr(lock_views, "FEW_KEYS", 0)
    store.acquire(Owner("holder"), Claim("k"))
    store.park(owner("a"), claim(limit=1), MessageToPark(b"body", "R", "nobody"))
    store.release("k", "holder", Ending.FINAL)
    assert calls(store) == {"report": FirstCall("report", "a", "adrift")}


@on_all_stores
def test_a_call_whose_record_was_lost_is_not_shown(store, lock_client):
    start(store, "a")
    lock_client.delete(store.keyspace.lock("k").record)
    assert calls(store) == {}


@pytest.mark.parametrize("name", ["[k]*", "long" * 100])
def test_the_calls_of_a_lock_of_any_name_are_found(store, name):
    store.announce(name, "[a-z]:call", "a")
    store.announce("k", "other", "b")
    (call,) = show_lock(store, name).calls
    assert (call.key, call.task_id) == ("[a-z]:call", "a")


def test_two_locks_whose_names_and_calls_read_alike_have_their_own_calls(store):
    """Both had one entry in Redis, so a call of one lock was no longer sent for the other one."""
    pairs = [("k", "x68:unique:report"), ("k:unique:x68", "report")]
    assert bucket_of("k") == bucket_of("k:unique:x68")
    for (name, key), task_id in zip(pairs, "ab", strict=True):
        assert store.announce(name, key, task_id).state is EntryState.ANNOUNCED
    for (name, key), task_id in zip(pairs, "ab", strict=True):
        assert store.announce(name, key, "asks").task_id == task_id
        (call,) = show_lock(store, name).calls
        assert (call.key, call.task_id) == (key, task_id)


def test_an_entry_that_an_older_version_has_written_still_counts(store, lock_client):
    """Only a key that contains the part ``unique`` has another name in Redis than before."""
    store.announce("k", "unique report:unique", "a")
    assert lock_client.exists(f"{store.keyspace.unique('k')}unique report:unique:call")


def test_what_another_program_has_stored_is_no_call(store, lock_client):
    before = store.keyspace.unique("k")
    lock_client.rpush(f"{before}list:call", "data")
    lock_client.set(f"{before}text:call", "data")
    lock_client.set(f"{before}a:unique:b:7:long-call", "data")
    start(store, "a")
    lock_client.set(f"{before}a:followers", "data")
    assert calls(store) == {"report": FirstCall("report", "a", "running")}


def test_show_has_a_line_for_each_call(store):
    start(store, "a")
    follow(store, "a", number=2)
    send(store, "b", "other")
    lines = [line for line in render.detail(show_lock(store, "k")) if line.startswith("unique")]
    assert lines[0].startswith("unique   report: task a is running, and came 0.")
    assert lines[0].endswith(" s ago; 2 duplicates wait for its result")
    assert lines[1].startswith(
        "unique   other: task b is in the broker, and counts as sent for another "
    )


def test_show_leaves_out_calls_of_a_lock_that_has_many(store):
    for number in range(12):
        send(store, f"t{number}", f"report {number}")
    lines = [line for line in render.detail(show_lock(store, "k")) if line.startswith("unique")]
    assert len(lines) == 11
    assert lines[-1] == "unique   2 more calls"


def test_why_says_that_duplicates_wait_for_a_task(store):
    start(store, "a")
    follow(store, "a", number=1)
    park(store, "b", "other", limit=1)
    told = why(store, "a").sentence
    assert told.endswith(
        "; calls like it are duplicates (lock_unique); 1 duplicate waits for its result"
    )
    assert why(store, "b").sentence.endswith("; calls like it are duplicates (lock_unique)")
    assert "lock_unique" not in why(store, "a-duplicate-0").sentence


def test_why_says_nothing_of_uniqueness_that_ended_at_the_start(store):
    start(store, "a", until_start=True)
    assert "lock_unique" not in why(store, "a").sentence


def test_the_key_of_a_call_controls_no_terminal_and_no_page(store, capsys):
    """It comes from the arguments of a call."""
    start(store, HOSTILE, HOSTILE)
    render.show(render.detail(show_lock(store, "k")))
    shown = capsys.readouterr().out
    assert "<b>" in shown
    assert not {"\x1b", "\u202e"} & set(shown)
    rows = LockRows(store)
    (row,) = rows.page()["locks"]
    (call,) = rows.details(row["id"])["calls"]
    for text in (call["key"], call["task_id"]):
        assert text.isprintable()
        assert "<b>" in text  # the page shows it as text


def test_the_page_of_a_task_says_how_many_duplicates_wait_for_it(store):
    start(store, "a")
    follow(store, "a", number=2)
    park(store, "b", "other", limit=1)
    rows = LockRows(store)
    assert rows.of_task("a", "k")["call"]["followers"] == 2
    assert rows.of_task("b")["call"]["state"] == "parked"
    assert rows.of_task("a-duplicate-0")["call"] is None


MUTANTS = {
    "holders are not read": ("{holders, queue, adrift,", "{queue, adrift,"),
    "the queue is not read": ("{holders, queue, adrift,", "{holders, adrift,"),
    "messages out of the queue are not read": ("adrift, deadlines}", "adrift}"),
    "keys of followers are not read": ("or rec.follows and rec.follows[1]", ""),
    "followers are not counted": ("type(followers) == 'number' and followers or 0", "0"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_line_of_the_script_is_noticed(store, name, monkeypatch):
    old, new = MUTANTS[name]
    scripts = store.operations.scripts
    script = scripts["list_calls"]
    assert old in script.text
    scripts["list_calls"] = dataclasses.replace(script, text=script.text.replace(old, new))
    with pytest.raises(AssertionError):
        test_of_many_keys_the_calls_of_the_workers_and_of_followers_are_shown(store, monkeypatch)

"""Messages that settle before they queue (``lock_debounce``)."""

from __future__ import annotations

import re

import pytest

from celery_singleton_lock.admin import show_lock, why
from celery_singleton_lock.admin.export_parked import export, restore
from celery_singleton_lock.admin.select_parked import Filter
from celery_singleton_lock.cli import render
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.settle import Settle
from celery_singleton_lock.flower.rows import LockRows
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import ClusterAdminStore, RedisAdminStore
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
REALM = "f" * 16
QUIET = 100
MOST = 250
KEYS = Keyspace().lock("k")


@pytest.fixture
def store(lock_client, kind):
    if kind == "cluster":
        store = ClusterAdminStore(lock_client, claim_lease=50_000.0)
    else:
        store = RedisAdminStore(lock_client, claim_lease=50_000.0)
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    return store


SETTLES = Settle(QUIET)


def park(
    store,
    who,
    *,
    settle=SETTLES,
    task="app.task",
    head_start=0,
    deadline=None,
    realm=REALM,
    **more,
):
    owner = Owner(f"{who}.0", f"{who}/0/0", task, "w")
    claim = Claim("k", flow=packed((), head_start, settle=settle), **more)
    return store.park(owner, claim, MessageToPark(b"body", realm, "q", deadline))


def sweep(store):
    return store.sweep_and_grant("k", worker="w").next_starts.get("k")


def assert_delivered(store, *expected, worker="w"):
    """Assert what has come to the worker: (verdict, who, by whom, whether it settled)."""
    found = []
    while (each := store.receive(worker, 10.0 if len(found) < len(expected) else 0.01)) is not None:
        by = each.by.partition("/")[0]
        found.append((each.verdict, each.token.partition(".")[0], by, each.settled))
    assert found == list(expected)


def end(store, who):
    token = next(h.token for h in store.inspect("k").holders if h.token.startswith(who))
    store.release("k", token, Ending.FINAL)


def state(store, token):
    found = store.locate_token("k", token).waiting
    return found and found.state


# --- the quiet period -----------------------------------------------------------------------------


@on_all_stores
def test_a_call_waits_for_its_quiet_period_although_the_lock_is_free(store):
    reply = park(store, "a")
    assert (reply.verdict, reply.rank, reply.holder) == (Verdict.WAITING, 0, None)
    assert reply.waits_for is WaitsFor.SETTLING
    assert QUIET - 30 < reply.next_start <= QUIET
    let_pass(store, QUIET - 60)
    assert 0 < sweep(store) <= 60
    assert_delivered(store)
    assert state(store, "a.0") == "settling"
    let_pass(store, 60)
    assert sweep(store) is None
    assert_delivered(store, ("granted", "a", "", False))


@on_all_stores
def test_views_say_when_a_settling_call_queues_at_the_earliest(store):
    park(store, "a", head_start=40)
    let_pass(store, QUIET - 60)
    (listed,) = show_lock(store, "k").waiting
    for each in (listed, store.locate_token("k", "a.0").waiting):
        assert each.state == "settling"
        assert 40 < each.settles_for <= 60
    assert re.search(r"it queues for 'k' in (4\d|5\d|60) s, if no later", why(store, "a").sentence)
    (row,) = [line for line in render.detail(show_lock(store, "k")) if line.startswith("  ")]
    assert re.search(r"settling .* (4\d|5\d|60) s$", row)
    let_pass(store, 60)
    sweep(store)
    assert store.locate_token("k", "a.0").waiting.settles_for == 0


@on_all_stores
def test_lists_show_a_lock_whose_only_call_settles(store):
    park(store, "a")
    (lock,) = store.summarise_locks()
    assert (lock.waiting, lock.aside) == (0, 1)
    (row,) = render.lock_rows([lock])
    assert row[-1] == "1 out of the queue"
    (row,) = LockRows(store).page(state="waiting")["locks"]
    assert row["aside"] == 1
    assert LockRows(store).page()["states"]["waiting"] == 1


@on_all_stores
def test_only_the_newest_call_of_a_burst_runs(store):
    for who in "abc":
        park(store, who)
        let_pass(store, QUIET - 50)
        sweep(store)
    assert_delivered(store, ("replaced", "a", "b", True), ("replaced", "b", "c", True))
    let_pass(store, 50)
    sweep(store)
    assert_delivered(store, ("granted", "c", "", False))
    for who in "ab":
        store.release("k", f"{who}.0", Ending.FINAL)
    end(store, "c")
    view = store.inspect("k")
    assert (view.holders, view.waiting, view.bodies) == ((), 0, 0)


@on_all_stores
def test_a_steady_stream_runs_when_its_maximum_is_over(store):
    """It counts from the first call, and the newest one runs."""
    for who in "abcd":
        park(store, who, settle=Settle(QUIET, MOST))
        let_pass(store, 60)
    assert 0 < sweep(store) <= 10
    let_pass(store, 10)
    sweep(store)
    replaced = [("replaced", a, b, True) for a, b in ("ab", "bc", "cd")]
    assert_delivered(store, *replaced, ("granted", "d", "", False))
    park(store, "e", settle=Settle(QUIET, MOST))
    let_pass(store, QUIET - 60)
    sweep(store)
    assert state(store, "e.0") == "settling"  # it begins a burst of its own


@on_all_stores
def test_a_call_that_comes_after_the_quiet_period_settles_on_its_own(store):
    park(store, "a")
    let_pass(store, QUIET)
    park(store, "b")
    assert_delivered(store, ("granted", "a", "", False))
    assert state(store, "b.0") == "settling"


@on_all_stores
def test_the_first_call_after_a_quiet_period_can_run_at_once(store):
    first = Settle(QUIET, run_first=True)
    park(store, "a", settle=first)
    assert_delivered(store, ("granted", "a", "", False))
    assert park(store, "b", settle=first).waits_for is WaitsFor.SETTLING
    end(store, "a")
    assert_delivered(store)  # b still settles
    park(store, "c", settle=first)
    let_pass(store, QUIET)
    sweep(store)
    assert_delivered(store, ("replaced", "b", "c", True), ("granted", "c", "", False))
    end(store, "c")
    let_pass(store, QUIET)
    park(store, "d", settle=first)
    assert_delivered(store, ("granted", "d", "", False))


@on_all_stores
def test_a_first_call_is_remembered_for_a_quiet_period_that_is_longer_than_the_lock_lives(
    store, lock_client
):
    first = Settle(7200, run_first=True)
    park(store, "a", settle=first)
    end(store, "a")
    assert lock_client.pttl(KEYS.flow) > 7_000_000
    assert park(store, "b", settle=first).waits_for is WaitsFor.SETTLING


@on_all_stores
def test_tasks_that_share_a_lock_settle_apart(store):
    park(store, "a", task="app.one")
    park(store, "b", task="app.two")
    let_pass(store, QUIET)
    sweep(store)
    assert_delivered(store, ("granted", "a", "", False))
    assert state(store, "b.0") == "parked"


@on_all_stores
def test_a_call_is_not_lost_to_one_of_another_application_on_the_same_redis(store):
    """It has another broker, and other workers: they would run another task."""
    other = "e" * 16
    store.worker_heartbeat("w2", other, ["q"], 60_000.0, 99)
    first = Settle(QUIET, run_first=True)
    for who in "abc":
        park(store, who, settle=first)
        park(store, f"other-{who}", realm=other, settle=first)
    end(store, "a")
    end(store, "other-a")
    let_pass(store, QUIET)
    sweep(store)
    assert_delivered(
        store,
        ("granted", "a", "", False),
        ("replaced", "b", "c", True),
        ("granted", "c", "", False),
    )
    end(store, "c")
    assert_delivered(
        store,
        ("replaced", "other-b", "other-c", True),
        ("granted", "other-a", "", False),
        ("granted", "other-c", "", False),
        worker="w2",
    )


# --- its place ------------------------------------------------------------------------------------


@on_all_stores
def test_a_call_queues_where_it_has_settled(store):
    """Those that came meanwhile are before it, and its head start counts from there."""
    assert store.acquire(Owner("holder"), Claim("k", 30_000.0)).verdict is Verdict.GRANTED
    park(store, "settled")
    park(store, "usual", settle=None)
    let_pass(store, QUIET)
    sweep(store)
    page, _ = store.list_waiters("k", "queue")
    assert [each.token[:-2] for each in page] == ["usual", "settled"]
    park(store, "urgent", task="app.urgent", head_start=50_000_000)
    let_pass(store, 40)
    park(store, "late", settle=None)
    let_pass(store, QUIET - 40)
    sweep(store)
    page, _ = store.list_waiters("k", "queue")
    assert [each.token[:-2] for each in page] == ["usual", "settled", "late", "urgent"]


@on_all_stores
def test_a_head_start_passes_those_that_came_shortly_before_its_end(store):
    store.acquire(Owner("holder"), Claim("k", 30_000.0))
    park(store, "urgent", head_start=50_000_000)
    let_pass(store, QUIET - 40)
    park(store, "late", settle=None)
    let_pass(store, 40)
    sweep(store)
    page, _ = store.list_waiters("k", "queue")
    assert [each.token[:-2] for each in page] == ["urgent", "late"]


@on_all_stores
@pytest.mark.parametrize("head_start", [0, -60_000_000])
def test_a_settled_call_is_not_passed_by_later_ones_because_a_patient_one_waits(store, head_start):
    """Who lets others pass for an hour is no reason that they pass the settled one, too."""
    store.acquire(Owner("holder"), Claim("k", 30_000.0))
    park(store, "patient", settle=None, head_start=-3_600_000_000)
    park(store, "settled", head_start=head_start)
    let_pass(store, QUIET)
    sweep(store)
    let_pass(store, 61)
    park(store, "late", settle=None)
    page, _ = store.list_waiters("k", "queue")
    assert [each.token[:-2] for each in page] == ["settled", "late", "patient"]


@on_all_stores
def test_the_wait_for_the_lock_begins_when_it_has_settled(store):
    store.acquire(Owner("holder"), Claim("k", 30_000.0))
    park(store, "a", deadline=50.0)
    let_pass(store, QUIET + 40)
    sweep(store)
    assert state(store, "a.0") == "parked"
    let_pass(store, 50)
    sweep(store)
    assert_delivered(store, ("overdue", "a", "", False))


@on_all_stores
def test_a_call_that_settles_takes_no_room_in_a_full_queue(store):
    store.acquire(Owner("holder"), Claim("k", 30_000.0))
    assert park(store, "a", max_waiting=0).waits_for is WaitsFor.SETTLING


OFFER = 5
"""Seconds after which a message that a worker has to end is delivered again."""


@pytest.mark.parametrize("kind", ["redis", "in_memory"], indirect=True)
def test_replaced_calls_that_wait_for_a_slot_do_not_occupy_their_worker(lock_client, kind):
    """They are delivered again, since the worker may have died, but ever more rarely."""
    store, times = RedisAdminStore(lock_client, claim_lease=OFFER), 0
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 0)
    park(store, "old", settle=Settle(10_000))
    park(store, "new", settle=Settle(10_000))
    for _ in range(14):
        let_pass(store, OFFER)
        sweep(store)
    while (each := store.receive("w", 0.01)) is not None:
        assert (each.verdict, each.token) == ("replaced", "old.0")
        times += 1
    assert 4 <= times <= 5  # after 0, 5, 15 and 35 s, and perhaps after 75 s


# --- which is the newest --------------------------------------------------------------------------


@on_all_stores
def test_a_redelivered_call_loses_to_one_that_settles(store):
    """It arrived at a worker before: else the broker would not have delivered it twice."""
    park(store, "new")
    park(store, "old", copy=1)
    assert_delivered(store, ("replaced", "old", "new", True))
    let_pass(store, QUIET)
    sweep(store)
    assert_delivered(store, ("granted", "new", "", False))


@on_all_stores
def test_the_newest_of_calls_that_are_all_redelivered_runs(store):
    """A worker that stopped had received all of them, and none was stored."""
    park(store, "old", copy=1)
    park(store, "new", copy=1)
    assert_delivered(store, ("replaced", "old", "new", True))
    let_pass(store, QUIET)
    sweep(store)
    assert_delivered(store, ("granted", "new", "", False))


@on_all_stores
def test_a_redelivered_call_alone_settles_and_runs(store):
    park(store, "old", copy=1)
    let_pass(store, QUIET)
    sweep(store)
    assert_delivered(store, ("granted", "old", "", False))


@on_all_stores
def test_a_call_that_was_received_before_another_is_the_older_one(store):
    """Two workers may store them in the other order."""
    now = round(store.time() * 1e6)
    park(store, "new", place=now - 1_000_000)
    park(store, "old", place=now - 2_000_000)
    assert_delivered(store, ("replaced", "old", "new", True))


@on_all_stores
def test_a_repeated_request_changes_nothing(store):
    park(store, "a")
    let_pass(store, QUIET - 50)
    park(store, "a", copy=1)
    park(store, "a")
    let_pass(store, 50)
    sweep(store)
    assert_delivered(store, ("granted", "a", "", False))


@on_all_stores
def test_a_retry_does_not_restart_the_quiet_period(store):
    """The worker sends it without the option."""
    park(store, "a")
    park(store, "retry", settle=None)
    assert_delivered(store, ("granted", "retry", "", False))
    end(store, "retry")
    let_pass(store, QUIET)
    sweep(store)
    assert_delivered(store, ("granted", "a", "", False))


# --- its end --------------------------------------------------------------------------------------


@on_all_stores
def test_a_call_that_is_replaced_while_no_worker_lives_is_ended_later(store):
    """It is delivered until a worker has ended its task."""
    park(store, "a")
    let_pass(store, 100_000)  # all heartbeats have ended
    store.worker_heartbeat("w", REALM, ["q"], 200_000.0, 99)
    sweep(store)
    assert_delivered(store, ("granted", "a", "", False))


@on_all_stores
def test_a_revoked_call_that_settles_is_ended(store):
    park(store, "a")
    store.deliver_revoked("k", "a.0", worker="w", realm=REALM)
    assert_delivered(store, ("revoked", "a", "", False))
    store.release("k", "a.0", Ending.FINAL)
    park(store, "b")
    let_pass(store, QUIET)
    sweep(store)
    assert_delivered(store, ("granted", "b", "", False))


@on_all_stores
def test_a_call_that_was_dropped_is_replaced_by_none(store):
    park(store, "a")
    assert store.drop_waiters("k", ["a.0"], by=Operator("test"))
    park(store, "b")
    assert_delivered(store)
    assert state(store, "b.0") == "settling"


@on_all_stores
def test_nothing_is_left_when_all_has_ended(store, lock_client):
    for who in "ab":
        park(store, who)
    store.release("k", "a.0", Ending.FINAL)
    let_pass(store, QUIET)
    sweep(store)
    end(store, "b")
    keys = [key for key in lock_client.keys("*") if b"k}" in key]
    assert [key for key in keys if lock_client.pttl(key) == -1] == []
    assert [key for key in lock_client.keys("*") if b"fleet:parked" in key] == []


def test_a_message_that_settles_moves_to_another_broker_and_is_replaced_there(store):
    park(store, "a")
    lines = list(export(store, Filter(), Operator("jane")))
    store.leave("w", REALM, ["q"])
    assert restore(store, lines, Operator("jane"), realm="S").done == {"k": 1}
    store.worker_heartbeat("other", "S", ["q"], 60_000.0, 99)
    park(store, "b", realm="S")
    assert_delivered(store, ("replaced", "a", "b", True), worker="other")
    assert list(store.find_contradictions("k")) == []

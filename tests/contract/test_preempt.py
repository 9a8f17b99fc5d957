"""The newest call replaces the one that waits and the one that runs (``lock_on_conflict``)."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Preempted, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.preempt import Age, aged
from celery_singleton_lock.core.rate import Rate, packed, rates_of
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import ClusterAdminStore, RedisAdminStore
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
REALM = "f" * 16
JANE = Operator("jane")
LEASE = 1000
MOST = 5
KEYS = Keyspace().lock("k")


@pytest.fixture
def store(lock_client, kind):
    if kind == "cluster":
        store = ClusterAdminStore(lock_client, claim_lease=50_000.0)
    else:
        store = RedisAdminStore(lock_client, claim_lease=50_000.0)
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    return store


def asks(who, *, age=Age.NEW, most=MOST, task="app.task", retries=0, rates=(), **more):
    flow = aged(packed(rates, preempt=most or None), age)
    owner = Owner(f"{who}{retries or ''}.0", f"{who}/{retries}/0", task, "w")
    return owner, Claim("k", LEASE, flow=flow, **more)


def acquire(store, who, **options):
    return store.acquire(*asks(who, **options)).verdict


def park(store, who, *, realm=REALM, queue="q", deadline=None, **options):
    message = MessageToPark(b"body", realm, queue, deadline)
    return store.park(*asks(who, **options), message).verdict


def delivered(store, worker="w"):
    """Return what has come to the worker: verdict, whose, and by whom."""
    found = []
    while (each := store.receive(worker, 0.05)) is not None:
        found.append((each.verdict, each.token.partition(".")[0], each.by.partition("/")[0]))
    return found


def renewed(store, who):
    return store.extend([("k", f"{who}.0", LEASE)])[0]


def end(store, who, ending=Ending.FINAL):
    token = next(h.token for h in store.inspect("k").holders if h.token.split(".")[0] == who)
    return store.release("k", token, ending, worker="w").verdict


def claim(store, who):
    token = next(h.token for h in store.inspect("k").holders if h.token.split(".")[0] == who)
    owner = Owner(token, f"{who}/0/0", "app.task", "w")
    assert store.claim(owner, "k", LEASE).verdict is Verdict.GRANTED
    return token


def states(store):
    view = store.inspect("k")
    return (
        {h.token.split(".")[0]: h.state for h in view.holders},
        {w.token.split(".")[0]: w.state for w in view.waiters},
    )


# --- the run is told, and the newest call is next -------------------------------------------------


@on_all_stores
def test_a_newer_call_tells_the_run_that_it_must_end_and_starts_only_after_its_release(store):
    acquire(store, "a")
    assert renewed(store, "a") is True
    assert park(store, "b") is Verdict.WAITING
    assert delivered(store) == [("preempted", "a", "b")]
    assert states(store) == ({"a": "preempted"}, {"b": "parked"})
    assert renewed(store, "a") == Preempted("b/0/0")
    assert end(store, "a") is Verdict.RELEASED
    assert delivered(store) == [("granted", "b", "")]
    assert store.inspect("k").counters["preempted"] == 1


@on_all_stores
def test_it_is_told_once_although_the_lock_is_swept_and_renewed(store):
    acquire(store, "a")
    park(store, "b")
    for _ in range(3):
        store.sweep_and_grant("k", worker="w")
        park(store, "b")  # asked again, after a lost reply
    assert delivered(store) == [("preempted", "a", "b")]
    assert renewed(store, "a") == Preempted("b/0/0")


@on_all_stores
def test_a_run_that_was_parked_before_is_told_too(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    claim(store, "a")
    park(store, "b")
    assert delivered(store) == [("granted", "a", ""), ("preempted", "a", "b")]
    end(store, "a")
    assert delivered(store) == [("granted", "b", "")]


@on_all_stores
def test_of_the_calls_that_wait_only_the_newest_one_stays(store):
    acquire(store, "a")
    for who in "bcd":
        park(store, who)
    assert delivered(store) == [
        ("preempted", "a", "b"),
        ("replaced", "b", "c"),
        ("replaced", "c", "d"),
    ]
    assert states(store)[1] == {"d": "parked"}
    end(store, "a")
    assert delivered(store) == [("granted", "d", "")]


@on_all_stores
def test_the_message_of_a_preempted_run_whose_worker_dies_ends_as_replaced(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    claim(store, "a")
    park(store, "b")
    delivered(store)
    let_pass(store, LEASE + 1)
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    store.sweep_and_grant("k", worker="w")
    assert sorted(delivered(store)) == [("granted", "b", ""), ("replaced", "a", "b")]


@on_all_stores
def test_the_message_of_a_preempted_run_that_is_given_back_ends_as_replaced(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    claim(store, "a")
    park(store, "b")
    delivered(store)
    end(store, "a", Ending.AGAIN)
    assert sorted(delivered(store)) == [("granted", "b", ""), ("replaced", "a", "b")]


@on_all_stores
def test_a_run_that_comes_back_after_the_newer_call_has_gone_runs_on(store):
    """Its worker has died, and the newer one was dropped."""
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    claim(store, "a")
    park(store, "b")
    store.drop_waiters("k", ["b.0"], JANE)
    end(store, "a", Ending.AGAIN)
    assert delivered(store)[-1] == ("granted", "a", "")
    token = claim(store, "a")
    assert store.extend([("k", token, LEASE)]) == [True]
    assert states(store)[0] == {"a": "running"}


@on_all_stores
def test_a_newer_call_does_not_take_the_place_of_a_revoked_one(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    park(store, "y", task="other", most=0)
    store.deliver_revoked("k", "a.0", realm=REALM, worker="w")
    park(store, "b")
    end(store, "x")
    assert delivered(store) == [("revoked", "a", ""), ("granted", "y", "")]


# --- who is preempted, and by whom ----------------------------------------------------------------


@on_all_stores
@pytest.mark.parametrize(
    ("holder", "caller"),
    [
        ({"task": "other"}, {}),
        ({"most": 0}, {}),  # a Lock, or a task that was declared otherwise
        ({}, {"task": "other"}),
        ({}, {"most": 0}),
        ({}, {"age": Age.COPY}),
    ],
    ids=["other task", "no option", "by another task", "by one without it", "by a copy"],
)
def test_a_holder_is_not_preempted(store, holder, caller):
    if holder.get("most") == 0:
        holder = {**holder, "task": ""}
    acquire(store, "a", **holder)
    park(store, "b", **caller)
    assert [each for each in delivered(store) if each[0] == "preempted"] == []
    assert states(store)[0] == {"a": "running"}
    assert renewed(store, "a") is True


@on_all_stores
def test_nothing_is_preempted_while_a_message_of_another_task_is_before_it(store):
    acquire(store, "a")
    park(store, "x", task="other", most=0)
    park(store, "b")
    assert delivered(store) == []
    assert renewed(store, "a") is True
    store.drop_waiters("k", ["x.0"], JANE)
    store.sweep_and_grant("k", worker="w")
    assert delivered(store) == [("preempted", "a", "b")]


@on_all_stores
def test_a_newer_call_takes_the_place_of_the_one_that_waits(store):
    """Else other tasks would pass a steady stream for ever."""
    acquire(store, "a", task="other", most=0)
    park(store, "b")
    park(store, "x", task="other", most=0)
    park(store, "c")
    assert delivered(store) == [("replaced", "b", "c")]
    end(store, "a")
    assert delivered(store) == [("granted", "c", "")]


@on_all_stores
def test_a_newer_call_takes_the_room_of_the_one_that_waits(store):
    acquire(store, "a")
    assert park(store, "b", max_waiting=1) is Verdict.WAITING
    assert park(store, "c", max_waiting=1) is Verdict.WAITING
    assert park(store, "x", max_waiting=1, task="other", most=0) is Verdict.FULL


@on_all_stores
def test_a_call_that_came_before_the_one_that_runs_ends(store):
    """It has asked later: its worker was slower."""
    now = int(store.time() * 1e6)
    acquire(store, "b", place=now - 1_000_000)
    park(store, "a", place=now - 2_000_000)
    assert delivered(store) == [("replaced", "a", "b")]
    assert states(store) == ({"b": "running"}, {})


@on_all_stores
def test_a_call_that_came_before_the_one_that_waits_ends(store):
    now = int(store.time() * 1e6)
    acquire(store, "x", task="other", most=0)
    park(store, "b", place=now - 1_000_000)
    park(store, "a", place=now - 2_000_000)
    assert delivered(store) == [("replaced", "a", "b")]
    assert states(store)[1] == {"b": "parked"}


@on_all_stores
def test_a_retry_that_meets_a_newer_call_ends(store):
    acquire(store, "a")
    end(store, "a")
    acquire(store, "b")
    park(store, "a", retries=1, age=Age.RETRY)
    assert delivered(store) == [("replaced", "a1", "b")]


@on_all_stores
def test_a_retry_that_is_sent_before_its_first_attempt_has_ended_waits(store):
    acquire(store, "a")
    park(store, "a", retries=1, age=Age.RETRY)
    assert delivered(store) == []
    end(store, "a")
    assert delivered(store) == [("granted", "a1", "")]


@on_all_stores
def test_a_copy_waits_beside_an_earlier_call_since_it_may_be_the_newest(store):
    """As after a lost connection: the broker delivers again what no worker has begun."""
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    park(store, "b", age=Age.COPY)
    assert delivered(store) == []
    end(store, "x")
    assert delivered(store) == [("granted", "a", "")]
    claim(store, "a")
    end(store, "a")
    assert delivered(store) == [("granted", "b", "")]


@on_all_stores
def test_a_later_call_replaces_a_copy_that_waits(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a", age=Age.COPY)
    park(store, "b")
    end(store, "x")
    assert delivered(store) == [("granted", "a", ""), ("replaced", "a", "b"), ("granted", "b", "")]


@on_all_stores
def test_a_copy_that_runs_is_preempted(store):
    acquire(store, "a", age=Age.COPY)
    park(store, "b")
    assert delivered(store) == [("preempted", "a", "b")]


@on_all_stores
def test_a_call_of_another_broker_replaces_none_that_waits(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    park(store, "b", realm="e" * 16)
    assert delivered(store) == []
    assert states(store)[1] == {"a": "parked", "b": "parked"}


@on_all_stores
def test_a_call_that_was_granted_and_has_not_begun_gives_its_permit_back_at_once(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    assert delivered(store) == [("granted", "a", "")]
    park(store, "b")
    assert sorted(delivered(store)) == [("granted", "b", ""), ("replaced", "a", "b")]
    assert store.inspect("k").counters["replaced"] == 1
    late = store.claim(Owner("a.0", "a/0/0", "app.task", "w"), "k", LEASE)
    assert late.verdict is Verdict.ABSENT


@on_all_stores
def test_a_call_that_comes_back_behind_a_newer_one_ends(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    claim(store, "a")
    store.pause("k", JANE)
    park(store, "b")
    end(store, "a", Ending.AGAIN)
    delivered(store)
    store.resume("k", JANE)
    store.sweep_and_grant("k", worker="w")
    assert delivered(store) == [("replaced", "a", "b"), ("granted", "b", "")]
    assert states(store)[1] == {}


def assert_the_newest_one_stays(store, when):
    """The call that ``when`` takes the lock from stays the older one, behind all others."""
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    token = claim(store, "a")
    park(store, "b")
    delivered(store)
    when(token)
    assert sorted(delivered(store)) == [("granted", "b", ""), ("replaced", "a", "b")]
    claim(store, "b")
    assert renewed(store, "b") is True


@on_all_stores
def test_a_run_that_an_operator_ends_does_not_replace_the_newest_call(store):
    assert_the_newest_one_stays(store, lambda token: store.force_release("k", token, JANE))


@on_all_stores
def test_a_run_whose_lock_is_reset_does_not_replace_the_newest_call(store):
    assert_the_newest_one_stays(store, lambda _: store.reset("k"))


@on_all_stores
def test_a_call_that_came_back_twice_does_not_replace_the_newest_one_after_its_delay(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    claim(store, "a")
    end(store, "a", Ending.AGAIN)
    claim(store, "a")
    park(store, "b")
    end(store, "a", Ending.AGAIN)
    claim(store, "b")
    delivered(store)
    let_pass(store, 2)
    store.sweep_and_grant("k", worker="w")
    assert delivered(store) == [("replaced", "a", "b")]
    assert states(store) == ({"b": "running"}, {})


@on_all_stores
def test_the_newest_call_waits_for_a_copy_if_an_operator_has_put_it_behind_that(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    token = claim(store, "a")
    park(store, "b", age=Age.COPY)
    delivered(store)
    store.force_release("k", token, JANE)
    assert delivered(store) == [("granted", "b", "")]
    assert states(store)[1] == {"a": "parked"}
    claim(store, "b")
    end(store, "b")
    assert delivered(store) == [("granted", "a", "")]


@on_all_stores
def test_of_many_calls_with_one_task_id_only_the_newest_one_waits(store):
    def park_under_one_id(base):
        owner, claim = asks(base)
        message = MessageToPark(b"body", REALM, "q")
        store.park(owner._replace(attempt="one/0/0"), claim, message)

    acquire(store, "x", task="other", most=0)
    park_under_one_id("a")
    end(store, "x")
    claim(store, "a")
    for base in "bcd":
        park_under_one_id(base)
    assert states(store) == ({"a": "preempted"}, {"d": "parked"})


@on_all_stores
def test_a_call_that_waits_for_its_delay_is_replaced(store):
    """It has begun twice, and has come back each time."""
    acquire(store, "x", task="other", most=0)
    park(store, "a")
    end(store, "x")
    for _ in range(2):
        claim(store, "a")
        end(store, "a", Ending.AGAIN)
    acquire(store, "x", task="other", most=0)
    delivered(store)
    park(store, "b")
    assert delivered(store) == [("replaced", "a", "b")]


@on_all_stores
def test_a_call_that_no_live_worker_takes_is_replaced(store):
    acquire(store, "x", task="other", most=0)
    park(store, "a", queue="nobody")
    end(store, "x")
    assert states(store) == ({}, {})  # it is adrift
    park(store, "b")
    assert delivered(store) == [("granted", "b", "")]
    assert store.locate_token("k", "a.0").waiting.state == "replaced"
    let_pass(store, 60_000)
    store.worker_heartbeat("v", REALM, ["nobody"], 60_000.0, 9)
    store.sweep_and_grant("k", worker="v")
    assert delivered(store, "v") == [("replaced", "a", "b")]


@on_all_stores
def test_with_a_free_permit_an_older_call_runs(store):
    now = int(store.time() * 1e6)
    acquire(store, "b", limit=2, place=now - 1_000_000)
    park(store, "a", limit=2, place=now - 2_000_000)
    assert delivered(store) == [("granted", "a", "")]


@on_all_stores
def test_a_run_without_a_message_that_waits_in_its_place_is_not_concerned(store):
    """As an eager task: no worker could tell it, and none could wait for it."""
    acquire(store, "x", task="other", most=0)
    park(store, "before")
    store.drop_waiters("k", ["before.0"], JANE)
    end(store, "x")
    acquire(store, "a")
    owner, claimed = asks("b")
    assert store.acquire(owner, claimed, wait=5000.0).verdict is Verdict.WAITING
    store.sweep_and_grant("k", worker="w")
    assert delivered(store) == []
    end(store, "a")
    assert states(store) == ({"b": "granted"}, {})
    park(store, "c")
    assert delivered(store) == []
    assert states(store) == ({"b": "granted"}, {"c": "parked"})


# --- when nothing would be gained -----------------------------------------------------------------


@on_all_stores
def test_nothing_is_preempted_for_a_call_that_may_not_start(store):
    acquire(store, "a")
    store.pause("k", JANE)
    park(store, "b")
    assert delivered(store) == []
    store.resume("k", JANE)
    store.sweep_and_grant("k", worker="w")
    assert delivered(store) == [("preempted", "a", "b")]


@on_all_stores
def test_nothing_is_preempted_for_a_call_above_a_rate(store):
    """Another task of the lock, or an operator, has set it."""
    acquire(store, "a")
    store.set_rates("k", rates_of("1/h"), JANE)
    end(store, "a")
    acquire(store, "b")
    park(store, "c")
    assert delivered(store) == []
    assert renewed(store, "b") is True


@on_all_stores
def test_nothing_is_preempted_for_a_call_that_costs_too_much(store):
    """Since an operator has lowered the rate: it ends when it is next."""
    costly = {"rates": (Rate("9/m", cost=5),)}
    acquire(store, "a", **costly)
    store.pause("k", JANE)
    park(store, "b", **costly)
    store.set_rates("k", [Rate("3/m", cost=1)], JANE)
    store.resume("k", JANE)
    store.sweep_and_grant("k", worker="w")
    assert delivered(store) == []
    assert states(store)[0] == {"a": "running"}


@on_all_stores
def test_nothing_is_preempted_for_a_call_that_no_live_worker_takes(store):
    acquire(store, "a")
    park(store, "b", queue="nobody")
    assert delivered(store) == []
    assert renewed(store, "a") is True


@on_all_stores
def test_a_run_is_preempted_soon_after_a_worker_that_takes_the_newest_call_is_live_again(store):
    """It had missed its heartbeats. Each renewal of the run put the next look at the lock off."""
    acquire(store, "a")
    park(store, "b", queue="later")
    store.worker_heartbeat("back", REALM, ["later"], 60_000.0, 99)
    for _ in range(2):
        assert renewed(store, "a") is True
        let_pass(store, 3.0)
    renewed(store, "a")
    let_pass(store, 5.1)
    assert store.take_due_locks() == ["k"]
    store.sweep_and_grant("k", worker="back")
    assert delivered(store) == [("preempted", "a", "b")]


@on_all_stores
def test_with_two_permits_the_first_run_is_preempted_and_only_if_none_is_free(store):
    acquire(store, "a", limit=2)
    assert park(store, "b", limit=2) is Verdict.WAITING
    assert delivered(store) == [("granted", "b", "")]
    claim(store, "b")
    park(store, "c", limit=2)
    park(store, "d", limit=2)
    assert delivered(store) == [("preempted", "a", "c"), ("replaced", "c", "d")]
    end(store, "a")
    assert delivered(store) == [("granted", "d", "")]
    claim(store, "d")
    park(store, "e", limit=2)
    assert delivered(store) == [("preempted", "b", "e")]


# --- a steady stream makes progress ---------------------------------------------------------------


def preempt_all(store, first, number):
    """Let each of so many calls preempt the one before; return the last one, which runs."""
    acquire(store, f"{first}0", most=2)
    for n in range(1, number + 1):
        park(store, f"{first}{n}", most=2)
        assert delivered(store) == [("preempted", f"{first}{n - 1}", f"{first}{n}")]
        end(store, f"{first}{n - 1}")
        assert delivered(store) == [("granted", f"{first}{n}", "")]
        claim(store, f"{first}{n}")
    return f"{first}{number}"


@on_all_stores
def test_after_as_many_in_a_row_the_next_one_waits_and_a_run_that_ends_resets_that(store):
    last = preempt_all(store, "a", 2)
    park(store, "b", most=2)
    park(store, "c", most=2)
    assert delivered(store) == [("replaced", "b", "c")]
    assert renewed(store, last) in {True, False}
    end(store, last)
    assert delivered(store) == [("granted", "c", "")]
    claim(store, "c")
    park(store, "d", most=2)
    assert delivered(store) == [("preempted", "c", "d")]


@on_all_stores
def test_the_row_is_remembered_while_a_run_goes_on(store):
    """Also if it lasts longer than the keys of an idle lock live."""
    last = preempt_all(store, "a", 2)
    token = store.inspect("k").holders[0].token
    for _ in range(4):
        let_pass(store, LEASE // 3)
        assert store.extend([("k", token, LEASE)]) == [True]
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    park(store, "b", most=2)
    assert delivered(store) == []
    end(store, last)
    assert delivered(store) == [("granted", "b", "")]


def test_the_row_lives_as_long_as_the_lease(lock_client):
    store = RedisAdminStore(lock_client, claim_lease=50_000.0)
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    preempt_all(store, "a", 2)
    token = store.inspect("k").holders[0].token
    store.claim(Owner(token, "a2/0/0", "app.task", "w"), "k", LEASE, acks_early=True)
    store.extend([("k", token, LEASE)])
    assert lock_client.pttl(KEYS.flow) > 0.9 * LEASE * 1000


@on_all_stores
def test_runs_of_other_tasks_do_not_reset_the_row(store):
    last = preempt_all(store, "a", 2)
    end(store, last, Ending.AGAIN)
    delivered(store)
    end(store, last)
    acquire(store, "x", task="other", most=5)
    park(store, "y", task="other", most=5)
    delivered(store)
    end(store, "x")
    end(store, "y")
    delivered(store)
    acquire(store, "b", most=2)
    park(store, "c", most=2)
    assert delivered(store) == []


@on_all_stores
def test_a_run_that_is_given_back_does_not_reset_the_row(store, lock_client):
    preempt_all(store, "a", 2)
    store.release("k", store.inspect("k").holders[0].token, Ending.AGAIN, worker="w")
    row = {k.decode(): v for k, v in lock_client.hgetall(KEYS.flow).items() if b"in_a_row" in k}
    assert row == {"in_a_row:app.task": b"2"}


@on_all_stores
def test_calls_that_have_not_begun_count_in_the_row(store):
    """Else a stream would give the permit back for ever while all slots are busy."""
    acquire(store, "x", task="other", most=0)
    for n in range(4):
        park(store, f"a{n}", most=2)
        if n == 0:
            end(store, "x")
    found = delivered(store)
    assert [each for each in found if each[0] == "granted"] == [
        ("granted", "a0", ""),
        ("granted", "a1", ""),
        ("granted", "a2", ""),
    ]
    assert states(store) == ({"a2": "granted"}, {"a3": "parked"})

"""``locks try``: what would happen to a call is what happens when it is made."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin.try_call import try_call
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_set import Key
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiters import hold as held
from support.waiters import park

pytestmark = pytest.mark.contract

TASK, NAME = "app.task", "account:42"


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client)
    yield store
    store.close()


def hold(store, name=NAME, limit=1):
    owner = Owner(new_token(), f"{new_token()}/0/0", "app.other", "w@h#1")
    store.acquire(owner, Claim(name, limit=limit, lease=600))
    return owner


def tried(store, *keys, **options):
    return try_call(store, TASK, keys or (Key(NAME),), LockOptions(**options), "R")


def test_a_free_lock_starts_the_call_at_once(store):
    found = tried(store)
    assert (found.outcome, found.lock, found.rank) == ("run", "", 0)
    assert found.sentence == "It would start at once, under 'account:42'."
    (lock,) = found.locks
    assert (lock.name, lock.limit, lock.held, lock.told) == (NAME, 1, 0, "free")


@pytest.mark.parametrize(
    ("options", "outcome", "told"),
    [
        ({}, "park", "It would be parked, as the 2nd in the queue: 'account:42' is held by "),
        ({"wait_timeout": 60.0}, "park", "It would be parked for at most 60 s, as the 2nd in"),
        (
            {"on_conflict": "wait", "wait_timeout": 5.0},
            "wait",
            "It would wait in its pool slot for at most 5.0 s: 'account:42' is held by ",
        ),
        ({"on_conflict": "requeue"}, "requeue", "It would go back to the broker for 1.0 s: "),
        ({"on_conflict": "skip"}, "skip", "It would be skipped and end as REVOKED: 'account:42' "),
        ({"on_conflict": "fail"}, "fail", "It would fail with LockConflict: 'account:42' is held"),
        (
            {"max_waiting": 1},
            "fail-full",
            "It would fail with LockQueueFull, since 1 of at most 1 wait already (lock_max_waiti",
        ),
        ({"max_waiting": 1, "on_full": "skip"}, "skip-full", "It would be skipped and end as REV"),
        (
            {"max_waiting": 1, "on_full": "replace"},
            "replace",
            "It would replace the oldest waiting message of its task, since 1 of at most 1 wait",
        ),
        ({"max_waiting": 1, "on_conflict": "skip"}, "skip", "It would be skipped and end as REVO"),
        ({"max_waiting": 2}, "park", "It would be parked, as the 2nd in the queue"),
        ({"mode": "observe"}, "run-unlocked", "It would start at once, without a lock: its mode"),
        ({"mode": "off"}, "run-unlocked", "It would start at once, without a lock: its mode is of"),
    ],
)
def test_a_busy_lock_leads_to_what_the_policy_says(store, options, outcome, told):
    store.worker_heartbeat("w#1", "R", ["q"], 600, tasks=[TASK])
    hold(store)
    park(store, NAME)
    found = tried(store, **options)
    assert found.outcome == outcome
    assert found.sentence.startswith(told)
    assert found.rank == (2 if outcome in {"park", "wait"} else 0)


def test_a_full_queue_without_a_message_of_this_task_lets_nothing_be_replaced(store):
    store.worker_heartbeat("w#1", "R", ["q"], 600, tasks=[TASK])
    hold(store)
    park(store, NAME)
    options = LockOptions(max_waiting=1, on_full="replace")
    found = try_call(store, "app.another", (Key(NAME),), options, "R")
    assert found.outcome == "fail-full"


def test_a_paused_lock_is_not_free_though_nobody_holds_it(store):
    store.pause(NAME, Operator("jane", why="stock count"))
    found = tried(store)
    assert found.outcome == "park"
    assert "'account:42' is paused (" in found.sentence
    assert found.locks[0].waits_for == "pause"


@pytest.mark.parametrize(
    ("declared", "wanted", "outcome"), [(2, 2, "run"), (2, 1, "park"), (1, 2, "park")]
)
def test_the_lowest_limit_of_those_that_hold_counts(store, declared, wanted, outcome):
    hold(store, limit=declared)
    found = tried(store, limit=wanted)
    assert (found.outcome, found.locks[0].limit) == (outcome, min(declared, wanted))
    owner = Owner(new_token(), "now/0/0", TASK)
    granted = store.acquire(owner, Claim(NAME, limit=wanted)).verdict == "granted"
    assert granted == (outcome == "run"), "the store decides the same"


def test_a_limit_that_an_operator_has_set_counts(store):
    hold(store)
    store.set_limit(NAME, 2, Operator("jane"))
    assert tried(store).outcome == "run"
    store.set_limit(NAME, 1, Operator("jane"))
    assert tried(store, limit=5).outcome == "park"


def test_of_several_locks_the_first_busy_one_decides(store):
    """It would hold those before, and others would wait for them."""
    hold(store, "b")
    hold(store, "c")
    found = tried(store, Key("a"), Key("b", 1), Key("c", 3))
    assert (found.outcome, found.lock, found.rank) == ("park", "b", 1)
    assert found.sentence.endswith(" It would hold 'a' meanwhile.")
    assert [lock.told == "free" for lock in found.locks] == [True, False, False]
    assert [lock.limit for lock in found.locks] == [1, 1, 1], "c has a holder that wants 1"
    both = tried(store, Key("a"), Key("z", 2))
    assert both.sentence == "It would start at once, under all 2 locks."


def test_it_changes_nothing(store):
    hold(store)
    park(store, NAME)

    def dump():
        return {key: store.client.dump(key) for key in store.client.keys("*")}

    before = dump()
    tried(store, Key("new"), Key(NAME))
    tried(store, max_waiting=1, on_full="replace")
    assert dump() == before


def in_group(name, limit=1):
    return packed((), group=Group(name, limit))


def test_a_group_at_its_limit_waits_although_a_permit_is_free(store):
    store.worker_heartbeat("w#1", "R", ["q"], 600, tasks=[TASK])
    held(store, NAME, limit=3, flow=in_group("acme"))
    acme, other = ({"limit": 3, "fair_by": name, "fair_limit": 1} for name in ("acme", "other"))
    found = tried(store, **acme)
    assert (found.outcome, found.locks[0].waits_for) == ("park", "group")
    assert found.sentence == (
        "It would be parked, as the 1st in the queue: 'account:42' is free, but the group 'acme' "
        "holds as many permits as it may (lock_fair_limit)."
    )
    assert tried(store, **acme, on_conflict="skip").outcome == "skip"
    assert tried(store, **other).outcome == "run"


def test_a_call_passes_the_tasks_of_a_group_at_its_limit(store):
    store.worker_heartbeat("w#1", "R", ["q"], 600, tasks=[TASK])
    held(store, NAME, limit=3, flow=in_group("acme"))
    for _ in range(4):
        park(store, NAME, limit=3, flow=in_group("acme"))
    assert tried(store, limit=3, fair_by="acme", fair_limit=1).rank == 5
    assert tried(store, limit=3, fair_by="other", fair_limit=1).outcome == "run"
    assert tried(store, limit=3).outcome == "run"
    other = held(store, NAME, limit=3, flow=in_group("other"))
    assert {holder.token for holder in store.inspect(NAME).holders} >= {other.token}


def test_a_call_with_debounce_settles_though_the_lock_is_free(store):
    found = tried(store, debounce=5.0)
    assert (found.outcome, found.lock, found.rank) == ("park", NAME, 0)
    assert found.sentence == (
        "It would settle for 5.0 s, and a later call may replace it meanwhile (lock_debounce). "
        "Then it would queue for 'account:42'."
    )
    hold(store)
    assert tried(store, debounce=5.0, max_waiting=0).sentence == found.sentence
    assert tried(store, debounce=5.0, mode="off").outcome == "run-unlocked"

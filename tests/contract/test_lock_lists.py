"""Lists of locks and waiters: order, omissions, and commands at Redis."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin.force_release import (
    Refused,
    force_release,
    forced_release_warning,
    why_not,
)
from celery_singleton_lock.admin.lock_views import ORDERS, list_locks, show_lock, waiting_in
from celery_singleton_lock.core.lock_view import Holder
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.store.operator.base import PARTS, Glance, Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiters import hold, park

pytestmark = pytest.mark.contract


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client, claim_lease=30)
    yield store
    store.close()


FEW = Glance("c", held=1, waiting=1, oldest=2.0, holders=(Holder("t", expires_in=5.0),))
SOME = Glance("b", held=2, waiting=2, oldest=9.0, holders=(Holder("t", expires_in=9.0),))
MANY = Glance("a", held=1, waiting=1, adrift=3, oldest=2.0, holders=(Holder("t", expires_in=9.0),))
FREE = Glance("d")


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("name", "abcd"),
        ("waiting", "abcd"),
        ("oldest", "bacd"),
        ("held", "bacd"),
        ("lease", "dcab"),
    ],
)
def test_most_or_longest_comes_first_and_of_equals_the_name_decides(order, names):
    locks = sorted([FEW, SOME, FREE, MANY], key=ORDERS[order])
    assert "".join(lock.name for lock in locks) == names


def test_a_lease_of_many_holders_is_the_one_that_ends_first():
    later, sooner = Holder("t", expires_in=9.0), Holder("t", expires_in=1.0)
    assert ORDERS["lease"](Glance("x", holders=(later, sooner)))[0] == 1.0


def test_a_list_is_cut_after_it_was_sorted(store):
    for name, waiting in (("a", 0), ("b", 1), ("c", 2)):
        hold(store, name)
        for number in range(waiting):
            park(store, name, f"t{number}")

    def names(**how):
        return [lock.name for lock in list_locks(store, **how)]

    assert names() == ["a", "b", "c"]
    assert names(order="waiting") == ["c", "b", "a"]
    assert names(order="waiting", most=2) == ["c", "b"]
    assert names(pattern="b") == ["b"]
    with pytest.raises(ValueError, match=r"^order is 'size': use one of name, waiting, .*lease\.$"):
        names(order="size")


def test_idle_locks_are_listed_when_they_are_asked_for(store):
    who = hold(store, "idle")
    store.release("idle", who.token, Ending.FINAL)
    assert list_locks(store) == []
    assert [lock.name for lock in list_locks(store, idle=True)] == ["idle"]
    store.probe()
    assert [lock.name for lock in list_locks(store, idle=True)] == ["idle"]


def test_a_lock_with_another_programs_data_is_always_listed(store):
    """Its tasks wait, so "no lock is held or waited for" would mislead."""
    store.client.set(store.keyspace.lock("taken").meta, "of another program")
    (found,) = list_locks(store)
    assert found.broken


def test_one_holder_is_listed_unless_more_are_asked_for(store):
    for _ in range(3):
        hold(store, "a", limit=3)
    assert [len(lock.holders) for lock in list_locks(store)] == [1]
    assert [len(lock.holders) for lock in list_locks(store, holders=2)] == [2]


class Counting(RedisAdminStore):
    """Records the requested pages."""

    def list_waiters(self, name, part, after="", most=100):
        self.asked.append((part, bool(after), most))
        return super().list_waiters(name, part, after, most)


def test_waiters_are_read_in_pages_and_only_as_many_as_asked_for(store):
    hold(store, "a")
    store.worker_heartbeat("w", "R", ["q"], 30)
    tokens = [park(store, "a", f"t{number}") for number in range(5)]
    tokens.append(park(store, "a", "adrift", queue="nobody"))
    counting = Counting(store.client)
    counting.asked = []
    assert [each.token for each in waiting_in(counting, "a", 2)] == tokens
    assert {most for _, _, most in counting.asked} == {2}
    assert [part for part, after, _ in counting.asked if not after] == list(PARTS)
    counting.asked = []
    assert [each.token for each in show_lock(counting, "a", waiters=5).waiting] == tokens[:5]
    assert counting.asked == [("queue", False, 100)]


def test_twenty_waiters_are_shown_and_those_once(store):
    hold(store, "a")
    store.worker_heartbeat("w", "R", ["q"], 30)
    for number in range(22):
        park(store, "a", f"t{number}")
    detail = show_lock(store, "a")
    assert len(detail.waiting) == 20
    assert detail.view.waiting == 22
    assert detail.view.waiters == ()


def test_t28_a_refused_release_names_each_holder_with_its_token(store):
    assert why_not(store, "a", "x.0") == (
        "x.0 does not hold the lock 'a': it has released it, or its lease has expired. "
        "Nobody holds it now."
    )
    holders = [hold(store, "a", limit=2, lease=20.0), hold(store, "a", limit=2, lease=30.0)]
    told = why_not(store, "a", "x.0")
    one, two = (f"app.task[{who.token[:4]}] (token {who.token})" for who in holders)
    assert told.endswith(f" It is held by {one}, {two}.")
    waiter = park(store, "a", "t")
    told = f"{waiter} waits for the lock 'a' and does not hold it: drop it instead."
    assert why_not(store, "a", waiter) == told


def test_t28_a_released_task_whose_message_is_kept_runs_again_unless_it_is_dropped(store):
    """The error has the name of the lock."""
    store.worker_heartbeat("w", "R", ["q"], 30)
    for keep, waiting in ((None, 1), (False, 0)):
        holder = hold(store, f"a{keep}")
        token = park(store, f"a{keep}", f"t{keep}")
        store.release(f"a{keep}", holder.token, Ending.FINAL)
        how = {} if keep is None else {"keep": keep}
        force_release(store, f"a{keep}", token, Operator("jane"), **how)
        view = store.inspect(f"a{keep}")
        assert len(view.holders) + view.waiting == waiting
    with pytest.raises(Refused) as caught:
        force_release(store, "a", "x.0", Operator("jane"))
    assert caught.value.name == "a"


def test_t28_a_forced_release_names_its_risk():
    told = forced_release_warning("a", "settle[3f2a]")
    assert told.startswith("settle[3f2a] may still be running. It will not be stopped")
    assert "The next task of 'a' will run at the same time" in told
    assert "lower fencing tokens" in told

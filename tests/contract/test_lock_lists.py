"""Lists of locks and waiters: order, omissions, and commands at Redis."""

from __future__ import annotations

import importlib

import pytest

from celery_singleton_lock.admin import lock_views
from celery_singleton_lock.admin.force_release import (
    Refused,
    force_release,
    forced_release_warning,
    why_not,
)
from celery_singleton_lock.admin.lock_views import (
    ORDERS,
    list_locks,
    rank_locks,
    show_lock,
    shown_of,
    waiting_in,
)
from celery_singleton_lock.admin.why import why
from celery_singleton_lock.core.lock_view import Holder
from celery_singleton_lock.core.model import Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.flower.rows import LockRows
from celery_singleton_lock.store.operator.base import PARTS, Glance, Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiters import hold, park

why_module = importlib.import_module("celery_singleton_lock.admin.why")

pytestmark = pytest.mark.contract


@pytest.mark.needs_real_redis("INFO commandstats")
@pytest.mark.parametrize("order", ["waiting", "oldest", "held", "lease", "name"])
def test_the_first_locks_of_a_large_redis_are_those_with_waiters_and_need_no_scan(
    store, order, monkeypatch
):
    """Flower asks every second, and 100,000 locks take seconds to read."""
    monkeypatch.setattr(lock_views, "FEW_KEYS", 0)
    for name, waiting in (("a", 0), ("b", 1), ("c", 2)):
        hold(store, name)
        for number in range(waiting):
            park(store, name, f"t{number}")
    store.client.config_resetstat()
    ranking = rank_locks(store, "", order, 2)
    assert ranking.names == (["c", "b"] if order == "waiting" else ["b", "c"])
    assert (ranking.total, ranking.waiting) == (2, 3)
    assert [lock.name for lock in shown_of(store, ranking)] == list(ranking.names)
    assert rank_locks(store, "a", order, 2).names == ["a"]  # named exactly, and no other matches
    assert rank_locks(store, "?", order, 1).total == 2
    assert not {"cmdstat_scan", "cmdstat_hscan"} & set(store.client.info("commandstats"))


@pytest.mark.needs_real_redis("INFO commandstats")
def test_flowers_page_of_a_large_redis_needs_no_scan_unless_locks_without_waiters_may_match(
    store, monkeypatch
):
    """It asks every second while somebody views it."""
    monkeypatch.setattr(lock_views, "FEW_KEYS", 0)
    store.worker_heartbeat("w", "R", ["q"], 30)
    tokens = {name: hold(store, name).token for name in ("runs", "waited", "paused", "unserved")}
    park(store, "waited", "t1")
    park(store, "waited", "t2")
    park(store, "paused", "t3")
    store.pause("paused", Operator("jane"))
    park(store, "unserved", "t4", queue="nobody")
    store.release("unserved", tokens["unserved"], Ending.FINAL)
    store.client.config_resetstat()
    rows = LockRows(store)

    def names(**query):
        return [lock["name"] for lock in rows.page(**query)["locks"]]

    found = rows.page(order="trouble")
    assert [lock["name"] for lock in found["locks"]] == ["paused", "unserved", "waited"]
    assert [lock["state"] for lock in found["locks"]] == ["paused", "unserved", "waiting"]
    assert found["keys"] == store.key_count()
    states = {"all": 3, "stuck": 2, "dead": 0, "unserved": 1, "paused": 1, "waiting": 3, "held": 2}
    assert found["states"] == states
    assert names(state="stuck", order="name") == ["paused", "unserved"]
    assert names(state="waiting") == ["waited", "paused", "unserved"]
    assert names(state="unserved") == ["unserved"]
    assert not {"cmdstat_scan", "cmdstat_hscan"} & set(store.client.info("commandstats"))
    assert names(state="held", order="name") == ["paused", "runs", "waited"]
    assert names(text="run") == ["runs"]
    assert store.client.info("commandstats")["cmdstat_scan"]["calls"] >= 2


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client, claim_lease=30)
    yield store
    store.close()


@pytest.mark.needs_real_redis("INFO commandstats")
def test_why_finds_a_task_in_the_list_of_its_worker_without_a_scan(store, monkeypatch):
    """By its id or the beginning of it. It had to read all locks, seconds with 100,000."""
    monkeypatch.setattr(why_module, "FEW_KEYS", 0)
    monkeypatch.setattr(why_module, "SEARCH", 0.0)
    holder = Owner(new_token(), "0123456789abcdef/0/0", "app.task")
    store.acquire(holder, Claim("runs"))
    store.list_running("w", [("0123456789abcdef", "runs", holder.token)], [], 60.0)
    store.client.config_resetstat()
    answer = why(store, "0123456789abcdef")
    assert (answer.state, answer.lock, answer.token) == ("running", "runs", holder.token)
    assert "cmdstat_scan" not in store.client.info("commandstats")
    assert why(store, "01234567").lock == "runs"
    store.release("runs", holder.token, Ending.FINAL)
    assert why(store, "0123456789abcdef").state == "unseen", "the list is a hint only"


def test_why_says_if_it_has_not_searched_all_locks(store, monkeypatch):
    monkeypatch.setattr(why_module, "FEW_KEYS", 0)
    monkeypatch.setattr(why_module, "SEARCH", -1.0)
    holder = Owner(new_token(), "0123456789abcdef/0/0", "app.task")
    store.acquire(holder, Claim("runs"))
    answer = why(store, "0123456789abcdef")
    assert answer.state == "unseen"
    assert "not all locks were searched" in answer.sentence
    assert "--all" in answer.sentence
    assert why(store, "0123456789abcdef", every=True).lock == "runs"


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
    told = f"{waiter} waits for the lock 'a' and does not hold it, so there is nothing to release."
    assert why_not(store, "a", waiter).startswith(told)


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

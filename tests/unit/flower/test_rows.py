"""The data of Flower's pages: bounded, shared by all viewers, read at a bounded rate."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.admin import lock_views
from celery_singleton_lock.flower import list_cache
from celery_singleton_lock.flower.list_cache import AGE_FACTOR, LISTS, LOCKS
from celery_singleton_lock.flower.rows import MAX_ROWS, LockRows, UnknownLock
from celery_singleton_lock.flower.values import locks_in, visible
from celery_singleton_lock.store.operator.base import Glance


class ManualClock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class FakeStore:
    """Has the given locks. Listing them takes ``takes`` seconds of the clock."""

    def __init__(self, clock, names=(), takes=0.0):
        self.clock, self.names, self.takes = clock, list(names), takes
        self.listed, self.ranked = [], []
        self.keys = 0
        self.may_list = None

    def time(self):
        return 1e9

    def summarise_locks(self, pattern="", *, holders=1):
        self.listed.append(pattern)
        if self.may_list is not None:
            self.may_list.wait(60)
        self.clock.now += self.takes
        for n, name in enumerate(self.names):
            if pattern in name:
                yield Glance(name, held=1, waiting=n, limit=1)

    def key_count(self):
        return self.keys

    def count_waiters(self, order="waiting"):
        self.ranked.append(order)
        return [(name, n, float(n)) for n, name in enumerate(self.names) if n]

    def summarise_named(self, names, *, holders=1):
        known = {lock.name: lock for lock in self.summarise_locks()}
        self.listed.pop()
        return [known[name] for name in names]

    def locate_tasks(self, task_ids):
        return [("a", "token")] if "task-1" in task_ids else []

    def task_ids(self, start):
        return iter(())


@pytest.fixture
def clock():
    return ManualClock()


def test_viewers_of_the_same_list_share_one_read(clock):
    """Also viewers who ask while the list is read."""
    store = FakeStore(clock, ["a"])
    rows, store.may_list = LockRows(store, clock), threading.Event()
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(rows.page) for _ in range(5)]
        store.may_list.set()
        assert [answer.result(60)["total"] for answer in answers] == [1] * 5
    assert store.listed == [""]


def test_a_list_that_takes_long_to_read_is_read_less_often(clock):
    """The answer says how old it is."""
    store = FakeStore(clock, ["a"], takes=2.0)
    rows = LockRows(store, clock)
    rows.page()
    clock.now += AGE_FACTOR * 2.0 - 0.1
    assert rows.page()["age"] == pytest.approx(AGE_FACTOR * 2.0 - 0.1)
    assert len(store.listed) == 1
    clock.now += 0.2
    assert rows.page()["age"] == 0
    assert len(store.listed) == 2


def test_the_number_of_lists_and_rows_in_memory_is_bounded(clock):
    """For any number of filters and locks."""
    rows = LockRows(FakeStore(clock, map(str, range(LOCKS + 5))), clock)
    for n in range(3 * LISTS):
        rows.page(f"no such {n}")
    assert len(rows._lists) == LISTS
    found = rows.page(limit=10**6)
    assert (found["total"], found["listed"]) == (LOCKS + 5, LOCKS)
    assert len(found["locks"]) == MAX_ROWS
    assert found["locks"][0]["waiting"] == LOCKS + 4  # the first of the order stay in memory
    assert rows.page(offset=10**9)["locks"] == []


def test_an_unknown_order_or_lock_is_refused(clock):
    rows = LockRows(FakeStore(clock), clock)
    with pytest.raises(ValueError, match="use one of trouble, name, waiting"):
        rows.page(order="sideways")
    with pytest.raises(UnknownLock, match="Reload the list"):
        rows.details("0" * 32)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("account:42", "account:42"),
        ("a\nb\x00c\x7f", "a\u240ab\u2400c\u2421"),
        ("\ud800 alone", "? alone"),
        ("x" * 30, "x" * 19 + "…"),
        ("a\u202eb", "a\\u202eb"),
    ],
)
def test_text_is_cut_and_made_printable_for_a_page(text, shown):
    """Control characters, unpaired surrogates and marks that reverse a line are replaced."""
    assert visible(text, 20) == shown


@pytest.mark.parametrize(
    "stats", [{}, {"singleton_lock": None}, {"singleton_lock": {}}, {"singleton_lock": "odd"}]
)
def test_statistics_without_locks_or_of_an_older_worker_have_no_locks(stats):
    assert locks_in(stats) == []


def test_locks_are_counted_by_state_and_found_by_the_id_of_a_waiting_task(clock):
    """The counts are of all locks that match the text, whichever state is selected."""
    rows = LockRows(FakeStore(clock, ["a", "b", "c"]), clock)
    found = rows.page(state="waiting")
    assert [lock["name"] for lock in found["locks"]] == ["c", "b"]
    assert (found["total"], found["states"]["all"], found["states"]["waiting"]) == (2, 3, 2)
    assert (found["states"]["held"], found["states"]["stuck"]) == (3, 0)
    assert [lock["name"] for lock in rows.page("task-1")["locks"]] == ["a"]


@pytest.fixture
def large(clock):
    """A large Redis, with locks of 0, 1 and 2 waiters."""
    store = FakeStore(clock, ["a", "b", "c"])
    store.keys = lock_views.FEW_KEYS + 1
    return store


@pytest.mark.parametrize("order", ["trouble", "waiting", "oldest"])
@pytest.mark.parametrize(
    "query", [{}, {"state": "stuck"}, {"state": "unserved"}, {"state": "waiting"}]
)
def test_of_a_large_redis_only_locks_with_waiters_are_listed_and_counted(
    clock, large, query, order
):
    """All 100,000 locks took seconds to read. The answer says what is missing."""
    found = LockRows(large, clock).page(order=order, **query)
    assert large.listed == []
    assert large.ranked == ["waiting" if order == "trouble" else order]
    assert (found["keys"], found["unread"]) == (lock_views.FEW_KEYS + 1, 0)
    assert [found["states"][state] for state in ("all", "waiting", "held")] == [2, 2, 2]
    waited = query.get("state", "waiting") == "waiting"
    assert (found["total"], found["waiting"]) == ((2, 3) if waited else (0, 0))


@pytest.mark.parametrize(
    ("query", "total"),
    [({"state": "held"}, 3), ({"state": "dead"}, 0), ({"state": "paused"}, 0), ({"text": "a"}, 1)],
)
def test_of_a_large_redis_all_locks_are_read_if_one_without_waiters_may_match(
    clock, large, query, total
):
    found = LockRows(large, clock).page(**query)
    assert (large.listed, large.ranked, found["total"]) == ([""], [], total)
    assert (found["keys"], found["unread"]) == (0, 0)


def test_all_states_of_long_waits_are_read_from_locks_with_waiters(clock, large):
    LockRows(large, clock).page(state="held", longer=10.0)
    assert large.listed == []


def test_locks_with_waiters_that_are_not_read_are_told(clock, large, monkeypatch):
    """Those with the fewest waiters."""
    monkeypatch.setattr(list_cache, "LOCKS", 1)
    found = LockRows(large, clock).page(order="trouble")
    assert [lock["name"] for lock in found["locks"]] == ["c"]
    assert (found["total"], found["states"]["all"], found["unread"]) == (1, 1, 1)


def test_of_a_small_redis_all_locks_are_read(clock, large):
    large.keys = lock_views.FEW_KEYS
    found = LockRows(large, clock).page()
    assert (found["total"], found["keys"], large.listed) == (3, 0, [""])


def test_audit_entries_are_cut_and_bounded(clock):
    """An operator's reason may be anything; entries of older versions lack some fields."""
    entry = {"at": 1e9, "action": "pause", "lock": "x" * 500, "count": 1, "why": "a\nb"}
    store = FakeStore(clock)
    store.audit = lambda most: [entry] * min(most, 3000)
    (shown,) = LockRows(store, clock).audit(1)
    assert (shown["who"], shown["host"], shown["more"]) == ("?", "?", 0)
    assert (shown["why"], len(shown["lock"])) == ("a\u240ab", 200)
    assert len(LockRows(store, clock).audit(10**6)) == MAX_ROWS

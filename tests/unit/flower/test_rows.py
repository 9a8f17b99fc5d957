"""The data of Flower's pages: bounded, shared by all viewers, read at a bounded rate."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

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
        self.listed = []
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
    with pytest.raises(ValueError, match="use one of name, waiting"):
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
    ],
)
def test_text_is_cut_and_made_printable_for_a_page(text, shown):
    """Control characters and unpaired surrogates are replaced."""
    assert visible(text, 20) == shown


@pytest.mark.parametrize(
    "stats", [{}, {"singleton_lock": None}, {"singleton_lock": {}}, {"singleton_lock": "odd"}]
)
def test_statistics_without_locks_or_of_an_older_worker_have_no_locks(stats):
    assert locks_in(stats) == []

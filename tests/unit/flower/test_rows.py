"""What Flower's pages are told: bounded, shared, and never more often than Redis can bear."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.flower.rows import (
    KEPT,
    LISTS,
    MOST_ROWS,
    REST,
    Feed,
    UnknownLock,
    locks_in,
    visible,
)
from celery_singleton_lock.store.operator.base import Glance


class HandClock:
    """Time that a test moves."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class PaperStore:
    """Has as many locks as it is told, and takes its time to list them."""

    def __init__(self, clock, names=(), takes=0.0):
        self.clock, self.names, self.takes = clock, list(names), takes
        self.listed = []
        self.gate = None

    def time(self):
        return 1e9

    def glances(self, pattern="", *, holders=1):
        self.listed.append(pattern)
        if self.gate is not None:
            self.gate.wait(10)
        self.clock.now += self.takes
        for n, name in enumerate(self.names):
            if pattern in name:
                yield Glance(name, held=1, waiting=n, limit=1)


@pytest.fixture
def clock():
    return HandClock()


def test_who_looks_at_the_same_list_shares_one_reading(clock):
    """Also those who come while it is read."""
    store = PaperStore(clock, ["a"])
    feed, store.gate = Feed(store, clock), threading.Event()
    with ThreadPoolExecutor(5) as pool:
        looks = [pool.submit(feed.page) for _ in range(5)]
        store.gate.set()
        assert [look.result(10)["total"] for look in looks] == [1] * 5
    assert store.listed == [""]


def test_a_list_that_took_long_is_left_alone_for_long(clock):
    """Reading takes a small part of the time, and the answer says how old it is."""
    store = PaperStore(clock, ["a"], takes=2.0)
    feed = Feed(store, clock)
    feed.page()
    clock.now += REST * 2.0 - 0.1
    assert feed.page()["age"] == pytest.approx(REST * 2.0 - 0.1)
    assert len(store.listed) == 1
    clock.now += 0.2
    assert feed.page()["age"] == 0
    assert len(store.listed) == 2


def test_no_more_lists_and_rows_are_kept_than_said(clock):
    """However many filters are asked for, and however many locks there are."""
    feed = Feed(PaperStore(clock, map(str, range(KEPT + 5))), clock)
    for n in range(3 * LISTS):
        feed.page(f"no such {n}")
    assert len(feed._lists) == LISTS
    found = feed.page(limit=10**6)
    assert (found["total"], found["listed"]) == (KEPT + 5, KEPT)
    assert len(found["locks"]) == MOST_ROWS
    assert found["locks"][0]["waiting"] == KEPT + 4  # the first in the order are those kept
    assert feed.page(offset=10**9)["locks"] == []


def test_an_unknown_order_or_lock_is_refused(clock):
    """With a sentence for people."""
    feed = Feed(PaperStore(clock), clock)
    with pytest.raises(ValueError, match="use one of name, waiting"):
        feed.page(order="sideways")
    with pytest.raises(UnknownLock, match="Look at the list again"):
        feed.details("0" * 32)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("account:42", "account:42"),
        ("a\nb\x00c\x7f", "a\u240ab\u2400c\u2421"),
        ("\ud800 alone", "? alone"),
        ("x" * 30, "x" * 19 + "…"),
    ],
)
def test_what_a_page_cannot_show_is_made_visible(text, shown):
    """Control characters, halves of characters, and lengths."""
    assert visible(text, 20) == shown


@pytest.mark.parametrize(
    "stats", [{}, {"singleton_lock": None}, {"singleton_lock": {}}, {"singleton_lock": "odd"}]
)
def test_a_worker_without_locks_or_of_an_older_version_has_none(stats):
    """Its statistics lack what newer ones have."""
    assert locks_in(stats) == []

"""What the watchdog does with a lease that is only noted, not held yet, or flushed at the end."""

from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.lock.lease import Lease
from celery_singleton_lock.lock.lease_watchdog import LONG, Watchdog
from celery_singleton_lock.lock.renewals import Round


class HandClock:
    """A clock that is turned by hand."""

    def __init__(self, now=1000.0):
        self.now = now

    def monotonic(self):
        return self.now


class Knows:
    """A store that knows some tokens, and notes what it is asked for."""

    def __init__(self, *tokens):
        self.tokens = set(tokens)
        self.asked = []

    def extend(self, leases):
        leases = list(leases)
        self.asked.append(leases)
        return [token in self.tokens for _, token, _ in leases]


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def store():
    return Knows("a")


@pytest.fixture
def starts():
    """How often the thread was asked to go on."""
    return []


@pytest.fixture
def dog(store, clock, starts, monkeypatch):
    """A watchdog without its thread: the tests look themselves."""
    monkeypatch.setattr(Watchdog, "_start", lambda self: starts.append(self._stopping))
    return Watchdog(store, clock)


@pytest.mark.parametrize("lease", [LONG - 0.1, LONG, 30.0])
@pytest.mark.parametrize("held", [True, False])
def test_a_noted_lease_is_the_one_that_was_noted(dog, store, clock, lease, held):
    """Name, token, length, whether it is held, from when, and who hears of its loss."""
    losses = []
    dog.watch_later("lock", "b", lease, held=held, on_lost=lambda *who: losses.append(who))
    clock.now += lease / 3 + 0.01
    assert dog.run_once() == (Round(lost=1) if held else Round(unknown=1))
    assert store.asked == [[("lock", "b", lease)]]
    assert losses == ([("lock", "b")] if held else [])
    assert dog.watching() == (() if held else ("b",))


@pytest.mark.parametrize("lease", [LONG - 0.1, LONG])
def test_a_noted_lease_is_held_from_when_it_was_noted(dog, clock, lease):
    """For its length: without a renewal it is lost then, and not before."""
    dog.watch_later("lock", "a", lease, held=True, on_lost=print)
    clock.now += 0.3 * lease
    assert dog.run_once() == Round()
    clock.now += 0.1 * lease
    assert dog.run_once() == Round(renewed=1)


@pytest.mark.parametrize(("lease", "noted"), [(LONG - 0.1, False), (LONG, True)])
def test_a_lease_that_is_noted_costs_no_lock_and_is_long(dog, lease, noted):
    """A shorter one must not wait for the next reading of the notes."""
    dog.watch_later("lock", "a", lease, held=True, on_lost=print)
    assert (list(dog._noted) == ["a"]) is noted
    assert (list(dog._leases) == ["a"]) is not noted


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize("lives", [False, True])
def test_a_note_starts_the_thread_if_it_is_not_running(dog, starts, lives, stopping):
    """A thread that must end reads no more; one that goes on reads without a call."""
    dog._thread, dog._stopping = (threading.current_thread() if lives else None), stopping
    dog.watch_later("lock", "a", 30.0, held=True, on_lost=print)
    assert starts == ([] if lives and not stopping else [False])
    assert not dog._stopping or starts == []


def test_what_is_not_held_yet_is_looked_at_again_in_a_third_of_its_lease(dog, store, clock):
    """Not sooner: each look is a call, and the pool may be busy for long."""
    dog.watch("lock", "b", 30.0, held=False)
    clock.now += 10.0
    assert dog.run_once() == Round(unknown=1)
    clock.now += 9.9
    assert dog.run_once() == Round()
    clock.now += 0.2
    assert dog.run_once() == Round(unknown=1)
    store.tokens.add("b")
    clock.now += 10.0
    assert dog.run_once() == Round(renewed=1)


def test_a_flush_renews_at_once_even_after_a_failure():
    """Holders that outlive the watchdog get a whole lease; no pause between tries is kept."""
    clock, store = HandClock(now=0.5), Knows("a")
    dog = Watchdog(store, clock)
    dog._start = lambda: None
    dog.watch("lock", "a", 30.0)
    dog._retry_at = 9.0
    dog.stop(flush=True)
    assert store.asked == [[("lock", "a", 30.0)]]


def test_a_lease_is_looked_at_by_its_end_also_while_calls_fail():
    """To report its loss in time needs no call."""
    lease = Lease("lock", "a", 30.0, valid_until=1030.0)
    assert lease.next_look(0.0) == pytest.approx(1010.0)
    assert lease.next_look(1020.0) == 1020.0
    assert lease.next_look(1040.0) == 1030.0
    unheld = Lease("lock", "a", 30.0, valid_until=1030.0, held=False)
    assert unheld.next_look(1040.0) == 1040.0


def test_a_lease_may_join_from_a_sixth_of_its_age_on():
    """So that leases that began together are renewed together."""
    lease = Lease("lock", "a", 30.0, valid_until=1030.0)
    assert not lease.may_join(1004.99)
    assert lease.may_join(1005.01)

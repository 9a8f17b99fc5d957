"""Time: durations of this machine, and a guess of the server's clock."""

from __future__ import annotations

import itertools
import time
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock.core.clock import (
    ServerClock,
    SystemClock,
    _seconds_since_boot,
    seconds_until,
)


class SetClock:
    """A clock that stands where it is put."""

    def __init__(self, now=0.0):
        self.now = now

    def monotonic(self):
        return self.now


def test_the_machines_clock_never_goes_back():
    """Two looks at it are in order."""
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has this clock")
def test_a_machine_that_was_suspended_counts_that_time():
    """Its monotonic clock stood still meanwhile, while its leases ended on the server."""
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert SystemClock().monotonic() == pytest.approx(since_boot, abs=5)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has this clock")
def test_of_the_machines_clocks_the_one_that_counts_a_suspension_is_read(monkeypatch):
    asleep = 3600.0

    def read(clock):
        return time.monotonic() + (asleep if clock == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", read)
    assert _seconds_since_boot()() - time.monotonic() == pytest.approx(asleep, abs=5)


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_without_such_a_clock_the_monotonic_one_is_read(monkeypatch, error):
    """On macOS and Windows, and where a sandbox does not know it."""

    def refuse(clock):
        raise error

    monkeypatch.setattr(time, "clock_gettime", refuse, raising=False)
    assert _seconds_since_boot() is time.monotonic


@pytest.mark.parametrize("hours", [-2, 0, 5])
def test_an_eta_is_computed_in_its_own_time_zone(hours):
    """A naive one is UTC, as Celery's are."""
    now = datetime.now(timezone.utc)
    there = (now + timedelta(seconds=60)).astimezone(timezone(timedelta(hours=hours)))
    assert seconds_until(there) == pytest.approx(60, abs=5)
    assert seconds_until(now.replace(tzinfo=None)) == pytest.approx(0, abs=5)


def test_without_a_measurement_the_place_is_now_whenever_the_server_sees_it():
    """0 leaves it to the server."""
    assert ServerClock(SetClock(5.0)).next_place() == 0


def test_a_place_is_in_the_servers_microseconds():
    """The server's time is taken for that of the middle between question and answer."""
    clock = SetClock(100.0)
    server = ServerClock(clock)
    server.sync(1_700_000_000.0, asked=100.0, answered=100.0)
    assert server.next_place() == 1_700_000_000_000_000
    clock.now = 102.5
    assert server.next_place() == 1_700_000_002_500_000


@given(
    st.lists(
        st.one_of(
            st.just("next"),
            st.tuples(st.just("sync"), st.floats(0, 2e9), st.floats(0, 10)),
            st.tuples(st.just("wait"), st.floats(0, 100)),
        )
    )
)
def test_two_messages_of_one_worker_keep_their_order(steps):
    """Places strictly increase, whatever the measurements say, back or forth."""
    clock = SetClock()
    server = ServerClock(clock)
    server.sync(1_000.0, 0.0, 0.0)
    places = [server.next_place()]
    for step in steps:
        if step == "next":
            places.append(server.next_place())
        elif step[0] == "sync":
            server.sync(step[1], clock.now, clock.now + step[2])
        else:
            clock.now += step[1]
    assert all(one < other for one, other in itertools.pairwise(places))


class Server:
    """A server whose clock is ahead, and whose replies take a given time."""

    def __init__(self, clock, ahead=1_000.0):
        self.clock = clock
        self.ahead = ahead
        self.delays = []
        self.asked = 0

    def time(self):
        self.asked += 1
        seconds = self.clock.now + self.ahead
        self.clock.now += self.delays.pop(0) if self.delays else 0.0
        return seconds

    def behind(self, place):
        return self.clock.now + self.ahead - place / 1e6


@pytest.mark.parametrize(("delays", "asked"), [([0.3], 2), ([0.3, 0.2], 3), ([], 1)])
def test_a_worker_that_stands_still_as_it_reads_the_clock_passes_no_other_worker(delays, asked):
    """Else the places of its messages would lie before those of earlier ones at other workers."""
    clock = SetClock()
    server, estimate = Server(clock), ServerClock(clock)
    server.delays = delays
    estimate.measure(server.time)
    assert server.behind(estimate.next_place()) == pytest.approx(0, abs=1e-5)
    assert server.asked == asked


def test_a_slow_reply_keeps_a_better_estimate():
    """Each reply takes long: the machine is busy."""
    clock = SetClock()
    server, estimate = Server(clock), ServerClock(clock)
    estimate.measure(server.time)
    server.delays = [0.5, 0.4, 0.3]
    estimate.measure(server.time)
    assert server.behind(estimate.next_place()) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("change", [-5.0, 5.0])
def test_a_slow_reply_tells_that_the_servers_clock_was_set(change):
    clock = SetClock()
    server, estimate = Server(clock), ServerClock(clock)
    estimate.measure(server.time)
    server.ahead += change
    server.delays = [0.5, 0.4, 0.3]
    estimate.measure(server.time)
    estimate.next_place()
    clock.now += 10
    assert 0 <= server.behind(estimate.next_place()) <= 0.5


def test_a_clock_that_was_set_back_moves_places_by_one_microsecond():
    """Until the server's clock has caught up."""
    server = ServerClock(SetClock())
    server.sync(1_000.0, 0.0, 0.0)
    first = server.next_place()
    server.sync(10.0, 0.0, 0.0)
    assert [server.next_place(), server.next_place()] == [first + 1, first + 2]


@pytest.mark.parametrize("seconds", [1.7e9, 4e9])
def test_microseconds_are_exact_enough_for_an_order(seconds):
    """Floats of today's size still tell microseconds apart."""
    clock = SetClock()
    server = ServerClock(clock)
    server.sync(seconds, 0.0, 0.0)
    first = server.next_place()
    clock.now = 0.001
    assert abs(server.next_place() - first - 1_000) <= 2

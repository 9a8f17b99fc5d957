"""Local timers: a lock is swept when its rate allows the next start, by the worker that knows."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Reply, Verdict
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.worker.agent.rate_timers import LONGEST, MOST, TIMES, RateTimers
from celery_singleton_lock.worker.agent_commands import NoteNextStart, SweepLock
from celery_singleton_lock.worker.agent_queue import RETRY, AgentQueue
from celery_singleton_lock.worker.lock_header import (
    MOST_OF_NOTICE,
    next_start_in,
    notice_of_next_start,
)
from support.agent_fakes import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def commands(clock):
    return AgentQueue(clock)


@pytest.fixture
def timers(commands, clock):
    return RateTimers(commands, clock)


def waits(seconds, reason=WaitsFor.RATE):
    return Reply(Verdict.WAITING, next_look=seconds, waits_for=reason)


def test_a_lock_is_swept_when_its_rate_allows_the_next_start(timers, commands, clock):
    timers.note("k", waits(0.7))
    assert commands.take(0) == []
    clock.now += 0.7
    assert commands.take(0) == [SweepLock("k")]
    assert timers.is_due("k")
    timers.forget("k", clock.now)
    assert not timers.is_due("k")


@pytest.mark.parametrize("reply", [waits(5.0, WaitsFor.HOLDER), waits(0.0), waits(5.0, None)])
def test_other_waits_set_no_timer(timers, commands, clock, reply):
    timers.note("k", reply)
    clock.now += 10
    assert commands.take(0) == []


def test_a_thousand_parked_messages_of_one_lock_are_one_sweep(timers, commands, clock):
    for _ in range(1000):
        timers.set("k", 3.0)
    clock.now += 3
    assert commands.take(0) == [SweepLock("k")]
    timers.forget("k", clock.now)
    clock.now += 60
    assert commands.take(0) == []


def fire(timers, commands, clock):
    """Return how often a lock is swept in ten seconds, if no sweep grants it."""
    sweeps = 0
    for _ in range(1000):
        clock.now += 0.01
        for command in commands.take(0):
            if timers.is_due(command.name):
                sweeps += 1
                timers.forget(command.name, clock.now)
    return sweeps


def test_each_time_of_a_lock_is_swept_until_a_sweep_grants_it(timers, commands, clock):
    """In any order of the replies."""
    for seconds in (2.0, 3.0, 1.0, 2.0005):
        timers.set("k", seconds)
    assert fire(timers, commands, clock) == 3
    for seconds in (2.0, 3.0, 1.0):
        timers.set("k", seconds)
    timers.restart("k", 4.0)
    assert fire(timers, commands, clock) == 1


def test_a_time_that_comes_while_redis_sweeps_is_swept_too(timers, commands, clock):
    timers.set("k", 1.0)
    timers.set("k", 1.003)
    clock.now += 1
    assert commands.take(0) == [SweepLock("k")]
    began = clock.now
    clock.now += 0.005
    timers.forget("k", began)
    assert timers.is_due("k")
    assert commands.take(0) == [SweepLock("k")]


def test_of_many_times_the_earliest_and_the_latest_are_kept(timers, commands, clock):
    for number in range(100):
        timers.set("k", 1 + number / 50)
    clock.now += 2.9
    assert timers.is_set("k")
    clock.now -= 2.9
    assert fire(timers, commands, clock) == TIMES


def test_far_starts_and_too_many_locks_are_left_to_the_sweep_of_each_second(timers, commands):
    timers.set("far", LONGEST + 1)
    for number in range(MOST + 5):
        timers.set(f"k{number}", 1.0)
    commands.take(0)
    assert len(commands._later) == MOST


def test_a_pool_child_reports_the_next_start():
    assert next_start_in(notice_of_next_start("a:ü", 0.25)) == ("a:ü", 0.25)
    assert next_start_in("!something else") is None
    assert not notice_of_next_start("n" * MOST_OF_NOTICE, 1.0)


def swept(store):
    """Return the locks that were swept; each tick sweeps those that are due, here none."""
    return [name for _, *names in store.asked("sweep_and_grant_many") for name in names]


def test_the_agent_sweeps_at_the_time_and_sets_the_next_timer(agent, store, clock):
    """What the sweep grants is followed by the next start."""
    store.next_starts = {"k": 0.5}
    agent._commands.put(NoteNextStart("k", 0.3))
    agent.run_once()
    assert swept(store) == []
    clock.now += 0.3
    agent.run_once()
    assert swept(store) == ["k"]
    store.next_starts = {}
    clock.now += 0.5
    agent.run_once()
    assert swept(store) == ["k", "k"]
    clock.now += 5
    agent.run_once()
    assert swept(store) == ["k", "k"]


def test_a_start_that_a_late_claim_has_moved_is_not_up_to_a_second_late(agent, store, clock):
    """The sweep at the time of the grant's reply grants nothing, and its reply has no time."""
    store.next_starts = {"k": 0.121}
    agent._commands.put(NoteNextStart("k", 0.1))
    agent.run_once()
    clock.now += 0.1
    agent.run_once()  # grants one, and sets the timer
    clock.now += 0.004
    agent._commands.put(NoteNextStart("k", 0.121))  # of the reply to the claim
    agent.run_once()
    store.next_starts = {}
    clock.now += 0.117
    agent.run_once()
    clock.now += 0.004
    agent.run_once()
    agent.run_once()
    assert swept(store) == ["k", "k", "k"]


def test_a_sweep_that_redis_did_not_answer_is_repeated(agent, store, clock):
    """Otherwise the next task would wait for the sweep of each second, of some worker."""
    agent._commands.put(NoteNextStart("k", 0.3))
    agent.run_once()
    clock.now += 0.3
    store.fails["sweep_and_grant_many"] = BackendUnreachable("away")
    agent.run_once()
    del store.fails["sweep_and_grant_many"]
    store.calls.clear()
    clock.now += RETRY
    agent.run_once()
    assert swept(store) == ["k"]
    assert not agent._commands._later


def test_a_worker_that_stops_sweeps_no_more(agent, store, clock):
    agent._commands.put(NoteNextStart("k", 0.3))
    agent.run_once()
    agent.retire()
    clock.now += 1
    agent.run_once()
    assert swept(store) == []

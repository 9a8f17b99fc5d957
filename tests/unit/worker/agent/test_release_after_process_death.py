"""The lock of a process is released when the process is gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from celery_singleton_lock.core.model import Ending, Reservation
from celery_singleton_lock.worker.agent.release_after_process_death import GONE, gone
from celery_singleton_lock.worker.agent_commands import Release
from support.agent_fakes import (
    header,
)
from support.waiting import eventually


def test_a_lock_is_not_released_before_its_process_is_gone(agent, store, clock, caplog):
    """Not while it lives. If it does not end, its lease decides, and a log line says so."""
    lease_end = clock.now + 30.0
    agent._commands.put(Release(header("a"), Ending.FINAL, os.getpid(), clock.now, lease_end))
    agent.run_once()
    for _ in range(5):
        clock.now += GONE
        agent.run_once()
        assert store.asked("release") == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"the process {os.getpid()} of task" in caplog.text
    assert "in 25 s, when its lease ends" in caplog.text
    clock.now += GONE
    agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.FINAL)]


def test_a_process_that_goes_late_is_heard_of_before_its_lease_ends(agent, store, clock):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        lease_end = clock.now + 30.0
        agent._commands.put(Release(header("a"), Ending.AGAIN, child.pid, clock.now, lease_end))
        agent.run_once()
        clock.now += 2 * GONE
        agent.run_once()
        assert store.asked("release") == []
        child.kill()
        eventually(lambda: gone(child.pid), 10)
        clock.now += 0.6
        agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.AGAIN)]


def test_a_lock_of_a_process_that_is_gone_is_released_at_once(agent, store, clock):
    """A zombie counts as gone: it runs nothing."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        eventually(lambda: gone(child.pid), 10)  # not reaped yet
        agent._commands.put(Release(header("a"), Ending.AGAIN, child.pid, clock.now))
        agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.AGAIN)]


@pytest.mark.parametrize(
    ("ending", "passed", "expected"),
    [
        (Ending.HOLD, 40.0, (Ending.HOLD, 20.0)),
        (Ending.HOLD, 70.0, (Ending.FINAL, None)),
        (Ending.KEEP, 70.0, (Ending.FINAL, None)),
        (Ending.LATER, 40.0, (Ending.LATER, 20.0)),
        (Ending.LATER, 70.0, (Ending.LATER, None)),
    ],
)
def test_a_lock_stays_taken_no_longer_if_redis_hears_late_of_the_end(
    agent, store, clock, ending, passed, expected
):
    """The time counts from the end of the task, not of the outage."""
    kept = Reservation("id/1/0", 60.0, clock.now)
    clock.now += passed
    agent._commands.put(Release(header("a"), ending, kept=kept))
    agent.run_once()
    assert store.asked("release") == [("release", "a", expected[0])]
    (reserved,) = store.reserved
    assert (reserved and reserved.seconds) == expected[1]

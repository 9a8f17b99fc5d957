"""The list of the tasks that a worker has had for seconds."""

from __future__ import annotations

import pytest

from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.worker.agent.running_tasks import WHOLE, RunningTasks
from support.agent_fakes import header


@pytest.fixture
def flying():
    return []


@pytest.fixture
def running(store, flying):
    return RunningTasks(store, "w", in_flight=lambda: [header(token) for token in flying])


def entry(token):
    return (token, f"k:{token}", token)


def test_a_short_task_costs_no_command(running, store, flying):
    """Only what is in flight at two ticks is listed."""
    for token in "abc":
        flying[:] = [token]
        running.update()
    assert store.asked("list_running") == []


def test_a_task_is_listed_once_and_removed_when_it_has_ended(running, store, flying):
    flying[:] = ["a", "b"]
    for _ in range(5):
        running.update()
    flying[:] = ["b"]
    running.update()
    running.clear()
    assert store.asked("list_running") == [
        ("list_running", [entry("a"), entry("b")], []),
        ("list_running", [], [entry("a")]),
        ("list_running", [], [entry("b")]),
    ]


def test_a_full_redis_does_not_end_the_tick_of_the_agent(running, store, flying):
    """Else it logged each second that locked tasks wait, and stayed down after an outage."""
    flying[:] = ["a"]
    store.fails["list_running"] = BackendRefused("full")
    for _ in range(3):
        running.update()
    store.fails.clear()
    running.update()
    assert store.asked("list_running")[-1] == ("list_running", [entry("a")], [])


def test_a_list_is_written_as_a_whole_at_times_and_after_a_failure(running, store, flying, clock):
    """Redis may have lost it."""
    flying[:] = ["a"]
    running.update()
    store.fails["list_running"] = BackendUnreachable()
    with pytest.raises(BackendUnreachable):
        running.update()
    store.fails.clear()
    running.update()
    clock.now += WHOLE
    running.update()
    assert store.asked("list_running")[-2:] == [("list_running", [entry("a")], [])] * 2

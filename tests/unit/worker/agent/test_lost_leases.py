"""Which lost leases are reported."""

from __future__ import annotations

import pytest

from celery_singleton_lock.events import LeaseLost
from celery_singleton_lock.worker.agent.lost_leases import END_REPORT_DELAY


@pytest.mark.parametrize("ended", [True, False])
def test_a_loss_is_reported_unless_the_task_has_just_ended(
    agent, dispatcher, seen, clock, ended, caplog
):
    """Its end may be on its way from the pool: a second is given to it."""
    dispatcher.in_flight.tokens = {"a"}
    agent.lost_leases.noticed("k:a", "a")
    agent.run_once()
    assert seen.events == []
    if ended:
        dispatcher.in_flight.tokens = set()
    clock.now += END_REPORT_DELAY + 0.01
    agent.run_once()
    assert [type(event) for event in seen.events] == ([] if ended else [LeaseLost])
    assert ("was lost" in caplog.text) is not ended


def test_the_line_about_a_loss_names_the_task(agent, dispatcher, clock, caplog):
    """An operator who reads it looks for this task first."""
    dispatcher.in_flight.tokens = {"a"}
    agent.lost_leases.noticed("k:a", "a")
    clock.now += END_REPORT_DELAY + 0.01
    agent.run_once()
    assert "while its task app.task[a] ran" in caplog.text


def test_a_grant_that_is_gone_before_its_task_begins_is_no_loss(
    agent, dispatcher, seen, clock, caplog
):
    """It waited for a slot: it lapsed, went to another worker, or its queue was deleted."""
    dispatcher.in_flight.tokens, dispatcher.in_flight.begun = {"a"}, set()
    agent.lost_leases.noticed("k:a", "a")
    agent.run_once()
    clock.now += END_REPORT_DELAY + 0.01
    agent.run_once()
    assert seen.events == []
    assert "was lost" not in caplog.text


def test_a_loss_is_reported_only_after_pending_ends_are_handled(agent, dispatcher, seen, clock):
    seen.still, dispatcher.in_flight.tokens = True, {"a"}
    agent.lost_leases.noticed("k:a", "a")
    for _ in range(10):
        clock.now += END_REPORT_DELAY
        agent.run_once()
    assert seen.events == []
    seen.still = False
    for call, args in seen.later:
        call(*args)
    clock.now += END_REPORT_DELAY + 0.01
    agent.run_once()
    agent.run_once()
    assert [type(event) for event in seen.events] == [LeaseLost]

"""A short storm over workers whose tasks have flow control."""

from __future__ import annotations

import pytest

from chaos.__main__ import OF_TIME, summary
from chaos.storm import Storm
from chaos.tasks import FLOW

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.needs_real_redis("signals, append-only data"),
    pytest.mark.timeout(600),
    pytest.mark.full,
]


def test_a_storm_with_flow_control_breaks_no_rule(tmp_path):
    """Beside other tests the machine may stand still, so a late start is no violation here."""
    report = Storm(tmp_path, seed=2, seconds=40, flow=True).run()
    assert not [each for each in report.violations if each.rule not in OF_TIME], summary(report)
    tasks = {event["task"] for event in report.history.of("published")}
    assert {*FLOW} <= tasks, "there was no flow control"
    assert report.history.of("duplicate"), "no call was a duplicate"


def test_a_rate_that_is_not_in_force_is_noticed(tmp_path):
    """The storm ends when the defect is caught, after some seconds."""
    report = Storm(tmp_path, seed=3, seconds=120, broken="rate").run()
    assert report.caught is not None, summary(report)

"""Promises about time are checked by the present speed of the machine."""

from __future__ import annotations

import pytest

from support import waiting
from support.waiting import STANDSTILL, in_time, in_time_once, slowdown


def test_a_late_result_on_an_idle_machine_fails(monkeypatch):
    monkeypatch.setattr(waiting, "slowdown", lambda: 1.0)
    in_time(1.9, 2)
    in_time_once([5.0, 1.9, 2.1], 2)
    with pytest.raises(AssertionError, match=r"took 2\.10 s at best, and 2 s are promised"):
        in_time_once([2.1, 5.0], 2)


def test_on_a_busy_machine_the_bound_is_longer(monkeypatch):
    monkeypatch.setattr(waiting, "slowdown", lambda: 3.0)
    in_time_once([5.9], 2)
    with pytest.raises(AssertionError, match=r"took 6\.10 s"):
        in_time_once([6.1], 2)


def test_what_is_measured_once_may_have_met_a_process_that_stood_still(monkeypatch):
    monkeypatch.setattr(waiting, "slowdown", lambda: 3.0)
    in_time(2 + STANDSTILL + 3.9, 2)
    with pytest.raises(AssertionError, match=r"took 16\.10 s, and 2 s are promised"):
        in_time(6 + STANDSTILL + 0.1, 2)


def test_the_slowdown_is_at_least_one():
    assert slowdown() >= 1

"""Which tasks keep their locks: declared, switched for one task, switched for all."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin.observe_report import report_lines
from celery_singleton_lock.core.lock_mode import ALL, ENFORCE, MODES, OBSERVE, OFF, Modes, laxer
from celery_singleton_lock.core.lock_view import Observations, Observed


@pytest.mark.parametrize("declared", MODES)
def test_without_a_switch_a_task_has_the_mode_that_it_declares(declared):
    modes = Modes({"settle": declared})
    assert modes.of("settle") == declared
    assert modes.relaxed() == ([] if declared == ENFORCE else ["settle"])


@pytest.mark.parametrize("declared", MODES)
@pytest.mark.parametrize("switch", MODES)
def test_the_switch_of_a_task_replaces_what_it_declares(declared, switch):
    """Also towards enforce: so a task is taken from observing to its lock without a deployment."""
    modes = Modes({"settle": declared, "other": declared})
    changed = modes.apply({"settle": switch})
    assert (modes.of("settle"), modes.of("other")) == (switch, declared)
    assert changed == ([] if switch == declared else ["settle"])


@pytest.mark.parametrize("declared", MODES)
@pytest.mark.parametrize("own", [None, *MODES])
@pytest.mark.parametrize("switch", MODES)
def test_the_switch_for_all_only_relaxes(declared, own, switch):
    """Whatever else is switched, ``off`` for all is off, and ``enforce`` for all asks nothing."""
    modes = Modes({"settle": declared})
    modes.apply({ALL: switch, **({"settle": own} if own else {})})
    assert modes.of("settle") == laxer(own or declared, switch)


def test_a_switch_that_is_taken_away_leaves_what_is_declared():
    modes = Modes({"settle": OBSERVE})
    modes.apply({ALL: OFF})
    assert modes.apply({}) == ["settle"]
    assert modes.of("settle") == OBSERVE


def test_what_is_no_mode_is_left_out():
    """Another version may have written it; an unknown word does not unlock a task."""
    modes = Modes({"settle": ENFORCE})
    assert modes.apply({ALL: "paused", "settle": ""}) == []
    assert modes.switches() == {}


def test_an_order_counts_until_the_switch_in_redis_has_it():
    """The beat may bring an older switch meanwhile, or none."""
    modes = Modes({"settle": ENFORCE})
    assert modes.order(ALL, OFF) == ["settle"]
    assert modes.apply({}) == []
    assert modes.of("settle") == OFF
    modes.end_order(ALL, OFF)
    assert (modes.of("settle"), modes.switches()) == (OFF, {ALL: OFF})
    assert modes.apply({}) == ["settle"]


def test_an_order_can_take_a_switch_away():
    modes = Modes({"settle": ENFORCE})
    modes.apply({ALL: OFF})
    assert modes.order(ALL, None) == ["settle"]
    assert modes.apply({ALL: OFF}) == []
    assert modes.of("settle") == ENFORCE
    modes.end_order(ALL, None)
    assert (modes.of("settle"), modes.switches()) == (ENFORCE, {})


def test_only_the_last_order_is_settled():
    """One that had to wait for Redis must not undo what was ordered after it."""
    modes = Modes({"settle": ENFORCE})
    modes.order(ALL, OFF)
    modes.order(ALL, OBSERVE)
    assert not modes.is_ordered(ALL, OFF)
    modes.end_order(ALL, OFF)
    assert modes.is_ordered(ALL, OBSERVE)
    assert modes.of("settle") == OBSERVE


def test_the_report_names_tasks_and_locks_with_their_waits():
    report = Observations(
        tasks=(Observed("settle", 100, 40, 80.0, 12.5), Observed("mail", 7)),
        locks=(Observed("account:42", 0, 40, 80.0, 12.5),),
    )
    lines = report_lines(report)
    assert lines[0] == "Of 107 runs 40 would have been blocked."
    assert lines[3].split() == ["100", "40", "80.0", "2.0", "12.5", "settle"]
    assert lines[4].split() == ["7", "0", "0.0", "0.0", "0.0", "mail"]
    assert lines[-1].split() == ["40", "80.0", "2.0", "12.5", "account:42"]


def test_a_long_report_has_the_number_of_omitted_entries():
    report = Observations(tasks=tuple(Observed(f"t{n}", 1) for n in range(30)))
    assert report_lines(report)[-1] == "… and 10 more"


def test_an_empty_report_explains_how_to_start_observing():
    (line,) = report_lines(Observations())
    assert "singleton_lock_mode" in line

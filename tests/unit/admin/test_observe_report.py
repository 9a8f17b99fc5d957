"""The report of observe: tasks, then locks, the longest waits first."""

from __future__ import annotations

from celery_singleton_lock.admin.observe_report import NOTHING, report_lines
from celery_singleton_lock.core.lock_view import Observations, Observed

TASKS = (
    Observed("app.settle", runs=20, blocked=4, waited=10.0, longest=6.25),
    Observed("app.send", runs=3),
)
LOCKS = tuple(Observed(f"account:{n}", blocked=2, waited=3.0, longest=2.0) for n in range(3))


def test_runs_blocked_and_waits_stand_below_their_headings():
    lines = report_lines(Observations(TASKS, LOCKS[:1]))
    assert lines == [
        "Of 23 runs 4 would have been blocked.",
        "",
        "   runs  blocked  would have waited, s:  total      average   longest  task",
        "     20        4                          10.0          2.5       6.2  app.settle",
        "      3        0                           0.0          0.0       0.0  app.send",
        "",
        "   runs  blocked  would have waited, s:  total      average   longest  lock",
        "               2                           3.0          1.5       2.0  account:0",
    ]


def test_what_a_pause_would_have_held_back_is_told():
    """It says nothing of how the locks are declared."""
    tasks = (Observed("app.settle", runs=20, blocked=4, paused=3),)
    first, *_ = report_lines(Observations(tasks))
    assert first == "Of 20 runs 4 would have been blocked, 3 of them by an operator's pause."


def test_what_a_later_call_would_have_replaced_is_told():
    """These runs need not have run."""
    tasks = (Observed("app.index", runs=20, replaced=17), Observed("app.send", runs=3))
    first, *lines = report_lines(Observations(tasks))
    assert first.endswith("17 would not have run: a later call replaced them (lock_debounce).")
    assert lines[2].endswith("  app.index (17 replaced)")
    assert lines[3].endswith("  app.send")


def test_where_nothing_blocks_no_lock_is_listed():
    assert not [line for line in report_lines(Observations(TASKS[1:])) if line.endswith("lock")]


def test_what_is_left_out_is_counted():
    told = report_lines(Observations(TASKS, LOCKS), most=1)
    assert [line for line in told if line.startswith("…")] == ["… and 1 more", "… and 2 more"]
    assert sum("app." in line for line in told) == 1
    assert sum("account:" in line for line in told) == 1
    assert "…" not in "".join(report_lines(Observations(TASKS, LOCKS), most=3))


def test_a_long_report_shows_twenty_of_each():
    many = tuple(Observed(f"t{n}", runs=1) for n in range(25))
    assert report_lines(Observations(many)).count("… and 5 more") == 1


def test_an_empty_report_explains_how_to_start():
    assert report_lines(Observations()) == [NOTHING]

"""The report of the mode ``observe``: which tasks would have been blocked, and for how long."""

from __future__ import annotations

from collections.abc import Iterable

from celery_singleton_lock.core.lock_view import Observations, Observed

NOTHING = (
    "No runs were observed. Set singleton_lock_mode (or lock_mode of a task) to observe, or run "
    "locks mode observe. Run this command again after some tasks have run."
)


def report_lines(report: Observations, *, most: int = 20) -> list[str]:
    """Return the lines of the report: a table of tasks, then of locks; the longest waits first.

    Args:
        report: the observations in the store.
        most: largest number of rows of each table.
    """
    if not report.tasks:
        return [NOTHING]
    runs, blocked = (sum(getattr(t, what) for t in report.tasks) for what in ("runs", "blocked"))
    paused = sum(task.paused for task in report.tasks)
    by_pause = f", {paused} of them by an operator's pause" if paused else ""
    first = f"Of {runs} runs {blocked} would have been blocked{by_pause}."
    replaced = sum(task.replaced for task in report.tasks)
    if replaced:
        first += f" {replaced} would not have run: a later call replaced them (lock_debounce)."
    lines = [first, "", _HEAD.format("task")]
    lines += [_line(each, str(each.runs)) for each in report.tasks[:most]]
    lines += _left_out(report.tasks, most)
    if report.locks:
        lines += ["", _HEAD.format("lock")]
        lines += [_line(each, "") for each in report.locks[:most]]
        lines += _left_out(report.locks, most)
    return lines


_HEAD = "   runs  blocked  would have waited, s:  total      average   longest  {}"


def _line(each: Observed, runs: str) -> str:
    average = each.waited / each.blocked if each.blocked else 0.0
    return (
        f"{runs:>7}  {each.blocked:>7}  {each.waited:>28.1f}  {average:>11.1f}  "
        f"{each.longest:>8.1f}  {each.name}{_replaced(each)}"
    )


def _replaced(each: Observed) -> str:
    return f" ({each.replaced} replaced)" if each.replaced else ""


def _left_out(found: Iterable[Observed], most: int) -> list[str]:
    more = len(list(found)) - most
    return [f"… and {more} more"] if more > 0 else []

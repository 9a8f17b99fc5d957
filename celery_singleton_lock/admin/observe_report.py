"""The report of ``observe``, for people: which locks would have blocked, whom, and how long."""

from __future__ import annotations

from collections.abc import Iterable

from celery_singleton_lock.core.model import Observations, Observed

NOTHING = (
    "Nothing was observed. Set singleton_lock_mode (or lock_mode of a task) to observe, or switch "
    "it while workers run, and ask again when some tasks have run."
)


def report_lines(report: Observations, *, most: int = 20) -> list[str]:
    """Return the report as lines: by task, then by lock; the longest waits first.

    Args:
        report: what the store keeps.
        most: most tasks, and most locks, that are shown.
    """
    if not report.tasks:
        return [NOTHING]
    runs, blocked = (sum(getattr(t, what) for t in report.tasks) for what in ("runs", "blocked"))
    lines = [f"Of {runs} runs {blocked} would have been blocked.", "", _HEAD.format("task")]
    lines += [_line(each, str(each.runs)) for each in report.tasks[:most]]
    lines += _left_out(report.tasks, most)
    if report.locks:
        lines += ["", _HEAD.format("lock")]
        lines += [_line(each, "") for each in report.locks[:most]]
        lines += _left_out(report.locks, most)
    return lines


_HEAD = "   runs  blocked  would have waited, s: in sum   on average   longest  {}"


def _line(each: Observed, runs: str) -> str:
    average = each.waited / each.blocked if each.blocked else 0.0
    return (
        f"{runs:>7}  {each.blocked:>7}  {each.waited:>28.1f}  {average:>11.1f}  "
        f"{each.longest:>8.1f}  {each.name}"
    )


def _left_out(found: Iterable[Observed], most: int) -> list[str]:
    more = len(list(found)) - most
    return [f"… and {more} more"] if more > 0 else []

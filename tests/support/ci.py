"""What differs in CI: nothing may be skipped, and each failure is printed at once."""

from __future__ import annotations

import os
from typing import Any

import pytest


def in_ci() -> bool:
    """Return whether this is a CI run, in which everything must be installed."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def skip_or_fail(reason: str) -> None:
    """Skip the test; in CI, fail."""
    if in_ci():
        pytest.fail(f"CI=true, so this may not be skipped: {reason}", pytrace=False)
    pytest.skip(reason)


class FailuresAtOnce:
    """Prints each failure when it happens: a run that is cut off never prints its summary.

    Args:
        terminal: pytest's reporter.
    """

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            told = reason[0].removeprefix("E").strip() if reason else "see the summary"
            self._terminal.write_line(f"\nFAILED {report.nodeid}: {told}")

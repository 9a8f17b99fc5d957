"""A pytest plugin for the foreign tests: it writes one line per test report."""

from __future__ import annotations

import json
import os
from pathlib import Path

RESULTS = "FOREIGN_RESULTS"
"""The environment variable that names the file."""


def pytest_runtest_logreport(report):
    """Write what became of a test's setup, call or teardown."""
    if report.outcome == "passed" and report.when != "call":
        return
    line = {
        "test": report.nodeid,
        "outcome": "failed" if report.failed else report.outcome,
        "text": report.longreprtext if report.failed else "",
    }
    with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")


def pytest_collectreport(report):
    """Write that a file could not be collected."""
    if report.failed:
        pytest_runtest_logreport(report)

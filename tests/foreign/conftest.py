"""Other projects' tests run only with ``--foreign``: they are downloaded, and take minutes."""

from __future__ import annotations

import pytest

REPORT = "foreign"


def pytest_collection_modifyitems(config, items):
    """Skip what is not asked for."""
    if config.getoption("--foreign"):
        return
    for item in items:
        if item.path.parent.name == "foreign":
            item.add_marker(pytest.mark.skip(reason="--foreign runs other projects' tests"))


def pytest_terminal_summary(terminalreporter):
    """Tell how many of their tests passed."""
    counts = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if report.when == "call" and name == REPORT
    ]
    if counts:
        terminalreporter.section("tests of other projects")
        for line in counts:
            terminalreporter.line(line)

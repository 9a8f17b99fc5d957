"""A pytest plugin for runs over mutants: the quickest tests first, since one failure decides."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Final

import pytest

STATS: Final = Path("mutmut-stats.json")
"""What mutmut measured before the first mutant; it runs pytest beside it."""

MOST: Final = "CSL_MUTANTS_MEET"
"""Environment variable: seconds; longer tests are left out."""


@functools.cache
def took() -> dict[str, float]:
    """Return the seconds of each test; read before the first mutant's process is forked."""
    if not STATS.exists():
        return {}
    found: dict[str, float] = json.loads(STATS.read_text(encoding="utf-8"))["duration_by_test"]
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    seconds = took()
    if config.option.collectonly:
        return  # mutmut looks which tests there are
    most = float(os.environ.get(MOST, "inf"))
    slow = [item for item in items if seconds.get(item.nodeid, 0.0) > most]
    items[:] = sorted(
        (item for item in items if item not in slow),
        key=lambda item: seconds.get(item.nodeid, 0.0),
    )
    if slow:
        config.hook.pytest_deselected(items=slow)

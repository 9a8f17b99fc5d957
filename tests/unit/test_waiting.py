"""A test that was late is played again; one that failed is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PLAYS = """
import itertools
import pytest
from support.waiting import in_time

plays = {name: itertools.count(1) for name in ("recovers", "stays_late", "is_wrong", "is_expected")}

def test_recovers(tmp_path):
    in_time(5 if next(plays["recovers"]) < 3 else 1, 2)

def test_stays_late():
    next(plays["stays_late"])
    in_time(5, 2)

def test_is_wrong():
    assert next(plays["is_wrong"]) > 1

@pytest.mark.xfail(strict=True)
def test_is_expected():
    next(plays["is_expected"])
    in_time(5, 2)

def test_zzz_plays():
    assert [next(count) - 1 for count in plays.values()] == [3, 3, 1, 1]
"""


def test_who_was_late_may_try_twice_more_and_is_named(tmp_path):
    """In time at last: passed, and told. Always late, or wrong once: failed."""
    (tmp_path / "test_plays.py").write_text(PLAYS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:randomly", "-rA"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        env.pop(name, None)
    ran = subprocess.run(
        [*command, str(tmp_path)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    told = re.findall(r"^(PASSED|FAILED|LATE) .*::test_(\w+)", ran.stdout, re.MULTILINE)
    assert sorted(told) == [
        ("FAILED", "is_wrong"),
        ("FAILED", "stays_late"),
        ("LATE", "recovers"),
        ("PASSED", "recovers"),
        ("PASSED", "zzz_plays"),
    ], ran.stdout

"""docs/what-happens.md is up to date, and its figures hold for this version."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "what_happens" / "results.json").read_text())
OURS = {one["scene"]: one for one in RESULTS["seen"].values() if one["package"] == "ours"}
NUMBER = re.compile(r"\d+\.\d+|\d+(?= of \d+ others)")
"""A time, or how many tasks of two slots began before one: on a busy machine, one more or less."""
OF_SHORT_SPANS = {"longer", "redis-emptied"}
"""Scenes that end otherwise if a process stands still for longer than a lease, or a renewal."""
LEEWAY = {True: 12.0, False: 1.0}
"""By how much a time (True), in seconds, or a count may differ from the page on a busy machine."""


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.what_happens", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_page_is_of_the_present_scenes():
    """Each scene was played on each package, and the page says what was seen."""
    checked = run("--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.full
@pytest.mark.needs_real_redis("scenes restart it")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("scene", sorted(OURS.keys() - OF_SHORT_SPANS))
def test_the_column_of_this_package_matches_the_page(scene):
    """In the same words; times may differ by some seconds, for which a process may stand still.

    What they show is held by other tests, so the usual run leaves them out.
    """
    played = run("--play", scene, "ours")
    assert played.returncode == 0, played.stderr
    brief, documented = json.loads(played.stdout.splitlines()[-1])["brief"], OURS[scene]["brief"]
    assert NUMBER.sub("N", brief) == NUMBER.sub("N", documented)
    for now, then in zip(NUMBER.findall(brief), NUMBER.findall(documented), strict=True):
        assert abs(float(now) - float(then)) <= LEEWAY["." in now], (brief, documented)

"""Errors of the benchmarks are reported at once, with the worker's log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_NOBODY = "from benchmarks.rig import Rig; Rig(['nobody'], 1, 10).__enter__()"
FAILING = """
import benchmarks.rig
benchmarks.rig.Worker.publish = lambda self, jobs: self._publisher.send_task(
    self.setup.task(), ("no slot", "", 0), queue=self.peer
)
benchmarks.rig.Rig(["locked"], 1, 10).__enter__()
"""


def run(*command, timeout=120):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "told"),
    [(OF_NOBODY, ["has ended with", "KeyError: 'nobody'"]), (FAILING, ["raised unexpected"])],
    ids=["the-worker-ends", "its-tasks-fail"],
)
def test_a_worker_that_cannot_work_ends_the_run_with_its_log(script, told):
    """Within 30 s, and not after a minute without a word."""
    ended = run("-c", script)
    assert ended.returncode == 1
    for words in ["RuntimeError", *told]:
        assert words in ended.stderr


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["contended", "uncontended"])
def test_a_peer_that_is_asked_for_and_not_installed_is_an_error(benchmark, tmp_path):
    """The error says at once what to install. Without a selection the others run."""
    hidden = "import sys; sys.modules['redis_lock'] = None; sys.argv[0] = 'x'; import runpy; "
    script = f"{hidden}runpy.run_module('benchmarks.{benchmark}', run_name='__main__')"
    ended = run("-c", script, "--peers", "plain", "redis_lock")
    assert ended.returncode == 2
    assert "pip install python-redis-lock" in ended.stderr

"""A forked worker starts and ends like one that is started by its command."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from support import fork_server
from support.workers import CeleryWorker

APP = """
import json, os, signal, sys, threading

print(json.dumps({
    "arguments": sys.argv,
    "environment": {name: value for name, value in os.environ.items() if "PYTEST" not in name},
    "path": sys.path,
    "folder": os.getcwd(),
    "session": os.getsid(0) == os.getpid(),
    "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)),
    "others": [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 3],
    "signals": {n: str(signal.getsignal(n)) for n in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "threads": threading.active_count(),
    "library": "celery_singleton_lock.lock.sync" in sys.modules,
    "patched": any(name in sys.modules for name in ("gevent", "eventlet")),
}, default=str))
sys.exit(7)
"""

pytestmark = pytest.mark.skipif(
    not fork_server.fits(
        "solo", {**os.environ, "PYTHONPATH": fork_server.path(), "PYTHONUNBUFFERED": "1"}
    ),
    reason="this run starts all workers by their command",
)


@pytest.fixture
def start(tmp_path):
    """A function that starts a worker, which prints its surroundings and exits."""
    (tmp_path / "shows.py").write_text(APP)

    def started(**options) -> CeleryWorker:
        worker = CeleryWorker(
            "shows", "memory://", name="same", pool="solo", cwd=tmp_path, **options
        )
        worker.start(wait=False)
        return worker

    return started


def shown(worker: CeleryWorker) -> dict:
    log = str(worker._log_file)
    assert worker.wait() == 7, worker.log_tail()
    return json.loads(worker.log().replace(log, "its log").splitlines()[0])


def test_a_forked_worker_has_the_same_surroundings_as_a_started_one(start, monkeypatch):
    """Arguments, environment, paths, open files, signals."""
    forked = start()
    monkeypatch.setattr(fork_server, "fits", lambda *_: False)
    started = start()
    assert isinstance(forked._main, fork_server.ForkedWorker)
    assert not isinstance(started._main, fork_server.ForkedWorker)
    assert shown(forked) == shown(started)


def test_a_signal_that_kills_it_is_its_exit_code(start):
    """As with subprocess."""
    worker = start()
    worker.kill()
    assert worker.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["TMPDIR", "REMAP_SIGTERM", "AUTOSCALE_KEEPALIVE", "PYTHONPATH"])
def test_a_worker_whose_environment_may_change_imports_is_not_forked(name):
    """A module imported with another environment may behave differently."""
    env = {**os.environ, "PYTHONPATH": fork_server.path(), "PYTHONUNBUFFERED": "1"}
    assert fork_server.fits("prefork", env | {"BOOK_FOLDER": str(Path.cwd())})
    assert not fork_server.fits("prefork", env | {name: "other"})
    assert not fork_server.fits("gevent", env)

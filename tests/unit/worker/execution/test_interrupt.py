"""The tokens of lost locks, in a process that did not inherit it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from celery_singleton_lock.worker.execution import interrupt
from celery_singleton_lock.worker.execution.interrupt import LostTokens
from celery_singleton_lock.worker.loop_channel import LoopChannel
from support.workers import TESTS

LINUX = Path("/proc/self/fd").exists()

READ_AND_BE_SIGNALLED = """
import os, signal
from celery_singleton_lock.worker.execution.interrupt import _opened, interrupts_of_process, PATH
interrupts_of_process().install()
os.kill(os.getpid(), signal.SIGUSR2)
print(_opened(os.environ[PATH]).shows("token"))
"""


def shown_elsewhere(path):
    """Return what a child sees of the token, after a signal that is not for its task."""
    return subprocess.run(
        [sys.executable, "-c", READ_AND_BE_SIGNALLED],
        env={**os.environ, interrupt.PATH: path}, cwd=TESTS.parent, capture_output=True,
        text=True, timeout=120, check=True,
    ).stdout.strip()  # fmt: skip


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(
    params=[pytest.param(True, marks=pytest.mark.skipif(not LINUX, reason="/proc")), False]
)
def channel(request, temporary, monkeypatch):
    """The loop channel of a worker, on a system that has names for open files, and on others."""
    if not request.param:
        monkeypatch.setattr("celery_singleton_lock.worker.loop_channel.PROC", "/there-is-none")
    channel = LoopChannel()
    yield channel
    channel.close()
    assert list(temporary.iterdir()) == []


@pytest.mark.full("False")
def test_a_spawned_child_reads_the_board_and_survives_a_late_signal(channel):
    """Also tokens that are written after the child has opened it; no file is left behind."""
    lost_tokens = LostTokens()
    path = lost_tokens.publish(channel.publish())
    assert shown_elsewhere(path) == "False"
    taken = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        lost_tokens.interrupt(os.getpid(), "token")
    finally:
        signal.signal(signal.SIGUSR2, taken)
    assert lost_tokens.shows("token")
    assert shown_elsewhere(path) == "True"


def test_without_the_board_a_child_survives_the_signal_and_logs_why(caplog, monkeypatch, tmp_path):
    """Its tasks are not interrupted."""
    missing = str(tmp_path / "missing")
    assert shown_elsewhere(missing) == "False"
    monkeypatch.setenv(interrupt.PATH, missing)
    with caplog.at_level(logging.WARNING):
        interrupt.interrupts_of_process()
    assert missing in caplog.text


def test_a_process_without_a_worker_installs_no_handler(monkeypatch):
    """Such as a client, or a child that was forked."""
    monkeypatch.delenv(interrupt.PATH, raising=False)
    before = signal.getsignal(signal.SIGUSR2)
    interrupt.interrupts_of_process().install()
    assert signal.getsignal(signal.SIGUSR2) is before

"""The main process lets a task end, and kills only the process that still runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.dispatch.preemption import SIGNAL_AGAIN, Preemption
from celery_singleton_lock.worker.execution.interrupt import LostTokens
from celery_singleton_lock.worker.message_stage import Stage
from support.waiting import eventually

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


class Scene:
    """A worker with one task, whose timers run when a test says so."""

    def __init__(self, *, children=True, stage=Stage.RUNNING, pid=None):
        self.told, self.later, self.after, self.killed, self.signals = [], [], [], [], []
        self.tokens = LostTokens()
        self.tokens.signal = self.signals.append
        self.request = SimpleNamespace(
            stage=stage, preempted_by="", worker_pid=pid, lock_header=SimpleNamespace(token="t.0"),
            options=lambda _: LockOptions(on_conflict="preempt", preempt_grace=3.0),
        )  # fmt: skip
        self.preemption = Preemption(
            rules=None,
            in_flight=SimpleNamespace(of={"t.0": self.request}.get),
            lost_tokens=self.tokens,
            notifier=SimpleNamespace(preempted=self.told.append),
            children=children,
            post=lambda call, *args: call(*args),
            later=self.later.append,
            after=lambda seconds, call: self.after.append((seconds, call)),
            terminate=lambda *whom: self.killed.append(whom),
        )

    def tell(self):
        self.preemption.end_task("t.0", "newer/0/0")

    def end_grace(self):
        """Make the call that is due at the end of the grace."""
        self.after, (kill,) = [], [call for seconds, call in self.after if seconds == 3.0]
        kill()

    def show(self, token="t.0"):
        """Show in the shared memory which task the process of the request runs."""
        own = self.request.worker_pid
        self.tokens._write(64 * 160, f"\n{own} {token}\n".encode())


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def state(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_task_is_told_once_however_often_the_notice_comes():
    scene = Scene(pid=7)
    for _ in range(3):
        scene.tell()
    assert (scene.told, scene.signals) == ([scene.request], [7])
    assert scene.request.preempted_by == "newer/0/0"
    assert sorted(seconds for seconds, _ in scene.after) == [SIGNAL_AGAIN, 3.0]


def test_a_task_that_was_not_in_its_body_is_interrupted_again_until_the_grace_has_passed():
    """Else its process is killed, and it could not clean up."""
    scene = Scene(pid=7)
    scene.tell()
    for number in range(64):  # other tasks are told to end before this one looks
        scene.tokens.note(f"other{number}.0", "newer/0/0")
    pauses = []
    while again := [each for each in scene.after if each[0] != 3.0]:
        scene.after.clear()
        pauses.append(again[0][0])
        again[0][1]()
        assert scene.tokens.preempted_by("t.0") == "newer/0/0"
    assert pauses == [0.25, 0.5, 1.0]
    assert scene.signals == [7] * 4


def test_a_task_that_has_ended_is_not_interrupted_again():
    scene = Scene(pid=7)
    scene.tell()
    scene.request.stage = Stage.ENDED
    for _, call in scene.after:
        call()
    assert scene.signals == [7]


def test_a_task_that_is_not_here_is_not_told():
    scene = Scene()
    scene.preemption.end_task("other.0", "newer/0/0")
    assert (scene.told, scene.preemption.preempted) == ([], 0)


@pytest.mark.parametrize("stage", [Stage.ACCEPTED, Stage.IN_POOL])
def test_a_task_that_is_about_to_run_is_interrupted_when_it_does(stage):
    scene = Scene(stage=stage, pid=7)
    scene.tell()
    assert scene.signals == []
    scene.request.stage = Stage.RUNNING
    scene.later.pop()()
    assert scene.signals == [7]


def test_a_task_that_has_ended_meanwhile_is_not_interrupted():
    scene = Scene(stage=Stage.ACCEPTED, pid=7)
    scene.tell()
    scene.request.stage = Stage.ENDED
    scene.later.pop()()
    assert (scene.signals, scene.later) == ([], [])


def test_a_thread_is_not_interrupted_and_reads_it():
    scene = Scene(children=False)
    scene.tell()
    assert (scene.signals, scene.after, scene.later) == ([], [], [])
    assert scene.tokens.preempted_by("t.0") == "newer/0/0"


@needs_proc
def test_after_the_grace_the_process_that_still_runs_it_is_killed(process):
    scene = Scene(pid=process.pid)
    scene.tell()
    scene.show()
    scene.end_grace()
    assert scene.killed == [(process.pid, signal.SIGKILL)]
    assert (scene.preemption.killed, state(process)) == (1, "T")


@needs_proc
def test_a_process_that_runs_the_next_task_is_not_killed(process):
    scene = Scene(pid=process.pid)
    scene.tell()
    scene.show("next.0")
    scene.end_grace()
    assert (scene.killed, scene.after) == ([], [])
    assert state(process) != "T"


@needs_proc
def test_a_process_that_begins_the_next_task_until_it_stands_still_goes_on(process):
    scene = Scene(pid=process.pid)
    scene.tell()
    asked = []

    def runs(pid, _token):
        asked.append(pid)
        return len(asked) == 1

    scene.tokens.runs = runs
    scene.end_grace()
    assert (scene.killed, scene.after, len(asked)) == ([], [], 2)
    eventually(lambda: state(process) != "T", message="it goes on")


def test_a_process_that_cannot_be_stopped_is_tried_again(monkeypatch):
    scene = Scene(pid=os.getpid())
    scene.tell()
    scene.show()
    sent = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    monkeypatch.setattr("celery_singleton_lock.worker.dispatch.preemption._LOOKS", 2)
    scene.end_grace()
    assert scene.killed == []
    assert [number for _, number in sent] == [signal.SIGSTOP, signal.SIGCONT]
    assert [seconds for seconds, _ in scene.after] == [1.0]

"""The end of a worker in a thread. A separate file: it ends other workers of its process."""

from __future__ import annotations

import gc
import logging
import threading
import uuid

import psutil
import pytest
from celery import Celery

from celery_singleton_lock import LockedTask
from celery_singleton_lock.testing import SingletonLocks
from celery_singleton_lock.worker.background_thread import BackgroundThread
from support.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_worker_of_a_test_leaves_no_thread_behind(pool):
    """It ends by an exception, and its process goes on; solo is what Celery's start_worker has.

    Nor does it leave the root logger as workers want it: tests behind it look for warnings.
    """
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    app = Celery("ends", broker="memory://", backend="cache+memory://", set_as_current=False)

    @app.task(base=LockedTask, lock_key="k", shared=False)
    def work(): ...

    with SingletonLocks(app) as locks, locks.worker(pool=pool):
        with locks.hold("k"):
            result = work.delay()
            locks.assert_parked(result)
        locks.assert_ran_alone(result)
    assert (root.level, root.handlers) == before

    def left():
        return [thread.name for thread in threading.enumerate() if "singleton" in thread.name]

    eventually(lambda: not left())
    app.close()


@pytest.mark.full
def test_workers_of_tests_leave_no_file_open():
    """After some 250 of them, no further worker of the process ran a task: select() fails then."""

    def play() -> None:
        name = f"files-{uuid.uuid4().hex}"
        app = Celery(name, broker="memory://", backend="cache+memory://", set_as_current=False)
        with SingletonLocks(app) as locks, locks.worker(pool="threads"):
            pass
        app.close()

    def files() -> int:
        gc.collect()
        return psutil.Process().num_fds()

    play()  # what the first one imports and opens stays
    before = files()
    play()
    play()
    eventually(lambda: files() <= before, message=lambda: f"{files()} files, {before} before")


class Killed(BaseException):
    """Ends a thread between two rounds, whatever it guards."""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_delivers_parked_tasks_after_the_death_of_its_threads(monkeypatch, capfd):
    """Formerly nothing was renewed or delivered any more, without a log line."""
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    doomed, go_on = set(), BackgroundThread._safely

    def die_or_go_on(thread, call):
        if thread.name in doomed:
            doomed.remove(thread.name)
            raise Killed
        return go_on(thread, call)

    monkeypatch.setattr(BackgroundThread, "_safely", die_or_go_on)
    app = Celery("dies", broker="memory://", backend="cache+memory://", set_as_current=False)

    @app.task(base=LockedTask, lock_key="k", shared=False)
    def work():
        return "done"

    def named(name):
        return [thread for thread in threading.enumerate() if thread.name == name]

    def kill(name):
        (thread,) = named(name)
        doomed.add(name)
        eventually(lambda: named(name) not in ([], [thread]), message=f"{name} lives again")

    with SingletonLocks(app) as locks, locks.worker(pool="threads"):
        with locks.hold("k"):
            result = work.delay()
            locks.assert_parked(result)
            kill("singleton-lock-agent")
            kill("singleton-lock-inbox")
        locks.assert_ran_alone(result)
        assert result.get(timeout=30) == "done"
    said = capfd.readouterr().err  # a worker takes all handlers from the root logger
    for name in ("agent", "inbox"):
        assert f"the thread singleton-lock-{name} has died; a new one is started" in said
    app.close()

"""How a worker in a thread ends. A file of its own: others of its process end with it."""

from __future__ import annotations

import logging
import threading

import pytest
from celery import Celery

from celery_singleton_lock import LockedTask
from celery_singleton_lock.testing import SingletonLocks
from support.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_worker_of_a_test_leaves_no_thread_of_ours_behind(pool):
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

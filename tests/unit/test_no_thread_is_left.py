"""Threads of ours end with the last lock: Celery's own tests look whether any is left behind."""

from __future__ import annotations

import threading

import pytest
from celery import Celery

from celery_singleton_lock import Lock, LockedTask, watchdog
from celery_singleton_lock.testing import memory_client


def threads():
    return {thread for thread in threading.enumerate() if thread.is_alive()}


@pytest.fixture
def before():
    return threads()


@pytest.fixture
def app():
    app = Celery("app", set_as_current=False)
    app.conf.update(
        broker_url="memory://",
        singleton_lock_backend="memory://left",
        singleton_lock_eager=True,
        task_always_eager=True,
    )
    return app


@pytest.fixture
def task(app):
    @app.task(base=LockedTask, lock_key="k:{n}", lock_lease=30, shared=False)
    def task(n):
        task.ran_beside = threads()

    return task


def test_no_thread_is_left_behind_by_an_eager_task(before, task):
    """As Celery's fixture threads_not_lingering wants it: at once, not five seconds later."""
    task.delay(1).get()
    (watchdog_thread,) = task.ran_beside - before
    assert watchdog_thread.name == "csl-watchdog"
    assert threads() <= before


def test_no_thread_is_left_behind_by_a_lock(before):
    client = memory_client("left")
    for _ in range(3):
        with Lock(client, "lock"):
            assert len(threads() - before) == 1
        assert threads() <= before


def test_a_loop_of_locks_keeps_its_thread_and_a_closed_app_ends_it(before, app, task):
    """A thousand turns must not start a thousand threads."""
    with app:
        for turn in range(4 * watchdog.STARTS):
            task.delay(turn)
        assert len(threads() - before) <= 1
    assert threads() <= before


def test_the_tracer_of_a_task_can_be_deleted_as_that_of_any_task(app, task):
    """Celery's own tests do it."""
    tracer = lambda *about: about  # noqa: E731
    task.__trace__ = tracer
    assert task.__trace__ is not None
    del task.__trace__
    assert task.__trace__ is None

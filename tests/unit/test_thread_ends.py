"""Threads end with the last lock: Celery's own tests check for remaining threads."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_singleton_lock import Lock, LockedTask, new_token
from celery_singleton_lock.lock import lease_watchdog
from celery_singleton_lock.testing import memory_client


class Started:
    """The threads that watchdogs made in a test have started, and no others of this process."""

    def __init__(self):
        self._others = set(lease_watchdog.watchdogs())
        self._seen = set()

    def alive(self):
        for dog in set(lease_watchdog.watchdogs()) - self._others:
            self._seen |= {dog._thread} - {None}
        return {thread for thread in self._seen if thread.is_alive()}


@pytest.fixture
def started():
    return Started()


@pytest.fixture
def memory():
    """A name of a Redis in memory that no other test uses."""
    return new_token()


@pytest.fixture(autouse=True)
def neighbour(monkeypatch):
    """Another watchdog, which starts its thread while a test runs."""
    monkeypatch.setattr(lease_watchdog, "STOP_WAIT", 60.0)  # for a busy machine
    lock = Lock(memory_client(new_token()), "neighbour")
    yield lock
    if lock.held:
        lock.release()


@pytest.fixture
def app(memory):
    app = Celery("app", set_as_current=False)
    app.conf.update(
        broker_url="memory://",
        singleton_lock_backend=f"memory://{memory}",
        singleton_lock_eager=True,
        task_always_eager=True,
    )
    return app


@pytest.fixture
def task(app, started):
    @app.task(base=LockedTask, lock_key="k:{n}", lock_lease=30, shared=False)
    def task(n):
        task.ran_beside = started.alive()

    return task


def test_no_thread_is_left_behind_by_an_eager_task(neighbour, started, task):
    """As Celery's fixture threads_not_lingering wants it: at once, not five seconds later."""
    neighbour.acquire()
    task.delay(1).get()
    (watchdog_thread,) = task.ran_beside
    assert watchdog_thread.name == "csl-watchdog"
    assert not started.alive()


def test_no_thread_is_left_behind_by_a_lock(neighbour, started, memory):
    neighbour.acquire()
    client = memory_client(memory)
    for _ in range(3):
        with Lock(client, "lock"):
            assert len(started.alive()) == 1
        assert not started.alive()


def test_a_loop_of_locks_keeps_its_thread_and_a_closed_app_ends_it(neighbour, started, app, task):
    """A thousand turns must not start a thousand threads."""
    neighbour.acquire()
    with app:
        for turn in range(4 * lease_watchdog.STARTS):
            task.delay(turn)
        assert len(started.alive()) <= 1
    assert not started.alive()


def test_the_tracer_of_a_task_can_be_deleted_as_that_of_any_task(app, task):
    """Celery's own tests do it."""
    tracer = lambda *about: about  # noqa: E731
    task.__trace__ = tracer
    assert task.__trace__ is not None
    del task.__trace__
    assert task.__trace__ is None

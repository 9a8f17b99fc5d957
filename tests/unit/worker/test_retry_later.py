"""RetryLater where it is created, and in runs without a message."""

from __future__ import annotations

import pickle

import pytest
from celery import Celery, states
from celery.exceptions import Ignore

from celery_singleton_lock import ConfigurationError, LockedTask, RetryLater, current_lock
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.testing import memory_client


@pytest.fixture
def app():
    with Celery(
        "later", broker="memory://", backend="cache+memory://", set_as_current=False
    ) as app:
        app.conf.singleton_lock_backend = "memory://retry-later"
        yield app


def test_it_survives_pickle():
    """A pool child sends it to its worker."""
    later = pickle.loads(pickle.dumps(RetryLater(30, why="429", name="crm")))
    assert (later.seconds, later.why, later.name) == (30.0, "429", "crm")
    assert str(later) == "run again in 30 s: 429"
    assert isinstance(later, Ignore)  # so autoretry_for does not apply


@pytest.mark.parametrize("seconds", [0, -1, True, None, "30", float("nan"), 367 * 86_400])
def test_a_time_that_is_none_is_refused_where_it_is_created(seconds):
    with pytest.raises(
        ConfigurationError, match=r"seconds must be a number of seconds from 0\.001"
    ):
        RetryLater(seconds)
    with pytest.raises(ConfigurationError, match="why must be a str"):
        RetryLater(30, why=429)


def test_a_direct_call_gets_the_exception(app):
    """A unit test of a task may expect it."""

    @app.task(base=LockedTask, shared=False, lock_key="k")
    def task():
        current_lock().pause(30)  # there is no lock: nothing happens
        raise RetryLater(30)

    with pytest.raises(RetryLater):
        task()


@pytest.mark.parametrize("locks", [False, True])
def test_an_eager_task_fails_since_nothing_could_run_it_later(app, locks):
    """With singleton_lock_eager it closes its lock all the same."""
    app.conf.singleton_lock_eager = locks

    @app.task(base=LockedTask, shared=False, lock_key="k", autoretry_for=(Exception,))
    def task():
        raise RetryLater(30, why="429")

    result = task.apply()
    assert result.state == states.FAILURE
    with pytest.raises(RetryLater):
        result.get()
    client = memory_client("retry-later")
    view = RedisStore(client).inspect("k")
    assert bool(view.closed) is locks
    assert view.holders == ()
    client.flushdb()


def test_a_plain_task_is_told_what_to_use(app):
    @app.task(shared=False)
    def plain():
        raise RetryLater(30)

    result = plain.apply()
    assert "use self.retry(countdown=30)" in str(result.result)
    assert isinstance(result.result, ConfigurationError)

"""Which tasks have results that a duplicate can have, and how it ends with one."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, states
from celery.exceptions import SecurityError, SoftTimeLimitExceeded
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_singleton_lock import ConfigurationError, LockedTask
from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.worker.execution.celery_outcome import Run
from celery_singleton_lock.worker.execution.follow import check_results, follow
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.not_started import NotStarted
from celery_singleton_lock.worker.startup_checks_app import check_app, tell_of_idle_follow

FIRST, SECOND = "first", "second"
OPTIONS = {"lock_key": "report", "lock_unique": "until_done", "lock_on_duplicate": "follow"}


@pytest.fixture
def make():
    apps = []

    def make(backend="cache+memory://", **options):
        app = Celery("shop", broker="memory://", backend=backend, set_as_current=False)
        app.conf.singleton_lock_backend = "redis://r:6379/0"
        apps.append(app)

        @app.task(base=LockedTask, name="report", shared=False, **OPTIONS, **options)
        def report():
            pytest.fail("the body of a follower does not run")

        task = app.tasks[report.name]
        for each in (FIRST, SECOND) if backend.startswith("cache") else ():
            task.AsyncResult(each).forget()  # all apps of a process share this backend
        return task

    yield make
    for app in apps:
        app.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ignore_result": True}, "ignore_result=True stores no result. Leave it out"),
        ({"backend": "rpc://"}, "rpc:// sends each result to its caller only"),
        ({"backend": "disabled://"}, "there is no result backend. Set result_backend"),
    ],
)
def test_a_worker_refuses_tasks_whose_results_are_not_stored(make, options, told):
    backend = options.pop("backend", "cache+memory://")
    task = make(backend, **options)
    with pytest.raises(ConfigurationError, match="task report: lock_on_duplicate is 'follow'") as e:
        check_app(install(task.app))
    assert told in str(e.value)
    assert 'or use "existing"' in str(e.value)


def test_a_task_whose_results_are_stored_is_allowed(make):
    task = make()
    check_results(task, install(task.app).options(task))
    check_app(install(task.app))


def end(task):
    run = Run(task, None, SECOND, (), {}, {"id": SECOND, "hostname": "w"})
    return follow(run, NotStarted(Outcome.FOLLOW, FIRST))


def outcome_in(ended):
    return ended.info.retval.outcome


def test_a_follower_returns_what_the_first_task_has_returned(make):
    task = make()
    task.backend.store_result(FIRST, {"a": 1}, states.SUCCESS)
    assert end(task).info is None
    assert task.AsyncResult(SECOND).get() == {"a": 1}


def test_a_follower_raises_what_the_first_task_has_raised(make):
    task = make()
    task.backend.store_result(FIRST, KeyError("x"), states.FAILURE, traceback="t")
    assert end(task).info.state == states.FAILURE
    found = task.AsyncResult(SECOND)
    assert found.state == states.FAILURE
    assert (type(found.result), found.result.args) == (KeyError, ("x",))


@pytest.mark.parametrize("lost", [WorkerLostError("gone"), TimeLimitExceeded(3), MemoryError()])
def test_a_worker_does_not_take_the_error_of_the_first_task_for_the_end_of_a_process(make, lost):
    """It would call error callbacks and chord again, or end."""
    task = make()
    task.backend.store_result(FIRST, lost, states.FAILURE)
    reported = end(task).retval.exception
    assert type(task.AsyncResult(SECOND).result) is type(lost)
    assert not isinstance(reported, type(lost))
    assert repr(reported) == repr(lost)


@pytest.mark.parametrize(
    "error", [ContentDisallowed(), DecodeError(), SecurityError()], ids=lambda e: type(e).__name__
)
def test_a_follower_runs_itself_if_the_result_of_the_first_task_cannot_be_read(make, caplog, error):
    task = make()

    def fail(*_args, **_options):
        raise error

    task.backend = SimpleNamespace(get_task_meta=fail)
    assert outcome_in(end(task)) is Outcome.FOLLOW
    assert "cannot read the result of task first, and queues without it" in caplog.text


def test_a_follower_of_a_revoked_task_is_revoked(make):
    task = make()
    task.backend.mark_as_revoked(FIRST, "no", store_result=True)
    assert outcome_in(end(task)) is Outcome.SKIP_FOLLOWING
    assert task.AsyncResult(SECOND).state == states.REVOKED


@pytest.mark.parametrize("state", [None, states.STARTED, states.RETRY, "PROGRESS"])
def test_a_follower_runs_itself_if_the_first_task_has_no_final_state(make, state):
    task = make()
    if state:
        task.backend.store_result(FIRST, None, state)
    assert outcome_in(end(task)) is Outcome.FOLLOW
    assert task.AsyncResult(SECOND).state == states.PENDING


def test_a_follower_runs_itself_if_no_results_are_stored(make):
    """Such as one call of a task that has no result backend."""
    assert outcome_in(end(make("disabled://"))) is Outcome.FOLLOW


@pytest.mark.parametrize("error", [ConnectionError, SoftTimeLimitExceeded])
def test_a_follower_is_delivered_again_if_the_result_backend_does_not_answer(make, caplog, error):
    """Or only after the soft time limit of the task, which concerns its body."""
    task = make()

    def fail(*_args, **_options):
        raise error

    task.backend = SimpleNamespace(get_task_meta=fail)
    assert outcome_in(end(task)) is Outcome.GONE
    assert "cannot read the result of task first yet" in caplog.text


def test_the_tasks_are_named_whose_duplicates_run_themselves(make, caplog):
    task = make()
    with caplog.at_level(logging.WARNING):
        tell_of_idle_follow(install(task.app))
    (told,) = caplog.messages
    assert told.endswith("each duplicate runs itself when it has the lock: report")

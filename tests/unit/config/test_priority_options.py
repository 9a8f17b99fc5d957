"""The option ``lock_priority``: what is refused, where, and with which words."""

from __future__ import annotations

import json
import logging
import warnings

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, LockedTask
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.core.model import FLOW_SCHEMA, SCHEMA
from celery_singleton_lock.worker.install import install

SECONDS = 1_000_000


@pytest.fixture
def app():
    app = Celery("priority", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_backend = "memory://priority"
    yield app
    app.close()


def declare(app, **options):
    @app.task(name="t", base=LockedTask, shared=False, lock_key="k", **options)
    def t(urgency=0):
        """Have an argument."""

    app.finalize()
    return app.tasks["t"]


def head_start(app, task, *args, call=None, **kwargs):
    """Return the head start of a call, in seconds."""
    extension = install(app)
    options = extension.options_of_call(task, call) if call else extension.options(task)
    options = extension.computed(task, args, kwargs, None, options)
    return json.loads(options.flow or "{}").get("head_start", 0) / SECONDS


def test_a_task_without_priority_sends_no_flow_options(app):
    task = declare(app, lock_priority=None)
    assert head_start(app, task) == 0
    assert not install(app).options(task).flow
    assert install(app).schema() == SCHEMA


@pytest.mark.parametrize(
    ("priority", "seconds"),
    [
        (30, 30),
        (-1.5, -1.5),
        ("{urgency}", 7),
        ("{urgency}0", 70),
        (lambda urgency=0: -urgency, -7),
    ],
    ids=["number", "below 0", "template", "literal", "callable"],
)
def test_a_number_a_template_and_a_callable_give_seconds(app, priority, seconds):
    task = declare(app, lock_priority=priority)
    assert head_start(app, task, 7) == seconds
    assert head_start(app, task, urgency=7) == seconds
    assert install(app).schema() == FLOW_SCHEMA


def test_one_call_may_have_its_own(app):
    task = declare(app, lock_priority="{urgency}")
    assert head_start(app, task, 7, call={"lock_priority": 30}) == 30
    assert head_start(app, task, 7, call={"lock_priority": "{urgency}1"}) == 71


def test_one_call_of_a_task_without_priority_may_have_one(app):
    assert head_start(app, declare(app), 7, call={"lock_priority": 30}) == 30


@pytest.mark.parametrize(
    ("priority", "said"),
    [
        ("30", "which names no argument. Give the seconds of head start as a number"),
        (86_401, "give the seconds of head start, from -86400 to 86400"),
        (float("nan"), "give the seconds of head start"),
        (True, "is True: give the seconds"),
        ("{rush}", "it names the argument 'rush', which the task does not have"),
        (lambda: 1, "Give it the task's signature"),
    ],
    ids=["text", "too long", "nan", "bool", "unknown argument", "other signature"],
)
def test_a_wrong_priority_is_refused_at_the_declaration(app, priority, said):
    with pytest.raises(ConfigurationError) as error:
        declare(app, lock_priority=priority)
    assert "task t: lock_priority" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("soon", "lock_priority is 'soon', from the template '{urgency}': it must be seconds"),
        (None, "argument 'urgency' is None, so lock_priority is not known"),
        ([1], "lock_priority is '[1]'"),
    ],
    ids=["text", "none", "list"],
)
def test_a_call_whose_priority_is_no_number_fails_and_names_it(app, value, said):
    task = declare(app, lock_priority="{urgency}")
    with pytest.raises(ConfigurationError) as error:
        head_start(app, task, value)
    assert said in str(error.value)


def test_a_callable_that_raises_or_returns_no_number_fails_the_call(app):
    task = declare(app, lock_priority=lambda urgency=0: {1: "no"}[urgency])
    with pytest.raises(ConfigurationError, match="lock_priority is 'no', from the callable"):
        head_start(app, task, 1)
    with pytest.raises(ConfigurationError, match="callable lock_priority raised KeyError"):
        head_start(app, task, 2)


def test_a_priority_out_of_range_is_clamped_and_logged_once_per_task(app, caplog):
    task = declare(app, lock_priority="{urgency}")
    with caplog.at_level(logging.WARNING):
        assert head_start(app, task, 10**9) == 86_400
        assert head_start(app, task, -(10**9)) == -86_400
    (record,) = caplog.records
    assert "The lock_priority of a call of t is 1000000000" in record.getMessage()


def test_a_callable_for_one_call_is_refused(app):
    task = declare(app)
    with pytest.raises(ConfigurationError, match="must be a number of seconds or a template"):
        task.apply_async((1,), lock_priority=lambda urgency=0: 1)
    with pytest.raises(ConfigurationError, match="names the argument 'rush'"):
        task.apply_async((1,), lock_priority="{rush}")


@pytest.mark.parametrize("policy", ["skip", "fail", "requeue"])
def test_a_priority_of_a_task_that_never_waits_is_warned_of(app, policy):
    task = declare(app, lock_priority=30, lock_on_conflict=policy)
    with pytest.warns(ConfigurationWarning, match="it is in no queue"):
        install(app).options(task)


def test_a_priority_of_a_task_that_waits_for_its_rate_is_not_warned_of(app):
    task = declare(app, lock_priority=30, lock_on_conflict="skip", lock_rate="1/m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install(app).options(task)


def test_a_quorum_refuses_a_priority():
    app = Celery("quorum", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_backend = [f"redis://localhost:{port}" for port in (1, 2, 3)]
    task = declare(app, lock_priority=30, lock_on_conflict="skip")
    with pytest.raises(ConfigurationError, match=r"lock_priority is 30.0: .* has no queue"):
        install(app).options(task)

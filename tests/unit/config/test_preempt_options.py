"""lock_on_conflict="preempt", lock_preempt_grace and lock_preempt_max: meaning, contradictions."""

from __future__ import annotations

import json
import pickle

import pytest
from celery.exceptions import Ignore

from celery_singleton_lock import ConfigurationError, LockPreempted
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.core.model import Preempted
from celery_singleton_lock.core.preempt import Age, aged, is_preempting
from celery_singleton_lock.worker.preempted import preempted_at

PREEMPT = {"lock_on_conflict": "preempt"}


def resolved(settings=None, **declared):
    return resolve_options("shop.build", declared, settings)


def test_it_becomes_a_flow_option_with_the_age_of_the_call():
    options = resolved(**PREEMPT)
    assert (options.preempt_grace, options.preempt_max) == (10.0, 5)
    assert json.loads(options.flow) == {"preempt": [5, 1]}
    assert json.loads(aged(options.flow, Age.RETRY)) == {"preempt": [5, 0]}
    assert json.loads(aged(options.flow, Age.COPY)) == {"preempt": [5, -1]}
    assert aged(options.flow, Age.NEW) == options.flow
    assert is_preempting(options.flow)
    assert not is_preempting(aged(options.flow, Age.RETRY))
    other = resolved(lock_debounce=5).flow
    assert (aged(other, Age.RETRY), is_preempting(other)) == (other, False)
    assert (aged("", Age.COPY), is_preempting("")) == ("", False)


def test_an_app_may_preempt_in_all_tasks():
    settings = Settings(on_conflict="preempt", preempt_max=2, preempt_grace=1.0)
    options = resolved(settings)
    assert options.preempts
    assert json.loads(options.flow) == {"preempt": [2, 1]}


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"lock_preempt_grace": 0}, "lock_preempt_grace is 0: it must be above 0"),
        ({"lock_preempt_grace": "1"}, "it must be a number of seconds, not str"),
        ({"lock_preempt_max": 0}, "lock_preempt_max is 0: it must be from 1 to"),
        ({"lock_preempt_max": None}, "lock_preempt_max is None: it must be a whole number"),
        ({"lock_keys": ["a", "b"]}, "lock_keys is ['a', 'b']: with lock_on_conflict="),
        ({"lock_rate": "5/m"}, "lock_rate is '5/m': with lock_on_conflict="),
        ({"lock_rate": "{rate}"}, "lock_rate is '{rate}': with lock_on_conflict="),
        ({"lock_fair_by": "{tenant}"}, "lock_fair_by is '{tenant}': with lock_on_conflict="),
        ({"lock_debounce": 5}, "lock_debounce is 5: with lock_on_conflict="),
        ({"lock_unique": "until_done"}, "lock_unique is 'until_done': with lock_on_conflict="),
        ({"lock_max_waiting": 1, "lock_on_full": "replace"}, "lock_on_full is 'replace': with"),
        ({"lock_on_retry": "keep"}, "lock_on_retry is 'keep': with lock_on_conflict="),
    ],
    ids=range(12),
)
def test_what_cannot_be_kept_is_refused_at_the_declaration(declared, told):
    with pytest.raises(ConfigurationError) as error:
        resolved(**PREEMPT, **declared)
    assert told in str(error.value)
    assert "Use " in str(error.value) or "Leave " in str(error.value) or "it must" in told


def test_a_quorum_refuses_it_by_name():
    quorum = Settings(backend=("redis://a", "redis://b", "redis://c"))
    with pytest.raises(ConfigurationError, match="lock_on_conflict is 'preempt': with several"):
        resolved(quorum, **PREEMPT)


@pytest.mark.parametrize("option", ["lock_preempt_grace", "lock_preempt_max"])
def test_an_option_without_effect_is_told(option):
    with pytest.warns(ConfigurationWarning, match=f"{option} is 3, and has no effect: it needs"):
        resolved(Settings(), **{option: 3})


def test_the_exception_names_the_newer_task_and_celery_does_not_retry_it():
    error = pickle.loads(pickle.dumps(preempted_at("build:main", Preempted("a/b/0/0"))))
    assert (type(error), error.name, error.by) == (LockPreempted, "build:main", "a/b")
    assert str(error).startswith("Task a/b is newer and replaces this run at the lock 'build:main'")
    assert isinstance(error, Ignore)

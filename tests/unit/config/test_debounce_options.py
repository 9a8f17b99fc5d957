"""lock_debounce, lock_debounce_max and lock_debounce_first: meaning and contradictions."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.task_options import resolve_options


def resolved(settings=None, **declared):
    return resolve_options("shop.index", declared, settings)


def test_they_become_one_flow_option_in_milliseconds():
    options = resolved(lock_debounce=5, lock_debounce_max=60, lock_debounce_first="run")
    assert json.loads(options.flow) == {"settle": [5000, 60_000, 1]}
    assert json.loads(resolved(lock_debounce=0.5).flow) == {"settle": [500, 0, 0]}
    assert json.loads(resolved(lock_debounce=1e-9).flow) == {"settle": [1, 0, 0]}
    assert resolved(lock_debounce=None).flow == ""


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"lock_debounce": 0}, "lock_debounce is 0: it must be above 0"),
        ({"lock_debounce": -1}, "lock_debounce is -1: it must be above 0"),
        ({"lock_debounce": float("nan")}, "lock_debounce is nan: it must be above 0"),
        ({"lock_debounce": "5"}, "lock_debounce is '5': it must be a number of seconds, not str"),
        ({"lock_debounce": 367 * 86_400}, "at most 31622400 seconds; None lets each call queue"),
        ({"lock_debounce": 5, "lock_debounce_max": 5}, "it must be longer than lock_debounce (5)"),
        ({"lock_debounce": 5, "lock_debounce_first": "go"}, 'it must be "wait" or "run"'),
        ({"lock_debounce": 5, "lock_keys": ["a", "b"]}, "may have different locks. Use lock_key"),
        ({"lock_debounce": 5, "lock_on_conflict": "skip"}, "lock_debounce parks messages, and"),
        ({"lock_debounce": 5, "lock_on_conflict": "requeue"}, '="requeue" does not. Use "park"'),
    ],
    ids=range(10),
)
def test_what_cannot_be_kept_is_refused_at_the_declaration(declared, told):
    with pytest.raises(ConfigurationError) as error:
        resolved(**declared)
    assert told in str(error.value)


def test_a_quorum_refuses_it():
    for policy in ("park", "skip"):  # else each of the two would advise the other one
        quorum = Settings(backend=("redis://a", "redis://b", "redis://c"), on_conflict=policy)
        with pytest.raises(ConfigurationError, match=r"lock_debounce is 5.*: with several servers"):
            resolved(quorum, lock_debounce=5)


@pytest.mark.parametrize("option", ["lock_debounce_max", "lock_debounce_first"])
def test_an_option_without_effect_is_told(option):
    value = 60 if option == "lock_debounce_max" else "run"
    with pytest.warns(ConfigurationWarning, match=f"{option} is .* without lock_debounce"):
        resolved(Settings(), **{option: value})

"""lock_unique and its companions: meaning and contradictions."""

from __future__ import annotations

import warnings

import pytest

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.settings import LockOptions, Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.unique import UniqueCall, unpacked


def resolved(settings=None, **options):
    return resolve_options("t", options, settings or Settings())


@pytest.mark.parametrize("until", ["until_started", "until_done", 600, 0.5, None])
def test_uniqueness_ends_at_the_start_at_the_end_or_after_seconds(until):
    assert resolved(lock_unique=until).unique == until


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lock_unique": True}, "or None"),
        ({"lock_unique": "started"}, '"until_started", "until_done"'),
        ({"lock_unique": "10m"}, "or None: use 600."),
        ({"lock_unique": []}, "must be a number of seconds, not list"),
        ({"lock_unique": 0}, "must be above 0"),
        ({"lock_unique": float("nan")}, "must be above 0"),
        ({"lock_unique": 5, "lock_unique_key": 7}, 'a template such as "{user}"'),
        ({"lock_unique": 5, "lock_on_duplicate": "skip"}, '"existing" or "raise" or "follow"'),
        ({"lock_unique": 5, "lock_on_duplicate": "follow"}, 'Use "until_done"'),
        ({"lock_unique": "until_started", "lock_on_duplicate": "follow"}, 'Use "until_done"'),
        ({"lock_unique": 5, "lock_unique_max": 0}, "must be above 0"),
        ({"lock_unique": 5, "lock_keys": ["a"]}, "Use lock_key"),
        ({"lock_unique": 5, "lock_debounce": 5}, "Use one of the two"),
        ({"lock_unique": 5, "lock_key": "{__queue__}:a"}, "does not know the queue"),
        ({"lock_unique": 5, "lock_unique_key": "{__queue__}"}, "does not know the queue"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, told):
    with pytest.raises(ConfigurationError, match="task t: lock_") as error:
        resolved(**options)
    assert told in str(error.value)


def test_a_quorum_has_no_unique_calls():
    several = Settings(backend=tuple(f"redis://r{n}:6379/0" for n in range(3)))
    with pytest.raises(ConfigurationError, match="task t: lock_unique is 'until_done'"):
        resolved(several, lock_unique="until_done", lock_on_conflict="skip")


def test_the_warning_about_follow_advises_the_lock_unique_that_follow_accepts():
    with pytest.warns(ConfigurationWarning, match='Add lock_unique="until_done"'):
        resolved(lock_on_duplicate="follow")
    resolved(lock_on_duplicate="follow", lock_unique="until_done")


@pytest.mark.parametrize("option", [("lock_unique_key", "{user}"), ("lock_on_duplicate", "raise")])
def test_without_unique_the_other_options_have_no_effect(option):
    with pytest.warns(ConfigurationWarning, match='Add lock_unique="until_started"'):
        resolved(**dict([option]))


def test_a_complete_declaration_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved(lock_unique=5, lock_unique_key="{user}", lock_on_duplicate="raise")


def test_only_the_header_of_a_message_reaches_the_scripts():
    """A message of a canvas, or of a sender without the class, has none."""
    call = UniqueCall("a", "k", until_start=True, most=60.0, late=True)
    assert LockOptions(unique="until_done").flow == ""
    assert LockOptions(unique=call).flow == packed((), unique=call) == '{"unique":["k",1,60000,1]}'


@pytest.mark.parametrize("late", [True, False])
def test_a_header_survives_its_message(late):
    call = UniqueCall("a", "k", until_start=not late, most=60.0, late=late)
    assert unpacked(call.header) == call


@pytest.mark.parametrize("header", [None, "a", [], ["a", "k", 1, 5], ["a", 1, 1, 5, 1], {"a": 1}])
def test_a_header_of_somebody_else_is_no_header(header):
    assert unpacked(header) is None


def test_the_header_of_a_follower_names_its_first_task():
    call = UniqueCall("a", "k", until_start=False, most=60.0, follows="first")
    assert unpacked(call.header) == call
    assert unpacked([*call.header, "more"]) is None
    assert unpacked([*call.header[:5], 7]) is None
    options = LockOptions(unique=call)
    assert options.follows
    assert options.flow == '{"follow":["k","first",0,60000,0]}'
    assert not LockOptions(unique=call._replace(follows="")).follows

# the number of a trap is part of its test's name
"""Errors can be pickled and keep their attributes."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest

from celery_singleton_lock import errors
from celery_singleton_lock.errors import (
    LockConflict,
    LockError,
    LockQueueFull,
    LockTimeout,
    SingletonLockError,
)

EVERY_CLASS = sorted(
    (
        value
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if not name.startswith("_") and issubclass(value, BaseException)
    ),
    key=lambda cls: cls.__name__,
)


def made(cls):
    """An error with all of its fields set."""
    if issubclass(cls, (LockConflict, LockTimeout)):
        return cls("busy", "account:1", "settle[3f] on w2", 12.5)
    return cls("busy", "account:1") if issubclass(cls, LockError) else cls("busy")


def facts(error):
    """What a program can read from an error."""
    names = ("message", "name", "holder", "expires_in", "args")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


@pytest.mark.parametrize("cls", EVERY_CLASS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_T29_every_error_survives_pickle(cls, protocol):
    """An exception that does not unpickle ends a prefork worker."""
    error = made(cls)
    arrived = pickle.loads(pickle.dumps(error, protocol))
    assert type(arrived) is cls
    assert facts(arrived) == facts(error)
    assert str(arrived) == "busy"


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_T29_every_error_survives_a_json_result_backend(cls):
    """Celery rebuilds an exception as `type(*args)`, from JSON."""
    error = made(cls)
    arrived = cls(*json.loads(json.dumps(error.args)))
    assert facts(arrived) == facts(error)
    assert str(arrived) == "busy"


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_T29_every_error_survives_celerys_own_code(cls):
    """`prepare_exception` and `exception_to_python`, with JSON and with pickle."""
    celery = pytest.importorskip("celery")
    app = celery.Celery("t", set_as_current=False, backend="cache+memory://")
    error = made(cls)
    for serializer in ("json", "pickle"):
        stored = app.backend.prepare_exception(error, serializer=serializer)
        if serializer == "json":
            stored = json.loads(json.dumps(stored))
        arrived = app.backend.exception_to_python(stored)
        assert type(arrived) is cls
        assert facts(arrived) == facts(error)


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_T29_every_error_can_be_made_from_whatever_a_backend_kept(cls):
    """No argument, or the message alone: never a TypeError instead of the error."""
    assert str(cls()) == ""
    assert str(cls("busy")) == "busy"
    assert facts(copy.copy(cls("busy"))) == facts(cls("busy"))


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_the_root_catches_every_error(cls):
    """One `except` for all, and the picture in the docstring shows each."""
    assert issubclass(cls, SingletonLockError)
    assert cls is SingletonLockError or f"── {cls.__name__} " in errors.__doc__


def test_an_error_shows_its_sentence_and_keeps_its_facts():
    """People read, programs ask."""
    conflict = LockConflict("account:1 is held by x", "account:1", "x", 3)
    assert str(conflict) == "account:1 is held by x"
    assert (conflict.name, conflict.holder, conflict.expires_in) == ("account:1", "x", 3.0)
    assert LockQueueFull("full", "account:1").name == "account:1"
    assert LockQueueFull("full").name == ""


@pytest.mark.parametrize(
    "error",
    [
        LockConflict("busy", "account:1", "x", 3.0, "pause"),
        LockQueueFull("full", "account:1", "pause"),
        LockTimeout("late", "account:1", "x", 3.0, "pause"),
    ],
)
def test_an_error_says_what_the_lock_was_waited_for(error):
    """Also in another process, by pickle or as JSON."""
    copied = pickle.loads(pickle.dumps(error))  # our own
    rebuilt = type(error)(*json.loads(json.dumps(error.args)))
    assert {each.waits_for for each in (error, copied, rebuilt)} == {"pause"}


def test_of_other_errors_that_is_not_known():
    assert {errors.LockWaitTimeout("late").waits_for, LockConflict().waits_for} == {""}


def test_a_wrong_declaration_is_a_ValueError_too():
    """For callers who know nothing of this library."""
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.LockNameError, errors.ConfigurationError)

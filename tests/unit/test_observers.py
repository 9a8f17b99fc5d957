"""The log of a failing observer, the facts of an error without an event, and wrong arguments."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from celery import Celery

from celery_singleton_lock import observe
from celery_singleton_lock.errors import LockConflict
from celery_singleton_lock.events import Event, Listener, Observers, TaskBlocked
from celery_singleton_lock.metrics import export, log_events
from celery_singleton_lock.worker.install import install


class Broken:
    def notify(self, event):
        raise OSError("disk")


def test_an_observer_that_fails_is_logged_with_what_it_failed_on(caplog):
    """And with its traceback."""
    event = TaskBlocked("account:42")
    Observers([Broken()]).notify(event)
    (record,) = caplog.records
    assert record.getMessage() == f"An observer of locks raised an error for {event!r}"
    assert isinstance(record.exc_info[1], OSError)


@pytest.mark.parametrize("kind", get_args(Event))
def test_each_event_type_can_be_observed(kind):
    """Those of stopped queues were refused, and an observer of all events did not hear them."""
    app, heard, told = Celery(set_as_current=False), [], []
    observe(app, kind)(told.append)
    observe(app)(heard.append)
    observers = install(app).observers
    event = object.__new__(kind)
    observers.notify(event)
    assert told == heard == [event]


def test_a_conflict_without_known_facts_has_no_details():
    """No name, no holder, no time."""
    error = LockConflict()
    assert (error.message, error.name, error.holder, error.expires_in) == ("", "", "", 0.0)


def test_a_removed_observer_gets_no_more_events():
    """Others go on, and one that was never there is no error."""
    heard, left = [], []
    first, second = Listener(heard.append, (TaskBlocked,)), Listener(left.append, (TaskBlocked,))
    observers = Observers([first, second])
    observers.remove(first)
    observers.remove(first)
    observers.notify(TaskBlocked("account:42"))
    assert (len(heard), len(left)) == (0, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: observe(print), "observe() got <built-in function print>: give the Celery app"),
        (lambda: observe(TaskBlocked), "observe() got <class"),
        (lambda: install("app"), "install() got 'app': give the Celery app"),
        (lambda: log_events([]), "log_events() got []: give the Celery app"),
        (lambda: export(object(), Celery(set_as_current=False)), "export() got <object"),
        (
            lambda: log_events(Celery(set_as_current=False), "INFO"),
            "log_events() got the level 'INFO': give a number, such as logging.INFO",
        ),
    ],
)
def test_what_is_no_app_and_no_level_is_refused_where_it_is_given(call, words):
    """``@observe`` without parentheses registered nothing, and said nothing."""
    with pytest.raises(TypeError, match=re.escape(words)):
        call()

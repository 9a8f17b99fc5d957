"""What is said when an observer fails, and of what an error knows when nothing was said."""

from __future__ import annotations

from celery_singleton_lock.errors import LockConflict
from celery_singleton_lock.events import Listener, Observers, TaskBlocked


class Broken:
    def notify(self, event):
        raise OSError("disk")


def test_an_observer_that_fails_is_logged_with_what_it_failed_on(caplog):
    """And with its traceback."""
    event = TaskBlocked("account:42")
    Observers([Broken()]).notify(event)
    (record,) = caplog.records
    assert record.getMessage() == f"An observer of locks failed on {event!r}"
    assert isinstance(record.exc_info[1], OSError)


def test_a_conflict_of_which_nothing_is_known_says_nothing():
    """No name, no holder, no time."""
    error = LockConflict()
    assert (error.message, error.name, error.holder, error.expires_in) == ("", "", "", 0.0)


def test_who_is_removed_hears_no_more():
    """Others go on, and one that was never there is no error."""
    heard, left = [], []
    first, second = Listener(heard.append, (TaskBlocked,)), Listener(left.append, (TaskBlocked,))
    observers = Observers([first, second])
    observers.remove(first)
    observers.remove(first)
    observers.notify(TaskBlocked("account:42"))
    assert (len(heard), len(left)) == (0, 1)

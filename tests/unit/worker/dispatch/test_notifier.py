"""What is told of a task's lock, and to whom."""

from __future__ import annotations

from types import SimpleNamespace

from celery_singleton_lock.events import LockAcquired, LockReleased, Observers
from celery_singleton_lock.worker.dispatch.notifier import Herald


class Ear:
    """Notes what it is told."""

    def __init__(self):
        self.heard = []

    def notify(self, event):
        self.heard.append(type(event))


def a_request():
    return SimpleNamespace(
        id="id",
        acquired_at=None,
        ran_for=None,
        task=SimpleNamespace(name="task", send_events=True),
        stamp=SimpleNamespace(name="lock", error=None, stamped_at=0.0),
        say=lambda call: call(),
    )


def test_who_begins_to_listen_while_a_task_runs_hears_of_locks_from_the_next_on():
    """A release of which nobody has heard the taking would be half a story."""
    observers, ear = Observers(), Ear()
    herald, before, after = Herald(observers), a_request(), a_request()
    herald.acquired(before)
    observers.add(ear)
    herald.acquired(after)
    herald.released(before)
    herald.released(after)
    assert ear.heard == [LockAcquired, LockReleased]


def test_of_two_who_tell_that_a_lock_is_taken_the_first_is_heard():
    ear, request = Ear(), a_request()
    herald = Herald(Observers([ear]))
    herald.acquired(request)
    herald.acquired(request)
    assert ear.heard == [LockAcquired]

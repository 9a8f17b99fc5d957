"""Events and log lines about a task's lock."""

from __future__ import annotations

from types import SimpleNamespace

from celery_singleton_lock.events import LockAcquired, LockReleased, Observers
from celery_singleton_lock.worker.dispatch.notifier import Notifier


class Ear:
    """Records its calls."""

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
        lock_header=SimpleNamespace(name="lock", error=None, created_at=0.0),
        call_in_order=lambda call: call(),
    )


def test_an_observer_added_while_a_task_runs_gets_events_of_the_next_one():
    """A release is reported only if the acquisition was."""
    observers, ear = Observers(), Ear()
    notifier, before, after = Notifier(observers), a_request(), a_request()
    notifier.acquired(before)
    observers.add(ear)
    notifier.acquired(after)
    notifier.released(before)
    notifier.released(after)
    assert ear.heard == [LockAcquired, LockReleased]


def test_of_two_notices_of_an_acquired_lock_the_first_counts():
    ear, request = Ear(), a_request()
    notifier = Notifier(Observers([ear]))
    notifier.acquired(request)
    notifier.acquired(request)
    assert ear.heard == [LockAcquired]

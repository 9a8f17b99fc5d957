"""Events: what Celery is told, and that a broken observer breaks nothing."""

from __future__ import annotations

import logging

import pytest

from celery_singleton_lock.events import (
    BackendDown,
    LeaseLost,
    Observers,
    TaskBlocked,
    TaskDelivered,
    TaskDuplicate,
    TaskReplaced,
    celery_event,
)


class Notes:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def notify(self, event):
        self.told.append(event)


class Broken:
    """Fails at everything."""

    def notify(self, event):
        raise RuntimeError(event)


def test_a_blocked_task_is_shown_as_blocked_with_holder_and_rank():
    """The event carries state BLOCKED, since monitors keep the state of the last event."""
    name, fields = celery_event(TaskBlocked("a:1", "settle", "id-1", holder="x", rank=3))
    assert name == "task-blocked"
    assert fields == {
        "lock": "a:1",
        "uuid": "id-1",
        "policy": "park",
        "holder": "x",
        "rank": 3,
        "state": "BLOCKED",
    }


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (TaskDelivered("a:1", "settle", "id-1"), "task-delivered"),
        (TaskDuplicate("a:1", "settle", "id-1"), "task-duplicate"),
        (TaskReplaced("a:1", "settle", "id-1", by="id-2"), "task-replaced"),
        (LeaseLost("a:1"), "task-lock-lost"),
    ],
)
def test_later_events_carry_no_state(event, name):
    """A state in an event that comes late would overwrite the final one."""
    sent = celery_event(event)
    assert sent is not None
    assert sent[0] == name
    assert "state" not in sent[1]


def test_what_is_no_task_is_no_celery_event():
    """An outage is for observers only."""
    assert celery_event(BackendDown("redis://host:1/0")) is None


def test_a_broken_observer_keeps_nobody_else_from_hearing(caplog):
    """What it raised is logged, and the others are told."""
    notes = Notes()
    observers = Observers([Broken()])
    observers.add(notes)
    with caplog.at_level(logging.ERROR):
        observers.notify(LeaseLost("a:1"))
    assert notes.told == [LeaseLost("a:1")]
    assert "observer" in caplog.text.lower()

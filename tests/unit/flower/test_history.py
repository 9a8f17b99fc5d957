"""The times of the last tasks of each lock: from events, and bounded."""

from __future__ import annotations

import pytest

from celery_singleton_lock.flower.history import LOCKS, TASKS, LockHistory, history_of, listen
from celery_singleton_lock.flower.values import id_of


def acquired(lock, waited):
    return {"type": "lock-acquired", "lock": lock, "waited": waited}


def test_waits_and_holds_of_a_lock_are_remembered_in_their_order():
    history = LockHistory()
    history.note(acquired("a", 1.25))
    history.note({"type": "lock-released", "lock": "a", "held": 3})
    history.note(acquired("a", 0.5))
    assert history.of(id_of("a")) == {"waited": [1.25, 0.5], "held": [3.0]}
    assert history.of(id_of("b")) == {"waited": [], "held": []}


def test_the_memory_is_bounded_for_any_number_of_tasks_and_locks():
    """The last tasks of a lock stay, and the locks with the latest events."""
    history = LockHistory()
    for n in range(TASKS + 5):
        history.note(acquired("often", n))
    assert history.of(id_of("often"))["waited"] == [float(n) for n in range(5, TASKS + 5)]
    for n in range(LOCKS):
        history.note(acquired(f"lock:{n}", 1))
    assert len(history) == LOCKS
    assert history.of(id_of("often"))["waited"] == []


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": "task-started", "lock": "a", "waited": 1.0},
        {"type": "lock-acquired", "waited": 1.0},
        {"type": "lock-acquired", "lock": "a"},
        {"type": "lock-acquired", "lock": ["a"], "waited": 1.0},
        {"type": "lock-acquired", "lock": "a", "waited": "1"},
    ],
)
def test_other_and_malformed_events_are_ignored(event):
    """Anybody can send an event."""
    history = LockHistory()
    history.note(event)
    assert len(history) == 0


def test_flowers_receiver_still_gets_each_event():
    class Events:
        def __init__(self):
            self.seen = []

        def on_event(self, event):
            self.seen.append(event)

    listen(Events)
    one, other = Events(), Events()
    one.on_event(acquired("a", 2.0))
    assert one.seen == [acquired("a", 2.0)]
    assert history_of(one).of(id_of("a"))["waited"] == [2.0]
    assert len(history_of(other)) == 0

"""Events: what Celery gets, and that a failing observer affects nothing."""

from __future__ import annotations

import logging

import pytest
from celery import Celery
from celery.events.state import State

from celery_singleton_lock import observe
from celery_singleton_lock.events import (
    CELERY_EVENTS,
    BackendDown,
    BackendUp,
    LeaseLost,
    Observers,
    TaskBlocked,
    TaskDelivered,
    TaskDuplicate,
    TaskFollowed,
    TaskPreempted,
    TaskReplaced,
    _field,
    celery_event,
    fields_of,
    log_keys,
)
from celery_singleton_lock.worker.install import install
from support import event_docs


class Notes:
    """Records its events."""

    def __init__(self):
        self.told = []

    def notify(self, event):
        self.told.append(event)


class Broken:
    """Fails at everything."""

    def notify(self, event):
        raise RuntimeError(event)


def test_a_blocked_task_is_shown_as_blocked_with_holder_and_rank():
    """Celery's State makes BLOCKED of the event's name."""
    name, fields = celery_event(
        TaskBlocked("a:1", "settle", "id-1", holder="x", rank=3, waits_for="holder")
    )
    assert name == "task-blocked"
    assert fields == {
        "lock": "a:1",
        "uuid": "id-1",
        "policy": "park",
        "holder": "x",
        "rank": 3,
        "waits_for": "holder",
    }


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (TaskDelivered("a:1", "settle", "id-1"), "task-delivered"),
        (TaskDuplicate("a:1", "settle", "id-1"), "lock-duplicate"),
        (TaskReplaced("a:1", "settle", "id-1", by="id-2"), "task-replaced"),
        (TaskPreempted("a:1", "settle", "id-1", by="id-2"), "task-preempted"),
        (TaskFollowed("a:1", "settle", "id-1", of="id-2"), "lock-followed"),
        (LeaseLost("a:1"), "lock-lost"),
    ],
)
def test_later_events_carry_no_state(event, name):
    """A state in an event that comes late would overwrite the final one."""
    sent = celery_event(event)
    assert sent is not None
    assert sent[0] == name
    assert "state" not in sent[1]


def test_an_event_of_a_lock_names_its_task_as_celery_does():
    """Nothing else would: there may have been no ``task-received``."""
    assert celery_event(LeaseLost("a:1", "settle", "id-1", reason="lapsed")) == (
        "lock-lost",
        {"lock": "a:1", "name": "settle", "uuid": "id-1", "reason": "lapsed"},
    )


def test_a_log_line_has_the_events_name_and_its_facts():
    """A collector of logs finds them by these keys."""
    assert log_keys(LeaseLost("a:1", "settle", "id-1", reason="lapsed")) == {
        "lock_event": "lock-lost",
        "lock_name": "a:1",
        "lock_task": "settle",
        "lock_task_id": "id-1",
        "lock_reason": "lapsed",
    }
    down = log_keys(BackendDown("redis://h:1/0", "away"))
    assert down == {
        "lock_event": "lock-backend-down",
        "lock_url": "redis://h:1/0",
        "lock_reason": "away",
    }


def test_without_observers_no_event_is_created():
    observers, one = Observers(), Broken()
    assert not observers.any
    observers.add(one)
    assert observers.any
    assert Observers([one]).any
    observers.remove(one)
    assert not observers.any


def test_a_field_is_made_with_its_default_its_unit_and_its_meaning():
    """Made for the test: those of the events are made at import."""
    made = _field(2.5, "how long", "s")
    assert made.default == 2.5
    assert made.metadata == {"about": "how long", "unit": "s"}
    assert _field("", "why").metadata["unit"] == ""


def test_each_field_of_an_event_has_a_unit_and_a_meaning():
    assert fields_of(BackendUp) == [
        ("url", "", "without credentials"),
        ("down_for", "s", "for how long it did not"),
    ]
    assert BackendUp("redis://h").down_for == 0.0
    assert fields_of(BackendDown)[1] == ("reason", "", "why, as readable text; may be empty")


def test_what_is_no_task_is_no_celery_event():
    """An outage is for observers only."""
    assert celery_event(BackendDown("redis://host:1/0")) is None


def test_a_failing_observer_does_not_affect_others(caplog):
    """Its error is logged, and the others get the event."""
    notes = Notes()
    observers = Observers([Broken()])
    observers.add(notes)
    with caplog.at_level(logging.ERROR):
        observers.notify(LeaseLost("a:1"))
    assert notes.told == [LeaseLost("a:1")]
    assert "observer" in caplog.text.lower()


def test_the_docs_list_each_event_with_its_fields_and_units():
    """As ``PYTHONPATH=tests python -m support.event_docs`` writes it from their types."""
    assert event_docs.PAGE.read_text() == event_docs.page()


@pytest.mark.parametrize("kind", event_docs.kinds(), ids=lambda kind: kind.__name__)
def test_each_field_of_an_event_is_documented(kind):
    """Name, unit (seconds, if it is a duration) and meaning."""
    for name, unit, about in fields_of(kind):
        assert about
        assert (unit == "s") is (name in {"waited", "held", "seconds", "down_for", "stopped_for"})


def test_an_observer_gets_only_the_types_that_it_asked_for():
    """Or all; the decorator leaves the function as it is."""
    app, told, everything = Celery("observed", set_as_current=False), [], []

    @observe(app, LeaseLost)
    def note(event):
        told.append(event)

    observe(app)(everything.append)
    lost, blocked, down = LeaseLost("a"), TaskBlocked("a"), BackendDown("redis://host/0")
    for event in (lost, blocked, down):
        install(app).observers.notify(event)
    assert told == [lost]
    assert everything == [lost, blocked, down]
    note(blocked)
    assert told == [lost, blocked]


@pytest.mark.parametrize("kind", ["task-blocked", str, None])
def test_to_observe_what_is_no_event_is_refused_at_once(kind):
    """The error says what to give."""
    with pytest.raises(TypeError, match="give types"):
        observe(Celery("observed", set_as_current=False), kind)


ONE, OTHER = "one@host", "other@host"


def play(*events):
    """Return the state that Celery's State shows after events of (type, worker, fields)."""
    state = State()
    for clock, (kind, worker, fields) in enumerate(events):
        state.event(
            {"type": kind, "uuid": "id", "hostname": worker, "pid": 1, "clock": clock, **fields}
        )
    return state.tasks["id"].state


def at(timestamp, **fields):
    """Return an event's fields, with the clock of its worker."""
    return {"timestamp": timestamp, "local_received": 0, **fields}


def orders(first, second):
    """Return all ways in which two workers' events may be mixed, each worker's in their order."""
    if not first or not second:
        return [[*first, *second]]
    return [
        *([first[0], *rest] for rest in orders(first[1:], second)),
        *([second[0], *rest] for rest in orders(first, second[1:])),
    ]


@pytest.mark.parametrize("skew", [0.0, 86_400.0, -86_400.0])
@pytest.mark.parametrize("end", [("task-succeeded", "SUCCESS"), ("task-failed", "FAILURE")])
def test_in_whatever_order_two_workers_events_come_the_end_is_shown(end, skew):
    """One parked the task, the other ran it; their clocks are a day apart."""
    parked = [("task-received", ONE, at(1e9)), ("task-blocked", ONE, at(1e9, lock="a", rank=1))]
    ran = [
        ("task-delivered", OTHER, at(1e9 + skew, lock="a")),
        ("lock-acquired", OTHER, at(1e9 + skew, lock="a")),
        ("task-started", OTHER, at(1e9 + skew, state="STARTED")),
        (end[0], OTHER, at(1e9 + skew)),
        ("lock-released", OTHER, at(1e9 + skew, lock="a")),
    ]
    for order in orders(parked, ran):
        assert play(*order) == end[1], order


@pytest.mark.parametrize("before", [[], ["task-received"], ["task-received", "task-blocked"]])
def test_what_is_told_of_a_lock_changes_no_state(before):
    """At no time: not of a task that runs, nor of one that has ended."""
    for name in CELERY_EVENTS.values():
        if name.startswith("lock-"):
            for end in ("task-started", "task-succeeded", "task-revoked", "task-retried"):
                events = [(kind, ONE, at(1e9)) for kind in (*before, end)]
                assert play(*events, (name, OTHER, at(1e9, lock="a"))) == play(*events)

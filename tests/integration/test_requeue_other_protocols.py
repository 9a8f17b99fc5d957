"""lock_on_conflict="requeue" for messages of protocol 1, and of other languages."""

from __future__ import annotations

import itertools

import pytest
from celery import Celery, states

from celery_singleton_lock.errors import LockWaitTimeout
from integration.book import LONG_LEASE
from support.events import EventLog
from support.waiting import eventually

KEY = "old"


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


def send_protocol_1(book, task):
    """Send as Celery 3 did: everything is in the body."""
    with Celery("old", broker=book.url, backend=book.backend, set_as_current=False) as app:
        app.conf.task_protocol = 1
        return app.send_task(task, (KEY, 1)).id


def send_hybrid(book, task):
    """Send as clients in other languages do: a JSON object, without headers."""
    return book.put({"id": "hybrid", "task": task, "args": [KEY, 1], "kwargs": {}})


def send_without_args(book, task):
    """Send what has keyword arguments only, and does not say that it has no others."""
    return book.put({"id": "no-args", "task": task, "kwargs": {"key": KEY, "n": 1}})


@pytest.fixture(params=[send_protocol_1, send_hybrid, send_without_args])
def send(request):
    """How the message is sent."""
    return request.param


def held(book):
    first = book.send("act", KEY, 0, hold="go")
    book.started(first)
    return first


@pytest.mark.full
def test_an_old_message_is_held_back_twice_as_long_each_time(own_book, send):
    """Its requeues are counted, and the task sees no lock header."""
    with own_book.worker(args=("-E",)), EventLog(own_book.app) as events:
        first = held(own_book)
        second = send(own_book, "act_requeue")
        eventually(lambda: events.counts(second).get("task-blocked", 0) >= 6)
        blocked = [
            event["timestamp"]
            for event in events.seen
            if event["type"] == "task-blocked" and event["uuid"] == second
        ]
        pauses = [later - earlier for earlier, later in itertools.pairwise(blocked)]
        # An event that is sent late shortens the pause behind it.
        assert max(pauses) > 0.8 * 0.75
        own_book.open("go")
        assert [own_book.value(first), own_book.value(second)] == [0, 1]
    assert own_book.starts(id=second)[0]["leaks"] == []


@pytest.mark.full("send_without_args", "send_hybrid")
def test_the_deadline_of_an_old_message_counts_from_its_first_arrival(own_book, send):
    """Requeued more than once within it, it fails at the first try after."""
    with own_book.worker():
        first = held(own_book)
        state, error = own_book.outcome(send(own_book, "act_requeue_brief"), 8)
        assert state == states.FAILURE
        assert isinstance(error, LockWaitTimeout)
        own_book.open("go")
        assert own_book.value(first) == 0

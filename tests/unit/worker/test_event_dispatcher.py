"""Celery's dispatcher of events, which a pool of threads uses beside the main loop."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_singleton_lock.worker.event_dispatcher import enable_lock_events, open_buffers


@pytest.fixture
def dispatcher():
    """One that buffers, as a worker's does, and has not sent anything yet."""
    app = Celery("app", set_as_current=False)
    found = app.events.Dispatcher(None, enabled=False, buffer_group=["task"])
    found.enabled = True
    return found


def look_while_another_thread_sends(dispatcher):
    """What ``flush`` does in the main loop, while a thread sends the first event of a group."""
    enable_lock_events(dispatcher)
    dispatcher.send("task-received", uuid="1")
    for _ in dispatcher._group_buffer.items():
        dispatcher.send("lock-acquired", uuid="1")


def test_the_first_event_of_a_group_may_come_while_the_loop_looks(dispatcher):
    """It ended the worker's main loop: the dictionary of groups grew under its eyes."""
    open_buffers(dispatcher)
    look_while_another_thread_sends(dispatcher)
    assert [event["type"] for event in dispatcher._group_buffer["lock"]] == ["lock-acquired"] * 2


def test_without_that_place_the_look_fails(dispatcher):
    """So that this is still needed, and still the place that Celery uses."""
    with pytest.raises(RuntimeError, match="changed size"):
        look_while_another_thread_sends(dispatcher)

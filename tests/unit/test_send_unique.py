"""Whether a call counts whose sending has failed."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_singleton_lock import LockedTask
from celery_singleton_lock.core.unique import Announced, EntryState
from celery_singleton_lock.events import Observers
from celery_singleton_lock.send_unique import Call, send_unique


class Store:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def announce(self, name, key, task_id, *, instead_of=""):
        self.told.append("announce")
        return Announced(EntryState.ANNOUNCED, task_id)

    def withdraw(self, name, key, task_id, retries):
        self.told.append("withdraw")


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def send(store):
    app = Celery(set_as_current=False)

    @app.task(base=LockedTask, lock_key="report", lock_unique="until_done", shared=False)
    def report(): ...

    options = report._lock_extension.options(report)

    def send(error):
        def fail(**sending):
            raise error

        def call():
            return Call(report, options, "report", "report", {"task_id": "a"})

        send_unique(call, lambda: store, fail, {"task_id": "a"}, Observers())

    return send


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TypeError("not serialisable")])
def test_a_call_that_was_certainly_not_sent_is_withdrawn(store, send, error):
    with pytest.raises(type(error)):
        send(error)
    assert store.told == ["announce", "withdraw"]


def test_a_call_that_was_perhaps_sent_counts(store, send):
    with pytest.raises(TimeoutError):
        send(TimeoutError())
    assert store.told == ["announce"]


def test_an_error_that_the_caller_handles_proves_nothing(store, send):
    """A call in an ``except`` block was withdrawn, and was sent twice."""
    try:
        raise ConnectionRefusedError
    except ConnectionRefusedError:
        with pytest.raises(TimeoutError):
            send(TimeoutError())
    assert store.told == ["announce"]

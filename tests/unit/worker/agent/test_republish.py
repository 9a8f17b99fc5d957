"""Messages that a worker sends back to the broker."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from celery_singleton_lock.worker.agent import republish
from celery_singleton_lock.worker.agent_commands import Requeue
from support.waiting import eventually


@pytest.fixture
def sent():
    return []


@pytest.fixture
def may_send():
    return threading.Event()


@pytest.fixture
def held():
    return set()


@pytest.fixture
def told():
    return []


@pytest.fixture
def republisher(sent, may_send, held, told, monkeypatch):
    def requeue(kept, *_, **__):
        sent.append(kept)
        assert may_send.wait(10)

    monkeypatch.setattr(
        "celery_singleton_lock.worker.agent.republish.pack", lambda message: message
    )
    dispatcher = Mock()
    dispatcher.requeues.copies_of = lambda request: [request] if request in held else []
    made = republish.Republisher(
        publisher=SimpleNamespace(requeue=requeue, close=lambda: None),
        queues=Mock(),
        commands=Mock(),
        dispatcher=dispatcher,
        post=lambda _, copies: told.append([each.message for each in copies]),
        watchdog=Mock(),
        registered=(),
        declared=tuple,
    )
    yield made
    may_send.set()
    made.close(10)


def message(body):
    return Mock(
        message=body,
        is_only_copy=False,
        runs_later=False,
        first_place=7,
        arrival=SimpleNamespace(requeues=1),
        lock_header=SimpleNamespace(first_place=0, attempt=f"{body}/0/0"),
    )


def test_a_message_whose_connection_is_lost_while_it_waits_for_the_broker_is_not_sent(
    republisher, sent, may_send, held, told
):
    """The broker delivers it again, so there were two of each, and then four."""
    first, second = message("first"), message("second")
    held |= {first, second}
    for each in (first, second):
        republisher.requeue(Requeue(each))
    eventually(lambda: sent == ["first"], message="it is being sent")
    held.clear()
    may_send.set()
    eventually(lambda: told == [["first"], []], message="only the first one is acknowledged")
    assert sent == ["first"]
    assert republisher.requeued == 1


def test_the_message_of_a_task_that_runs_later_is_sent_with_the_claim_of_its_run(
    republisher, sent, may_send
):
    """The next worker parks it: with "skip" it was skipped if the lock was busy."""
    claims = []
    may_send.set()
    republisher._outbox._publisher.requeue = lambda *args, **_: claims.append(args[4])
    request = message("again")
    request.runs_later = True
    request.lock_header = SimpleNamespace(
        first_place=0, attempt="again/0/0", token="t.1", lock_set=None
    )
    republisher.publish_at_exit(request)
    eventually(lambda: claims, message="it is sent")
    assert claims == [("again/0/0", "t.1", [])]

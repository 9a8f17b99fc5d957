"""Messages that Redis delivers with a grant or a verdict."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.worker.state import revoked

from celery_singleton_lock.core.clock import wall_time
from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.worker.agent_commands import Release
from celery_singleton_lock.worker.lock_header import in_order_of_release
from support.dispatcher_fakes import (
    deliver,
    end,
    take,
    turn,
)


def test_a_delivered_message_goes_to_the_pool_with_its_grant(parts):
    """Its lease is renewed while it waits for its slot; a second delivery of it is nothing."""
    request = deliver(parts)
    assert parts.sent == [request]
    assert (request.lock_header.granted, request.lock_header.token) == (True, "token.0")
    assert parts.agent.names() == ["watch_later"]
    deliver(parts)
    assert parts.sent == [request]
    assert parts.dispatcher.in_flight.backlog() == 1


def test_a_message_that_has_ended_here_does_not_run_again_after_redis_has_lost_its_end(parts):
    """Nor is it left in Redis, nor dropped without a word."""
    first = deliver(parts)
    first.on_accepted(4711, 0.0)
    end(first)
    deliver(parts)  # an operator's wish, or a lapsed lease: Redis was there all the while
    assert len(parts.sent) == 2
    end(parts.sent[1])
    parts.dispatcher.pool_exit.ends.doubt()
    told = []
    parts.notifier.observers.add(SimpleNamespace(notify=told.append))
    again = deliver(parts)
    assert len(parts.sent) == 2
    assert Release(again.lock_header, Ending.FINAL) in parts.agent.commands(Release)
    assert [event.verdict for event in told] == ["ended"]


def test_an_ended_task_with_several_locks_does_not_block_them_when_it_is_delivered_again(parts):
    """Its message has the token of its first delivery. A later grant has another one."""
    stored = LockSet((Part("k:a", "token.0"), Part("k:b", new_token())), place=1).header()

    def deliver_under(token):
        request = parts.message("pair", "a", "b", request_id="x", **stored)
        parts.dispatcher.deliveries.deliver(Delivery("k:a", token, 7, b"", "granted"), request)
        return request

    ran = deliver_under("token.0")
    take(parts, ran)
    end(ran)
    parts.dispatcher.pool_exit.ends.doubt()
    deliver_under("token.1")
    assert parts.sent == [ran]
    *_, release = parts.agent.commands(Release)
    *_, last = in_order_of_release(release.lock_header)
    assert (last.name, last.token, release.ending) == ("k:a", "token.1", Ending.FINAL)


def test_notices_about_a_delivered_message_are_queued_in_order(parts):
    """Who parked it tells of that first. Each event has the time at which it happened."""
    later, told = [], []
    parts.notifier.later, parts.notifier.sends_events = later.append, lambda: True
    parts.notifier.send_event = lambda event, /, **fields: told.append((event, fields["timestamp"]))
    request = parts.message("early", "b")
    request._eventer = SimpleNamespace(enabled=True, send=parts.notifier.send_event)
    parts.dispatcher.deliveries.deliver(Delivery("k:b", "token.1", 7, b"", "granted", 1.5), request)
    take(parts, request)
    request.send_event("task-succeeded")
    assert told == []
    (send_delayed_events,) = later
    spoke = wall_time()
    send_delayed_events()
    names = [name for name, _ in told]
    assert names[0] == "task-delivered"
    assert names.index("task-started") < names.index("task-succeeded")
    assert max(at for _, at in told) < spoke
    request.send_event("task-retried")
    assert told[-1][0] == "task-retried"


def test_a_message_behind_a_delivered_one_is_parked_at_once(parts):
    """It holds its lock already."""
    deliver(parts)
    request = parts.message("early", "a")
    parts.dispatcher(request)
    assert parts.agent.parked() == [request]


def test_an_overdue_message_goes_to_the_pool_to_fail_there(parts):
    """Celery's own failure path ends it."""
    request = deliver(parts, verdict="overdue")
    assert type(request.lock_header.error).__name__ == "LockWaitTimeout"
    assert parts.sent == [request]


def test_an_overdue_message_is_kept_from_other_workers_only_while_it_ends_here(parts):
    """While it waits for a slot, another worker may have one."""
    request = deliver(parts, verdict="overdue")
    assert "watch_later" not in parts.agent.names()
    request.on_accepted(4711, 0.0)
    assert parts.agent.names() == ["watch_later"]


@pytest.fixture
def no_revokes():
    """What this process knows of revokes ends with the test: ids are used again."""
    yield
    revoked.clear()


def test_T17_a_revoked_message_is_ended_here_though_another_worker_heard_of_it(parts, no_revokes):
    """Celery's own path ends it: REVOKED, acknowledged; nothing is sent, and it is settled."""
    request = deliver(parts, verdict="revoked")
    assert parts.sent == []
    assert request.task.backend.get_state(request.id) == "REVOKED"
    assert request.acknowledged
    assert parts.agent.names() == ["put", "forget"]
    assert parts.agent.commands(Release)[0].ending is Ending.FINAL


def test_a_grant_that_lapsed_is_dropped_here(parts):
    """The message is delivered again under its next token, so nothing is parked or acknowledged."""
    request = deliver(parts)
    request.on_accepted(4711, 0.0)
    turn(request, Outcome.GONE)
    assert parts.agent.parked() == []
    assert parts.dispatcher.in_flight.by_token == {}

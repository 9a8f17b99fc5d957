"""The dispatcher: the way of a message into the pool, and the order of messages of a lock."""

from __future__ import annotations

import pytest

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.worker.message_stage import Stage
from support.dispatcher_fakes import (
    end,
    fail_always,
    take,
    turn,
)


def test_other_tasks_pass_untouched(parts):
    """What is no locked request goes Celery's own way."""
    parts.dispatcher("anything")
    assert parts.sent == ["anything"]


def test_a_task_without_locks_that_has_our_request_class_passes_untouched(parts):
    """Its message has no error that a retry would send, and that could not be serialized."""
    request = parts.message("plain", "a")
    before = dict(request.request_dict)
    parts.dispatcher(request)
    assert parts.sent == [request]
    assert request.request_dict == before


def test_the_second_of_a_key_is_parked_without_a_slot(parts):
    """The first holds the lock: the second goes to the agent."""
    first, second = parts.message("early", "a"), parts.message("early", "a")
    parts.dispatcher(first)
    take(parts, first)
    parts.dispatcher(second)
    assert parts.sent == [first]
    assert parts.agent.parked() == [second]


def test_while_a_lock_waits_for_its_rate_later_tasks_are_parked_without_a_slot(parts):
    """Those of other locks, and those that do not park, go to the pool."""
    parts.dispatcher.waits_for_rate = lambda name: name == "k:a"
    rated, skips = (
        LockOptions(rate=(Rate("1/m"),)),
        LockOptions(rate=(Rate("1/m"),), on_rate="skip"),
    )
    waits, other, skipped = (parts.message("early", key) for key in "aba")
    for request, options in ((waits, rated), (other, rated), (skipped, skips)):
        request.own_options = options
        parts.dispatcher(request)
    assert parts.agent.parked() == [waits]
    assert parts.sent == [other, skipped]


def test_a_follower_is_not_parked_before_the_first_message_is_decided(parts):
    """Else a release elsewhere could grant it while the first is on its way to a slot."""
    requests = [parts.message("early", "a") for _ in range(3)]
    for request in requests:
        parts.dispatcher(request)
    assert parts.agent.parked() == []
    take(parts, requests[0])
    assert parts.agent.parked() == requests[1:]


def test_a_refused_task_is_parked_before_its_followers(parts):
    """Order of arrival, also if the first finds its lock busy."""
    requests = [parts.message("early", "a") for _ in range(3)]
    for request in requests:
        parts.dispatcher(request)
    requests[0].on_accepted(4711, 0.0)
    turn(requests[0])
    assert parts.agent.parked() == requests


def test_a_message_that_arrives_during_a_parking_is_parked_after_it(parts):
    """It is not sent to the pool, where it could overtake."""
    first, second, third = (parts.message("early", "a") for _ in range(3))
    parts.dispatcher(first)
    first.on_accepted(4711, 0.0)
    turn(first)
    parts.dispatcher(second)
    assert parts.agent.parked() == [first, second]
    parts.dispatcher.blocked.parked(first, "", 1)
    parts.dispatcher.blocked.parked(second, "", 2)
    parts.dispatcher(third)
    assert parts.sent == [first, third]


def test_nothing_is_kept_of_a_lock_when_all_is_over(parts):
    """The table of flights does not grow."""
    requests = [parts.message("early", "a") for _ in range(3)]
    for request in requests:
        parts.dispatcher(request)
    take(parts, requests[0])
    end(requests[0])
    for request in requests[1:]:
        parts.dispatcher.blocked.parked(request, "", 1)
    assert parts.dispatcher.counts()["in_flight"] == {}
    assert parts.dispatcher.in_flight.by_token == {}


def test_a_limit_of_two_lets_two_into_the_pool(parts):
    """The third is parked."""
    requests = [parts.message("two", "a") for _ in range(3)]
    for request in requests:
        parts.dispatcher(request)
    for request in requests[:2]:
        take(parts, request)
    assert parts.sent == requests[:2]
    assert parts.agent.parked() == [requests[2]]


def test_a_policy_that_does_not_wait_is_decided_in_the_pool(parts):
    """lock_on_conflict="fail": each goes to the pool, and is refused there."""
    requests = [parts.message("fails", "a") for _ in range(2)]
    for request in requests:
        parts.dispatcher(request)
    assert parts.sent == requests


def test_messages_behind_a_task_that_waits_in_its_slot_are_parked(parts):
    """They would count as prefetched until its wait ends, and the worker take no other tasks."""
    waiting, followers = parts.message("early", "a"), [parts.message("early", "a") for _ in "12"]
    parts.dispatcher(waiting)
    parts.dispatcher(followers[0])
    for _ in range(3):
        parts.dispatcher.make_room()
    assert parts.agent.parked() == []  # it waits for a slot, and does not ask yet
    waiting.on_accepted(4711, 0.0)
    parts.dispatcher.make_room()
    assert parts.agent.parked() == []  # it may be asking at this moment
    parts.dispatcher.make_room()
    assert parts.agent.parked() == followers[:1]
    parts.dispatcher(followers[1])
    assert parts.agent.parked() == followers


def test_the_dispatcher_is_busy_while_something_is_in_the_pool(parts):
    """Then dead children are looked for."""
    assert not parts.dispatcher.in_flight.busy()
    request = parts.message("early", "a")
    parts.dispatcher(request)
    assert parts.dispatcher.in_flight.busy()
    end(request)
    assert not parts.dispatcher.in_flight.busy()


def test_without_a_dispatcher_a_request_is_celerys_own(app, parts):
    """Nothing breaks if a worker has no dispatcher."""
    request = parts.message("early", "a")
    request.on_accepted(4711, 0.0)
    assert parts.acked == [request.id]
    end(request)


@pytest.mark.parametrize("for_good", [False, True])
def test_a_message_that_cannot_be_sent_to_the_pool_holds_back_no_later_one(parts, for_good):
    """It fails in a slot, if it can be sent then, and takes no lock.

    A revoked task cannot be sent while the result backend is away, where its end is stored.
    """
    first, second = parts.message("early", "a"), parts.message("early", "a")
    send = first.execute_using_pool

    def fail(_pool):
        first.execute_using_pool = fail_always if for_good else send
        raise RuntimeError

    first.execute_using_pool = fail
    if for_good:
        with pytest.raises(RuntimeError):
            parts.dispatcher(first)
    else:
        parts.dispatcher(first)
        end(first)
    parts.dispatcher(second)
    assert second.stage is Stage.IN_POOL


@pytest.mark.parametrize("task", ["early", "pair"])
def test_a_delivery_that_cannot_be_sent_to_the_pool_holds_back_no_later_message(parts, task):
    """It is returned, and delivered again."""
    request, later = parts.message(task, "a", "b"), parts.message(task, "a", "b")
    delivery = Delivery("k:a", "token.0", 7, b"")
    request.execute_using_pool = fail_always
    with pytest.raises(RuntimeError):
        parts.dispatcher.deliveries.deliver(delivery, request)
    parts.dispatcher.deliveries.undelivered(delivery)
    parts.dispatcher(later)
    assert later.stage is Stage.IN_POOL

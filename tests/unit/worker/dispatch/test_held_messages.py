"""Messages that arrive while Redis does not answer."""

from __future__ import annotations

import threading

from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.worker.dispatch.wait_for_redis import WaitForRedis
from celery_singleton_lock.worker.message_stage import Stage
from support.dispatcher_fakes import (
    deliver,
    fail_always,
    hold_lock,
    take,
    turn,
)


def test_while_redis_is_down_messages_are_held_and_the_window_grows(parts):
    """One more may be unacknowledged for each; when Redis is back they go on, in order."""
    parts.dispatcher.backend_down()
    requests = [parts.message("early", key) for key in "abc"]
    for request in requests:
        parts.dispatcher(request)
    assert parts.sent == []
    assert parts.prefetch == [1, 1, 1]
    parts.dispatcher.backend_up()
    assert parts.sent == requests
    assert sum(parts.prefetch) == 0


def test_messages_that_redis_does_not_store_keep_no_others_from_the_worker(parts):
    """The broker may send one more for each, as long as it is not stored."""
    hold_lock(parts)
    requests = [parts.message("early", "a") for _ in range(3)]
    for request in requests:
        parts.dispatcher(request)
    parts.dispatcher.make_room()
    assert parts.prefetch == []  # Redis answers most of them at once
    parts.dispatcher.make_room()
    assert parts.prefetch == [1, 1, 1]
    parts.dispatcher.blocked.parked(requests[0], "", 1)
    parts.dispatcher.make_room()
    assert sum(parts.prefetch) == 2
    for request in requests[1:]:
        parts.dispatcher.blocked.parked(request, "", 1)
    parts.dispatcher.make_room()
    assert sum(parts.prefetch) == 0


def test_while_redis_is_down_a_task_that_may_run_unlocked_does(parts):
    """lock_on_backend_error="run" and "fail" are decided in the pool."""
    parts.dispatcher.backend_down()
    requests = [parts.message("runs", "a") for _ in range(2)]
    for request in requests:
        parts.dispatcher(request)
    assert parts.sent == requests


def test_a_message_that_arrives_during_an_outage_is_held_with_its_followers(parts):
    """They go on in the order of arrival when Redis is back."""
    requests = [parts.message("early", "a") for _ in range(3)]
    for request in requests:
        parts.dispatcher(request)
    requests[0].on_accepted(4711, 0.0)
    turn(requests[0], Outcome.UNAVAILABLE)
    assert parts.agent.parked() == []
    assert "backend_failed" in parts.agent.names()
    assert parts.dispatcher.held._unanswered._suspended == requests
    assert parts.acked == []


def test_a_task_in_the_pool_at_the_start_of_an_outage_stays_first(parts):
    """The agent notices the outage before the child: arrival decides, not who is held first."""
    first, second, third = (parts.message("late", "a", n) for n in range(3))
    parts.dispatcher(first)
    parts.dispatcher.backend_down()
    parts.dispatcher(second)
    first.on_accepted(4711, 0.0)
    turn(first, Outcome.UNAVAILABLE)
    parts.dispatcher(third)
    assert parts.dispatcher.held._unanswered._suspended == [second, first, third]
    parts.dispatcher.backend_up()
    assert parts.sent == [first, first]
    take(parts, first)
    assert parts.agent.parked() == [second, third]


def test_what_is_held_is_either_sent_on_or_still_held_when_a_mode_changes_meanwhile(parts):
    """Whether a lock is kept is asked once: another thread may hear of a switch any moment."""
    outage, kept = WaitForRedis(parts.prefetch.append), iter([False, True])
    outage.begin(request := parts.message("late", "a"))
    assert outage.free(lambda _: next(kept)) == [request]
    assert len(outage) == 0
    assert sum(parts.prefetch) == 0


def test_a_message_that_a_pool_thread_holds_while_redis_comes_back_is_sent_on(parts):
    """The thread and the main loop meet at any moment: nothing stays behind until a next outage."""
    outage, ended, threads = WaitForRedis(parts.prefetch.append), [], []

    class Meeting(list):
        def append(self, request):
            threads.append(threading.Thread(target=lambda: ended.extend(outage.end())))
            threads[0].start()
            threads[0].join(0.1)
            super().append(request)

    outage._suspended = Meeting()
    outage.begin(request := parts.message("late", "a"))
    threads[0].join()
    assert ended == [request]
    assert not outage.suspend(parts.message("late", "a"))
    assert len(outage) == 0
    assert sum(parts.prefetch) == 0


def test_why_locked_tasks_wait_is_logged_once(parts, caplog):
    """By whoever notices first."""
    requests = [parts.message("late", key) for key in "ab"]
    for request in requests:
        parts.dispatcher(request)
        request.on_accepted(4711, 0.0)
    for request in requests:
        turn(request, Outcome.UNAVAILABLE)
    assert [record.message for record in caplog.records] == [
        "celery-singleton-lock: held Locked tasks wait."
    ]


def test_a_message_that_cannot_be_dispatched_loses_no_message_behind_it(parts, caplog):
    """Redis answers again, and the pool refuses the first of those that waited."""
    requests = [parts.message("late", key) for key in "abc"]
    parts.dispatcher.backend_down()
    for request in requests:
        parts.dispatcher(request)
    requests[0].execute_using_pool = fail_always
    parts.dispatcher.backend_up()
    assert [request for request in parts.sent if request is not requests[0]] == requests[1:]
    assert "failed in the worker's main loop" in caplog.text


def test_a_message_that_another_worker_got_is_not_held_for_redis_here(parts):
    """It would run a second time after a long outage."""
    request = deliver(parts)
    request.on_accepted(4711, 0.0)
    parts.dispatcher.deliveries.withdraw(request)
    turn(request, Outcome.UNAVAILABLE)
    parts.dispatcher.backend_up()
    assert parts.sent == [request]
    assert request.stage is Stage.ENDED

"""What the pool reports: acceptance, end, failure of a process."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import SoftTimeLimitExceeded, Terminated, WorkerLostError
from billiard.pool import MaybeEncodingError
from celery.signals import task_revoked

from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.events import Listener, TaskFollowed
from celery_singleton_lock.worker.agent_commands import Release
from celery_singleton_lock.worker.execution.follow import FirstFailed
from celery_singleton_lock.worker.lock_header import (
    REQUEUED,
    LockHeader,
    notice_of_end,
)
from celery_singleton_lock.worker.message_stage import Stage
from celery_singleton_lock.worker.not_started import NotStarted
from celery_singleton_lock.worker.request import bare
from support.dispatcher_fakes import (
    deliver,
    die,
    end,
    take,
    turn,
)


@pytest.mark.parametrize(("notice_first", "held"), [(False, [False, False]), (True, [True, True])])
def test_a_lock_that_was_taken_before_its_task_was_accepted_can_be_lost(parts, notice_first, held):
    """Child and pool report by two pipes: if the notice came first, the lock is known to be held.

    Else its first renewal would take a lock that is gone for one that is not taken yet, and the
    task would neither be told nor interrupted.
    """
    request = parts.message("pair", "a", "b")
    parts.dispatcher(request)
    if notice_first:
        parts.dispatcher.pool_callbacks.on_notice(request.lock_header.token)
    request.on_accepted(4711, 0.0)
    assert [how["held"] for name, _, how in parts.agent.calls if name == "watch_later"] == held


def test_an_early_ack_waits_for_the_lock(parts):
    """Accepted is not acknowledged: a blocked task would be lost with its worker."""
    request = parts.message("early", "a")
    parts.dispatcher(request)
    request.on_accepted(4711, 0.0)
    assert parts.acked == []
    parts.dispatcher.pool_callbacks.on_notice(request.lock_header.token)
    assert parts.acked == [request.id]


def test_an_early_ack_that_did_not_start_waits_for_redis(parts):
    """It is acknowledged only when the agent says that it is parked."""
    request = parts.message("early", "a")
    parts.dispatcher(request)
    request.on_accepted(4711, 0.0)
    turn(request)
    assert parts.acked == []
    parts.dispatcher.blocked.parked(request, "holder", 1)
    assert parts.acked == [request.id]


def test_a_lost_notice_is_made_up_for_by_the_end(parts):
    """The pipe was full: the task's end acknowledges."""
    request = parts.message("early", "a")
    parts.dispatcher(request)
    request.on_accepted(4711, 0.0)
    end(request)
    assert parts.acked == [request.id]


def test_a_late_ack_comes_with_the_end(parts):
    """acks_late: neither acceptance nor the lock acknowledges."""
    request = parts.message("late", "a")
    parts.dispatcher(request)
    take(parts, request)
    assert parts.acked == []
    end(request)
    assert parts.acked == [request.id]


def test_the_lease_is_watched_from_acceptance_to_the_end(parts):
    """Watch, confirm, forget."""
    request = parts.message("early", "a")
    parts.dispatcher(request)
    take(parts, request)
    end(request)
    assert parts.agent.names() == ["watch_later", "confirm", "forget"]


@pytest.mark.parametrize("error", [WorkerLostError("gone"), Terminated(9)])
def test_the_agent_releases_for_a_dead_child(parts, error):
    """With its pid, so that it does so only once the process is gone."""
    request = parts.message("early", "a")
    parts.dispatcher(request)
    take(parts, request)
    die(request, error)
    [release] = parts.agent.commands(Release)
    assert (release.lock_header, release.ending, release.pid) == (
        request.lock_header,
        Ending.FINAL,
        4711,
    )


@pytest.mark.parametrize("error", [WorkerLostError("gone"), Terminated(9)])
def test_a_preempted_task_that_was_killed_ends_as_revoked_once(parts, error, caplog):
    """Its monitors and its log say so once, and its message is acknowledged."""
    caplog.set_level("INFO")
    request, told = parts.message("late", "a"), []
    parts.dispatcher(request)
    take(parts, request)
    request.preempted_by = "newer/0/0"
    with listening(task_revoked, lambda **sent: told.append(sent["terminated"])):
        die(request, error)
    assert (told, parts.acked) == ([True], [request.id])
    assert caplog.text.count("was preempted: Task newer is newer") == 1
    assert len(parts.agent.commands(Release)) == 1


@pytest.mark.parametrize("ends", [end, lambda request: die(request, FirstFailed("KeyError(7)"))])
def test_an_event_says_that_a_duplicate_has_the_result_of_the_first_task(parts, ends):
    request, heard = parts.message("early", "a"), []
    parts.notifier.observers.add(Listener(heard.append, (TaskFollowed,)))
    delivery = Delivery("k:a", "token.0", 7, b"", "following", by="first")
    parts.dispatcher.deliveries.deliver(delivery, request)
    request.on_accepted(4711, 0.0)
    ends(request)
    assert heard == [TaskFollowed("k:a", "early", request.id, of="first")]


@contextmanager
def listening(signal, receiver):
    signal.connect(receiver, weak=False)
    yield
    signal.disconnect(receiver)


def test_a_notice_with_an_unknown_token_is_ignored(parts):
    """A child that was flushed may still announce."""
    parts.dispatcher.pool_callbacks.on_notice("unknown")
    assert parts.agent.calls == []


def test_a_child_that_could_not_release_has_the_agent_do_it(parts):
    """Its process lives, so nobody waits for its end."""
    header = LockHeader("a", "t.0", "id/1/0", "task", "w")
    parts.dispatcher.pool_callbacks.on_notice(notice_of_end(header, Ending.FINAL))
    assert parts.agent.calls == [("put", (Release(header, Ending.FINAL),), {})]


@pytest.mark.parametrize("task", ["early", "pair"])
def test_a_soft_time_limit_at_any_moment_leaves_no_lock_held(parts, task):
    """It may strike before the child knows that it has the lock, so the main process releases."""
    request = parts.message(task, "a")
    parts.dispatcher(request)
    request.on_accepted(4711, 0.0)
    die(request, SoftTimeLimitExceeded())
    (release,) = parts.agent.commands(Release)
    assert (release.lock_header, release.ending) == (request.lock_header, Ending.FINAL)
    assert release.pid is None  # its process lives


class _CannotBePickled(BaseException):
    """Such as FunctionTimedOut of func_timeout, which refers to a decorated function."""


@pytest.mark.parametrize("task", ["early", "pair"])
def test_an_error_that_its_process_could_not_report_leaves_no_lock_held(parts, task):
    """Its process leaves the release to the worker, and billiard reports another error instead."""
    request = parts.message(task, "a")
    parts.dispatcher(request)
    request.on_accepted(4711, 0.0)
    die(request, MaybeEncodingError("cannot pickle it", _CannotBePickled()))
    (release,) = parts.agent.commands(Release)
    assert (release.lock_header, release.ending) == (request.lock_header, Ending.FINAL)
    assert release.pid is None


def test_refused_for_a_full_queue_it_fails_in_the_pool(parts):
    """LockQueueFull travels in the header."""
    first, second = parts.message("early", "a"), parts.message("early", "a")
    parts.dispatcher(first)
    take(parts, first)
    parts.dispatcher(second)
    parts.dispatcher.blocked.refused(second, "as many wait")
    assert parts.sent == [first, second]
    assert type(second.lock_header.error).__name__ == "LockQueueFull"


def test_a_task_that_is_refused_before_its_thread_goes_on_fails_in_a_slot(parts):
    """The agent is another thread. What counts as ended is not sent to a pool of threads."""
    parts.agent.put = lambda command: parts.dispatcher.blocked.refused(
        command.request, "as many wait"
    )
    request = parts.message("early", "a")
    parts.dispatcher(request)
    request.on_accepted(4711, 0.0)
    turn(request)
    assert type(request.lock_header.error).__name__ == "LockQueueFull"
    assert parts.sent == [request, request]
    assert request.stage is Stage.IN_POOL


def test_a_requeued_task_that_has_waited_too_long_fails_in_a_slot(parts):
    parts.place.sync(1000.0, 0.0, 0.0)
    request = parts.message("requeues", "a", **{REQUEUED: [3, 1]})
    parts.dispatcher(request)
    request.on_accepted(4711, 0.0)
    turned = SimpleNamespace(exception=NotStarted(Outcome.REQUEUE, "held"), traceback="")
    request.on_success((1, turned, 0.1))
    assert type(request.lock_header.error).__name__ == "LockWaitTimeout"
    assert parts.sent == [request, request]
    assert request.stage is Stage.IN_POOL


def test_copies_of_one_message_go_back_to_the_broker_as_one(parts):
    """Each restored delivery added a message that was requeued for ever, a hundred in the end."""

    def held_back(at):
        request = parts.message("requeues", "a", request_id="x", **{REQUEUED: [2, at]})
        parts.dispatcher(request)
        request.on_accepted(4711, 0.0)
        turn(request, Outcome.REQUEUE)
        return request

    at = 1_000_000
    first, *copies = [held_back(at) for _ in range(3)]
    another_call = held_back(at + 1)
    requeues, requeued = parts.dispatcher.requeues, parts.dispatcher.blocked.requeued
    held = requeues.copies_of(first)
    published = held_back(at)  # it arrives before the first one is acknowledged
    requeued(held)
    assert parts.acked == ["x"] * 3
    assert [each.stage for each in copies] == [Stage.ENDED] * 2
    assert requeues.copies_of(first) == []
    requeued(held)
    assert parts.acked == ["x"] * 3
    assert requeues.copies_of(published) == [published], "it is the only one"
    assert requeues.copies_of(another_call) == [another_call]
    assert sum(parts.prefetch) == 2


def test_calls_with_one_task_id_that_came_before_redis_answered_all_go_back(parts, monkeypatch):
    """A worker that starts while Redis is away does not know the order in which messages came."""
    monkeypatch.setattr(parts.place, "next_place", lambda: 0)
    calls = [parts.message("requeues", "a", request_id="x") for _ in range(2)]
    for each in calls:
        parts.dispatcher(each)
        each.on_accepted(4711, 0.0)
        turn(each, Outcome.REQUEUE)
    parts.dispatcher.blocked.requeued(parts.dispatcher.requeues.copies_of(calls[0]))
    assert parts.acked == ["x"]
    assert parts.dispatcher.requeues.copies_of(calls[1]) == [calls[1]]


def test_a_task_that_is_sent_to_the_pool_again_counts_as_not_accepted(parts):
    """Redis was away when it asked for its lock: a lost connection gives it back."""
    request = deliver(parts, "late")
    request.on_accepted(4711, 0.0)
    turn(request, Outcome.UNAVAILABLE)
    parts.dispatcher.backend_up()
    assert parts.sent == [request, request]
    parts.dispatcher.abandon(unless_dispatched=False)
    assert request.stage is Stage.GIVEN_BACK
    assert parts.agent.commands(Release)


def test_a_reject_with_requeue_is_no_final_end(parts):
    """T36: what comes back keeps its body."""
    request = parts.message("late", "a")
    parts.dispatcher(request)
    assert request.ending() is Ending.AGAIN
    request.reject(requeue=True)
    assert request.ending() is Ending.AGAIN
    other = parts.message("late", "b")
    parts.dispatcher(other)
    other.reject(requeue=False)
    assert other.ending() is Ending.REJECT


def test_threads_wrap_their_errors():
    """The error itself counts."""
    error = ValueError("x")
    assert bare(error) is error
    wrapped = ExceptionWithTraceback(error, "")
    assert bare(wrapped) is error


def accepted_with_events(parts):
    """Return a message that a thread has accepted, and the list of its Celery events."""
    request, events = parts.message("early", "a"), []
    request._eventer = SimpleNamespace(
        enabled=True, send=lambda event, /, **fields: events.append(event)
    )
    parts.dispatcher(request)
    request.on_accepted(4711, 0.0)
    return request, events


def test_a_task_whose_end_overtakes_its_notice_starts_once_for_monitors(parts):
    """In a pool of threads the thread reports the end, and the main loop reads the notice."""
    request, events = accepted_with_events(parts)
    request.decided()  # as on_success() does before all else
    parts.dispatcher.pool_callbacks.on_notice(request.lock_header.token)
    assert events == ["task-started"]


@pytest.mark.parametrize("name", ["early", "late"])
def test_the_next_task_need_not_wait_for_the_acknowledgement_of_the_last_one(parts, name):
    """Its slot would be idle for a round trip to the broker. All else has happened by then."""
    parts.waits_for_slot = True
    request = parts.message(name, 1)
    parts.dispatcher(request)
    request.on_accepted(7, 0.0)
    request.on_success((0, 1, 0.1))
    assert parts.acked == []
    assert (request.stage, request.ending()) == (Stage.ENDED, Ending.FINAL)
    assert request.acknowledged
    for call in parts.later:
        call()
    assert parts.acked == [request.id]


def test_a_task_that_ends_while_it_is_acknowledged_has_started_before_for_monitors(parts):
    """In a pool of threads. A monitor would show a task that was blocked as started forever."""
    request, events = accepted_with_events(parts)
    request._on_ack = lambda *_: request.send_event("task-succeeded")
    parts.dispatcher.pool_callbacks.on_notice(request.lock_header.token)
    assert events == ["task-started", "task-succeeded"]


def test_a_task_whose_greenlet_is_cancelled_is_not_acknowledged_and_runs_again(parts):
    """Celery reports a killed greenlet as a success, before it notes that it has cancelled it."""
    request = deliver(parts, "late")
    take(parts, request)
    pool = SimpleNamespace(terminate_job=lambda *_: request.on_success((False, None, None)))
    request._announce_cancelled = lambda **_: None
    request.cancel(pool)
    assert not request.acknowledged
    assert [command.ending for command in parts.agent.commands(Release)] == [Ending.AGAIN]
    assert request.stage is Stage.ENDED

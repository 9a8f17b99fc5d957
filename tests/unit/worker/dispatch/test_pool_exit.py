"""What happens to messages in the pool if a connection is lost or the worker stops."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from celery.concurrency.thread import ApplyResult

from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.worker.agent_commands import Release
from celery_singleton_lock.worker.message_stage import Stage
from support.dispatcher_fakes import (
    deliver,
    deliver_as,
    end,
    hold_lock,
    take,
    turn,
)


def test_messages_of_a_lost_connection_leave_the_new_prefetch_count_alone(parts):
    """Celery starts with a new count, and the old messages are not counted in it."""
    hold_lock(parts)
    old, new = parts.message("early", "a"), parts.message("early", "a")
    parts.dispatcher(old)
    for _ in range(2):
        parts.dispatcher.make_room()
    parts.prefetch.clear()
    parts.dispatcher.abandon(unless_dispatched=False)
    parts.dispatcher.make_room()
    assert parts.prefetch == []
    parts.dispatcher(new)
    for _ in range(2):
        parts.dispatcher.make_room()
    assert parts.prefetch == [1]
    parts.dispatcher.blocked.parked(old, "", 1)
    parts.dispatcher.make_room()
    assert parts.prefetch == [1]


def test_connection_loss_gives_back_what_the_pool_has_flushed(parts):
    """Delivered messages are released to come again; those of the broker come by themselves."""
    own, delivered = parts.message("early", "a"), deliver(parts, key="b")
    parts.dispatcher(own)
    follower = parts.message("early", "a")
    parts.dispatcher(follower)
    parts.dispatcher.abandon(unless_dispatched=False)
    released = [(each.lock_header.name, each.ending) for each in parts.agent.commands(Release)]
    assert released == [("k:b", Ending.RETURN)]
    assert parts.dispatcher.in_flight.by_token == {}
    assert parts.agent.parked() == []
    assert delivered.stage is Stage.GIVEN_BACK


def test_connection_loss_takes_no_lock_from_a_task_with_several_that_may_have_begun(parts):
    """Its child may have claimed the last one unheard: then it keeps all."""
    delivered = deliver(parts)
    here = Part(delivered.lock_header.name, delivered.lock_header.token)
    locks = (Part("k:0", new_token()), here, Part("k:z", new_token()))
    delivered.lock_header = delivered.lock_header._replace(lock_set=LockSet(locks, at=1))
    parts.dispatcher.abandon(unless_dispatched=False)
    assert [each.ending for each in parts.agent.commands(Release)] == [Ending.RETURN]


def test_what_a_child_has_begun_unheard_keeps_its_lock_over_a_connection_loss(parts):
    """It was given back unless it had begun; its lease is renewed if the store still knows it."""
    delivered = deliver(parts)
    parts.dispatcher.abandon(unless_dispatched=False)
    delivered.on_accepted(4711, 0.0)
    watched = [more["held"] for name, _, more in parts.agent.calls if name == "watch_later"]
    assert watched == [True, False]
    assert parts.dispatcher.in_flight.has(delivered.lock_header.token)
    turn(delivered, Outcome.GONE)
    assert parts.agent.names()[-1] == "forget"
    assert parts.dispatcher.in_flight.by_token == {}


def test_what_another_worker_got_is_not_renewed_and_frees_its_slot(parts):
    delivered = deliver(parts)
    parts.dispatcher.deliveries.withdraw(delivered)
    parts.dispatcher.deliveries.withdraw(delivered)
    assert parts.agent.names().count("forget") == 1
    delivered.on_accepted(4711, 0.0)
    assert parts.agent.names().count("watch_later") == 1
    turn(delivered, Outcome.GONE)
    assert parts.dispatcher.pool_callbacks.unclaimed == 1
    assert parts.agent.parked() == []
    assert parts.dispatcher.in_flight.by_token == {}


def test_a_shutdown_gives_back_what_no_child_has_got(parts):
    """A closing prefork pool throws away what it has not written to a child."""
    unsent, written, threaded = (deliver_as(parts, key) for key in "abc")
    unsent.job = SimpleNamespace(_write_to=None)
    written.job = SimpleNamespace(_write_to="a process")
    threaded.job = object()
    parts.dispatcher.abandon(unless_dispatched=True)
    stages = [request.stage for request in (unsent, written, threaded)]
    assert stages == [Stage.GIVEN_BACK, Stage.IN_POOL, Stage.IN_POOL]


def test_a_shutdown_gives_back_what_no_thread_has_begun(parts):
    """A closing pool of threads cancels what waits; what runs ends here."""
    with ThreadPoolExecutor(1) as executor:
        begun, stop = threading.Event(), threading.Event()
        running, waiting = (deliver_as(parts, key) for key in "ab")
        running.job = ApplyResult(executor.submit(lambda: (begun.set(), stop.wait())))
        waiting.job = ApplyResult(executor.submit(stop.wait))
        begun.wait()
        parts.dispatcher.abandon(unless_dispatched=True)
        stop.set()
        waiting.job.wait(5)
    assert waiting.job.f.cancelled()  # else a thread might begin it before the pool closes
    assert [running.stage, waiting.stage] == [Stage.IN_POOL, Stage.GIVEN_BACK]
    assert [each.lock_header.name for each in parts.agent.commands(Release)] == ["k:b"]


def test_the_pool_reports_about_a_task_that_a_child_has_received_before_the_pool_was_flushed(parts):
    """Celery discards each job whose acceptance it has not read. The child runs it nevertheless."""
    unsent, written, announced = (parts.message("early", key) for key in "abc")
    cache = {}
    for number, request in enumerate((unsent, written, announced)):
        parts.dispatcher(request)
        request.job = SimpleNamespace(_cache=cache, _job=number, _write_to=number or None)
    parts.dispatcher.pool_callbacks.on_notice(announced.lock_header.token)
    jobs = [written.job, announced.job]
    parts.dispatcher.abandon(unless_dispatched=False)
    assert list(cache.values()) == jobs
    for request in (written, announced):
        request.on_accepted(4711, 0.0)
    assert [request.stage for request in (written, announced)] == [Stage.ACCEPTED, Stage.RUNNING]
    assert parts.agent.names().count("watch_later") == len(jobs)
    for request in (written, announced):
        end(request)
    assert parts.dispatcher.in_flight.by_token == {}
    assert unsent.job is None


def claim_unanswered(parts, task="early"):
    """Deliver a message; Redis does not answer its claim, which may have deleted it there."""
    request = deliver(parts, task)
    request.on_accepted(4711, 0.0)
    parts.dispatcher.backend_down()
    turn(request, Outcome.UNAVAILABLE)
    return request


def published(parts):
    return [args[0] for name, args, _ in parts.agent.calls if name == "publish_at_exit"]


@pytest.mark.parametrize("closing", [True, False])
def test_a_message_of_which_redis_may_have_no_copy_does_not_wait_in_the_pool(parts, closing):
    """It would be lost if the pool were flushed, or closed, before it has a free slot."""
    request = claim_unanswered(parts)
    parts.dispatcher.backend_up()
    assert parts.sent == [request]  # once: before the claim
    assert parts.agent.parked() == [request]
    parts.dispatcher.abandon(unless_dispatched=closing)
    assert published(parts) == ([request] if closing else [])


def test_a_message_that_redis_has_goes_to_the_pool_again(parts):
    """Acknowledged late: its claim deletes nothing."""
    request = claim_unanswered(parts, "late")
    parts.dispatcher.backend_up()
    assert parts.sent == [request, request]
    assert parts.agent.parked() == []


@pytest.mark.parametrize("closing", [True, False])
def test_a_task_that_runs_again_and_whose_lock_redis_refuses_is_not_lost(parts, closing):
    """It came from the broker, which has its acknowledgement. It ran, and raised RetryLater."""
    request = parts.message("early", "a")
    parts.dispatcher(request)
    take(parts, request)
    turn(request, Outcome.LATER)
    parts.dispatcher.blocked.hold_refused(request, "WRONGTYPE")
    parts.dispatcher.abandon(unless_dispatched=closing)
    assert parts.agent.parked() == [request, request]
    assert published(parts) == ([request] if closing else [])


def test_a_message_whose_claim_is_unanswered_while_the_pool_ends_is_sent_to_the_broker(parts):
    """Redis falls silent during a warm shutdown: the task that asked it then is not lost."""
    request = deliver(parts)
    request.on_accepted(4711, 0.0)
    parts.dispatcher.abandon(unless_dispatched=True)
    parts.dispatcher.backend_down()
    turn(request, Outcome.UNAVAILABLE)
    own = parts.message("early", "b")  # the broker delivers this one again by itself
    parts.dispatcher(own)
    assert published(parts) == []
    parts.dispatcher.publish_at_exit()
    parts.dispatcher.publish_at_exit()
    assert published(parts) == [request]


def test_a_message_that_is_parked_again_in_an_outage_of_both_is_sent_to_the_broker(parts):
    """The connection to the broker is lost, then the worker must stop; Redis is silent."""
    request = claim_unanswered(parts)
    parts.dispatcher.abandon(unless_dispatched=False)
    assert (parts.agent.parked(), published(parts)) == ([request], [])
    parts.dispatcher.abandon(unless_dispatched=True)
    assert published(parts) == [request]


def test_a_connection_that_is_lost_at_the_acknowledgement_leaves_the_rest_in_order(parts, caplog):
    """Celery sets its prefetch count behind it, on a channel that may be closed by then."""

    def lost(*_):
        raise ConnectionResetError("the broker went away")

    request = parts.message("late", "a")
    request._connection_errors, request._on_ack = (ConnectionError,), lost
    parts.dispatcher(request)
    take(parts, request)
    end(request)
    assert "may be delivered again" in caplog.text
    assert not parts.dispatcher.counts()["in_flight"]


def test_a_parked_message_is_told_though_celery_cannot_raise_its_prefetch_count(parts, caplog):
    """With eventlet and gevent another greenlet reads from the connection that Celery uses."""

    def second_reader(*_):
        request._message._state = "ACK"
        raise RuntimeError("Second simultaneous read on fileno 8 detected")

    caplog.set_level("INFO")
    hold_lock(parts)
    request = parts.message("early", "a")
    request._on_ack = second_reader
    parts.dispatcher(request)
    parts.dispatcher.blocked.parked(request, "t[id] on w", 1)
    assert request.acknowledged
    assert "is parked: 1st" in caplog.text
    assert "Second simultaneous read" in caplog.text


def test_an_acknowledgement_that_failed_itself_is_an_error(parts):
    request = parts.message("early", "a")
    request._on_ack = request._on_reject = lambda *_: 1 / 0
    for tell in (request.acknowledge, request.reject):
        with pytest.raises(ZeroDivisionError):
            tell()
    assert not request.acknowledged


def test_a_thread_that_requeues_while_the_connection_is_lost_keeps_no_message_here(parts):
    """The broker delivers all of them again; what is still held here would run twice."""
    parts.dispatcher.backend_down()
    waiting = parts.message("early", "w")
    parts.dispatcher(waiting)
    parts.dispatcher.held._unanswered.down = False
    held, late = (parts.message("requeues", key) for key in "ab")
    for request in (held, late):
        parts.dispatcher(request)
        request.on_accepted(4711, 0.0)
    turn(held, Outcome.REQUEUE)
    move = held.move

    def meanwhile(to):
        turn(late, Outcome.REQUEUE)
        return move(to)

    held.move = meanwhile
    parts.dispatcher.abandon(unless_dispatched=False)
    assert not parts.dispatcher.requeues.copies_of(held)
    assert waiting.stage is Stage.ENDED


def test_a_delivery_that_no_caller_can_send_returns_to_its_place(parts):
    """A revoked task while the result backend is away; its lock is not renewed any more."""
    request = deliver(parts)
    parts.dispatcher.not_sent(request)
    (release,) = parts.agent.commands(Release)
    assert (release.lock_header.token, release.ending) == ("token.0", Ending.RETURN)
    assert "forget" in parts.agent.names()
    assert not parts.dispatcher.in_flight.busy()


def test_what_a_thread_may_be_ending_is_left_to_it(parts):
    """A worker that stops gives it back, unless the thread has claimed it."""
    late = deliver(parts, verdict="overdue")
    late.job = SimpleNamespace(f=Future())
    parts.dispatcher.abandon(unless_dispatched=True)
    (release,) = parts.agent.commands(Release)
    assert (release.lock_header.token, release.ending) == ("token.0", Ending.RETURN)


def test_the_lock_of_what_another_process_ends_is_not_released(parts):
    late = deliver(parts, verdict="overdue")
    late.on_accepted(4711, 0.0)
    turn(late, Outcome.DONE)
    assert not parts.agent.commands(Release)
    assert not parts.dispatcher.in_flight.busy()
    assert late.stage is Stage.ENDED

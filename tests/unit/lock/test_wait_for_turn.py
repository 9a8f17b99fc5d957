"""What a caller does while it waits for the time at which a rate allows the next start."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Owner, Reply, Verdict
from celery_singleton_lock.lock.wait_for_turn import LockWait, acquire_plan
from support.agent_fakes import ManualClock

WAITING = Reply(Verdict.WAITING, rank=1, next_look=0.5, waits_for=WaitsFor.RATE)


def waits(*replies):
    """Return the waits of a caller that gets these replies, none of which wakes it."""
    wait = LockWait(ManualClock(), "token", blocking=True, timeout=None)
    plan, left, found = acquire_plan(wait, Owner("token", "1/0/0"), Claim("lock")), [*replies], []
    request = next(plan)
    while True:
        if hasattr(request, "seconds"):
            found.append((request.call is not None, request.seconds))
            request = plan.send(None)
        elif not left:
            return found
        else:
            request = plan.send(left.pop(0))


def test_the_last_tenth_of_a_second_before_a_start_is_spent_outside_redis():
    """Redis ends a blocking read up to that late: a loop at 10/s had five starts in a second."""
    (in_redis, blocked), (again_in_redis, slept) = waits(WAITING)
    assert (in_redis, again_in_redis) == (True, False)
    assert blocked == pytest.approx(0.402)
    assert slept == pytest.approx(0.1)


def test_a_shorter_wait_is_spent_outside_redis_altogether():
    assert waits(WAITING._replace(next_look=0.05)) == [(False, pytest.approx(0.052))]


def test_waiters_at_a_high_rate_ask_one_after_the_other_as_the_rate_allows():
    ((_, first),) = waits(WAITING._replace(next_look=0.01))
    ((_, fourth),) = waits(WAITING._replace(next_look=0.01, rank=4))
    assert fourth - first == pytest.approx(0.03)


def test_a_wait_for_a_holder_is_spent_in_redis():
    """A release wakes it there at once."""
    assert waits(WAITING._replace(waits_for=WaitsFor.HOLDER)) == [(True, pytest.approx(0.51))]

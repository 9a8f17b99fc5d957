"""A plan is carried out in the same way by a thread and by a task."""

from __future__ import annotations

import asyncio

import pytest

from celery_singleton_lock.core.lock_steps import carry_out, carry_out_async


def in_thread(plan, do):
    return carry_out(plan, do)


def in_task(plan, do):
    async def done(wish):
        await asyncio.sleep(0)
        return do(wish)

    return asyncio.run(carry_out_async(plan, done))


@pytest.fixture(params=[in_thread, in_task])
def carried_out(request):
    return request.param


def double(wish):
    if wish < 0:
        raise ValueError(wish)
    return 2 * wish


def test_a_plan_gets_its_answers_and_returns_what_it_makes_of_them(carried_out):
    def plan():
        return (yield 1) + (yield 2)

    assert carried_out(plan(), double) == 6


def test_steps_without_requests_are_carried_out_too(carried_out):
    def plan():
        return 7
        yield

    assert carried_out(plan(), double) == 7


def test_a_plan_may_go_on_after_an_error(carried_out):
    def plan():
        try:
            yield -1
        except ValueError as error:
            return (yield 3), error.args

    assert carried_out(plan(), double) == (6, (-1,))


def test_an_error_that_a_plan_does_not_expect_is_the_callers(carried_out):
    """And what the plan does at its end is done."""
    ended = []

    def plan():
        try:
            yield -1
        finally:
            ended.append(True)

    with pytest.raises(ValueError, match="-1"):
        carried_out(plan(), double)
    assert ended == [True]


def test_what_a_plan_raises_itself_is_raised(carried_out):
    def plan():
        yield 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        carried_out(plan(), double)

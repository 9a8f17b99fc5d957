"""Limits, costs, groups and head starts."""

from __future__ import annotations

from dataclasses import replace

from celery_singleton_lock.core.model import Ending, Reservation, Verdict
from celery_singleton_lock.core.rate import packed
from support.script_model.flow import FAIR, PACED, US
from support.script_model.histories.registry import history
from support.script_model.histories.steps import costs
from support.script_model.moves import everybody_dies
from support.script_model.world import MIXED, TWO


@history
def a_limit_of_two(world):
    world.beat("w1")
    askers = [world.new_asker(TWO) for _ in range(5)]
    for asker in askers:
        if world.acquire(asker).verdict is Verdict.BLOCKED:
            world.park(asker)
    world.release(TWO, askers[1].token, worker="w1", lost=True)
    world.claim(TWO, world.receive("w1").token)
    world.advance(11.0)
    world.beat("w1")
    world.sweep()
    assert len(world.state(TWO).holders) == 2


@history
def the_lowest_declared_limit_wins_until_the_lock_is_idle(world):
    first, second, third = (world.new_asker(MIXED, attempt="", limit=limit) for limit in (3, 1, 3))
    world.acquire(first)
    assert world.acquire(second).verdict is Verdict.BLOCKED
    assert world.acquire(third).verdict is Verdict.BLOCKED
    world.release(MIXED, first.token)
    assert world.acquire(third).verdict is Verdict.GRANTED
    assert world.acquire(first).verdict is Verdict.GRANTED


@history
def limits_change_while_the_lock_is_held(world):
    """The lowest that is declared counts, for those who wait too, until the lock is idle."""
    askers = [world.new_asker(MIXED, attempt="", limit=limit) for limit in (3, 3, 3)]
    for asker in askers:
        world.acquire(asker)
    waits = [world.new_asker(MIXED, attempt="", limit=limit) for limit in (2, 3)]
    for asker in waits:
        assert world.acquire(asker, 60.0).verdict is Verdict.WAITING
    for asker in askers:
        world.release(MIXED, asker.token)
    for asker in waits:
        world.claim(MIXED, asker.token)
        world.release(MIXED, asker.token)
    for asker in askers:
        assert world.acquire(asker).verdict is Verdict.GRANTED


@history
def a_message_behind_a_group_that_has_died_waits_for_its_own_cost(world):
    """Found by reading: the rate counted the cost of nobody, 1, and granted one of 2."""
    world.close_for(FAIR, 4000.0)
    world.acquire(costs(world, "dead", 1, attempt=""), 2.0)
    message = costs(world, "alive", 2)
    world.park(message)
    world.advance(4000.0)  # nobody swept, so the line of the client that died has expired
    world.beat("w1")
    world.charge(FAIR, "nobody.0", 3)
    assert not world.state(FAIR).holders
    world.advance(5.0)
    world.beat("w1")
    world.kick(FAIR)
    assert world.receive("w1").token == message.token
    everybody_dies(world)


@history
def a_caller_that_costs_too_much_now_and_does_not_wait_holds_nobody_up(world):
    """Found by a walk: it was the next for a moment, so a cheaper waiter stayed in the queue."""
    world.acquire(costs(world, "served", 1))
    world.advance(1.0)
    world.charge(FAIR, "nobody.0", 3)
    cheap = costs(world, "served", 1)
    world.park(cheap)
    world.advance(4.0)  # room for a cost of 1
    world.beat("w1")
    assert world.acquire(costs(world, "new", 2)).verdict is Verdict.BLOCKED
    assert world.receive("w1").token == cheap.token


@history
def a_head_start_does_not_shorten_the_wait_of_a_task_that_runs_later(world):
    """Found by reading: the wait began at the place, which is before the arrival."""
    first = world.new_asker(PACED, plain=True)
    first = replace(first, claim=first.claim._replace(flow=packed((), 30 * US)))
    world.acquire(first)
    copy = world.new_asker(
        PACED, attempt=first.owner.attempt, copy=1, deadline=20.0, plain=True, worker="w1"
    )
    assert world.acquire(copy).verdict is Verdict.TWIN
    world.park(copy)
    world.release(PACED, first.token, Ending.LATER, reserve=Reservation("429", 3.0))
    assert {rec["state"] for rec in world.state(PACED).record.values()} == {"parked"}
    everybody_dies(world)


@history
def a_retry_that_costs_more_than_its_rate_has_left_keeps_its_permit(world):
    """Found by a walk: the invariant took it to cost 1, as it has no record."""
    first = costs(world, "a", 1)
    world.acquire(first)
    world.charge(FAIR, "nobody.0", 2)
    world.release(FAIR, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 25.0))
    again = costs(world, "a", 2, attempt="r/1/0")
    assert world.acquire(again).verdict is Verdict.BLOCKED
    world.advance(5.0)
    assert world.acquire(again).verdict is Verdict.GRANTED

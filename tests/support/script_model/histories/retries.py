"""Retries that keep their permit."""

from __future__ import annotations

from celery_singleton_lock.core.model import Ending, Reservation, Verdict
from support.script_model.histories.registry import history
from support.script_model.world import MIXED, ONE, TWO


@history
def a_retry_keeps_its_permit_until_the_next_attempt_comes(world):
    world.beat("w1")
    first, waits = world.new_asker(ONE, attempt="r/0/0"), world.new_asker(ONE)
    world.acquire(first)
    world.park(waits)
    world.release(
        ONE, first.token, Ending.KEEP, worker="w1", reserve=Reservation("r/1/0", 25.0), lost=True
    )
    for _ in range(8):
        world.advance(3.0)
        world.beat("w1")
        world.sweep()
        assert world.acquire(world.new_asker(ONE)).verdict is Verdict.BLOCKED
    (holder,) = world.store.inspect(ONE).holders
    assert (holder.state, holder.task_id, holder.task) == ("reserved", "r", "app.task")
    again = world.new_asker(ONE, attempt="r/1/0")
    assert world.acquire(again).verdict is Verdict.GRANTED
    world.release(ONE, again.token, worker="w1")
    assert world.receive("w1").token == waits.token


@history
def a_reservation_lapses_and_the_next_goes_on(world):
    world.beat("w1")
    first, waits = world.new_asker(ONE, attempt="r/0/0"), world.new_asker(ONE)
    world.acquire(first)
    world.park(waits)
    world.release(ONE, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 5.0))
    world.advance(6.0)
    world.beat("w1")
    world.sweep()
    assert world.receive("w1").token == waits.token
    assert world.acquire(world.new_asker(ONE, attempt="r/1/0")).verdict is Verdict.BLOCKED


@history
def a_reservation_is_given_back_when_its_task_is_revoked(world):
    world.beat("w1")
    first, waits = world.new_asker(ONE, attempt="r/0/0"), world.new_asker(ONE)
    reserve = Reservation("r/1/0", 25.0)
    world.acquire(first)
    world.park(waits)
    world.release(ONE, first.token, Ending.KEEP, reserve=reserve)
    world.release(ONE, reserve.token, worker="w1", lost=True)
    assert world.receive("w1").token == waits.token


@history
def a_retry_that_is_parked_takes_its_reservation(world):
    world.beat("w1")
    first, waits = world.new_asker(ONE, attempt="r/0/0"), world.new_asker(ONE)
    world.acquire(first)
    world.park(waits)
    world.release(ONE, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 5.0))
    again = world.new_asker(ONE, attempt="r/1/0", max_waiting=1)
    assert world.park(again).verdict is Verdict.WAITING
    assert world.receive("w1").token == again.token


@history
def the_next_attempt_arrives_before_the_first_has_released(world):
    """A retry without countdown: whoever receives it is quicker than the end of the first."""
    world.beat("w1")
    for way in ("park", "wait"):
        first, waits = world.new_asker(ONE, attempt=f"{way}/0/0"), world.new_asker(ONE)
        world.acquire(first)
        world.park(waits)
        again = world.new_asker(ONE, attempt=f"{way}/1/0")
        world.park(again) if way == "park" else world.acquire(again, 20.0)
        world.release(ONE, first.token, Ending.KEEP, reserve=Reservation(f"{way}/1/0", 25.0))
        if way == "park":
            assert world.receive("w1").token == again.token
        assert world.claim(ONE, again.token).verdict is Verdict.GRANTED
        world.release(ONE, again.token, worker="w1")
        assert world.receive("w1").token == waits.token
        world.release(ONE, waits.token)


@history
def a_retry_of_a_paused_lock_keeps_no_permit_that_is_not_there(world):
    first, other = (world.new_asker(TWO, attempt=f"{name}/0/0") for name in "rs")
    world.acquire(first)
    world.acquire(other)
    world.set_limit(TWO, 1)
    world.pause(TWO)
    world.release(TWO, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 25.0), lost=True)
    world.resume(TWO)


@history
def a_retry_that_meets_a_pause_is_the_next(world):
    world.beat("w1")
    for way in ("park", "wait", "early"):
        first, waits = world.new_asker(ONE, attempt=f"{way}/0/0"), world.new_asker(ONE)
        again = world.new_asker(ONE, attempt=f"{way}/1/0", max_waiting=1)
        world.acquire(first)
        if way == "early":
            world.park(again)
        world.park(waits)
        world.pause(ONE, lost=True)
        world.release(ONE, first.token, Ending.KEEP, reserve=Reservation(f"{way}/1/0", 25.0))
        if way != "early":
            world.acquire(again, lost=True)
        if way == "park":
            world.park(again, lost=True)
        if way == "wait":
            world.acquire(again, 20.0, lost=True)
        world.resume(ONE, lost=True)
        assert again.token in world.state(ONE).holders
        world.release(ONE, again.token)
        world.release(ONE, waits.token)


@history
def a_copy_of_the_next_attempt_takes_the_reservation_once(world):
    first = world.new_asker(ONE, attempt="r/0/0")
    world.acquire(first)
    world.release(ONE, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 25.0))
    copies = [world.new_asker(ONE, attempt="r/1/0", copy=True) for _ in range(2)]
    assert world.acquire(copies[0]).verdict is Verdict.GRANTED
    assert world.acquire(copies[1]).verdict is Verdict.TWIN


@history
def a_reservation_cannot_be_claimed(world):
    first = world.new_asker(ONE, attempt="r/0/0")
    reserve = Reservation("r/1/0", 25.0)
    world.acquire(first)
    world.release(ONE, first.token, Ending.KEEP, reserve=reserve)
    assert world.claim(ONE, reserve.token).verdict is Verdict.ABSENT
    world.reset(ONE)
    assert world.acquire(world.new_asker(ONE)).verdict is Verdict.GRANTED


@history
def a_lower_limit_ends_a_reservation(world):
    first, other = (world.new_asker(MIXED, attempt=f"{n}/0/0", limit=2) for n in "rs")
    world.acquire(first)
    world.acquire(other)
    world.release(MIXED, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 25.0))
    world.acquire(world.new_asker(MIXED, limit=1))
    again = world.new_asker(MIXED, attempt="r/1/0", limit=2)
    assert world.acquire(again).verdict is Verdict.BLOCKED


@history
def the_next_attempt_comes_and_nobody_consumes_its_queue(world):
    """Found by the state machine: it was granted, and delivered to nobody."""
    world.beat("w1")
    first, waits = world.new_asker(ONE, attempt="r/0/0"), world.new_asker(ONE)
    world.acquire(first)
    world.park(waits)
    world.release(ONE, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 25.0))
    world.park(world.new_asker(ONE, attempt="r/1/0", queue="nobody's"))
    assert world.receive("w1").token == waits.token

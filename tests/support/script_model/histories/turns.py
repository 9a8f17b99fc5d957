"""Holders and waiters without messages: turns, leases, fences."""

from __future__ import annotations

from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.lock.wait_for_turn import Step
from support.script_model.clients import Patient
from support.script_model.histories.registry import history
from support.script_model.moves import everybody_dies
from support.script_model.world import MIXED, ONE, TWO


@history
def a_crashed_holder_is_followed_by_the_waiter(world):
    first, second = world.new_asker(ONE, attempt=""), world.new_asker(ONE, attempt="")
    world.acquire(first)
    world.acquire(second, 30.0)
    world.advance(11.0)
    world.kick(ONE)
    assert world.claim(ONE, second.token).verdict is Verdict.GRANTED
    world.release(ONE, first.token)
    world.release(ONE, second.token)
    everybody_dies(world)


@history
def a_lapsed_holder_is_followed_by_a_newcomer_who_only_tries(world):
    first, second = world.new_asker(ONE, attempt=""), world.new_asker(ONE, attempt="")
    world.acquire(first)
    world.advance(11.0)
    assert world.acquire(second).verdict is Verdict.GRANTED


@history
def waiters_are_granted_in_order_and_newcomers_wait(world):
    holder, *waiters = (world.new_asker(ONE, attempt="") for _ in range(4))
    world.acquire(holder)
    for waiter in waiters:
        world.acquire(waiter, 60.0, lost=True)
        world.advance(0.001)
    world.release(ONE, holder.token, lost=True)
    for waiter in waiters:
        assert world.acquire(world.new_asker(ONE, attempt="")).verdict is Verdict.BLOCKED
        assert world.claim(ONE, waiter.token).verdict is Verdict.GRANTED
        world.release(ONE, waiter.token, lost=True)


@history
def a_stopped_holder_wakes_up_after_its_successor_began(world):
    first, second = world.new_asker(ONE, attempt=""), world.new_asker(ONE, attempt="")
    world.acquire(first)
    world.acquire(second, 60.0)
    world.advance(12.0)
    world.extend(ONE, [first.token])
    world.claim(ONE, second.token)
    world.release(ONE, first.token)
    world.extend(ONE, [first.token, second.token])
    world.claim(ONE, first.token)


@history
def dead_waiters_are_passed_by(world):
    holder, *dead = (world.new_asker(ONE, attempt="") for _ in range(4))
    world.acquire(holder)
    for waiter in dead:
        world.acquire(waiter, 2.0)
    alive = world.new_asker(ONE, attempt="")
    world.acquire(alive, 60.0)
    world.advance(3.0)
    world.release(ONE, holder.token)
    assert world.claim(ONE, alive.token).verdict is Verdict.GRANTED


@history
def cancel_and_grant_cross(world):
    holder, waiter = world.new_asker(ONE, attempt=""), world.new_asker(ONE, attempt="")
    world.acquire(holder)
    world.acquire(waiter, 60.0)
    world.release(ONE, holder.token)
    assert world.release(ONE, waiter.token, Ending.CANCEL).verdict is Verdict.GRANTED
    world.claim(ONE, waiter.token)
    assert world.release(ONE, waiter.token, Ending.CANCEL).verdict is Verdict.GRANTED
    world.release(ONE, waiter.token)


@history
def a_waiter_gives_up(world):
    holder, waiter = world.new_asker(ONE), world.new_asker(ONE)
    world.acquire(holder)
    world.acquire(waiter, 60.0)
    world.release(ONE, waiter.token, Ending.CANCEL, lost=True)
    world.release(ONE, holder.token)
    everybody_dies(world)


@history
def a_claim_of_a_waiter_whose_turn_it_is(world):
    """Found by the state machine: WAITING, and granted by the very same call."""
    parked = world.new_asker(ONE)
    world.park(parked)
    world.beat("w1")
    assert world.claim(ONE, parked.token).verdict is Verdict.GRANTED
    assert world.receive("w1") is None
    world.claim(ONE, parked.token, lost=True)


@history
def a_waiter_that_is_not_next_claims(world):
    world.beat("w1")
    holder, parked = world.new_asker(ONE), world.new_asker(ONE)
    world.acquire(holder)
    world.park(parked)
    assert world.claim(ONE, parked.token).verdict is Verdict.WAITING


@history
def fences_grow_over_idleness_and_data_loss(world):
    for pause in (0.0, 1.0, 100.0):
        for _ in range(3):
            asker = world.new_asker(ONE, attempt="")
            world.acquire(asker)
            world.release(ONE, asker.token)
        world.advance(pause)
    world.acquire(world.new_asker(ONE, attempt=""))
    world.lose_all_data()
    world.acquire(world.new_asker(ONE, attempt=""))


@history
def fences_and_places_in_one_microsecond(world):
    askers = [world.new_asker(TWO, attempt="") for _ in range(6)]
    for asker in askers:
        world.acquire(asker, 60.0)
    for asker in askers:
        world.claim(TWO, asker.token)
        world.release(TWO, asker.token)


@history
def a_place_in_the_future_is_now(world):
    """It was given by a server with another clock; whoever comes meanwhile comes later."""
    ahead = world.new_asker(ONE, place=2_000_000)
    world.acquire(ahead)
    world.release(ONE, ahead.token)


@history
def two_locks_in_one_bucket_share_nothing(world):
    """One name begins with the other, and an attempt has the same id at both."""
    world.beat("w1")
    for lock in (ONE, TWO):
        world.acquire(world.new_asker(lock, attempt="same/0/0"))
    copy = world.new_asker(ONE, attempt="same/0/0", copy=True)
    assert world.acquire(copy).verdict is Verdict.TWIN
    world.reset(TWO)


@history
def a_lapsed_holder_that_nobody_swept_ends(world):
    world.beat("w1")
    parked = world.new_asker(ONE)
    world.park(parked)
    got = world.receive("w1")
    world.claim(ONE, got.token)
    world.advance(11.0)
    assert world.release(ONE, got.token).verdict is Verdict.RELEASED  # nobody took it meanwhile
    assert not world.state(ONE).bodies


@history
def a_client_waits_in_heartbeats_until_its_own_deadline(world):
    runs = world.new_asker(ONE, lease=60.0)
    world.acquire(runs)
    patients = [Patient(world, ONE, timeout, 10.0, 1) for timeout in (7.0, 20.0, None)]
    for _ in range(25):
        for patient in patients:
            if not patient.over:
                patient.go_on()
        world.advance(1.0)
    assert [patient.step for patient in patients[:2]] == [Step.STOP, Step.STOP]
    world.release(ONE, runs.token)
    while not patients[2].over:
        patients[2].go_on()
    assert patients[2].step is Step.HAVE


@history
def nobody_sweeps_and_that_is_told(world):
    world.park(world.new_asker(ONE, deadline=2.0))
    assert world.neglected(0.001) == []
    world.advance(10.0)
    assert world.neglected(5.0) == world.neglected(1.0) == [ONE]
    assert world.neglected(60.0) == []
    world.sweep()
    assert world.neglected(1.0) == []


@history
def everybody_dies_at_the_worst_time(world):
    world.beat("w1")
    for lock in (ONE, TWO, MIXED):
        for wait in (None, 20.0):
            world.acquire(world.new_asker(lock, attempt="", lease=30.0), wait)
        world.park(world.new_asker(lock))
        world.park(world.new_asker(lock, deadline=5.0))
    everybody_dies(world)

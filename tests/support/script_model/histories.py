"""Short directed histories: defects of other systems or of this one, in a few moves each.

All invariants are checked after every step of each history. The real scripts must break none, and
each mutant must break at least one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.model import Ending, Reservation, Verdict
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.core.rate import Rate, packed
from celery_singleton_lock.lock.wait_for_turn import Step
from support.script_model.clients import Patient
from support.script_model.flow import COSTED, FAIR, PACED, US
from support.script_model.moves import everybody_dies
from support.script_model.world import LIMITS, MIXED, ONE, TWO, Asker, World

History = Callable[[World], None]
HISTORIES: dict[str, History] = {}


def history(function: History) -> History:
    HISTORIES[function.__name__] = function
    return function


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
def a_newcomer_meets_a_message_whose_worker_has_just_come(world):
    """The lock is still free, and the message adrift: who comes later may not pass it."""
    parked = world.new_asker(ONE)
    world.park(parked)
    world.beat("w1")
    world.advance(0.001)
    assert world.acquire(world.new_asker(ONE, attempt="")).verdict is Verdict.BLOCKED
    assert world.receive("w1").token == parked.token


@history
def a_message_that_arrived_before_a_recalled_one_comes_first(world):
    early = world.new_asker(ONE, place=-2000)
    world.park(world.new_asker(ONE, place=-1000))
    world.beat("w1")
    assert world.acquire(early).verdict is Verdict.GRANTED
    world.kick(ONE)
    world.release(ONE, early.token)
    assert world.receive("w1") is not None


@history
def parking_at_a_free_lock_is_granted_at_once(world):
    """Found by the state machine: a local function hid an argument of park."""
    world.beat("w1")
    world.park(world.new_asker(ONE))
    assert world.receive("w1").verdict == "granted"


@history
def a_message_is_parked_delivered_claimed_and_ends(world):
    world.beat("w1")
    holder, parked = world.new_asker(ONE), world.new_asker(ONE)
    world.acquire(holder)
    world.acquire(parked)
    world.park(parked, lost=True)
    world.park(parked)
    world.release(ONE, holder.token, worker="w1")
    got = world.receive("w1")
    world.claim(ONE, got.token, lost=True)
    world.extend(ONE, [got.token], 30.0, lost=True)
    world.release(ONE, got.token, lost=True)
    late = world.new_asker(ONE, attempt=parked.owner.attempt, copy=True)
    assert world.acquire(late).verdict is Verdict.DONE
    assert world.park(late).verdict is Verdict.DONE
    assert world.acquire(parked).verdict is Verdict.DONE
    everybody_dies(world)


@history
def a_worker_dies_with_a_grant_and_another_gets_it_under_the_next_token(world):
    world.beat("w1")
    parked, later = world.new_asker(ONE, place=-9), world.new_asker(ONE)
    world.park(parked)
    world.park(later)
    first = world.receive("w1")
    world.advance(6.0)
    world.beat("w2")
    world.kick(ONE, "w2")
    second = world.receive("w2")
    assert second.token == f"{parked.base}.1"
    world.release(ONE, first.token)  # late, and frees nothing
    world.claim(ONE, second.token)
    world.release(ONE, second.token, Ending.AGAIN, lost=True)
    world.release(ONE, second.token)
    assert world.receive("w2").token == f"{parked.base}.2"


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
def a_copy_is_the_twin_of_a_running_attempt(world):
    world.beat("w1")
    first = world.new_asker(ONE)
    world.acquire(first)
    copy = world.new_asker(ONE, attempt=first.owner.attempt, copy=True)
    assert world.acquire(copy).verdict is Verdict.TWIN
    assert world.park(copy, lost=True) is None
    third = world.new_asker(ONE, attempt=first.owner.attempt, copy=True)
    assert world.park(third).verdict is Verdict.TWIN
    world.release(ONE, first.token, Ending.AGAIN)  # worker lost, requeued: the twin is all there is
    got = world.receive("w1")
    assert got.body == copy.parcel.body
    world.claim(ONE, got.token)
    world.release(ONE, got.token)
    assert (
        world.acquire(world.new_asker(ONE, attempt=first.owner.attempt, copy=True)).verdict
        is Verdict.DONE
    )


@history
def a_twin_goes_with_its_attempt(world):
    world.beat("w1")
    waits, holder = world.new_asker(ONE), world.new_asker(ONE)
    world.acquire(holder)
    world.park(waits)
    for first in (holder, waits):
        world.park(world.new_asker(ONE, attempt=first.owner.attempt, copy=True))
    world.release(ONE, holder.token)
    world.claim(ONE, waits.token)
    world.release(ONE, waits.token)


@history
def a_twin_takes_over_from_a_lapsed_holder(world):
    world.beat("w1")
    first = world.new_asker(ONE)
    world.acquire(first)
    world.park(world.new_asker(ONE, attempt=first.owner.attempt, copy=True))
    world.advance(11.0)
    world.beat("w1")
    world.sweep()
    assert world.receive("w1") is not None


@history
def the_first_ends_between_the_copys_two_calls(world):
    first = world.new_asker(ONE)
    world.acquire(first)
    copy = world.new_asker(ONE, attempt=first.owner.attempt, copy=True)
    assert world.acquire(copy).verdict is Verdict.TWIN
    world.release(ONE, first.token)
    assert world.park(copy).verdict is Verdict.DONE


@history
def a_twin_of_a_client_that_waits_in_its_slot(world):
    """Found by the state machine: the twin inherited the dead client's deadline."""
    world.beat("w1")
    holder, waits = world.new_asker(ONE), world.new_asker(ONE)
    world.acquire(holder)
    world.acquire(waits, 4.0)
    copy = world.new_asker(ONE, attempt=waits.owner.attempt, copy=True)
    assert world.acquire(copy).verdict is Verdict.TWIN
    world.park(copy)
    world.advance(5.0)  # the slot dies
    world.beat("w1")
    world.release(ONE, holder.token)
    got = world.receive("w1")
    assert (got.body, got.verdict) == (copy.parcel.body, "granted")


@history
def messages_without_a_worker_go_adrift_and_come_back_in_order(world):
    first, second, other = (world.new_asker(ONE, place=place) for place in (-30, -20, -10))
    world.park(second)
    world.park(first)
    world.park(world.new_asker(ONE, realm="S"))
    for worker in ("w1", "w3"):
        assert world.kick(ONE, worker, patience=5.0) == []
    client = world.new_asker(ONE, attempt="")
    assert world.acquire(client).verdict is Verdict.GRANTED  # passes only who cannot run
    world.advance(1.0)
    world.beat("w1")
    world.release(ONE, client.token)
    assert world.receive("w1").token == first.token
    world.park(other)
    world.release(ONE, first.token)
    assert world.receive("w1").token == second.token


@history
def asking_again_while_adrift_grants_others(world):
    """Found by the state machine: a token adrift asked, and a live waiter stayed at a free lock."""
    adrift, other = world.new_asker(TWO, realm="S"), world.new_asker(TWO)
    world.park(adrift)
    world.park(other)
    world.beat("w1")
    world.acquire(adrift)
    assert world.receive("w1").token == other.token


@history
def a_message_waits_for_too_long_and_is_delivered_with_a_verdict(world):
    world.beat("w1")
    holder, parked = world.new_asker(ONE, lease=30.0), world.new_asker(ONE, deadline=3.0)
    world.acquire(holder)
    world.park(parked)
    world.advance(4.0)
    world.beat("w1")
    world.sweep()
    assert world.receive("w1").verdict == "overdue"
    world.extend(ONE, [parked.token])
    world.advance(11.0)  # that worker dies
    world.beat("w2")
    world.sweep("w2")
    got = world.receive("w2")
    world.release(ONE, got.token, Ending.AGAIN)  # it retires
    assert world.receive("w2").verdict == "overdue"
    world.release(ONE, f"{parked.base}.1", lost=True)
    assert not world.state(ONE).bodies


@history
def the_wait_starts_anew_for_a_message_that_ran(world):
    world.beat("w1")
    parked = world.new_asker(ONE, deadline=3.0)
    world.park(parked)
    world.claim(ONE, world.receive("w1").token)
    world.advance(8.0)
    world.release(ONE, parked.token, Ending.AGAIN)
    world.advance(1.0)
    assert world.state(ONE).deadlines == {f"{parked.base}.1": world.now + 2000}
    world.advance(2.0)
    world.beat("w1")
    world.sweep()
    assert world.receive("w1").verdict == "overdue"


@history
def a_grant_that_nobody_took_does_not_prolong_the_wait(world):
    world.beat("w1")
    parked = world.new_asker(ONE, deadline=4.0)
    world.park(parked)
    world.advance(6.0)  # the worker died with the grant
    world.beat("w2")
    world.kick(ONE, "w2")
    assert world.receive("w2").verdict == "overdue"


@history
def early_acknowledgement_drops_the_body(world):
    world.beat("w1")
    parked = world.new_asker(ONE)
    world.park(parked)
    world.claim(ONE, world.receive("w1").token, settle=True, lost=True)
    world.advance(11.0)
    world.kick(ONE)
    assert not world.state(ONE).record


@history
def parking_again_while_the_early_acknowledged_task_runs(world):
    """Found by the state machine: the first reply was lost, and the task ran twice at once."""
    world.beat("w1")
    for number, again in enumerate((False, True)):
        parked = world.new_asker(TWO, lease=30.0)
        world.park(parked)
        got = world.receive("w1")
        if again:
            world.release(TWO, got.token, Ending.AGAIN)
            got = world.receive("w1")
        world.claim(TWO, got.token, 30.0, settle=True)
        assert world.park(parked).verdict is Verdict.WAITING
        assert world.receive("w1") is None
        asked = world.acquire(parked)
        assert asked.verdict is (Verdict.TWIN if again else Verdict.GRANTED)
        assert len(world.state(TWO).holders) == number + 1


@history
def a_late_ask_for_a_message_that_went_back(world):
    """The body waits under its second token: the first token must not run beside it."""
    world.beat("w1")
    parked = world.new_asker(ONE)
    world.park(parked)
    world.advance(6.0)
    world.kick(ONE)
    assert world.acquire(parked).verdict is Verdict.TWIN


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
def a_reset_goes_through_the_normal_path(world):
    world.beat("w1")
    parked, waiter = world.new_asker(ONE), world.new_asker(ONE, attempt="")
    world.park(parked)
    world.claim(ONE, world.receive("w1").token)
    world.acquire(waiter, 60.0)
    world.reset(ONE)
    assert world.receive("w1") is None
    world.release(ONE, parked.token)
    world.reset(ONE)
    assert world.receive("w1").token == f"{parked.base}.1"


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
def a_grant_goes_where_a_slot_is_free(world):
    """Its own worker keeps the lock as long as the slot that it frees is no other's."""
    world.beat("w1", 0)
    world.beat("w2", 1)
    parked = [world.new_asker(ONE) for _ in range(4)]
    for asker in parked:
        world.park(asker)
    first = world.receive("w2")
    world.claim(ONE, first.token)
    world.release(ONE, first.token, worker="w2")  # into the slot that is freed
    second = world.receive("w2")
    world.claim(ONE, second.token)
    world.beat("w2", -2)
    world.beat("w1", 1)
    world.release(ONE, second.token, worker="w2")
    third = world.receive("w1")
    world.release(ONE, third.token, worker="w2")  # has not begun, and frees no slot
    assert world.receive("w2") or world.receive("w1")


@history
def one_free_slot_takes_one_of_two(world):
    for _ in range(2):
        world.acquire(world.new_asker(TWO))
    for _ in range(2):
        world.park(world.new_asker(TWO))
    world.advance(11.0)
    world.beat("w1", 1)
    world.beat("w2", 1)
    world.kick(TWO)
    assert world.receive("w1")
    assert world.receive("w2")


@history
def a_grant_is_passed_on_until_it_has_begun(world):
    world.beat("w1", 1)
    parked = world.new_asker(ONE)
    world.park(parked)
    granted = world.receive("w1")
    world.release(ONE, granted.token, Ending.OFFER, worker="w1")  # nobody else lives
    world.beat("w2", 0)
    world.release(ONE, granted.token, Ending.OFFER, worker="w1")  # nor has a slot
    world.beat("w2", 1)
    reply = world.release(ONE, granted.token, Ending.OFFER, worker="w1")
    assert reply.verdict is Verdict.RELEASED
    assert world.claim(ONE, granted.token).verdict is Verdict.ABSENT
    passed_on = world.receive("w2")
    world.claim(ONE, passed_on.token)
    world.beat("w1", 1)
    for ending in (Ending.OFFER, Ending.RETURN):
        reply = world.release(ONE, passed_on.token, ending, worker="w2")
        assert reply.verdict is Verdict.GRANTED


@history
def a_grant_is_returned_until_it_has_begun(world):
    world.beat("w1")
    parked = world.new_asker(ONE)
    world.park(parked)
    granted = world.receive("w1")
    reply = world.release(ONE, granted.token, Ending.RETURN, worker="w1")
    assert reply.verdict is Verdict.RELEASED
    assert world.receive("w1").token == f"{parked.base}.1"


@history
def a_place_in_the_future_is_now(world):
    """It was given by a server with another clock; whoever comes meanwhile comes later."""
    ahead = world.new_asker(ONE, place=2_000_000)
    world.acquire(ahead)
    world.release(ONE, ahead.token)


@history
def two_messages_with_the_same_place(world):
    world.beat("w1")
    holder = world.new_asker(ONE)
    world.acquire(holder)
    for _ in range(3):
        world.park(world.new_asker(ONE, place=-5))
    world.release(ONE, holder.token)
    for _ in range(3):
        got = world.receive("w1")
        world.claim(ONE, got.token)
        world.release(ONE, got.token)


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
def a_full_queue(world):
    for number in range(4):
        asker = world.new_asker(ONE, max_waiting=2)
        reply = world.acquire(asker)
        if reply.verdict is Verdict.BLOCKED:
            reply = world.park(asker)
        assert (reply.verdict is Verdict.FULL) == (number == 3)


@history
def a_full_queue_of_messages_adrift(world):
    """Those that nobody consumes count too: the bound is there for the memory."""
    replies = [world.park(world.new_asker(ONE, max_waiting=2)) for _ in range(4)]
    assert [reply.verdict for reply in replies].count(Verdict.FULL) == 2


@history
def a_grant_is_acquired_and_its_reply_lost_then_it_is_parked(world):
    world.beat("w1")
    asker = world.new_asker(ONE)
    world.acquire(asker, lost=True)
    world.park(asker, lost=True)
    got = world.receive("w1")
    assert world.claim(ONE, got.token, settle=True).verdict is Verdict.GRANTED
    world.park(asker)  # found by Hypothesis: kept a second time, and delivered beside the first
    assert world.receive("w1") is None


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
def the_newest_message_takes_the_room_of_the_oldest(world):
    world.beat("w1")
    runs = world.new_asker(ONE, lease=30.0)
    world.acquire(runs)
    latest = [world.new_asker(ONE, max_waiting=1, replace=True) for _ in range(3)]
    for asker in latest:
        assert world.acquire(asker).verdict is Verdict.BLOCKED
        assert world.park(asker, lost=asker is latest[1]) is not Verdict.FULL
        world.advance(0.001)
    for asker, by in pairwise(latest):
        got = world.receive("w1")
        assert (got.token, got.verdict, got.by) == (asker.token, "replaced", by.owner.attempt)
    world.release(ONE, latest[0].token, lost=True)
    world.advance(6.0)  # the worker that was to end the second has died
    world.beat("w2")
    world.sweep("w2")
    got = world.receive("w2")
    assert (got.token, got.verdict) == (latest[1].token, "replaced")
    world.release(ONE, got.token, Ending.AGAIN, worker="w2")  # it retires
    got = world.receive("w2")
    assert (got.verdict, got.by) == ("replaced", latest[2].owner.attempt)
    world.release(ONE, got.token)
    world.release(ONE, runs.token, worker="w2")
    assert world.receive("w2").body == latest[2].parcel.body


@history
def the_oldest_of_two_makes_room_and_the_others_keep_their_order(world):
    world.beat("w1")
    runs = world.new_asker(ONE, lease=30.0)
    world.acquire(runs)
    latest = [world.new_asker(ONE, max_waiting=2, replace=True) for _ in range(4)]
    for asker in latest:
        world.park(asker)
        world.advance(0.001)
    for asker in latest[:2]:
        assert world.receive("w1").token == asker.token
        world.release(ONE, asker.token)
    for asker in (runs, *latest[2:]):
        world.release(ONE, asker.token, worker="w1")
    assert [world.receive("w1").token for _ in range(2)] == [a.token for a in latest[2:]]


@history
def a_message_of_another_task_is_not_replaced(world):
    world.beat("w1")
    world.acquire(world.new_asker(ONE))
    world.park(world.new_asker(ONE, task="other"))
    newest = world.new_asker(ONE, max_waiting=1, replace=True)
    assert world.park(newest).verdict is Verdict.FULL


@history
def a_message_adrift_is_replaced(world):
    first, second = (world.new_asker(ONE, max_waiting=1, replace=True) for _ in range(2))
    world.park(first)
    assert world.park(second).verdict is Verdict.WAITING
    world.beat("w1")
    world.advance(6.0)
    world.beat("w1")
    world.sweep()
    found = {got.token: got.verdict for got in (world.receive("w1"), world.receive("w1"))}
    assert found == {first.token: "replaced", second.token: "granted"}


@history
def a_revoked_message_leaves_the_line_and_is_ended(world):
    """Given back by a worker that closes, and never received by another: it is told again."""
    world.beat("w1")
    world.beat("w2")
    runs, gone, waits = (world.new_asker(ONE, lease=30.0) for _ in range(3))
    world.acquire(runs)
    for asker in (gone, waits):
        world.park(asker)
    assert world.revoke(ONE, gone.token, lost=True) is None
    got = world.receive("w1")
    assert (got.token, got.verdict) == (gone.token, "revoked")
    world.release(ONE, gone.token, Ending.AGAIN, worker="w2")
    given_back = world.receive("w2")
    assert (given_back.verdict, given_back.body) == ("revoked", gone.parcel.body)
    world.advance(6.0)
    world.beat("w1")
    world.sweep()
    again = world.receive("w1")
    assert (again.token, again.verdict) == (given_back.token, "revoked")
    world.release(ONE, again.token, worker="w1")
    world.release(ONE, runs.token, worker="w1")
    assert world.receive("w1").token == waits.token


@history
def a_revoke_leaves_alone_who_holds_or_is_a_client_or_of_another_broker(world):
    world.beat("w1")
    runs, client, other = (world.new_asker(ONE, realm=realm) for realm in ("R", "R", "S"))
    world.acquire(runs)
    world.acquire(client, 20.0)
    world.park(other)
    for asker in (runs, client, other):
        assert world.revoke(ONE, asker.token, "w1").verdict is Verdict.ABSENT
    assert world.revoke(ONE, "nobody.0", "w1").verdict is Verdict.ABSENT
    assert world.revoke(ONE, other.token, "w3").verdict is Verdict.RELEASED


@history
def a_revoke_that_finds_a_lapsed_lease_grants_to_the_next(world):
    world.beat("w1")
    runs, gone, waits = world.new_asker(ONE, lease=1.0), world.new_asker(ONE), world.new_asker(ONE)
    world.acquire(runs)
    for asker in (gone, waits):
        world.park(asker)
    world.advance(2.0)
    world.revoke(ONE, gone.token, "w1")
    assert [world.receive("w1").verdict for _ in range(2)] == ["revoked", "granted"]


@history
def a_message_adrift_is_revoked(world):
    gone = world.new_asker(ONE)
    world.park(gone)
    assert world.revoke(ONE, gone.token, "w1").verdict is Verdict.RELEASED
    world.beat("w1")
    world.advance(6.0)
    world.beat("w1")
    world.sweep()
    got = world.receive("w1")
    assert (got.token, got.verdict) == (gone.token, "revoked")
    world.release(ONE, got.token, worker="w1")


@history
def a_full_server_takes_nothing_new_and_all_that_ends(world):
    """Who holds goes on and ends, who waits is granted; who asks is refused, and leaves nothing."""
    world.beat("w1")
    runs, client, waits = (
        world.new_asker(ONE),
        world.new_asker(ONE, attempt=""),
        world.new_asker(ONE),
    )
    world.acquire(runs)
    world.acquire(client, 60.0)
    world.park(waits)
    world.fill(full=True)
    for lock in (ONE, TWO):
        assert world.acquire(world.new_asker(lock), 60.0) is None
        assert world.park(world.new_asker(lock)) is None
    world.extend(ONE, [runs.token])
    world.beat("w1")
    world.release(ONE, runs.token, worker="w1")
    world.claim(ONE, client.token)
    world.release(ONE, client.token, worker="w1")
    assert world.receive("w1").token == waits.token
    world.claim(ONE, waits.token)
    world.release(ONE, waits.token, Ending.AGAIN, worker="w1")
    again = world.receive("w1")
    world.reset(ONE)
    world.release(ONE, again.token)
    everybody_dies(world)


@history
def a_full_server_is_swept(world):
    """Found by the state machine: who holds has died, and no sweeper could take the lock."""
    world.beat("w1")
    waits = world.new_asker(ONE)
    world.acquire(world.new_asker(ONE))
    world.park(waits)
    world.fill(full=True)
    world.advance(11.0)
    world.beat("w1")
    for ask in (world.acquire, world.park):
        assert ask(world.new_asker(ONE)) is None  # though its sweep would free the lock
    assert world.sweep("w1") == [ONE]
    assert world.receive("w1").token == waits.token


@history
def on_a_full_server_a_permit_is_kept_and_a_message_revoked(world):
    world.beat("w1")
    first, gone = world.new_asker(ONE, attempt="r/0/0"), world.new_asker(ONE)
    world.acquire(first)
    world.park(gone)
    world.fill(full=True)
    world.release(ONE, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 25.0), lost=True)
    world.revoke(ONE, gone.token, lost=True)
    assert world.receive("w1").verdict == "revoked"
    world.release(ONE, gone.token)
    assert world.acquire(world.new_asker(ONE, attempt="r/1/0")) is None
    world.fill(full=False)
    assert world.acquire(world.new_asker(ONE, attempt="r/1/0")).verdict is Verdict.GRANTED


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


def leaves(world, *askers, worker="w1"):
    """Park messages that nobody takes, and return them on their way to the broker."""
    for asker in askers:
        world.park(asker)
    strays = world.kick(ONE, worker)
    world.published |= {(stray.seal, stray.token) for stray in strays}
    return strays


@history
def a_message_that_nobody_takes_leaves_for_its_own_broker(world):
    mine, other = world.new_asker(ONE), world.new_asker(ONE, realm="S")
    (stray,) = leaves(world, mine, other)
    assert stray.token == mine.token
    world.left(stray, sent=True, lost=True)
    assert world.acquire(world.moved(stray)).verdict is Verdict.GRANTED
    assert [stray.token for stray in world.kick(ONE, "w3")] == [other.token]


@history
def a_message_that_has_just_lost_its_worker_does_not_leave_yet(world):
    world.park(world.new_asker(ONE))
    for _ in range(3):
        assert world.kick(ONE, "w2", patience=5.0) == []
        world.advance(1.5)
    world.park(world.new_asker(ONE))
    world.advance(1.5)
    assert len(world.kick(ONE, "w2", patience=5.0)) == 2


@history
def a_worker_that_locks_gets_a_message_back_before_it_is_forgotten(world):
    for first, verdict in ((world.acquire, Verdict.TWIN), (world.park, Verdict.WAITING)):
        asker = world.new_asker(ONE)
        (stray,) = leaves(world, asker)
        message = world.moved(stray)
        assert first(message).verdict is verdict
        assert world.park(message).verdict is Verdict.WAITING
        world.acknowledged.add((stray.seal, stray.token))
        assert world.left(stray, sent=True) == 0
        assert asker.token in world.state(ONE).standing
        world.beat("w1")
        world.kick(ONE)
        assert world.receive("w1").token == asker.token
        world.claim(ONE, asker.token)
        world.release(ONE, asker.token)
        world.leave("w1")


@history
def a_process_dies_with_messages_that_it_was_to_publish(world):
    mine = world.new_asker(ONE)
    leaves(world, mine)
    world.beat("w1")
    world.advance(61.0)
    world.beat("w1")
    world.kick(ONE, "w1")
    assert world.receive("w1").token == mine.token


@history
def who_tells_too_late_that_a_message_was_sent_forgets_nothing(world):
    mine = world.new_asker(ONE)
    (late,) = leaves(world, mine)
    world.advance(61.0)
    assert world.kick(ONE, "w3") == []
    (again,) = world.kick(ONE)
    world.left(late, sent=True)
    assert world.state(ONE).record[again.token]["state"] == "leaving"


@history
def what_is_acknowledged_at_its_start_loses_its_twin(world):
    mine = world.new_asker(ONE)
    world.acquire(mine)
    copy = world.new_asker(ONE, attempt=mine.owner.attempt, copy=True)
    assert world.park(copy).verdict is Verdict.TWIN
    world.claim(ONE, mine.token, 1.0, settle=True)


@history
def a_message_that_the_broker_refused_waits_longer_each_time(world):
    (stray,) = leaves(world, world.new_asker(ONE))
    for pause in (2.0, 4.0, 8.0):
        world.left(stray, sent=False, lost=True)
        world.advance(pause - 0.1)
        assert world.kick(ONE) == []
        world.advance(0.1)
        (stray,) = world.kick(ONE)


@history
def a_worker_gets_only_messages_of_tasks_that_it_locks(world):
    """It consumes the queue, and knows the task as a plain one."""
    world.beat("w2")
    plain, locked = world.new_asker(ONE, task="app.other"), world.new_asker(ONE)
    runs = world.new_asker(ONE)
    world.acquire(runs)
    world.park(plain)
    world.park(locked)
    world.release(ONE, runs.token, worker="w2")
    assert world.receive("w2").token == locked.token
    assert plain.token in world.state(ONE).adrift
    world.beat("w1")
    world.claim(ONE, locked.token)
    world.release(ONE, locked.token, worker="w2")
    assert world.receive("w1").token == plain.token


@history
def what_was_acknowledged_at_its_start_does_not_begin_again(world):
    """A copy of it was kept as its twin, before or after it began."""
    for kept_before in (True, False):
        world.beat("w1")
        mine = world.new_asker(ONE)
        world.park(mine)
        token = world.receive("w1").token
        copy = world.new_asker(ONE, attempt=mine.owner.attempt, copy=True)
        if kept_before:
            world.park(copy)
        world.claim(ONE, token, 1.0, settle=True)
        if not kept_before:
            assert world.park(copy).verdict is Verdict.TWIN
        world.advance(2.0)
        world.kick(ONE, "w1")
        assert not world.state(ONE).standing


@history
def an_inbox_gets_what_its_worker_consumes(world):
    world.beat("w2")
    world.beat("w3")
    runs = world.new_asker(TWO)
    for asker in (runs, world.new_asker(TWO)):
        world.acquire(asker)
    for realm, queue in (("S", "q"), ("R", "r"), ("R", "q")):
        world.park(world.new_asker(TWO, realm=realm, queue=queue))
    for asker in list(world.state(TWO).holders):
        world.release(TWO, asker, worker="w2")
    assert world.receive("w2")
    assert world.receive("w3")


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
def a_message_waits_as_long_as_it_was_told_however_often_it_goes_back(world):
    world.beat("w1")
    waits = world.new_asker(ONE, deadline=20.0)
    world.park(waits)
    for _ in range(3):
        world.advance(6.0)  # each time the worker dies with the grant
        world.beat("w1")
        world.sweep("w1")
    world.advance(6.0)
    world.beat("w1")
    world.sweep("w1")
    assert world.state(ONE).overdue


@history
def a_first_is_the_twin_of_its_copy(world):
    """Found by the state machine: its lease had lapsed, it asked again, and ran beside its copy."""
    world.beat("w1")
    first = world.new_asker(TWO, lease=1.0)
    world.acquire(first)
    world.advance(2.0)
    copy = world.new_asker(TWO, attempt=first.owner.attempt, copy=True)
    assert world.acquire(copy).verdict is Verdict.GRANTED
    assert world.acquire(first).verdict is Verdict.TWIN
    assert world.park(copy).verdict is Verdict.WAITING  # it was granted, and its answer was lost
    assert world.receive("w1").token == copy.token
    world.advance(2.0)
    world.kick(TWO, "w1")


@history
def a_message_that_is_read_late_is_the_twin_of_its_redelivered_copy(world):
    """Found by the storm (RabbitMQ, seed 12), where both ran at once.

    A stopped worker read a message from its socket when the broker had long given it to another.
    """
    for lock in (ONE, TWO):
        busy = [world.new_asker(lock) for _ in range(LIMITS[lock])]
        for asker in busy:
            world.acquire(asker)
        copy = world.new_asker(lock, copy=True)
        assert world.park(copy).verdict is Verdict.WAITING
        late = world.new_asker(lock, attempt=copy.owner.attempt)
        assert world.acquire(late).verdict is Verdict.TWIN
        assert world.park(late).verdict is Verdict.TWIN


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


def comes_back(world, parked, ending=Ending.AGAIN):
    """A worker begins with a message, which comes back."""
    got = world.receive("w1")
    assert base_of(got.token) == parked.base
    if ending is not Ending.UNREAD:
        world.claim(ONE, got.token)
    world.release(ONE, got.token, ending, worker="w1", lost=True)
    return got


@history
def a_message_that_keeps_coming_back_lets_others_pass(world):
    world.beat("w1")
    stubborn, other = world.new_asker(ONE, place=-9), world.new_asker(ONE)
    world.park(stubborn)
    world.park(other)
    assert comes_back(world, stubborn).returns == 0
    assert comes_back(world, stubborn).returns == 1
    comes_back(world, other)  # for the first time: it keeps its place
    world.claim(ONE, f"{other.base}.1")
    world.advance(1.0)
    world.beat("w1")
    late = world.new_asker(ONE)
    world.park(late)
    world.receive("w1")
    world.release(ONE, f"{other.base}.1", worker="w1")
    for returns in range(2, 9):
        got = world.receive("w1")
        while got and base_of(got.token) != stubborn.base:
            world.claim(ONE, got.token)
            world.release(ONE, got.token, worker="w1")
            got = world.receive("w1")
        assert got.returns == returns
        world.claim(ONE, got.token)
        world.release(ONE, got.token, Ending.AGAIN, worker="w1")
        world.advance(min(2.0 ** (returns - 1), 60.0))
        world.beat("w1")
        world.sweep()


@history
def a_message_that_no_worker_can_receive_lets_others_pass_at_once(world):
    world.beat("w1")
    broken, other = world.new_asker(ONE, place=-9, deadline=30.0), world.new_asker(ONE)
    world.park(broken)
    world.park(other)
    comes_back(world, broken, Ending.UNREAD)
    comes_back(world, other)
    assert world.state(ONE).delayed == {f"{broken.base}.1"}
    everybody_dies(world)


@history
def a_message_that_was_delayed_is_revoked(world):
    world.beat("w1")
    gone = world.new_asker(ONE)
    world.park(gone)
    comes_back(world, gone, Ending.UNREAD)
    assert world.revoke(ONE, f"{gone.base}.1").verdict is Verdict.RELEASED
    assert world.receive("w1").verdict == "revoked"


@history
def a_rejected_message_is_kept_until_a_worker_has_published_it(world):
    world.beat("w1")
    parked = world.new_asker(ONE)
    world.park(parked)
    comes_back(world, parked, Ending.REJECT)
    got = world.receive("w1")
    assert (got.verdict, got.body, got.queue) == ("rejected", parked.parcel.body, "q")
    world.extend(ONE, [got.token])
    world.advance(11.0)  # that worker dies
    world.beat("w1")
    world.sweep()
    again = world.receive("w1")
    world.release(ONE, again.token, Ending.AGAIN)  # it retires
    last = world.receive("w1")
    assert last.verdict == "rejected"
    world.release(ONE, last.token)
    comes_back_from_the_broker = world.new_asker(ONE, attempt=parked.owner.attempt, copy=True)
    assert world.acquire(comes_back_from_the_broker).verdict is Verdict.GRANTED


@history
def the_end_of_a_rejected_message_that_was_not_parked_is_not_remembered(world):
    first = world.new_asker(ONE, copy=True)
    world.acquire(first)
    world.release(ONE, first.token, Ending.REJECT, mark=True)
    back = world.new_asker(ONE, attempt=first.owner.attempt, copy=True)
    assert world.acquire(back).verdict is Verdict.GRANTED


@history
def two_calls_with_one_task_id_run_one_after_the_other(world):
    """And what ends one of them leaves the other in the line, and in the index."""
    world.beat("w1")
    runs, first = world.new_asker(ONE), world.new_asker(ONE)
    second = world.new_asker(ONE, attempt=first.owner.attempt)
    world.acquire(runs)
    world.park(first)
    assert world.acquire(second).verdict is Verdict.BLOCKED
    world.park(second)
    world.release(ONE, runs.token, worker="w1")
    world.claim(ONE, world.receive("w1").token)
    world.release(ONE, first.token, worker="w1")
    marked = world.new_asker(ONE, attempt=first.owner.attempt, copy=True)
    assert world.acquire(marked).verdict is Verdict.DONE
    assert world.receive("w1").token == second.token
    world.claim(ONE, second.token)
    world.release(ONE, second.token)


@history
def a_delivery_that_one_of_two_workers_reads_late_is_a_twin(world):
    """The broker has marked the message that the other got; this one was read from a socket."""
    marked = world.new_asker(TWO, copy=True)
    world.acquire(marked)
    late = world.new_asker(TWO, attempt=marked.owner.attempt)
    assert world.acquire(late).verdict is Verdict.TWIN


@history
def one_of_two_calls_with_one_id_is_parked_when_it_has_long_waited(world):
    """It was granted, and the reply was lost; when it asks again, it counts as one of two copies.

    The other call holds the second permit, and is no delivery of it.
    """
    world.beat("w1")
    first = world.new_asker(TWO)
    world.acquire(first, lost=True)
    world.acquire(world.new_asker(TWO, attempt=first.owner.attempt))
    long_waited = replace(first, claim=first.claim._replace(copy=True))
    assert world.park(long_waited).verdict is Verdict.WAITING
    assert world.receive("w1").token == first.token


@history
def a_second_delivery_that_is_not_marked_is_known_by_its_message(world):
    world.beat("w1")
    first = world.new_asker(TWO)
    world.acquire(first)
    again = world.new_asker(TWO, attempt=first.owner.attempt, base=first.base)
    assert world.acquire(again).verdict is Verdict.TWIN
    world.park(again, lost=True)
    world.release(TWO, first.token, Ending.AGAIN)
    assert world.receive("w1").body == again.parcel.body


def comes_as_copy(world, asker):
    """A marked delivery, which would wait if it were not found to be a twin."""
    copy = world.new_asker(asker.claim.name, attempt=asker.owner.attempt, copy=True)
    assert world.acquire(copy, 30.0).verdict is Verdict.TWIN


@history
def a_copy_of_a_holder_that_came_after_the_last_search_is_a_twin(world):
    """Nobody notes the attempt of a holder when it is granted: the search must."""
    first, second, third = (world.new_asker(TWO) for _ in range(3))
    world.acquire(first)
    comes_as_copy(world, first)
    world.acquire(second)
    comes_as_copy(world, second)
    world.release(TWO, first.token)
    world.acquire(third)
    comes_as_copy(world, third)
    comes_as_copy(world, second)
    world.release(TWO, second.token)
    world.release(TWO, third.token)


@history
def copies_of_two_holders_come_when_no_search_has_read_them(world):
    """Scripts of an older version do not note what they have read; nor is it noted for long."""
    holders = [world.new_asker(TWO) for _ in range(2)]
    for holder in holders:
        world.acquire(holder)
    world.client.delete(world.keyspace.attempts(TWO))
    for holder in holders:
        comes_as_copy(world, holder)
        world.release(TWO, holder.token)


@history
def a_waiter_in_its_slot_dies_and_its_message_is_stored(world):
    """The message may wait as long as it was stored for, not as long as the waiter asked."""
    world.beat("w1")
    holder = world.new_asker(ONE, lease=30.0)
    world.acquire(holder)
    first = world.new_asker(ONE)
    world.acquire(first, wait=2.0)
    world.park(world.new_asker(ONE, attempt=first.owner.attempt, base=first.base))
    world.advance(4.0)
    world.beat("w1")
    world.kick(ONE, "w1")
    world.kick(ONE, "w1")
    world.release(ONE, holder.token)
    assert world.receive("w1").verdict == "granted"


@history
def a_task_that_waits_in_its_slot_comes_a_second_time_without_a_mark(world):
    world.acquire(world.new_asker(ONE))
    first = world.new_asker(ONE)
    assert world.acquire(first, wait=10.0).verdict is Verdict.WAITING
    again = world.new_asker(ONE, attempt=first.owner.attempt, base=first.base)
    assert world.acquire(again, wait=10.0).verdict is Verdict.TWIN


@history
def a_message_comes_back_before_it_is_forgotten_beside_another_with_its_task_id(world):
    """It is known as the copy of its own message, which then stays."""
    first = world.new_asker(ONE, queue="r")
    world.park(first)
    world.park(world.new_asker(ONE, queue="r", attempt=first.owner.attempt))
    for stray in world.kick(ONE, "w2"):
        world.published.add((stray.seal, stray.token))
        world.park(world.moved(stray))
        world.acknowledged.add((stray.seal, stray.token))
        world.left(stray, sent=True)
    assert len(world.state(ONE).bodies) == 2


@history
def a_message_that_stays_has_waited_for_too_long_meanwhile(world):
    world.park(world.new_asker(ONE, queue="r", deadline=3.0))
    (stray,) = world.kick(ONE, "w2")
    world.acquire(world.new_asker(ONE, attempt=""))
    world.advance(4.0)
    world.left(stray, sent=False)


def _costs(world: World, group: str, cost: int, **facts) -> Asker:
    asker = world.new_asker(FAIR, plain=True, **facts)
    flow = packed((Rate(COSTED, cost=cost),), group=Group(group))
    return replace(asker, claim=asker.claim._replace(flow=flow))


@history
def a_message_behind_a_group_that_has_died_waits_for_its_own_cost(world):
    """Found by reading: the rate counted the cost of nobody, 1, and granted one of 2."""
    world.close_for(FAIR, 4000.0)
    world.acquire(_costs(world, "dead", 1, attempt=""), 2.0)
    message = _costs(world, "alive", 2)
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
    world.acquire(_costs(world, "served", 1))
    world.advance(1.0)
    world.charge(FAIR, "nobody.0", 3)
    cheap = _costs(world, "served", 1)
    world.park(cheap)
    world.advance(4.0)  # room for a cost of 1
    world.beat("w1")
    assert world.acquire(_costs(world, "new", 2)).verdict is Verdict.BLOCKED
    assert world.receive("w1").token == cheap.token


@history
def a_message_that_is_reset_goes_behind_who_waits(world):
    world.beat("w1")
    first, waits = world.new_asker(ONE), world.new_asker(ONE)
    world.park(first)
    world.claim(ONE, world.receive("w1").token)
    world.advance(1.0)
    world.park(waits)
    world.reset(ONE)
    assert world.receive("w1").token == waits.token


@history
def a_retry_that_costs_more_than_its_rate_has_left_keeps_its_permit(world):
    """Found by a walk: the invariant took it to cost 1, as it has no record."""
    first = _costs(world, "a", 1)
    world.acquire(first)
    world.charge(FAIR, "nobody.0", 2)
    world.release(FAIR, first.token, Ending.KEEP, reserve=Reservation("r/1/0", 25.0))
    again = _costs(world, "a", 2, attempt="r/1/0")
    assert world.acquire(again).verdict is Verdict.BLOCKED
    world.advance(5.0)
    assert world.acquire(again).verdict is Verdict.GRANTED


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

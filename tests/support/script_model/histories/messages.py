"""Parked messages: queue, grants, slots of workers."""

from __future__ import annotations

from celery_singleton_lock.core.model import Ending, Verdict
from support.script_model.histories.registry import history
from support.script_model.moves import everybody_dies
from support.script_model.world import ONE, TWO


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

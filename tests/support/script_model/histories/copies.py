"""Copies of a message, and calls with one task id."""

from __future__ import annotations

from dataclasses import replace

from celery_singleton_lock.core.model import Ending, Verdict
from support.script_model.histories.registry import history
from support.script_model.histories.steps import comes_as_copy
from support.script_model.world import LIMITS, ONE, TWO


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
    assert got.body == copy.to_park.body
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
    assert (got.body, got.verdict) == (copy.to_park.body, "granted")


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
def what_is_acknowledged_at_its_start_loses_its_twin(world):
    mine = world.new_asker(ONE)
    world.acquire(mine)
    copy = world.new_asker(ONE, attempt=mine.owner.attempt, copy=True)
    assert world.park(copy).verdict is Verdict.TWIN
    world.claim(ONE, mine.token, 1.0, settle=True)


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
    assert world.receive("w1").body == again.to_park.body


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
def the_id_of_an_ended_task_is_used_again(world):
    world.beat("w1")
    holder, first = world.new_asker(ONE), world.new_asker(ONE, attempt="id/0/0")
    world.acquire(holder)
    world.park(first)
    world.release(ONE, holder.token, worker="w1")
    world.claim(ONE, world.receive("w1").token)
    begun = world.now_us
    world.release(ONE, first.token)
    world.advance(5.0)
    late = world.new_asker(ONE, attempt="id/0/0", copy=begun)
    world.acquire(late)
    world.park(late)
    again = world.new_asker(ONE, attempt="id/0/0", copy=world.now_us)
    world.acquire(again)
    world.release(ONE, again.token)
    world.park(world.new_asker(ONE, attempt="id/0/0", copy=world.now_us))

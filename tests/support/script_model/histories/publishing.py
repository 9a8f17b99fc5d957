"""Messages that go back to their broker, or come from it again."""

from __future__ import annotations

from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.core.owner_token import base_of
from support.script_model.histories.registry import history
from support.script_model.histories.steps import comes_back, leaves
from support.script_model.moves import everybody_dies
from support.script_model.world import ONE


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
def a_message_that_the_broker_refused_waits_longer_each_time(world):
    (stray,) = leaves(world, world.new_asker(ONE))
    for pause in (2.0, 4.0, 8.0):
        world.left(stray, sent=False, lost=True)
        world.advance(pause - 0.1)
        assert world.kick(ONE) == []
        world.advance(0.1)
        (stray,) = world.kick(ONE)


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

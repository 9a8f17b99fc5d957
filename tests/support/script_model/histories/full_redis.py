"""A Redis that is full."""

from __future__ import annotations

from celery_singleton_lock.core.model import Ending, Reservation, Verdict
from support.script_model.histories.registry import history
from support.script_model.moves import everybody_dies
from support.script_model.world import ONE, TWO


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

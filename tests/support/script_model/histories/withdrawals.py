"""Messages that end without a run: replaced, revoked, rejected, reset, or too late."""

from __future__ import annotations

from itertools import pairwise

from celery_singleton_lock.core.model import Ending, Reservation, Verdict
from support.script_model.histories.registry import history
from support.script_model.histories.steps import comes_back
from support.script_model.world import ONE


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
    assert world.receive("w2").body == latest[2].to_park.body


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
    assert (given_back.verdict, given_back.body) == ("revoked", gone.to_park.body)
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
def a_granted_message_that_has_not_begun_is_revoked(world):
    """Its lock goes to the next one at once. A worker of another broker leaves it alone."""
    world.beat("w1")
    runs, gone, waits = (world.new_asker(ONE, lease=30.0) for _ in range(3))
    world.acquire(runs)
    for asker in (gone, waits):
        world.park(asker)
    world.release(ONE, runs.token, worker="w1")
    assert world.receive("w1").token == gone.token
    assert world.revoke(ONE, gone.token, "w3").verdict is Verdict.ABSENT
    assert world.revoke(ONE, gone.token, "w1").verdict is Verdict.RELEASED
    found = {got.verdict for got in (world.receive("w1"), world.receive("w1"))}
    assert found == {"revoked", "granted"}


@history
def a_message_that_has_begun_is_not_revoked(world):
    """It is acknowledged late, so its message is stored while it runs."""
    world.beat("w1")
    runs, gone = (world.new_asker(ONE, lease=30.0) for _ in range(2))
    world.acquire(runs)
    world.park(gone)
    world.release(ONE, runs.token, worker="w1")
    got = world.receive("w1")
    assert world.claim(ONE, got.token).verdict is Verdict.GRANTED
    assert world.revoke(ONE, got.token, "w1").verdict is Verdict.ABSENT


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
def a_message_that_was_delayed_is_revoked(world):
    world.beat("w1")
    gone = world.new_asker(ONE)
    world.park(gone)
    comes_back(world, gone, Ending.UNREAD)
    assert world.revoke(ONE, f"{gone.base}.1").verdict is Verdict.RELEASED
    assert world.receive("w1").verdict == "revoked"


@history
def a_message_waits_while_another_lock_of_its_task_is_refused(world):
    world.beat("w1")
    parked = world.new_asker(ONE)
    world.park(parked)
    for _ in range(3):
        got = world.receive("w1")
        assert got.returns == 0
        refused = Reservation("other", 3.0)
        world.release(ONE, got.token, Ending.REFUSED, worker="w1", reserve=refused, lost=True)
        world.advance(2.0)
        world.beat("w1")
        world.sweep()
        assert world.state(ONE).record
        world.advance(1.5)
        world.beat("w1")
        world.sweep()
    world.claim(ONE, world.receive("w1").token)


@history
def a_rejected_message_is_kept_until_a_worker_has_published_it(world):
    world.beat("w1")
    parked = world.new_asker(ONE)
    world.park(parked)
    comes_back(world, parked, Ending.REJECT)
    got = world.receive("w1")
    assert (got.verdict, got.body, got.queue) == ("rejected", parked.to_park.body, "q")
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
def a_message_that_stays_has_waited_for_too_long_meanwhile(world):
    world.park(world.new_asker(ONE, queue="r", deadline=3.0))
    (stray,) = world.kick(ONE, "w2")
    world.acquire(world.new_asker(ONE, attempt=""))
    world.advance(4.0)
    world.left(stray, sent=False)


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
def another_worker_takes_the_grant_of_a_revoked_message_first(world):
    world.beat("w1")
    parked = world.new_asker(ONE)
    world.park(parked)
    granted = world.receive("w1").token
    world.revoke(ONE, granted, "w2", realm="R")
    world.revoke(ONE, granted, "w1", lost=True)
    world.release(ONE, world.receive("w1").token)
    world.revoke(ONE, granted, "w1")
    world.advance(121.0)
    world.revoke(ONE, granted, "w1")

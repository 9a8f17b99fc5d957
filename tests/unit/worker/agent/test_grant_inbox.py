"""Granted messages are fetched, passed on, or given back."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.worker.agent_commands import LookUp, Park
from celery_singleton_lock.worker.agent_queue import REFUSED_RETRY
from support.agent_fakes import (
    delivery,
    header,
    request,
)


def test_a_delivery_that_failed_is_left_to_its_claim_lease(agent, store, seen, clock):
    """Its grant lapses and is made again: trying twice could deliver it twice."""
    store.fails["body"] = BackendUnreachable()
    agent._commands.put(delivery("a", body=None))
    agent.run_once()
    store.fails, store.bodies = {}, {"a": b"{}"}
    clock.now += REFUSED_RETRY
    agent.run_once()
    assert seen.received == []


def test_a_delivery_without_its_message_fetches_it(agent, store, seen):
    """A message too long for the inbox is asked for; one that is settled meanwhile is no work."""
    store.bodies["a"] = b"long"
    agent._commands.put(delivery("a", body=None))
    agent._commands.put(delivery("settled", body=None))
    agent.run_once()
    assert [(found.token, found.body) for found in seen.received] == [("a", b"long")]
    assert agent.counts()["delivered"] == 1


def test_long_messages_of_many_grants_are_read_together(agent, store, seen):
    """Read one by one, with some milliseconds to Redis, the last leases had ended before."""
    tokens = [f"t{number}" for number in range(50)]
    store.bodies.update(dict.fromkeys(tokens[:-1], b"long"))
    for token in tokens:
        agent._commands.put(delivery(token, body=None))
    agent.run_once()
    assert [(found.token, found.body) for found in seen.received] == [
        (token, b"long") for token in tokens[:-1]
    ]
    assert len(store.asked("bodies_of")) == 3
    assert store.asked("body") == [("body", tokens[-1])], "it has gone, or was not read"


def test_long_messages_are_read_one_by_one_if_they_cannot_be_read_together(agent, store, seen):
    """The keys of one lock may be unusable."""
    store.fails["bodies_of"] = BackendRefused("WRONGTYPE")
    store.bodies.update(a=b"long", b=b"long")
    for token in "ab":
        agent._commands.put(delivery(token, body=None))
    agent.run_once()
    assert [found.token for found in seen.received] == ["a", "b"]


def test_a_copy_goes_to_the_pool_only_if_its_message_is_not_kept(agent, store, dispatcher):
    """Kept in Redis, the copy is dropped; unknown, it is all that is left and runs."""
    store.bodies["kept"] = b"{}"
    kept, unknown = request("kept"), request("unknown")
    agent._commands.put(LookUp(kept, "k:kept", "kept"))
    agent._commands.put(LookUp(unknown, "k:unknown", "unknown"))
    agent.run_once()
    assert dispatcher.heard("dropped", "redispatch") == [("dropped", kept), ("redispatch", unknown)]


def test_a_worker_that_retires_gives_back_what_is_in_its_inbox(agent, store, seen):
    """It leaves the fleet first, so that nothing new is pushed; then each grant returns."""
    store.inbox = [delivery("a"), delivery("b")]
    agent.retire()
    agent.run_once()
    verbs = [call for call in store.calls if call[0] in ("leave", "release")]
    assert verbs == [
        ("leave", "q"),
        ("release", "a", Ending.AGAIN),
        ("release", "b", Ending.AGAIN),
    ]
    assert seen.received == []


def notice(token):
    return replace(delivery(token, body=b""), verdict="preempted", by="newer/0/0")


def test_a_notice_of_a_preemption_gives_no_lock_back_whenever_it_comes(agent, store, seen):
    """It has the token of a task that runs: a release would free the lock beside its body."""
    agent._commands.put(notice("now"))
    agent.run_once()
    store.inbox = [notice("last")]
    agent.retire()
    agent.run_once()
    agent._commands.put(notice("late"))
    agent.run_once()
    assert seen.preempted == [(token, "newer/0/0") for token in ("now", "last", "late")]
    assert store.asked("release") == []
    assert seen.received == []


def test_a_delivery_that_arrives_after_retirement_is_given_back(agent, store, seen):
    """Nobody would run it here; the next worker does, in its old place."""
    agent.retire()
    agent.run_once()
    agent._commands.put(delivery("late"))
    agent.run_once()
    assert store.asked("release") == [("release", "late", Ending.AGAIN)]
    assert seen.received == []


def test_a_grant_that_waits_for_the_main_loop_at_its_end_is_given_back(agent, store, seen):
    """Otherwise nobody has the lock for five seconds."""
    seen.still = True
    store.replies["a"] = Reply(Verdict.GRANTED)  # no other worker has a free slot
    agent._commands.put(delivery("a"))
    agent.run_once()
    agent.retire()
    agent.run_once()
    assert store.asked("release")[-1] == ("release", "a", Ending.AGAIN)
    for call, args in seen.later:
        call(*args)
    assert seen.received == []


@pytest.mark.parametrize("runs", [False, True])
def test_a_grant_that_a_revoke_takes_before_it_is_received_keeps_no_other_lock(
    agent, store, seen, dispatcher, runs
):
    """The other lock stayed held until its lease had ended, although the task was REVOKED."""
    parts = (Part("k:first", "first.0"), Part("k:b", "beefbeef.0"))
    body = json.dumps({"headers": LockSet(parts, at=1).header()}).encode() + b"\n[]"
    seen.still = True  # the main loop has not received the first one when the second one comes
    store.replies["beefbeef.0"] = Reply(Verdict.GRANTED)
    if runs:
        dispatcher.in_flight.by_token["beefbeef.0"] = request("beefbeef.0")
    for token, verdict in (("beefbeef.0", "granted"), ("beefbeef.1", "revoked")):
        agent._commands.put(replace(delivery("b"), token=token, verdict=verdict, body=body))
    agent.run_once()
    for call, args in seen.later:
        call(*args)
    assert [found.token for found in seen.received] == ["beefbeef.1"]
    agent.run_once()
    released = ("release", "first.0", Ending.AGAIN) in store.asked("release")
    assert released is not runs


def test_a_grant_does_not_wait_for_the_agent_if_it_is_idle(agent, store, seen):
    """The lock is free meanwhile, and nobody may use it."""
    store.inbox = [delivery("a")]
    agent._commands.is_idle = True
    agent.inbox.receive()
    assert [found.token for found in seen.received] == ["a"]
    assert agent.counts()["delivered"] == 1


def test_a_grant_that_comes_on_a_new_connection_may_be_of_a_task_that_has_ended(
    agent, store, dispatcher
):
    """A replica was promoted at once: no call has failed but that which waited for a grant."""
    dispatcher.ends.note(header("ended.0"))
    agent.inbox.receive()
    assert not dispatcher.ends.forgotten("ended.1")
    store.fails["receive"] = BackendUnreachable()
    agent.inbox.receive()
    store.fails.clear()
    dispatcher.ends.note(header("later.0"))
    store.inbox = [delivery("ended.1")]
    agent.inbox.receive()
    assert dispatcher.ends.forgotten("ended.1")
    assert dispatcher.ends.forgotten("later.1")


def test_a_grant_waits_for_the_report_that_its_message_is_parked(agent, store, seen, dispatcher):
    """The lock was released between the script that parked it and that report."""
    agent._commands.is_idle = True  # as it was before the command arrived
    parked = request("a")

    def park_many(to_park):
        store.inbox = [delivery("a")]
        agent.inbox.receive()
        assert seen.received == []
        return [Reply(Verdict.WAITING, rank=1) for _ in to_park]

    store.park_many = park_many
    taken = threading.Thread(target=agent.run_once, args=(60.0,))
    taken.start()
    agent._commands.put(Park(parked))
    taken.join(60)
    assert [call[0] for call in dispatcher.heard("parked")] == ["parked"]
    assert seen.received == []
    agent.run_once()
    assert [found.token for found in seen.received] == ["a"]


def test_what_the_main_loop_cannot_run_at_once_is_left_to_the_agent(agent, store, seen):
    """It fetches long messages, ends rejected ones, and offers grants while the loop stands."""
    agent._commands.is_idle = True
    store.inbox = [delivery("long", body=None), replace(delivery("a"), verdict="overdue")]
    agent.inbox.receive()
    agent.inbox.receive()
    seen.still = True
    store.inbox = [delivery("b")]
    agent.inbox.receive()
    assert seen.received == []
    assert seen.later == []
    assert len(agent._commands.take(0)) == 3


def test_a_grant_that_arrives_as_the_worker_retires_is_left_to_the_agent(agent, store, seen):
    """The agent gives it back."""
    agent._commands.is_idle = True

    def receive(_worker, _timeout):
        agent.retire()
        return delivery("a")

    store.receive = receive
    agent.inbox.receive()
    assert seen.received == []
    store.receive = lambda _worker, _timeout: None
    agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.AGAIN)]


def test_grants_that_were_read_together_as_the_worker_retires_are_given_back(agent, store, seen):
    """The store has read the second one with the first: nobody else can receive it."""
    agent._commands.is_idle = True

    def receive(_worker, _timeout):
        store.receive = usual
        agent.retire()
        agent.run_once()
        store.inbox = [delivery("b")]
        return delivery("a")

    usual, store.receive = store.receive, receive
    agent.inbox.receive()
    agent.run_once()
    released = [("release", "a", Ending.AGAIN), ("release", "b", Ending.AGAIN)]
    assert store.asked("release") == released
    assert seen.received == []

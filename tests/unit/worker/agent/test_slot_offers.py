"""Grants that wait for a slot are offered to workers with a free one."""

from __future__ import annotations

from types import SimpleNamespace

from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.worker.agent.slot_offers import SLOT_WAIT
from support.agent_fakes import (
    delivery,
    header,
)


def slotless(token, task="task", received_at=0.0):
    """Return a granted message that waits for a slot."""
    named = SimpleNamespace(name=task)
    of_call = {"options": lambda of_task: of_task(named)}
    return SimpleNamespace(
        id=token, lock_header=header(token), task=named, received_at=received_at, **of_call
    )


def test_a_heartbeat_has_the_number_of_free_slots(agent, store):
    agent.run_once()
    assert store.free == 2


def test_a_grant_that_has_waited_two_seconds_for_a_slot_is_offered_to_others(
    agent, store, dispatcher, seen
):
    """One after the other, as long as somebody takes them; of another task in any case."""
    waiting = [slotless("a"), slotless("b"), slotless("c"), slotless("d", task="other")]
    dispatcher.in_flight.slotless = waiting
    store.replies["b"] = Reply(Verdict.GRANTED)
    agent.run_once()
    assert store.asked("release") == [("release", token, Ending.OFFER) for token in "abd"]
    assert dispatcher.heard("withdraw") == [("withdraw", waiting[0]), ("withdraw", waiting[3])]
    assert seen.forgotten == ["a", "d"]


def test_a_grant_is_not_offered_before_it_has_waited_two_seconds(agent, store, dispatcher, clock):
    dispatcher.in_flight.slotless = [slotless("a", received_at=clock.now - SLOT_WAIT + 0.1)]
    agent.run_once()
    assert store.asked("release") == []


def test_a_grant_is_passed_to_another_worker_while_the_main_loop_is_blocked(agent, store, seen):
    seen.still = True
    store.inbox.append(delivery("a"))
    agent.inbox.receive()
    agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.OFFER)]
    seen.still = False
    for call, args in seen.later:
        call(*args)
    assert seen.received == []


def test_a_grant_that_no_other_worker_takes_waits_for_the_main_loop_and_is_delivered_once(
    agent, store, seen
):
    """If it lapses meanwhile, the next delivery of the message takes its place."""
    seen.still = True
    for token in ("a.0", "a.1"):
        store.replies[token] = Reply(Verdict.GRANTED)
        store.inbox.append(delivery(token))
        agent.inbox.receive()
    agent.run_once()
    seen.still = False
    for call, args in seen.later:
        call(*args)
    assert [each.token for each in seen.received] == ["a.1"]

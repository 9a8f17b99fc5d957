"""A Redis that has lost its data: what is reported, and when."""

from __future__ import annotations

import logging

from celery_singleton_lock.core.model import Ending, Identity
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.events import ParkedLost
from celery_singleton_lock.worker.agent import data_loss
from celery_singleton_lock.worker.agent.loop import (
    BEAT,
)
from celery_singleton_lock.worker.agent_commands import Park
from celery_singleton_lock.worker.dispatch.recently_ended import REMEMBERED
from support.agent_fakes import (
    errors,
    header,
    request,
)


def rounds(agent, clock, seconds):
    """Let time pass, round by round."""
    for _ in range(int(seconds)):
        clock.now += 2 * BEAT
        agent.run_once()


def park_two(agent, clock):
    """Park "a" and "b"; a look knows them."""
    for token in "ab":
        agent._commands.put(Park(request(token)))
    rounds(agent, clock, 4)


def emptied(store):
    """Return how a Redis is known that has lost its data."""
    store.identities.append(Identity(("new marker",), frozenset({"run"})))


def test_parked_messages_that_redis_has_lost_are_reported_once(agent, store, clock, seen, caplog):
    park_two(agent, clock)
    emptied(store)
    store.gone = {"a", "b"}
    rounds(agent, clock, 20)
    (told,) = errors(caplog)
    assert "2 of the 2 messages that this worker has parked are lost" in told
    assert "task[a], task[b]" in told
    assert "marker is gone" in told
    assert store.asked("note_lost") == [("note_lost", "a", "b")]
    assert seen.events == [ParkedLost(f"k:{token}", "task", token) for token in "ab"]
    assert agent.counts()["parked_lost"] == 2


def test_the_schema_is_written_again_after_a_loss_also_if_a_full_redis_refused_it(
    agent, store, clock
):
    rounds(agent, clock, 20)
    asked = len(store.asked("schema"))
    assert asked
    store.fails["schema"] = BackendRefused("OOM")
    emptied(store)
    rounds(agent, clock, 20)
    refused = len(store.asked("schema"))
    assert refused > asked + 2
    del store.fails["schema"]
    rounds(agent, clock, 20)
    assert len(store.asked("schema")) > refused


def test_messages_that_have_ended_before_the_loss_are_not_reported(agent, store, clock, caplog):
    park_two(agent, clock)
    store.gone = {"a"}
    rounds(agent, clock, 4)
    emptied(store)
    store.gone = {"a", "b"}
    rounds(agent, clock, 20)
    assert store.asked("note_lost") == [("note_lost", "b")]


def test_a_promoted_replica_that_has_all_messages_is_no_loss(agent, store, clock, seen, caplog):
    caplog.set_level(logging.INFO)
    park_two(agent, clock)
    store.identities.append(Identity(("marker",), frozenset({"another run"})))
    rounds(agent, clock, 20)
    assert errors(caplog) == []
    assert seen.events == []
    (told,) = [text for text in caplog.messages if "may have lost data" in text]
    assert "No message that this worker has parked is lost (2 had not ended)" in told


def test_a_lost_release_is_repeated_and_confirmed(agent, store, dispatcher, clock):
    """The other workers then do not take what has ended here for lost."""
    rounds(agent, clock, 1)
    dispatcher.ends.note(header("ended.0"))
    dispatcher.in_flight.by_token["running.3"] = None
    assert not dispatcher.ends.forgotten("ended.1")
    store.identities.append(Identity(("marker",), frozenset({"another run"})))
    rounds(agent, clock, 5)
    assert ("release", "ended.0", Ending.FINAL) in store.calls
    assert store.asked("vouch") == [("vouch", "ended", "running")]
    assert dispatcher.ends.forgotten("ended.1")
    dispatcher.ends.note(header("later.0"))
    clock.now += 1
    assert not dispatcher.ends.forgotten("later.1")
    clock.now += REMEMBERED
    assert dispatcher.ends.headers() == []


def test_a_worker_that_ends_reports_a_loss_that_it_has_not_noticed_yet(agent, store, clock, caplog):
    park_two(agent, clock)
    emptied(store)
    store.gone = {"a", "b"}
    agent._shut_down()
    assert len(errors(caplog)) == 1


def test_the_oldest_messages_are_given_up_and_counted_where_too_many_are_parked(
    agent, store, clock, monkeypatch, caplog
):
    monkeypatch.setattr(data_loss, "MOST", 1)
    park_two(agent, clock)
    assert agent.counts()["parked_untracked"] == 1
    emptied(store)
    store.gone = {"a", "b"}
    rounds(agent, clock, 20)
    assert store.asked("note_lost") == [("note_lost", "b")]
    assert "1 older ones were not tracked" in errors(caplog)[0]

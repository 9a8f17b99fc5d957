"""A Redis that has lost its data: what is reported, and when."""

from __future__ import annotations

import logging

from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Claim, Ending, Identity, Owner, Reply, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.unique import UniqueCall
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.events import ParkedLost
from celery_singleton_lock.worker.agent import data_loss
from celery_singleton_lock.worker.agent.loop import (
    BEAT,
)
from celery_singleton_lock.worker.agent.replica_wait import ParkedAnswer
from celery_singleton_lock.worker.agent_commands import EndUnique, Park
from celery_singleton_lock.worker.dispatch.recently_ended import REMEMBERED
from support.agent_fakes import (
    delivery,
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


def of_two_locks(base):
    """Return the lock header of a delivery that was parked at the second of two locks."""
    parts = (Part("first", f"{base}a.0"), Part("second", f"{base}b.1"))
    return header(f"{base}b.1")._replace(lock_set=LockSet(parts, at=1))


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
    dispatcher.in_flight.by_token["running.3"] = request("running.3")
    assert not dispatcher.ends.forgotten("ended.1")
    store.identities.append(Identity(("marker",), frozenset({"another run"})))
    rounds(agent, clock, 5)
    assert ("release", "ended.0", Ending.REPEAT) in store.calls
    assert store.asked("vouch") == [("vouch", "ended", "running")]
    assert dispatcher.ends.forgotten("ended.1")
    dispatcher.ends.note(header("later.0"))
    clock.now += 1
    assert not dispatcher.ends.forgotten("later.1")
    clock.now += REMEMBERED
    assert dispatcher.ends.headers() == []


def test_a_unique_call_that_ended_before_a_loss_does_not_count_for_an_hour(agent, store, clock):
    """A replica without its end was promoted: calls like it were not sent, followers waited."""
    rounds(agent, clock, 1)
    agent._commands.put(EndUnique(UniqueCall("a", "key", until_start=False, most=3600), "id", 0))
    rounds(agent, clock, 1)
    for times in (2, 3):
        store.identities.append(Identity(("marker",), frozenset({f"run {times}"})))
        rounds(agent, clock, 20)
        assert len(store.asked("withdraw")) == times
    clock.now += REMEMBERED
    store.identities.append(Identity(("marker",), frozenset({"a later run"})))
    rounds(agent, clock, 20)
    assert len(store.asked("withdraw")) == 3


def test_a_task_that_runs_here_again_after_a_loss_keeps_its_lock(agent, store, dispatcher, clock):
    """Redis had lost its end, and granted it once more. The next task would run beside it."""
    rounds(agent, clock, 1)
    dispatcher.ends.note(header("ended.0"))
    dispatcher.in_flight.by_token["ended.1"] = request("ended.1")
    store.identities.append(Identity(("marker",), frozenset({"another run"})))
    rounds(agent, clock, 5)
    assert store.asked("release") == []
    assert store.asked("vouch") == [("vouch", "ended")]


def test_a_task_with_several_locks_is_not_lost_where_it_was_parked_before(
    agent, store, dispatcher, clock
):
    """The worker that has parked it at its first lock knows only the token of that lock."""
    rounds(agent, clock, 1)
    dispatcher.ends.note(of_two_locks("11111111"))
    running = request("22222222b.1")
    running.lock_header = of_two_locks("22222222")
    dispatcher.in_flight.by_token["22222222b.1"] = running
    store.identities.append(Identity(("marker",), frozenset({"another run"})))
    rounds(agent, clock, 5)
    ((_, *vouched),) = store.asked("vouch")
    assert vouched == ["11111111a", "11111111b", "22222222a", "22222222b"]


def test_a_grant_that_waits_for_a_busy_main_loop_is_not_lost(agent, store, clock, seen):
    """As in a solo worker that runs a task: it parks the message again afterwards."""
    rounds(agent, clock, 1)
    seen.still = True
    store.replies["arrived.1"] = Reply(Verdict.ABSENT, lost=True)
    agent.inbox._arrive(delivery("arrived.1"))
    store.identities.append(Identity(("marker",), frozenset({"another run"})))
    rounds(agent, clock, 5)
    assert store.asked("vouch") == [("vouch", "arrived")]


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


def test_a_message_that_is_parked_again_names_the_delivery_that_has_ended():
    """Its record may be back, and is no trace of the message."""
    parts = (Part("first", "f.0"), Part("second", "s.2"))
    one = header("f.0")._replace(lock_set=LockSet(parts, left=parts[1]))
    for each, ended in ((header("f.0"), []), (one, [("second", "s.2")])):
        parked = request("f.0")
        parked.lock_header = each
        for unanswered in (False, True):
            claim = Claim("first", unanswered=unanswered)
            given = Owner("f.0", "f/0/0"), claim, MessageToPark(b"", "r", "q", None)
            answer = ParkedAnswer(Park(parked), given, Reply(Verdict.WAITING), 0.0)
            former = (("first", "f.0"), *ended) if unanswered else ()
            assert answer.message.former == former

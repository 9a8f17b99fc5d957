"""Commands to the agent: their order, and what an error of one does to the others."""

from __future__ import annotations

import logging

import pytest

from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.errors import LockUnusable
from celery_singleton_lock.worker.agent_commands import Call, LookUp, Park, Release
from celery_singleton_lock.worker.agent_queue import LONGEST_RETRY, REFUSED_RETRY, RETRY
from support.agent_fakes import (
    errors,
    header,
    request,
)


def test_like_orders_that_pile_up_go_together_and_none_passes_another(agent, store):
    """Two parks in one call, then the release between them and the third, then that."""
    agent._commands.put(Park(request("a")))
    agent._commands.put(Park(request("b")))
    agent._commands.put(Release(header("c"), Ending.FINAL))
    agent._commands.put(Park(request("d")))
    assert agent.run_once() == 4
    assert store.asked("park_many", "release") == [
        ("park_many", "a", "b"),
        ("release", "c", Ending.FINAL),
        ("park_many", "d"),
    ]


def test_an_error_of_ours_ends_neither_the_round_nor_the_orders_behind_it(agent, store, caplog):
    """A bug in one order is logged; the next order is carried out."""
    store.fails["body"] = KeyError("a bug")
    agent._commands.put(LookUp(request("a"), "k:a", "a"))
    agent._commands.put(Park(request("b")))
    with caplog.at_level(logging.ERROR):
        agent.run_once()
    assert store.asked("park_many") == [("park_many", "b")]
    assert "the agent failed" in caplog.text


def parks(agent):
    agent._commands.put(Park(request("a")))


def ends(agent):
    agent._commands.put(Release(header("a"), Ending.FINAL))


def looks_up(agent):
    agent._commands.put(LookUp(request("a"), "k:a", "a"))


@pytest.mark.parametrize(
    ("verb", "order"),
    [("park_many", parks), ("release", ends), ("body", looks_up)],
    ids=["park", "end", "look up"],
)
@pytest.mark.parametrize("error", [KeyError("a bug"), SystemExit(1), MemoryError()], ids=repr)
def test_an_order_that_fails_by_an_error_of_ours_is_carried_out_later(
    agent, store, dispatcher, clock, verb, order, error
):
    """Dropped, a message would stay unacknowledged, or a lock be held until its lease ends."""
    store.fails[verb] = error
    order(agent)
    agent.run_once()
    assert len(store.asked(verb)) == 1
    store.fails = {}
    clock.now += RETRY
    agent.run_once()
    assert len(store.asked(verb)) == 2
    assert len(dispatcher.heard("parked", "released", "redispatch")) == 1
    clock.now += 100
    agent.run_once()
    assert len(store.asked(verb)) == 2


def test_a_message_that_cannot_be_parked_by_an_error_of_ours_holds_up_no_other(
    agent, store, dispatcher
):
    """They are parked together; the one to blame is tried again alone."""
    broken = request("broken")
    broken.message = None
    for each in (request("a"), broken, request("b")):
        agent._commands.put(Park(each))
    agent.run_once()
    assert [call[1].id for call in dispatcher.heard("parked")] == ["a", "b"]


def test_a_lasting_internal_error_is_logged_with_a_remedy_and_retried_once_a_minute(
    agent, store, clock, caplog
):
    store.fails["release"] = KeyError("a bug")
    agent._commands.put(Release(header("a"), Ending.FINAL))
    for _ in range(100):
        agent.run_once()
        clock.now += 6
    assert 10 <= len(store.asked("release")) <= 100 * 6 / LONGEST_RETRY + 10
    told = [line for line in errors(caplog) if "Please report" in line]
    assert told
    assert "Release of the lock 'k:a' has failed 6 times" in told[0]


def test_an_errand_of_ours_that_fails_is_made_once(agent, clock):
    made = []

    def errand():
        made.append(1)
        raise KeyError

    agent._commands.put(Call(errand))
    for _ in range(3):
        agent.run_once()
        clock.now += 100
    assert made == [1]


@pytest.fixture
def unusable(store, monkeypatch):
    """The tokens of locks that Redis refuses."""
    tokens, release = set(), store.release

    def refusing(name, token, ending, **more):
        if token in tokens:
            store.calls.append(("release", token, ending))
            raise LockUnusable
        return release(name, token, ending, **more)

    monkeypatch.setattr(store, "release", refusing)
    return tokens


def test_a_lock_that_redis_refuses_holds_up_no_release_of_another(
    agent, store, dispatcher, clock, unusable, caplog
):
    """It is logged once, tried again, and released when Redis answers."""
    unusable.add("b")
    for token in "abc":
        agent._commands.put(Release(header(token), Ending.FINAL))
    agent.run_once()
    assert [call[1] for call in dispatcher.heard("released")] == ["a", "c"]
    for _ in range(3):
        clock.now += REFUSED_RETRY
        agent.run_once()
    assert sum("Redis refuses the lock 'k:b'" in line for line in errors(caplog)) == 1
    assert dispatcher.heard("backend_down") == []
    unusable.clear()
    clock.now += REFUSED_RETRY
    agent.run_once()
    assert [call[1] for call in dispatcher.heard("released")] == ["a", "c", "b"]


def test_a_task_with_several_locks_gives_back_those_that_redis_does_not_refuse(
    agent, store, dispatcher, unusable
):
    unusable.add("b")
    parts = tuple(Part(f"k:{token}", token, None) for token in "abc")
    agent._commands.put(Release(header("a")._replace(lock_set=LockSet(parts)), Ending.FINAL))
    agent.run_once()
    assert [call[1] for call in store.asked("release")] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("verdict", "others"),
    [(Verdict.GRANTED, []), (Verdict.RELEASED, ["c", "a"]), (Verdict.ABSENT, ["c", "a"])],
)
def test_a_task_with_several_locks_that_has_begun_unheard_keeps_them_all(
    agent, store, verdict, others
):
    """It was granted its second lock, and the connection to the broker was lost."""
    store.replies["b"] = Reply(verdict)
    parts = tuple(Part(f"k:{token}", token, None) for token in "abc")
    lock_set = LockSet(parts, at=1)
    agent._commands.put(Release(header("b")._replace(lock_set=lock_set), Ending.RETURN))
    agent.run_once()
    assert store.asked("release") == [
        ("release", "b", Ending.RETURN),
        *(("release", token, Ending.AGAIN) for token in others),
    ]

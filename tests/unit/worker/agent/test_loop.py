"""The agent's rounds and threads: their order, their errors, their end."""

from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.core.model import ALIVE, Ending
from celery_singleton_lock.errors import BackendUnreachable, LockUnusable
from celery_singleton_lock.worker import background_thread
from celery_singleton_lock.worker.agent.loop import (
    BEAT,
)
from celery_singleton_lock.worker.agent.worker_heartbeat import SYNC
from celery_singleton_lock.worker.agent_commands import Call, Park, Release
from celery_singleton_lock.worker.agent_queue import RETRY
from support.agent_fakes import (
    errors,
    header,
    request,
    until_retired,
)
from support.waiting import eventually


def test_a_long_outage_of_the_broker_piles_up_no_calls_for_the_main_loop(
    agent, dispatcher, seen, clock
):
    """The loop would make them all when the broker is back, and answer nothing meanwhile."""
    dispatcher.in_flight.by_token = {"a": request("a")}
    seen.still = True
    for _ in range(100):
        agent.run_once()
        clock.now += 1.0
    assert seen.later == []


@pytest.mark.parametrize("error", [LockUnusable("wrong type"), KeyError("a bug")], ids=repr)
def test_a_step_of_the_round_that_fails_ends_no_other(
    agent, store, dispatcher, clock, error, caplog
):
    """A worker whose heartbeat is refused still sweeps; a refusal is logged once."""
    store.fails["worker_heartbeat"] = error
    for _ in range(3):
        agent.run_once()
        clock.now += 2 * BEAT
    assert len(store.asked("take_due_locks")) == 3
    assert dispatcher.heard("backend_down") == []
    assert sum("wrong type" in line for line in errors(caplog)) <= 1


def test_the_servers_clock_is_asked_rarely(agent, store, clock):
    """Once per SYNC seconds, whatever the number of beats."""
    for _ in range(10):
        agent.run_once()
        clock.now += SYNC / 6
    assert len(store.asked("time")) == 2
    assert len(store.asked("worker_heartbeat")) == 10


def test_an_idle_worker_of_a_large_fleet_sends_fewer_heartbeats(agent, store, clock):
    """A thousand idle workers must not load Redis. It counts as alive for three intervals."""
    store.fleet = 1000
    for _ in range(40):
        agent.run_once()
        clock.now += 1.2
    assert store.beats[0] == (ALIVE, False)  # it does not know the fleet yet
    assert set(store.beats[4:]) == {(5 * ALIVE, True), (5 * ALIVE, False)}
    assert len(store.beats) < 20
    assert len(store.asked("take_due_locks")) == len(store.beats)


def test_a_worker_of_a_large_fleet_tells_at_once_that_it_has_a_free_slot(agent, store, clock):
    store.fleet = 1000
    for free in range(40):
        agent._heartbeat._free = lambda free=free: free
        agent.run_once()
        clock.now += 1.2
    assert len(store.beats) == 40


def test_a_retired_worker_neither_beats_nor_sweeps(agent, store, clock):
    """A beat would put it back into the fleet."""
    agent.retire()
    agent.run_once()
    clock.now += 10
    agent.run_once()
    assert store.asked("worker_heartbeat", "take_due_locks") == []


def test_stop_carries_out_what_was_ordered_and_ends_both_threads(agent, store, dispatcher):
    """The threads run, an order is given and the agent stopped: done, told, and gone."""
    store.receive = until_retired(agent)
    agent.start()
    agent.start()  # twice is once
    threads = [agent._agent_thread, agent._inbox_thread]
    assert all(thread.is_alive() for thread in threads)
    message = request("a")
    agent._commands.put(Park(message))
    agent.stop(timeout=60)
    assert [call[:4] for call in dispatcher.heard("parked")] == [("parked", message, "", 1)]
    assert store.asked("leave")
    assert not any(thread.is_alive() for thread in threads)


def test_stop_ends_though_redis_is_away(agent, store, caplog):
    """Leases are left to end; the worker's exit does not wait for Redis."""
    store.fails = dict.fromkeys(
        ("park_many", "leave", "time", "worker_heartbeat"), BackendUnreachable()
    )
    store.receive = until_retired(agent)
    agent.start()
    agent._commands.put(Park(request("a")))
    agent.stop(timeout=60)
    assert "Leases and grants that it has, if any, end by themselves" in caplog.text
    assert not any(thread.is_alive() for thread in (agent._agent_thread, agent._inbox_thread))


@pytest.mark.parametrize(
    "step", ["_round", "run_once", "_pause", "_tick", "_look_after_children", "_carry_out"]
)
@pytest.mark.parametrize("error", [KeyError("a bug of ours"), SystemExit(1)], ids=["bug", "exit"])
def test_no_error_of_a_round_ends_the_agents_thread(agent, store, monkeypatch, caplog, step, error):
    """It beats and takes orders afterwards; else nothing of this worker was delivered any more."""
    monkeypatch.setattr(background_thread, "PAUSE", 0.01)
    store.receive = until_retired(agent)
    owner = agent._runner if step == "_carry_out" else agent
    real, failures = getattr(owner, step), [error]

    def broken(*args):
        if failures:
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(owner, step, broken)
    monkeypatch.setattr(agent._agent_thread, "_one_round", agent._round)
    agent.start()
    agent._commands.put(Call(lambda: None))
    eventually(lambda: failures == [])
    done = threading.Event()
    agent._commands.put(Call(done.set))
    assert done.wait(60)
    agent.stop(timeout=60)
    assert "Traceback" in caplog.text


class Killed(BaseException):
    """Ends a thread, as no error that is caught does."""


@pytest.fixture
def deadly(store, monkeypatch):
    """The tokens whose release kills the thread that carries it out, once each."""
    tokens, release = set(), store.release

    def killing(name, token, ending, **more):
        if token in tokens:
            tokens.remove(token)
            raise Killed
        return release(name, token, ending, **more)

    monkeypatch.setattr(store, "release", killing)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    return tokens


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_command_is_lost_if_the_agents_thread_dies(agent, store, dispatcher, deadly):
    """Neither the one at which it dies nor those behind it, and these keep their order.

    What was carried out is not repeated. The inbox' thread starts it again; the clock of this test
    stands still, so what is repeated later is carried out at the end.
    """

    def receive(worker, timeout):
        agent.inbox._retired.wait(0.01)

    store.receive = receive
    deadly.add("b")
    for token in "abcd":
        agent._commands.put(Release(header(token), Ending.FINAL))
    agent._commands.put(Park(request("e")))
    agent.start()
    eventually(lambda: dispatcher.heard("parked"))
    assert agent._agent_thread.restarts == 1
    assert [call[1] for call in dispatcher.heard("released")] == ["a", "c", "d"]
    store.clock.now += RETRY
    eventually(lambda: len(dispatcher.heard("released")) == 4)
    agent.stop(timeout=60)
    assert [call[1] for call in dispatcher.heard("released")] == ["a", "c", "d", "b"]
    assert len(store.asked("park_many")) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_command_is_lost_if_the_worker_stops_after_its_thread_has_died(
    agent, store, dispatcher, deadly
):
    store.receive = until_retired(agent)
    deadly.add("a")
    agent._agent_thread.start()
    agent._commands.put(Release(header("a"), Ending.FINAL))
    eventually(lambda: not agent._agent_thread.is_alive())
    agent._commands.put(Release(header("b"), Ending.FINAL))
    agent._commands.put(Park(request("c")))
    agent.stop(timeout=60)
    assert [call[0] for call in dispatcher.heard("released", "parked")] == ["released", "parked"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dead", ["agent", "inbox"])
def test_of_the_agents_threads_each_starts_the_other_again(
    agent, store, clock, monkeypatch, caplog, dead
):
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    thread = {"agent": agent._agent_thread, "inbox": agent._inbox_thread}[dead]
    real, killing = thread._one_round, [Killed()]

    def one_round():
        if killing:
            raise killing.pop()
        return real()

    def receive(worker, timeout):
        clock.now += 0.5
        agent.inbox._retired.wait(0.01)

    monkeypatch.setattr(thread, "_one_round", one_round)
    store.receive = receive
    agent.start()
    if dead == "inbox":
        clock.now += 10
    eventually(lambda: thread.restarts == 1 and thread.is_alive())
    assert f"singleton-lock-{dead} has died" in caplog.text
    assert set(agent.last_rounds()) == {
        "singleton-lock-agent",
        "singleton-lock-inbox",
        "singleton-lock-outbox",
        "csl-watchdog",
    }
    agent.stop(timeout=60)

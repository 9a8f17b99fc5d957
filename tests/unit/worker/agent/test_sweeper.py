"""Sweeps, and messages that no worker consumes."""

from __future__ import annotations

from contextlib import suppress

import pytest

from celery_singleton_lock.core.parked_message import Delivery, UntakenMessage
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.worker.agent.loop import SWEEP_ON
from support.waiting import eventually


@pytest.mark.parametrize(
    ("backlog", "asked"), [(0, [8]), (3, [5]), (8, [10]), (50, [10])], ids="backlog-{}".format
)
def test_a_sweep_takes_no_more_than_the_pool_can_soon_run(agent, store, dispatcher, backlog, asked):
    """Four per slot, less those that wait for one already; a few, if as many wait: see below."""
    dispatcher.in_flight.waiting = backlog
    agent.run_once()
    assert [call[1] for call in store.asked("take_due_locks")] == asked


def test_leases_and_waits_end_though_all_workers_have_more_grants_than_they_can_run(
    agent, store, dispatcher
):
    """The lock of a dead holder would be stuck, and no wait would time out, for the whole backlog.

    What such a sweep grants comes here only if no other worker takes it.
    """
    dispatcher.in_flight.waiting = 50
    store.due = ["k:a"]
    agent.run_once()
    assert store.asked("sweep_and_grant_many") == [("sweep_and_grant_many", "k:a")]


def test_locks_of_a_dead_worker_are_granted_as_fast_as_a_small_pool_runs_their_tasks(
    agent, store, dispatcher, clock
):
    """With one slot, four locks a second were swept: the last of 150 waiters began after 40 s."""
    dispatcher.in_flight.waiting = 4
    store.due = [f"k:{n}" for n in range(500)]
    agent.run_once()
    swept = agent.counts()["swept"]
    for waiting in (8, 8, 5, 0):  # no room, no room, room for three, for eight
        dispatcher.in_flight.waiting = waiting
        clock.now += SWEEP_ON
        agent.run_once()
    assert agent.counts()["swept"] == swept + 3 + 8


def test_locks_of_a_cluster_are_swept_between_two_ticks_too(agent, store, clock, monkeypatch):
    """It finds one in each bucket, so more than asked for. Locks of dead holders came late."""
    monkeypatch.setattr(store, "take_due_locks", lambda limit: [f"k:{n}" for n in range(64)])
    agent.run_once()
    swept = agent.counts()["swept"]
    clock.now += SWEEP_ON
    agent.run_once()
    assert agent.counts()["swept"] == swept + 64


@pytest.mark.parametrize(("workers", "most"), [(1, 1000), (4, 250), (50, 100)])
def test_all_workers_together_sweep_a_limited_number_of_locks_between_two_ticks(
    agent, store, clock, workers, most
):
    """Locks whose messages no worker takes are due again and again, which must not load Redis."""
    store.due = [f"k:{n}" for n in range(500)]
    store.fleet = workers
    agent.run_once()  # writes a heartbeat, which returns the number of workers
    agent._next_beat, before = 0.0, agent.counts()["swept"]
    agent.run_once()
    agent._next_beat = clock.now + 100
    for _ in range(300):
        clock.now += SWEEP_ON
        agent.run_once()
    assert agent.counts()["swept"] - before == most


def test_grants_that_the_main_loop_has_not_taken_yet_count_as_waiting(agent, store, seen):
    """A solo worker takes none while it runs a task. It would be granted a hundred meanwhile."""
    seen.still = True
    for n in range(6):
        agent.inbox._arrive(Delivery("k:a", f"t{n}", 1, b"{}"))
    store.due = [f"k:{n}" for n in range(500)]
    agent.run_once()
    assert store.asked("take_due_locks") == [("take_due_locks", 2)]


def test_grants_that_wait_in_redis_count_as_waiting_while_many_locks_are_due(agent, store, clock):
    """With 20 ms to Redis they came faster than they were read, and all had expired by then."""
    store.due = [f"k:{n}" for n in range(500)]
    agent.run_once()
    store.inbox = [Delivery("k:a", f"t{n}", 1, b"{}") for n in range(5)]
    for _ in range(2):
        clock.now += SWEEP_ON
        agent.run_once()
        store.inbox += [Delivery("k:a", f"u{n}", 1, b"{}") for n in range(3)]
    assert [call[1] for call in store.asked("take_due_locks")] == [8, 3]


@pytest.mark.parametrize("error", [BackendUnreachable("away"), KeyError("a bug")], ids=repr)
def test_a_sweep_between_two_ticks_that_fails_is_left_to_the_next_tick(agent, store, clock, error):
    """It would otherwise be tried again at once, for as long as it fails."""
    store.due = [f"k:{n}" for n in range(500)]
    agent.run_once()
    store.fails["take_due_locks"] = error
    clock.now += SWEEP_ON
    with suppress(KeyError):
        agent.run_once()
    asked = len(store.asked("take_due_locks"))
    clock.now += SWEEP_ON
    agent.run_once()
    assert len(store.asked("take_due_locks")) == asked


def test_a_sweep_looks_at_each_lock_that_it_has_taken_from_the_list(agent, store):
    """Nobody else sees them for a while: one passed by would be free, and wait."""
    store.due = ["k:a", "k:b"]
    agent.run_once()
    assert store.asked("sweep_and_grant_many") == [("sweep_and_grant_many", "k:a", "k:b")]


def untaken(queue, task):
    return UntakenMessage("k:a", task, queue, b"{}", "seal", f"{task}/0/0", 1, task)


def test_a_message_that_this_worker_would_discard_stays_parked(agent, store, seen, caplog):
    """After a deployment without its task all of them ended as NotRegistered."""
    store.due = ["k:a"]
    store.strays = [untaken("q", "plain"), untaken("q", "gone"), untaken("far", "gone")]
    agent.run_once()
    store.strays = store.due = []
    eventually(lambda: (agent.run_once(), len(store.asked("record_publish_result")))[1] == 2, 5)
    assert seen.published == [("plain/0/0", "q"), ("gone/0/0", "far")]
    assert store.asked("record_publish_result") == [
        ("record_publish_result", "seal", "plain", "gone", True),
        ("record_publish_result", "seal", "gone", False),
    ]
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("They stay parked until a worker that has it starts" in each for each in told)
    assert any("runs them WITHOUT the lock" in each for each in told)


def test_a_stopping_worker_does_not_say_that_it_runs_its_locked_tasks_without_the_lock(
    agent, store, seen, caplog
):
    """A copy that it received as it stopped let it sweep a lock after it had left the fleet."""
    caplog.set_level("INFO")
    store.due = ["k:a"]
    store.strays = [untaken("q", "task")]
    agent.run_once()
    store.strays = store.due = []
    eventually(lambda: (agent.run_once(), store.asked("record_publish_result"))[1], 5)
    assert seen.published == [("task/0/0", "q")]
    [told] = [r for r in caplog.records if "parked tasks of the lock" in r.getMessage()]
    assert told.levelname == "INFO"
    assert "WITHOUT" not in told.getMessage()


def test_an_adrift_message_is_published_and_a_broker_error_stops_nothing(
    agent, store, seen, caplog
):
    """It goes to its queue, and Redis records that; if it fails, Redis records that too."""
    store.due = ["k:a"]
    store.strays = [
        UntakenMessage("k:a", f"t{n}", "far", b"{}", "seal", f"{n}/0/0", 10 + n) for n in range(2)
    ]
    agent.run_once()
    store.strays = store.due = []
    eventually(lambda: agent.counts()["published"] == 2, 5, "both published")
    assert seen.published == [("0/0/0", "far"), ("1/0/0", "far")]
    eventually(lambda: (agent.run_once(), store.asked("record_publish_result"))[1], 5, "told")
    assert store.asked("record_publish_result") == [
        ("record_publish_result", "seal", "t0", "t1", True)
    ]
    seen.refuse = OSError("no broker")
    store.strays, store.due = [UntakenMessage("k:a", "t2", "far", b"{}", "seal2")], ["k:a"]
    agent._next_beat = 0.0
    agent.run_once()
    store.strays = store.due = []
    eventually(lambda: "could not be sent to the broker" in caplog.text, 5, "a warning")
    eventually(lambda: (agent.run_once(), store.asked("record_publish_result")[1:])[1], 5, "told")
    assert store.asked("record_publish_result")[1:] == [
        ("record_publish_result", "seal2", "t2", False)
    ]
    assert agent.counts()["published"] == 2

"""The contract of every store about modes: switches, observations, delivery of parked tasks.

The sum of the waits of observed tasks, with a clock of the test, is in ``test_modes.py``.
"""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark

pytestmark = pytest.mark.contract

NAME = "account:42"


@pytest.fixture(params=["redis", "asyncio", "cluster", "in_memory"])
def kind(request):
    """Each kind of store there is."""
    return request.param


@pytest.fixture
def store(make_store):
    return make_store()


def owner(who, **more):
    return Owner(new_token(), f"{who}/0/0", "settle", "w", **more)


def test_a_switch_is_there_until_it_is_taken_away(store):
    """The heartbeat returns it too, so that it costs no extra command."""
    assert store.switches() == store.worker_heartbeat("w", "R", ["q"], 3.0) == {}
    store.switch("*", "off")
    store.switch("settle", "observe")
    assert store.switches() == store.worker_heartbeat("w", "R", ["q"], 3.0)
    assert store.switches() == {"*": "off", "settle": "observe"}
    for task in ("*", "settle", "nobody"):
        store.switch(task, None)
    assert store.switches() == {}


def test_parked_messages_are_counted_by_queue_and_let_run(store):
    """They count until they are granted; the holder keeps its lock."""
    store.worker_heartbeat("w", "R", ["q"], 30.0)
    holder = owner("holder")
    store.acquire(holder, Claim(NAME))
    for who in "ab":
        parked = store.park(owner(who), Claim(NAME), MessageToPark(who.encode(), "R", "q"))
        assert parked.verdict is Verdict.WAITING
    assert list(store.waited_for()) == [NAME]
    assert {queue: each.waiting for queue, each in store.parked("R").items()} == {"q": 2}
    assert 0 <= store.parked("R")["q"].oldest < 30
    assert store.parked("S") == {}
    assert store.deliver_unlocked([NAME], ["settle"], 1, worker="w", realm="R") == 1
    assert store.parked("R")["q"].waiting == 1
    assert store.deliver_unlocked([NAME], ["settle"], 9, worker="w", realm="R") == 1
    assert store.parked("R") == {}
    holders = [each.token for each in store.inspect(NAME).holders]
    assert len(holders) == 3
    assert holder.token in holders


def test_observed_runs_hold_nothing_and_are_reported(store):
    """A task that would have been blocked gets the holder, and is not blocked."""
    first, second = owner("first"), owner("second")
    assert store.record_observation(first, Claim(NAME), waits=True) is None
    assert store.record_observation(second, Claim(NAME), waits=True).holder.task_id == "first"
    assert store.inspect(NAME).holders == ()
    for who in (first, second):
        assert store.record_observation(who, Claim(NAME), waits=True, took=0.5) is None
    (task,) = store.observations().tasks
    assert (task.name, task.runs, task.blocked) == ("settle", 2, 1)
    assert [lock.name for lock in store.observations().locks] == [NAME]
    store.clear_observations()
    assert (store.observations().tasks, store.observations().locks) == ((), ())

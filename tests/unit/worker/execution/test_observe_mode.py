"""Runs without their locks: what is recorded of them."""

from __future__ import annotations

from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.worker.execution.observe_mode import ObserveMode
from support.agent_fakes import ManualClock

OWNER = Owner("t", "a/0/0", "act", "w#1")


class SlowStore:
    """A store that answers each call after a second, and knows how long each run took."""

    def __init__(self, clock):
        self.clock = clock
        self.took = []

    def record_observation(self, _owner, _claim, *, waits, took=None):
        self.took.append(took)
        self.clock.now += 1


def test_a_run_that_was_overlapped_while_redis_answered_its_start_counts_as_blocking():
    """With its lock it would have held it since Redis recorded it, before the reply arrived."""
    clock = ManualClock()
    store = SlowStore(clock)

    def body():
        clock.now += 3
        return "result"

    watched = ObserveMode(lambda: store, clock).watch(OWNER, Claim("n"), body, waits=True)
    assert watched == "result"
    assert store.took == [None, 1 + 3]

"""A task with several locks whose message is delivered to two workers."""

from __future__ import annotations

import pytest

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.worker.execution.interrupt import Interrupts
from celery_singleton_lock.worker.execution.multi_lock_tracer import MultiLockTracer
from celery_singleton_lock.worker.execution.tracer import LockTracer
from celery_singleton_lock.worker.lock_header import LockHeader, singles
from celery_singleton_lock.worker.not_started import NotStarted

pytestmark = pytest.mark.contract

TO_PARK = MessageToPark(b"body", "R", "q")


@pytest.fixture
def store(make_store):
    """A store with a live worker that takes the messages."""
    store = make_store()
    store.worker_heartbeat("w", "R", ["q"], 600)
    return store


@pytest.fixture
def enter(store):
    """A function that has the process of a worker enter the locks of a delivery."""
    tracer = LockTracer(lambda: store, print, 3600.0, lambda *_: "a", Interrupts)
    tracer.multi_lock_tracer = MultiLockTracer(tracer, lambda: store, print, 3600.0)
    return lambda header: tracer.multi_lock_tracer.enter(header, LockOptions())


@pytest.fixture
def delivered(store):
    """The header of a task, acknowledged early, that holds a and was granted b."""
    lock_set = LockSet((Part("a", new_token()), Part("b", new_token())), at=1, place=1)
    header = LockHeader("b", lock_set.here.token, "id/0/0", "task", "w", lock_set=lock_set)
    header = header._replace(granted=True, acks_early=True)
    first, second = singles(header)
    assert store.acquire(owner(first), Claim("a")).verdict is Verdict.GRANTED
    store.park(owner(second), Claim("b"), TO_PARK)
    return header


def owner(header):
    return Owner(header.token, header.attempt, header.task, header.worker)


def test_a_task_is_not_lost_if_its_worker_stood_still_until_another_one_got_its_message(
    store, enter, delivered
):
    """The other one finds the first lock held, and parks the message there beside its holder."""
    again = Owner(new_token(), delivered.attempt, "task")
    assert store.park(again, Claim("a", copy=True), TO_PARK).verdict is Verdict.TWIN
    store.release("b", delivered.token, Ending.FINAL)
    with pytest.raises(NotStarted) as turned:
        enter(delivered)
    assert turned.value.outcome is Outcome.GONE
    view = store.inspect("a")
    assert (view.bodies, [each.state for each in view.holders]) == (1, ["granted"])


def test_a_copy_of_a_task_that_has_all_of_its_locks_does_not_run_after_it(store, enter, delivered):
    """It is acknowledged early: it has begun, and would end with its worker."""
    copy = Owner(new_token(), delivered.attempt, "task")
    store.park(copy, Claim("a", copy=True), TO_PARK)
    assert enter(delivered).held
    store.release("a", delivered.lock_set.parts[0].token, Ending.AGAIN)
    assert (store.inspect("a").bodies, store.inspect("b").bodies) == (0, 0)

"""A process that ends, or is interrupted, while it asks for a lock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.worker.execution.celery_outcome import Run
from celery_singleton_lock.worker.execution.interrupt import Interrupts
from celery_singleton_lock.worker.execution.multi_lock_tracer import MultiLockTracer
from celery_singleton_lock.worker.execution.tracer import LockTracer
from celery_singleton_lock.worker.lock_header import LockHeader, singles


class InterruptedStore:
    """Raises when it is asked for a lock, and notes how locks are released."""

    clock = SystemClock()

    def __init__(self, error):
        self.error, self.endings = error, set()

    def acquire(self, owner, claim, **_):
        if claim.name == "a":
            raise self.error
        return Reply(Verdict.GRANTED, 1, 30.0)

    def claim(self, *_, **__):
        raise self.error

    def release(self, _name, _token, ending, **_):
        self.endings.add(ending)
        return Reply(Verdict.RELEASED)


ONE = LockHeader("a", "ta.0", "id/0/0", "task", "w", granted=True)
TWO = ONE._replace(lock_set=LockSet((Part("a", "ta.0"), Part("b", "0b0b0b0b.0"))))


@pytest.fixture(params=[ONE, TWO], ids=["one lock", "two locks"])
def enter(request):
    """A function that has an interrupted process enter the locks of a task."""

    def call(store, *, parked=True):
        tracer = LockTracer(lambda: store, print, 3600.0, lambda *_: "a", Interrupts)
        tracer.multi_lock_tracer = MultiLockTracer(tracer, lambda: store, print, 3600.0)
        run = Run(None, None, "id", (), {}, {})
        return tracer.trace(run, request.param._replace(granted=parked), LockOptions())

    return call


def test_a_parked_task_is_not_lost_with_a_process_that_is_ended_while_it_claims(enter):
    """SIGTERM in a child: the main process releases, since it knows whether the task runs again."""
    store = InterruptedStore(SystemExit(1))
    with pytest.raises(SystemExit):
        enter(store)
    assert store.endings == set()


def test_a_message_of_the_broker_may_run_again_if_its_process_is_ended_while_it_asks(enter):
    """SIGTERM in a child: its end is not remembered, and nobody waits for its lock."""
    store = InterruptedStore(SystemExit(1))
    with pytest.raises(SystemExit):
        enter(store, parked=False)
    assert store.endings == {Ending.AGAIN}


def test_a_task_that_is_interrupted_while_it_claims_gives_its_lock_back(enter, monkeypatch):
    """Its soft time limit: it fails."""
    failed = []
    monkeypatch.setattr(
        "celery_singleton_lock.worker.execution.tracer.fail", lambda _, error: failed.append(error)
    )
    store = InterruptedStore(SoftTimeLimitExceeded())
    enter(store)
    assert (failed, store.endings) == ([store.error], {Ending.FINAL})


def held(header):
    """Return the locks of a task that runs."""
    locks = [SimpleNamespace(name=one.name, expires_in=9.0, rates=()) for one in singles(header)]
    return SimpleNamespace(locks=locks, expires_in=9.0, rates=())


@pytest.mark.parametrize("header", [ONE, TWO], ids=["one lock", "two locks"])
def test_a_lock_counts_as_left_from_the_start_of_its_release(header):
    """The watchdog may find it free before the answer comes."""
    left = []

    class Store(InterruptedStore):
        def release(self, _name, token, *_, **__):
            left.append((token, tracer.has_left(token)))
            return Reply(Verdict.RELEASED)

    tracer = LockTracer(lambda: Store(None), print, 3600.0, lambda *_: "a", Interrupts)
    tracer.multi_lock_tracer = MultiLockTracer(tracer, lambda: Store(None), print, 3600.0)
    tokens = [each.token for each in singles(header)]
    tracer.leave(header, Ending.AGAIN)
    assert not any(map(tracer.has_left, tokens)), "it has not run, and may ask for them again"
    left.clear()
    tracer.leave(header, Ending.FINAL, held(header))
    assert sorted(left) == sorted((token, True) for token in tokens)

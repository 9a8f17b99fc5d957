"""A lock that a task takes in its pool slot: what a refusal makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import BackendUnreachable, LockConflict
from celery_singleton_lock.worker.execution.undispatched import UndispatchedTracer
from celery_singleton_lock.worker.not_started import NotStarted


class RefusingStore:
    """Gives nobody the lock, and cannot be reached for a second question."""

    clock = SystemClock()

    def inspect(self, name, **_):
        raise BackendUnreachable


class BusyLock:
    """A lock that another client holds."""

    name = "k:1"

    def acquire(self, **_):
        return False


@pytest.mark.parametrize(("policy", "ends"), [("skip", NotStarted), ("fail", LockConflict)])
@pytest.mark.parametrize("on_error", ["run", "retry", "fail"])
def test_a_refusal_is_valid_if_redis_fails_before_the_holder_is_known(policy, ends, on_error):
    """Also where an error of Redis lets the task run without its lock: this lock was seen busy."""
    tracer = UndispatchedTracer(RefusingStore, observe=None)
    options = SimpleNamespace(on_conflict=policy, on_backend_error=on_error, wait_timeout=1.0)
    with pytest.raises(ends, match="held by another client"):
        tracer.take(BusyLock(), "task", options)

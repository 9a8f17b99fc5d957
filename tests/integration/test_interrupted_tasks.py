"""A soft time limit at any line of a task that no dispatcher has seen: its locks become free."""

from __future__ import annotations

from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock import LockedTask
from celery_singleton_lock.core.lock_mode import ENFORCE
from celery_singleton_lock.lock import lease_watchdog, multi_lock, sync
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.worker.execution import batches, eager, task_lock, undispatched
from celery_singleton_lock.worker.lock_header import COPY
from support.interruption import Injected

OPTIONS = {"one lock": {"lock_key": "a"}, "two locks": {"lock_keys": ["a", "b"]}}


@pytest.fixture
def app(redis_url):
    app = Celery("here", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        singleton_lock_backend=redis_url, singleton_lock_lease=60, singleton_lock_eager=True
    )
    yield app
    app.close()


def eagerly(task):
    task.apply(([],))


def in_its_slot(task):
    """As in a worker whose messages pass no dispatcher of this package."""
    outcome = task.__trace__("id", ([],), {}, {"id": "id", "hostname": "h"})
    if outcome.info is not None:
        raise outcome.info.retval


def as_a_copy(task):
    """A copy of a message that was parked, and is not known any more."""
    request = {"id": "id", "hostname": "h", COPY: ("a", "token")}
    outcome = task.__trace__("id", ([],), {}, request)
    if outcome.info is not None:
        raise outcome.info.retval


def in_a_batch(task):
    request = SimpleNamespace(id="id", args=(), kwargs={}, request_dict={"id": "id"})
    batches.run_batch(ENFORCE, lambda task, args: task.run(*args), task, ([request],))


def renewed():
    """Return the tokens whose leases this process renews."""
    return {token for each in lease_watchdog.watchdogs() for token in each.watching()}


@pytest.mark.full("two locks")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("work", [eagerly, in_its_slot, as_a_copy, in_a_batch])
def test_a_task_interrupted_at_any_line_leaves_no_lock_held_or_renewed(
    app, redis_client, work, options
):
    """Else the lock would stay taken until the lease ends, or as long as the process lives."""
    runs = []

    @app.task(base=LockedTask, name="act", shared=False, **options)
    def task(requests):
        runs.append(requests)

    task.__trace__ = build_tracer("act", task, app=app)

    copy_context().run(_interrupt_at_each_line, partial(work, task), runs, RedisStore(redis_client))


def _interrupt_at_each_line(work, runs, store):
    """Run this in a context of its own: an interruption may leave a current lock, not held."""
    others = renewed()  # of earlier tests in this process; these may end at any time
    work()
    assert len(runs) == 1
    assert renewed() <= others
    at, interrupted = 0, True
    while interrupted:
        at += 1
        injected = Injected(at, batches, eager, multi_lock, sync, task_lock, undispatched)
        with injected, suppress(SoftTimeLimitExceeded):
            work()
        interrupted = injected.where is not None
        for name in "ab":
            view = store.inspect(name)
            assert (view.holders, view.waiting) == ((), 0), injected.where
        assert renewed() <= others, injected.where
        runs.clear()
        work()
        assert len(runs) == 1, injected.where
    assert at > 30  # it did interrupt

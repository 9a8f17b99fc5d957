"""What a worker keeps of tasks that have ended without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.worker.dispatch.pool_exit import PoolExit
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.message_stage import Stage
from celery_singleton_lock.worker.not_started import NotStarted


def test_a_worker_of_threads_does_not_keep_the_messages_of_replaced_tasks():
    """The traceback of the error refers to the frames of the run, and these to the message."""
    error = NotStarted(Outcome.SKIP_DEBOUNCED, reason="a later message replaces it")
    header = LockHeader("document:1", "token.0", "id/0/0", "app.index", "", error=error)
    nothing: Any = MagicMock()
    pool_exit = PoolExit(
        in_flight=nothing,
        leases=nothing,
        commands=nothing,
        notifier=nothing,
        clock=SystemClock(),
        children=False,
    )
    request: Any = SimpleNamespace(
        lock_header=header,
        acquired_at=None,
        move_from=lambda *_: Stage.RUNNING,
        ending=lambda: Ending.FINAL,
    )
    pool_exit.end(request, gone=False)
    (kept,) = pool_exit.ends.headers()
    assert kept.token == header.token
    assert kept.error is None

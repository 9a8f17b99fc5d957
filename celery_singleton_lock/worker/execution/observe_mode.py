"""Runs tasks without their locks, and records which ones would have been blocked (``observe``).

A task runs whatever Redis replies. It does not wait longer for the reply than for that of a real
lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lock_view import Holder, WaitsFor, reason_in
from celery_singleton_lock.core.model import Claim, Owner, Reply
from celery_singleton_lock.core.preempt import is_preempting
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.store.base import WorkerStore

logger: Final = logging.getLogger(__name__)

PAUSE: Final = 5.0
"""Seconds for which nothing is recorded after Redis did not answer."""

_NOT_GRANTED: Final = {
    WaitsFor.RATE: "not be granted yet, since it would have reached its rate",
    WaitsFor.GROUP: "not be granted yet, since its group would hold as many permits as it may",
    WaitsFor.PAUSE: "not be granted, since it is paused, or closed for a time",
    WaitsFor.REDIS: "not be granted yet, since its Redis was replaced or restarted",
}


class ObserveMode:
    """Records the runs of the tasks of one process.

    Args:
        store: returns the store of this process.
        clock: source of monotonic seconds.
    """

    def __init__(self, store: Callable[[], WorkerStore], clock: Clock | None = None) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._paused_until = 0.0

    def watch(self, owner: Owner, claim: Claim, go: Callable[[], Any], *, waits: bool) -> Any:
        """Run a task without its lock.

        Args:
            owner: the owner of the run.
            claim: the claim that it would have made.
            go: runs the task.
            waits: whether a blocked run would wait; otherwise the run would be skipped.

        Returns:
            The result of ``go``.
        """
        began = self._clock.monotonic()
        self._begin(owner, claim, waits=waits)
        try:
            return go()
        finally:
            self._end(owner, claim, self._clock.monotonic() - began, waits=waits)

    def _begin(self, owner: Owner, claim: Claim, *, waits: bool) -> None:
        if self._clock.monotonic() < self._paused_until:
            return None
        try:
            blocked = self._store().record_observation(owner, claim, waits=waits)
        except BackendError as error:
            return self._pause_observing(error)
        if blocked is None:
            return None
        if blocked.waits_for is WaitsFor.SETTLING:
            self._tell_replaced(owner, claim, blocked.holder)
        else:
            self._tell(owner, claim, blocked)
        return None

    @staticmethod
    def _tell_replaced(owner: Owner, claim: Claim, older: Holder | None) -> None:
        task_id = older.task_id if older else ""
        logger.info(
            "%s[%s] would have replaced task %s, which would not have run: it would have settled "
            "for lock %r (lock_debounce)",
            owner.task,
            printable(owner.attempt.split("/", 1)[0]),
            printable(task_id),
            claim.name,
            extra={
                "lock_event": "observed-replaced",
                "lock_name": claim.name,
                "lock_task": owner.task,
                "lock_task_id": owner.attempt.split("/", 1)[0],
            },
        )

    @staticmethod
    def _tell(owner: Owner, claim: Claim, blocked: Reply) -> None:
        holder = str(blocked.holder) if blocked.holder and blocked.holder.task else ""
        would = f"be held by {holder or 'those before it'}"
        if blocked.waits_for in _NOT_GRANTED:
            would = _NOT_GRANTED[blocked.waits_for]
        elif is_preempting(claim.flow) and blocked.holder and blocked.holder.task == owner.task:
            would += ", which it would have preempted"
        logger.info(
            "%s[%s] would have been blocked: lock %r would %s",
            owner.task,
            printable(owner.attempt.split("/", 1)[0]),
            claim.name,
            would,
            extra={
                "lock_event": "observed-blocked",
                "lock_name": claim.name,
                "lock_task": owner.task,
                "lock_task_id": owner.attempt.split("/", 1)[0],
                "lock_holder": holder,
                "lock_waits_for": reason_in(blocked),
            },
        )

    def _end(self, owner: Owner, claim: Claim, took: float, *, waits: bool) -> None:
        """Record the end. Ignore a soft time limit that expires here, since the task has ended."""
        if self._clock.monotonic() < self._paused_until:
            return
        try:
            self._store().record_observation(owner, claim, waits=waits, took=took)
        except BackendError as error:
            self._pause_observing(error)
        except SoftTimeLimitExceeded:
            logger.debug("the end of a run was not recorded")

    def _pause_observing(self, error: BackendError) -> None:
        self._paused_until = self._clock.monotonic() + PAUSE
        logger.warning("celery-singleton-lock: %s Tasks run and are not observed.", error)

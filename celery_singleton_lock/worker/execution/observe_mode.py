"""Runs tasks without their locks, and writes down what the locks would have done (``observe``).

To observe must not do harm: a task runs whatever Redis answers, and waits for it no longer than it
would for its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.message_text import printable

logger = logging.getLogger(__name__)

PAUSE: Final = 5.0
"""Seconds for which nothing is written down after Redis has not answered."""


class Lookout:
    """Watches the tasks of one process.

    Args:
        store: returns this process' store.
        clock: source of monotonic seconds.
    """

    def __init__(self, store: Callable[[], Store], clock: Clock | None = None) -> None:
        """Have seen nothing yet."""
        self._store = store
        self._clock = clock or SystemClock()
        self._blind_until = 0.0

    def watch(self, owner: Owner, claim: Claim, go: Callable[[], Any], *, waits: bool) -> Any:
        """Run a task without its lock.

        Args:
            owner: the run.
            claim: what it would have asked.
            go: runs it.
            waits: whether it would wait if blocked; else it would be left out.

        Returns:
            What ``go`` returns.
        """
        self._begin(owner, claim, waits=waits)
        began = self._clock.monotonic()
        try:
            return go()
        finally:
            self._end(owner, claim, self._clock.monotonic() - began, waits=waits)

    def _begin(self, owner: Owner, claim: Claim, *, waits: bool) -> None:
        if self._clock.monotonic() < self._blind_until:
            return None
        try:
            holder = self._store().observe(owner, claim, waits=waits)
        except BackendError as error:
            return self._go_blind(error)
        if holder is not None:
            logger.info(
                "%s[%s] would have been blocked: lock %r would be held by %s",
                owner.task,
                printable(owner.attempt.split("/", 1)[0]),
                claim.name,
                holder if holder.task else "those before it",
                extra={
                    "lock_event": "observed-blocked",
                    "lock_name": claim.name,
                    "lock_task": owner.task,
                    "lock_task_id": owner.attempt.split("/", 1)[0],
                    "lock_holder": str(holder) if holder.task else "",
                },
            )
        return None

    def _end(self, owner: Owner, claim: Claim, took: float, *, waits: bool) -> None:
        """Write down its end; a soft time limit that strikes here comes too late for the task."""
        if self._clock.monotonic() < self._blind_until:
            return
        try:
            self._store().observe(owner, claim, waits=waits, took=took)
        except BackendError as error:
            self._go_blind(error)
        except SoftTimeLimitExceeded:
            logger.debug("the end of a run was not written down")

    def _go_blind(self, error: BackendError) -> None:
        self._blind_until = self._clock.monotonic() + PAUSE
        logger.warning("celery-singleton-lock: %s Tasks run and are not observed.", error)

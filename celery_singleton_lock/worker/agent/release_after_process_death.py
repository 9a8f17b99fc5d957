"""Releases for tasks whose processes cannot: they are gone, or will be in a moment."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.worker.partial_lock_sets import Kept
from celery_singleton_lock.core.model import Ending, Reservation
from celery_singleton_lock.worker.agent_commands import End
from celery_singleton_lock.worker.lock_header import Stamp, doubted, leaving
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_queue import Tray

logger = logging.getLogger(__name__)

GONE: Final = 5.0
"""Seconds after which it is told that a process was killed and does not go."""

LOOK: Final = 0.02
"""Seconds between two looks whether it has gone."""

RARE_LOOK: Final = 0.5
"""Likewise, after :data:`GONE`."""


class Releases:
    """Gives back locks, not before nobody can be running under them any more.

    Args:
        store: the agent's.
        kept: what parked messages keep meanwhile.
        orders: the agent's.
        taker: returns the worker that may be granted a lock that is freed; empty if none.
        done_for: seconds for which later copies of an ended attempt end quietly.
        lease_end: returns the monotonic time up to which the lease of a token is kept; None if it
            is not known.
        told: called with the token of what was released.

    Attributes:
        done: how many were released.
    """

    def __init__(
        self,
        store: Store,
        *,
        kept: Kept,
        orders: Tray,
        taker: Callable[[], str],
        done_for: float,
        lease_end: Callable[[str], float | None],
        told: Callable[[str], None],
    ) -> None:
        """Have released nothing yet."""
        self.done = 0
        self._store = store
        self._kept = kept
        self._orders = orders
        self._taker = taker
        self._done_for = done_for
        self._lease_end = lease_end
        self._told = told
        self._clock: Clock = store.clock

    def order(self, stamp: Stamp, ending: Ending, pid: int | None, hold: float = 0.0) -> None:
        """Have the locks of a task released, once ``pid`` is gone or they lapse. Does not wait.

        Args:
            stamp: of the task.
            ending: of the task.
            pid: of its process; None if that is gone.
            hold: seconds for which the locks stay taken, if the ending is HOLD.
        """
        now, until = self._clock.monotonic(), 0.0
        if pid:
            ends = [self._lease_end(part.token) for part in leaving(stamp)]
            until = max((end for end in ends if end is not None), default=now + GONE)
        self._orders.put(End(stamp, ending, pid, now, until, hold=hold))

    def carry_out(self, order: End) -> None:
        """Release, or look again a little later.

        Raises:
            BackendError: Redis did not answer.
        """
        now = self._clock.monotonic()
        if order.pid and now < order.until and not gone(order.pid):
            self._wait_for_process(order, now)
            return
        for stamp in leaving(order.stamp):
            self._store.release(
                stamp.name,
                stamp.token,
                order.ending,
                worker=self._taker(),
                done_for=self._done_for,
                mark=doubted(stamp, self._clock.monotonic(), self._done_for).copy,
                reserve=Reservation("", order.hold) if order.ending is Ending.HOLD else None,
            )
        self._kept.drop(order.stamp.token)
        self.done += 1
        self._told(order.stamp.token)

    def _wait_for_process(self, order: End, now: float) -> None:
        """Look again later. A process that was killed may hang in the kernel, and still be there.

        Its lease, which is not renewed any more, decides when the lock is free at the latest.
        """
        if now - order.since < GONE:
            self._orders.put_off(order, LOOK)
            return
        if not order.told:
            logger.warning(
                "celery-singleton-lock: the process %d of task %s was killed %.0f s ago and has "
                "not gone: its lock %r is free when it goes, or in %.0f s, when its lease ends",
                order.pid,
                order.stamp.task,
                now - order.since,
                order.stamp.name,
                order.until - now,
            )
        self._orders.put_off(replace(order, told=True), min(RARE_LOOK, order.until - now))


def gone(pid: int) -> bool:
    """Return whether a process has ended; one that only waits to be reaped has."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False

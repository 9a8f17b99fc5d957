"""Releases for tasks whose processes cannot: they are gone, or will be in a moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from celery_singleton_lock.clock import Clock
from celery_singleton_lock.kept import Kept
from celery_singleton_lock.model import Ending
from celery_singleton_lock.orders import End
from celery_singleton_lock.stamp import Stamp, doubted, leaving
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.tray import Tray

GONE: Final = 5.0
"""Seconds after which a process that was killed, and does not go, is left to its lease."""

LOOK: Final = 0.02
"""Seconds between two looks whether it has gone."""


class Releases:
    """Gives back locks, not before nobody can be running under them any more.

    Args:
        store: the agent's.
        kept: what parked messages keep meanwhile.
        orders: the agent's.
        taker: returns the worker that may be granted a lock that is freed; empty if none.
        done_for: seconds for which later copies of an ended attempt end quietly.
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
        told: Callable[[str], None],
    ) -> None:
        """Have released nothing yet."""
        self.done = 0
        self._store = store
        self._kept = kept
        self._orders = orders
        self._taker = taker
        self._done_for = done_for
        self._told = told
        self._clock: Clock = store.clock

    def order(self, stamp: Stamp, ending: Ending, pid: int | None) -> None:
        """Have the locks of a task released, once ``pid`` is gone. Does not wait."""
        self._orders.put(End(stamp, ending, pid, self._clock.monotonic() + GONE))

    def carry_out(self, order: End) -> None:
        """Release, or look again a little later.

        Raises:
            BackendError: Redis did not answer.
        """
        if order.pid and not gone(order.pid) and self._clock.monotonic() < order.until:
            self._orders.put_off(order, LOOK)
            return
        for stamp in leaving(order.stamp):
            self._store.release(
                stamp.name,
                stamp.token,
                order.ending,
                worker=self._taker(),
                done_for=self._done_for,
                mark=doubted(stamp, self._clock.monotonic(), self._done_for).copy,
            )
        self._kept.drop(order.stamp.token)
        self.done += 1
        self._told(order.stamp.token)


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

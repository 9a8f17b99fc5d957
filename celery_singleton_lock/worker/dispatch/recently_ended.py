"""The deliveries that have ended in a worker recently.

If Redis loses the record of these ends and delivers a message again, it does not run again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, NamedTuple

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.worker.lock_header import LockHeader

REMEMBERED: Final = 60.0
"""Seconds for which the end of a delivery is remembered."""

MOST: Final = 10_000
"""Most ends that are remembered."""


class _End(NamedTuple):
    lock_header: LockHeader
    at: float


class RecentEnds:
    """Remembers the deliveries that have ended here and are not retried. Safe from any thread.

    Args:
        clock: source of monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # After many of its first entries were deleted, a dict takes long to find its first entry.
        self._ends: OrderedDict[str, _End] = OrderedDict()
        self._doubted_at = 0.0
        # Reentrant: Celery's cold shutdown ends tasks in a signal handler of the main thread.
        self._mutex = threading.RLock()

    def note(self, header: LockHeader) -> None:
        """Remember the end of a delivery."""
        now = self._clock.monotonic()
        with self._mutex:
            self._ends[base_of(header.token)] = _End(header, now)
            self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        while self._ends:
            base, end = next(iter(self._ends.items()))
            if len(self._ends) <= MOST and end.at > now - REMEMBERED:
                return
            self._ends.pop(base, None)

    def doubt(self) -> None:
        """Note that Redis may have lost data up to now: it did not answer, or was replaced."""
        self._doubted_at = self._clock.monotonic()

    def forgotten(self, token: str) -> bool:
        """Return whether a delivery has ended here and Redis may have no record of its end.

        If Redis has lost no data, a message that it delivers again must run again: its lease has
        expired, or an operator has put it back into the queue.
        """
        with self._mutex:
            end = self._ends.get(base_of(token))
        return end is not None and end.at <= self._doubted_at

    def headers(self) -> list[LockHeader]:
        """Return the deliveries that have ended in the last minute."""
        with self._mutex:
            self._forget_old(self._clock.monotonic())
            return [end.lock_header for end in self._ends.values()]

"""What has ended in a worker lately: a Redis that lost these ends must not run it again."""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import base_of
from celery_singleton_lock.worker.lock_header import Stamp

REMEMBERED: Final = 60.0
"""Seconds for which an end is remembered."""

MOST: Final = 10_000
"""Most ends that are remembered."""


class _End(NamedTuple):
    stamp: Stamp
    at: float


class RecentEnds:
    """Remembers which deliveries have ended for good here. Safe from any thread.

    Args:
        clock: source of monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        """Remember none."""
        self._clock = clock
        self._ends: dict[str, _End] = {}
        self._doubted_at = 0.0
        self._mutex = threading.Lock()

    def note(self, stamp: Stamp) -> None:
        """Remember the end of a delivery."""
        now = self._clock.monotonic()
        with self._mutex:
            self._ends[base_of(stamp.token)] = _End(stamp, now)
            self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        while self._ends:
            base = next(iter(self._ends))
            if len(self._ends) <= MOST and self._ends[base].at > now - REMEMBERED:
                return
            del self._ends[base]

    def doubt(self) -> None:
        """Note that Redis may have lost what it was told until now: it was away, or is another."""
        self._doubted_at = self._clock.monotonic()

    def forgotten(self, token: str) -> bool:
        """Return whether a delivery has ended here, and Redis delivers it since it has lost that.

        A message that Redis delivers again without having been away is to run again: its lease had
        lapsed, or an operator has put it back into the line.
        """
        with self._mutex:
            end = self._ends.get(base_of(token))
        return end is not None and end.at <= self._doubted_at

    def stamps(self) -> list[Stamp]:
        """Return the deliveries that have ended in the last minute."""
        with self._mutex:
            self._forget_old(self._clock.monotonic())
            return [end.stamp for end in self._ends.values()]

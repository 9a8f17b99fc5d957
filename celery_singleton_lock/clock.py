"""The only file that reads time.

Order between clients is the server's business (every script reads ``TIME`` on the server). What a
process measures itself are durations, and those come from the monotonic clock. The wall clock is
read for one thing: how far off an ETA is, which Celery counts by it.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""
        return time.monotonic()


def seconds_until(eta: datetime) -> float:
    """Return how far off an ETA is; a naive one is UTC, as Celery's are."""
    aware = eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)
    return (aware - datetime.now(timezone.utc)).total_seconds()


class ServerClock:
    """Guesses the lock server's clock, to give each arriving message its place in line.

    The offset between the server's ``TIME`` and the local monotonic clock is measured now and then
    (:meth:`sync`); the wall clock of this machine is never read. Answers strictly increase, so two
    messages that arrive at one worker keep their order whatever the measurement says.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        """Start without an offset: :meth:`stamp` answers 0, "now, whenever the server sees it"."""
        self._clock = clock or SystemClock()
        self._offset: float | None = None
        self._last = 0

    def sync(self, server_seconds: float, answered: float) -> None:
        """Take a measurement: the server's time, and the monotonic time when it had arrived.

        Counted from the answer, so that the guess is late by the way back, and never early: a
        script cuts a place in the future down to its own now, and that would swap two messages.
        """
        self._offset = server_seconds - answered

    def stamp(self) -> int:
        """Return microseconds on the server's clock, growing with each call; 0 if not synced."""
        if self._offset is None:
            return 0
        now = int((self._clock.monotonic() + self._offset) * 1_000_000)
        self._last = max(self._last + 1, now)
        return self._last

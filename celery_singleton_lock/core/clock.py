"""The only file that reads time.

Order between clients is the server's business (every script reads ``TIME`` on the server). What a
process measures itself are durations, and those come from the monotonic clock. The wall clock is
read for what Celery counts by it: how far off an ETA is, and when an event happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any, Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...


def _seconds_since_boot() -> Callable[[], float]:
    """Return the clock that also counts the time in which the machine was suspended.

    Linux' ``CLOCK_MONOTONIC`` stands still meanwhile, and a lease on a server does not: a process
    would believe in a lease that has ended. Where there is no such clock, it is ``time.monotonic``.
    """
    try:
        read = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        read()
    except (AttributeError, OSError):
        return time.monotonic
    return read


class SystemClock:
    """The machine's monotonic clock; on Linux the one that counts a suspended machine's time.

    It is for durations that a server measures too. Waits of threads go by ``time.monotonic``.
    """

    monotonic = staticmethod(_seconds_since_boot())
    """Seconds since some fixed point; never goes back."""


def wall_time() -> float:
    """Return the seconds since 1970 by this machine's wall clock, as Celery's events tell them."""
    return time.time()


class MovableClock:
    """The clock of a server in this process' memory, and of those who use it; tests move it.

    Two faces: :meth:`monotonic` is what clients measure by, and always runs, so that nobody waits
    for ever; :meth:`microseconds` is the server's own, which can be stopped. Who moves it must keep
    the server from reading it meanwhile.
    """

    def __init__(self) -> None:
        """Show the time of day, and run."""
        self._ahead = 0.0
        self._began = time.monotonic()
        self._zero = time.time_ns() // 1000
        self._stopped_at: int | None = None

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back, and never stops."""
        return time.monotonic() + self._ahead

    def microseconds(self) -> int:
        """Return the server's time, in microseconds since 1970."""
        return self._running() if self._stopped_at is None else self._stopped_at

    def tick(self) -> int:
        """Return the server's time; one that stands still moves on by one microsecond.

        So what comes later has a later time, and the order of arrival stays.
        """
        if self._stopped_at is not None:
            self._stopped_at += 1
        return self.microseconds()

    @property
    def stopped(self) -> bool:
        """Whether the server's time stands still."""
        return self._stopped_at is not None

    def advance(self, seconds: float) -> None:
        """Let time pass, for both faces."""
        self._ahead += seconds
        if self._stopped_at is not None:
            self._stopped_at += round(seconds * 1_000_000)

    def stop(self) -> None:
        """Let the server's time stand still, but for :meth:`advance`. Twice is once."""
        self._stopped_at = self.microseconds()

    def go(self) -> None:
        """Let the server's time run again, from where it stands. Twice is once."""
        if self._stopped_at is not None:
            self._zero += self._stopped_at - self._running()
            self._stopped_at = None

    def _running(self) -> int:
        return self._zero + int((self.monotonic() - self._began) * 1_000_000)


def clock_for(client: Any) -> Clock:
    """Return the clock by which those go who use a client.

    It is the machine's, but for locks in memory: their clock is moved by tests.

    Args:
        client: redis-py's, for threads or for asyncio.
    """
    found: Clock | None = getattr(client, "lock_clock", None)
    return found or SystemClock()


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

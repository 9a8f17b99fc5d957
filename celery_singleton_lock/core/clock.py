"""The only module that reads time.

The Redis server decides the order of clients: each script reads its ``TIME``. A process measures
durations only, with the monotonic clock. It reads the wall clock for ETAs and for the times of
events, as Celery does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any, Final, Protocol

PROMPT: Final = 0.002
"""A reply within this many seconds is prompt, and shows the server's clock accurately."""

MEASUREMENTS: Final = 3
"""Most times that the server's clock is read in a row, if no reply is prompt."""


class Clock(Protocol):
    """A source of monotonic seconds."""

    def monotonic(self) -> float:
        """Return the seconds since some fixed point; they never decrease."""
        ...


def _seconds_since_boot() -> Callable[[], float]:
    """Return a clock that also counts the time in which the machine is suspended.

    ``CLOCK_MONOTONIC`` of Linux stops while the machine is suspended. A lease on a server does not
    stop, so after a resume the process would rely on a lease that has ended. If the machine has no
    such clock, return ``time.monotonic``.
    """
    try:
        read = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        read()
    except (AttributeError, OSError):
        return time.monotonic
    return read


class SystemClock:
    """The machine's monotonic clock; on Linux one that counts the time of a suspended machine.

    Use it for durations that a server measures too. Waits of threads use ``time.monotonic``.
    """

    monotonic: Final = staticmethod(_seconds_since_boot())
    """Return the seconds since some fixed point; they never decrease."""


def wall_time() -> float:
    """Return the seconds since 1970 by this machine's wall clock, as Celery's events have them."""
    return time.time()


class MovableClock:
    """The clock of a Redis in the memory of this process, and of its clients; tests control it.

    Clients read :meth:`monotonic`, which never stops, so no wait lasts for ever. The server reads
    :meth:`microseconds`, which can be stopped. The server must not read it during :meth:`advance`.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._began = time.monotonic()
        self._zero = time.time_ns() // 1000
        self._stopped_at: int | None = None

    def monotonic(self) -> float:
        """Return the seconds since some fixed point; they never decrease, and never stop."""
        return time.monotonic() + self._ahead

    def microseconds(self) -> int:
        """Return the server's time, in microseconds since 1970."""
        return self._running() if self._stopped_at is None else self._stopped_at

    def tick(self) -> int:
        """Return the server's time; add a microsecond first if it is stopped.

        So each request has a later time than the one before, and the order of arrival is kept.
        """
        if self._stopped_at is not None:
            self._stopped_at += 1
        return self.microseconds()

    def advance(self, seconds: float) -> None:
        """Add seconds to both times."""
        self._ahead += seconds
        if self._stopped_at is not None:
            self._stopped_at += round(seconds * 1_000_000)

    def stop(self) -> None:
        """Stop the server's time: only :meth:`advance` and :meth:`tick` move it. Idempotent."""
        self._stopped_at = self.microseconds()

    def go(self) -> None:
        """Let the server's time run again, from its present value. Idempotent."""
        if self._stopped_at is not None:
            self._zero += self._stopped_at - self._running()
            self._stopped_at = None

    def _running(self) -> int:
        return self._zero + int((self.monotonic() - self._began) * 1_000_000)


def clock_for(client: Any) -> Clock:
    """Return the clock for locks on a client: the machine's, or that of a Redis in memory.

    Args:
        client: a redis-py client, for threads or for asyncio.
    """
    found: Clock | None = getattr(client, "lock_clock", None)
    return found or SystemClock()


def seconds_until(eta: datetime) -> float:
    """Return the seconds until an ETA; one without a time zone is in UTC, as in Celery."""
    aware = eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)
    return (aware - datetime.now(timezone.utc)).total_seconds()


class ServerClock:
    """Estimates the Redis server's time, from which each message gets its place in the queue.

    :meth:`measure` compares the server's ``TIME`` with the local monotonic clock. The wall clock is
    not read. Estimates strictly increase, so the messages that arrive at one worker keep their
    order.

    Args:
        clock: source of monotonic seconds.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._offset: float | None = None
        self._last = 0

    def measure(self, server_time: Callable[[], float]) -> None:
        """Measure the offset, and again after a slow reply: the process may have been stopped.

        Args:
            server_time: asks the server for its time, in seconds.
        """
        for _ in range(MEASUREMENTS):
            asked = self._clock.monotonic()
            server_seconds, answered = server_time(), self._clock.monotonic()
            self.sync(server_seconds, asked, answered)
            if answered - asked <= PROMPT:
                return

    def sync(self, server_seconds: float, asked: float, answered: float) -> None:
        """Set the offset from one measurement.

        The estimate is behind the server by the time that the reply took. After a prompt reply it
        is never ahead of the server: a place in the future could swap two messages, because scripts
        replace it by their own time. A slow reply replaces an earlier offset only if the two
        contradict each other. If it always did, a worker that was suspended during the call would
        put its messages before those of others.

        Args:
            server_seconds: the server's time.
            asked: monotonic time before the question.
            answered: monotonic time at which the reply arrived.
        """
        least, most = server_seconds - answered, server_seconds - asked
        known = self._offset
        if known is None or answered - asked <= PROMPT or not least <= known <= most:
            self._offset = least

    def next_place(self) -> int:
        """Return the server's time in microseconds; greater in each call. 0 if not measured."""
        if self._offset is None:
            return 0
        now = int((self._clock.monotonic() + self._offset) * 1_000_000)
        self._last = max(self._last + 1, now)
        return self._last

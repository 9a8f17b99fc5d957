"""Local timers for the times at which locks may be granted: by their rate, or after a pause."""

from __future__ import annotations

import math
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import Reply
from celery_singleton_lock.worker.agent_commands import SweepLock
from celery_singleton_lock.worker.agent_queue import AgentQueue

LONGEST: Final = 60.0
"""Longest time of a timer, in seconds. Later starts are found by the sweep of each second."""

MOST: Final = 1000
"""Most locks with a timer; the others are found by the sweep of each second."""


class RateTimers:
    """Sweeps a lock when its rate allows the next start, or when a pause or timed close ends.

    A worker that gets this time in a reply sets a timer: it parked a message that waits, granted
    the lock, or released it. All other workers find the lock in their sweep of each second.

    Args:
        commands: the queue of the agent.
        clock: source of monotonic seconds.
    """

    def __init__(self, commands: AgentQueue, clock: Clock) -> None:
        self._commands = commands
        self._clock = clock
        self._set: dict[str, float] = {}

    def note(self, name: str, reply: Reply) -> None:
        """Set a timer if a reply says when the rate of the lock, or its pause, ends the wait."""
        if reply.next_start > 0:
            self.set(name, reply.next_start)

    def set(self, name: str, seconds: float) -> None:
        """Sweep a lock after ``seconds``, unless an earlier timer is set."""
        now = self._clock.monotonic()
        at = now + seconds
        if seconds > LONGEST or now < self._set.get(name, 0.0) <= at or len(self._set) >= MOST:
            return
        self._set[name] = at
        self._commands.put_off(SweepLock(name), seconds)

    def is_set(self, name: str) -> bool:
        """Return whether a timer of a lock is set. For any thread."""
        at = self._set.get(name)
        return at is not None and at > self._clock.monotonic()

    def is_due(self, name: str) -> bool:
        """Return whether the time of a lock's timer has come. Call :meth:`forget` after the sweep.

        If an earlier timer was set since, the later one is ignored.
        """
        return self._set.get(name, math.inf) <= self._clock.monotonic()

    def forget(self, name: str) -> None:
        """Remove the timer of a lock if its time has come. A sweep that failed is repeated."""
        if self.is_due(name):
            del self._set[name]

"""Local timers for the times at which locks may be granted: by their rate, or after a pause."""

from __future__ import annotations

from bisect import insort
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import Reply
from celery_singleton_lock.worker.agent_commands import SweepLock
from celery_singleton_lock.worker.agent_queue import AgentQueue

LONGEST: Final = 60.0
"""Longest time of a timer, in seconds. Later starts are found by the sweep of each second."""

MOST: Final = 1000
"""Most locks with a timer; the others are found by the sweep of each second."""

TIMES: Final = 8
"""Most times that are kept for a lock: the earliest ones, and the latest."""

SAME: Final = 0.001
"""Seconds by which two times of a lock differ at least; scripts reply in milliseconds."""


class RateTimers:
    """Sweeps a lock when its rate allows the next start, or when a pause or timed close ends.

    A worker that gets this time in a reply sets a timer: it parked a message that waits, granted
    the lock, or released it. All other workers find the lock in their sweep of each second.

    A start counts from when its task claims the grant. So the next start may be later than the
    sweep said that granted the lock, and the reply to the claim says a later time. The later times
    are kept, for the case that the sweep at the earlier one grants nothing.

    Args:
        commands: the queue of the agent.
        clock: source of monotonic seconds.
    """

    def __init__(self, commands: AgentQueue, clock: Clock) -> None:
        self._commands = commands
        self._clock = clock
        self._times: dict[str, tuple[float, ...]] = {}  # in order, not empty

    def note(self, name: str, reply: Reply) -> None:
        """Set a timer if a reply says when the rate of the lock, or its pause, ends the wait."""
        if reply.next_start > 0:
            self.set(name, reply.next_start)

    def set(self, name: str, seconds: float) -> None:
        """Sweep a lock after ``seconds``, if no sweep at an earlier time grants it."""
        known = self._times.get(name, ())
        if seconds > LONGEST or (len(self._times) >= MOST and not known):
            return
        at = self._clock.monotonic() + seconds
        if any(0 <= at - each < SAME for each in known):
            return
        times = list(known)
        insort(times, at)
        if len(times) > TIMES:
            del times[-2]
        self._times[name] = tuple(times)
        if at == times[0]:
            self._commands.put_off(SweepLock(name), seconds)

    def restart(self, name: str, seconds: float) -> None:
        """Sweep a lock after ``seconds``: a sweep has granted it, so earlier replies are old."""
        self._times.pop(name, None)
        self.set(name, seconds)

    def is_set(self, name: str) -> bool:
        """Return whether a timer of a lock is set. For any thread."""
        times = self._times.get(name)
        return times is not None and times[-1] > self._clock.monotonic()

    def is_due(self, name: str) -> bool:
        """Return whether the time of a lock's timer has come. Call :meth:`forget` after the sweep.

        A command of a timer that is set no more is ignored.
        """
        times = self._times.get(name)
        return times is not None and times[0] <= self._clock.monotonic()

    def forget(self, name: str, until: float) -> None:
        """Remove the times of a lock up to the beginning of a sweep. One that failed is repeated.

        Args:
            name: name of the lock.
            until: the monotonic time at which the sweep began.
        """
        times = self._times.get(name, ())
        left = tuple(at for at in times if at > until)
        if left == times:
            return
        del self._times[name]
        if left:
            self._times[name] = left
            self._commands.put_off(SweepLock(name), left[0] - self._clock.monotonic())

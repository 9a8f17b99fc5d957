"""Stops the consumption of a queue with too many parked messages in the locks' Redis."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from celery_singleton_lock.core.clock import Clock, wall_time
from celery_singleton_lock.core.lock_view import Parked
from celery_singleton_lock.events import Event, QueueResumed, QueueStopped, log_keys
from celery_singleton_lock.message_text import number_of
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.consumed_queues import Queues
from celery_singleton_lock.worker.queue_stops import QueueStops

logger: Final = logging.getLogger(__name__)

LOW: Final = 0.9
"""Share of the limit below which the queue is consumed again."""

EARLY: Final = 0.05
"""Least seconds between two checks near the limit."""

SPREAD: Final = 5.0
"""Seconds between two checks on a Cluster, where each check reads 64 buckets."""

OUTAGE: Final = 30.0
"""Seconds without an answer of Redis after which stopped queues are consumed again: nothing can be
parked then, and their other tasks should run."""

LOG_EVERY: Final = 60.0
"""Seconds between two log lines about one queue. Each stop is an event."""


class MostParked(NamedTuple):
    """How much may be parked of one queue before workers stop consuming it.

    Args:
        messages: their number; None for no limit.
        size: their bytes; None for no limit.
    """

    messages: int | None = None
    size: int | None = None

    def __bool__(self) -> bool:
        """Return whether there is a limit."""
        return self != (None, None)

    def reached(self, parked: Parked, share: float = 1.0) -> str:
        """Return which limit is reached, as a clause; empty if none is.

        Args:
            parked: what is parked.
            share: of the limits.
        """
        if self.messages is not None and parked.waiting >= self.messages * share:
            return f"singleton_lock_max_parked is {self.messages:,}"
        if self.size is not None and parked.size >= self.size * share:
            return f"singleton_lock_max_parked_bytes is {self.size:,}"
        return ""


class ParkedLimit:
    """Compares what is parked of each queue with the limit, and stops or resumes the queue.

    The worker continues with its other queues, and with the parked messages of the stopped queue,
    which come from Redis.

    Args:
        store: the agent's store.
        realm: hash of the broker's URL.
        queues: the queues that the worker consumes.
        most: the limit.
        stops: stops and resumes queues.
        interval: returns the seconds between two heartbeats.
        workers: returns the number of workers of these queues.
        tell: reports an event.

    Attributes:
        stopped: queue -> wall time since which it is not consumed. Replaced, never changed.
    """

    def __init__(
        self,
        store: Store,
        *,
        realm: str,
        queues: Queues,
        most: MostParked,
        stops: QueueStops,
        interval: Callable[[], float],
        workers: Callable[[], int],
        tell: Callable[[Event], None],
    ) -> None:
        self.stopped: Mapping[str, float] = {}
        self._store = store
        self._realm = realm
        self._queues = queues
        self._most = most
        self._stops = stops
        self._interval = interval
        self._workers = workers
        self._tell = tell
        self._clock: Clock = store.clock
        self._overruled: set[str] = set()
        self._next = self._next_early = 0.0
        self._guessed: dict[str, Parked] = {}
        self._next_log: dict[str, float] = {}
        self._logged: set[str] = set()

    def look(self) -> None:
        """Read what is parked, and stop or resume queues.

        Raises:
            BackendError: Redis did not answer.
        """
        now = self._clock.monotonic()
        if not self._most or now < self._next:
            return
        spread = getattr(getattr(self._store, "keyspace", None), "spread", False)
        self._next = now + max(SPREAD if spread else 0.0, self._interval() - 0.5)
        self._look()

    def look_early(self, parked: Mapping[str, Parked]) -> None:
        """Check at once if messages that were just parked may have reached a limit.

        Every worker is assumed to park as much as this one. So even if messages arrive fast, the
        limit is not exceeded by those of a whole second. Redis is asked only near the limit.

        Args:
            parked: queue -> messages that this worker has parked just now.
        """
        if not self._most:
            return
        near, workers = False, max(1, self._workers())
        for queue, more in parked.items():
            before = self._guessed.get(queue, Parked(0, 0.0))
            guess = Parked(
                before.waiting + more.waiting * workers, 0.0, before.size + more.size * workers
            )
            self._guessed[queue] = guess
            heeded = queue not in self.stopped and queue not in self._overruled
            near = near or (heeded and bool(self._most.reached(guess)))
        if near and self._clock.monotonic() >= self._next_early:
            self._next_early = self._clock.monotonic() + EARLY
            self._look()

    def _look(self) -> None:
        consumed = set(self._queues.consumed())
        self._heed_operators(consumed)
        found = self._store.parked(self._realm, consumed)
        self._guessed = dict(found)
        for queue in sorted(consumed):
            self._compare(queue, found.get(queue, Parked(0, 0.0)))
        self._stops.look()

    def consume_in_outage(self, down_for: float) -> None:
        """Resume all queues if Redis has not answered for long.

        Args:
            down_for: seconds for which it has not answered.
        """
        if down_for >= OUTAGE:
            for queue in self.stopped:
                self._resume(queue, "redis", "the locks' Redis does not answer, so nothing parks")

    def _heed_operators(self, consumed: set[str]) -> None:
        """Leave queues that an operator added or cancelled, until they are below the limit."""
        added = set()
        while self._stops.overruled:
            added.add(self._stops.overruled.pop())
        self._overruled &= consumed
        for queue in self.stopped:
            if queue in added or queue not in consumed:
                self._overruled.add(queue)
                self._resume(queue, "operator", "an operator has added or cancelled it")

    def _compare(self, queue: str, parked: Parked) -> None:
        if not self._most.reached(parked, LOW):
            self._overruled.discard(queue)
            if queue in self.stopped:
                self._resume(queue, "below", f"less than {LOW:.0%} of the limit is parked")
            return
        reached = self._most.reached(parked)
        if reached and queue not in self.stopped and queue not in self._overruled:
            self._stop(queue, parked, reached)

    def _stop(self, queue: str, parked: Parked, reached: str) -> None:
        event = QueueStopped(queue, parked.waiting, parked.size)
        if not self._may_stop(queue, reached):
            return
        self.stopped = {**self.stopped, queue: wall_time()}
        self._stops.stop(queue)
        if self._is_to_log(queue):
            self._logged.add(queue)
            logger.warning(
                "celery-singleton-lock: stopped consuming the queue %r: %s, %s bytes, are parked "
                "in the locks' Redis, and %s. The parked messages run as their locks become free. "
                "Other queues are consumed as before. Below %.0f %% of the limit the queue is "
                "consumed again.",
                queue,
                number_of(parked.waiting, "message"),
                f"{parked.size:,}",
                reached,
                LOW * 100,
                extra=log_keys(event),
            )
        self._tell(event)

    def _may_stop(self, queue: str, reached: str) -> bool:
        """Return whether the broker keeps this queue while it has no consumer."""
        reason = self._queues.why_deleted_unconsumed(queue)
        if reason and self._is_to_log(queue):
            logger.warning(
                "celery-singleton-lock: %s for the queue %r, and the worker goes on consuming it: "
                "the broker deletes it without a consumer (%s). Declare the queue without that.",
                reached,
                queue,
                reason,
            )
        return not reason

    def _resume(self, queue: str, reason: str, because: str) -> None:
        since = self.stopped[queue]
        self.stopped = {name: at for name, at in self.stopped.items() if name != queue}
        self._stops.resume(queue)
        event = QueueResumed(queue, max(0.0, wall_time() - since), reason)
        if queue in self._logged:
            self._logged.discard(queue)
            logger.info(
                "celery-singleton-lock: the queue %r is no longer stopped, after %.0f s: %s.",
                queue,
                event.stopped_for,
                because,
                extra=log_keys(event),
            )
        self._tell(event)

    def _is_to_log(self, queue: str) -> bool:
        now = self._clock.monotonic()
        if now < self._next_log.get(queue, now):
            return False
        self._next_log[queue] = now + LOG_EVERY
        return True

"""Writes a worker's heartbeat to Redis, and reads the server's time and switched modes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from celery_singleton_lock.core.clock import Clock, ServerClock
from celery_singleton_lock.core.model import ALIVE
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent.grant_inbox import GrantInbox
from celery_singleton_lock.worker.agent.mode_switches import ModeSwitches
from celery_singleton_lock.worker.consumed_queues import Queues

SYNC: Final = 30.0
"""Seconds between two measurements of the server's clock."""


WHOLE: Final = 8.0
"""Seconds after which a whole heartbeat is written, so that the keys do not expire."""

PER_SECOND: Final = 200
"""If more workers than this consume the same queues, an idle one sends fewer heartbeats."""

LONGEST: Final = 5.0
"""Most seconds between two heartbeats of an idle worker."""


class Heartbeat:
    """Records in Redis that this worker takes grants, until it stops taking them.

    Args:
        store: the agent's store.
        worker: id of this worker.
        realm: hash of the broker's URL.
        place: the clock that gives arriving messages their place. It is synchronised here.
        queues: the queues that the worker consumes.
        declared: returns the names of the tasks whose parked messages the worker can run.
        free: returns the number of free pool slots; -3: no slot is free, and three tasks wait for
            one.
        inbox: shows whether the worker takes grants.
        mode_switches: receives the modes that other workers have switched.
        stopped: returns the queues that the worker does not consume at present, although it takes
            their parked messages, and since when.

    Attributes:
        workers: number of workers of the same queues, at the last whole heartbeat.
        idle: whether this worker has had no work lately and the fleet is large. It then leaves the
            shared work to other workers.
    """

    def __init__(
        self,
        store: Store,
        *,
        worker: str,
        realm: str,
        place: ServerClock,
        queues: Queues,
        declared: Callable[[], Collection[str]],
        free: Callable[[], int],
        inbox: GrantInbox,
        mode_switches: ModeSwitches,
        stopped: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._store = store
        self._worker = worker
        self._realm = realm
        self._place = place
        self._queues = queues
        self._declared = declared
        self._free = free
        self._inbox = inbox
        self._mode_switches = mode_switches
        self._stopped = stopped
        self._clock: Clock = store.clock
        self.idle: bool = False
        self.workers: int = 1
        self._next_sync = 0.0
        self._next_whole = 0.0
        self._next_idle = 0.0
        self._interval = 1.0
        self._told: object = None
        self._about: object = None

    # -- these methods raise BackendError if Redis does not answer --------------------------------

    def sync(self) -> None:
        """Measure the server's clock, at most every :data:`SYNC` seconds."""
        now = self._clock.monotonic()
        if now >= self._next_sync:
            self._place.measure(self._store.time)
            self._next_sync = now + SYNC

    def beat(self) -> None:
        """Write the heartbeat if it is due, and apply modes that other workers have switched.

        In a large fleet it is due less often, unless something has changed: the queues, the tasks
        or the free slots, which grants take.
        """
        if self._inbox.retired:
            return
        now = self._clock.monotonic()
        queues, free, tasks = self._queues.consumed(), self._free(), self._declared()
        stopped = self._stopped()
        about = (sorted(queues), sorted(tasks), stopped)
        told = (about, free, self._inbox.delivered, self._inbox.replaced)
        self.idle = told == self._told and now < self._next_idle
        if self.idle:
            return
        light = about == self._about and now < self._next_whole
        interval = self._interval
        switches = self._store.worker_heartbeat(
            self._worker,
            self._realm,
            queues,
            ALIVE * interval,
            free,
            tasks=tasks,
            stopped=stopped,
            light=light,
        )
        if not light:
            self.workers = self._store.fleet_size(self._realm, queues)
            self._interval = min(LONGEST, max(1.0, self.workers / PER_SECOND))
            self._next_whole = now + WHOLE
        self._told, self._about = told, about
        self._next_idle = now + interval - 1  # one tick before it expires
        self._mode_switches.apply(switches)

    def interval(self) -> float:
        """Return the seconds between two heartbeats; they grow with the fleet."""
        return self._interval

    def leave(self) -> None:
        """Delete the heartbeat, and return the grants in the inbox: no further one is taken."""
        self._store.leave(self._worker, self._realm, self._queues.consumed())
        self._inbox.empty()

"""Writes a worker's heartbeat to Redis, and reads the server's time and switched modes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from celery_singleton_lock.core.clock import Clock, ServerClock
from celery_singleton_lock.core.model import ALIVE
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent.grant_inbox import GrantInbox
from celery_singleton_lock.worker.agent.mode_switches import ModeSwitches
from celery_singleton_lock.worker.consumed_queues import Queues

SYNC: Final = 30.0
"""Seconds between two measurements of the server's clock."""


class Heartbeat:
    """Records in Redis that this worker takes grants, until it takes no more.

    Args:
        store: the agent's store.
        worker: id of this worker.
        realm: hash of the broker's URL.
        place: the clock that gives arriving messages their place. It is synchronised here.
        queues: the queues that the worker consumes.
        declared: returns the names of the tasks whose parked messages the worker can run.
        free: returns the number of free pool slots; -3: three tasks wait for one.
        inbox: shows whether the worker takes grants.
        mode_switches: receives the modes that other workers have switched.
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
        self._clock: Clock = store.clock
        self._next_sync = 0.0

    # -- these methods raise BackendError if Redis does not answer --------------------------------

    def sync(self) -> None:
        """Measure the server's clock, at most every :data:`SYNC` seconds."""
        now = self._clock.monotonic()
        if now >= self._next_sync:
            self._place.sync(self._store.time(), self._clock.monotonic())
            self._next_sync = now + SYNC

    def beat(self) -> None:
        """Write the heartbeat, and apply modes that other workers have switched."""
        if self._inbox.retired:
            return
        queues, free, tasks = self._queues.consumed(), self._free(), self._declared()
        switches = self._store.worker_heartbeat(
            self._worker, self._realm, queues, ALIVE, free, tasks=tasks
        )
        self._mode_switches.hear(switches)

    def leave(self) -> None:
        """Delete the heartbeat, and return the grants in the inbox: the worker takes no more."""
        self._store.leave(self._worker, self._realm, self._queues.consumed())
        self._inbox.empty()

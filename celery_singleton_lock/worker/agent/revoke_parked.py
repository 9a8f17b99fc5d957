"""What a revoke ends in the locks' Redis: parked messages, and what is reserved for retries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery.worker.state import revoked as revoked_tasks

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import Ending, Reservation
from celery_singleton_lock.worker.agent_commands import Revoke
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_queue import Tray


@dataclass(frozen=True, slots=True)
class Minded:
    """A reservation that is to end when its task is revoked."""

    name: str
    token: str
    task_id: str
    until: float


class Revokes:
    """Ends what waits for tasks that Celery knows as revoked.

    Args:
        store: the agent's.
        realm: hash of the broker.
        orders: the agent's.
        taker: returns the worker that may be granted a lock that is freed; empty if none.
    """

    def __init__(self, store: Store, *, realm: str, orders: Tray, taker: Callable[[], str]) -> None:
        """Have heard of none yet."""
        self._store = store
        self._realm = realm
        self._orders = orders
        self._taker = taker
        self._clock: Clock = store.clock
        self._minded: dict[str, Minded] = {}
        self._seen: set[str] = set()

    def mind(self, name: str, reservation: Reservation, task_id: str) -> None:
        """End a reservation when its task is revoked. Does not wait."""
        until = self._clock.monotonic() + reservation.seconds
        self._minded[reservation.token] = Minded(name, reservation.token, task_id, until)

    def parked(self, task_id: str) -> None:
        """Look at a task that has just been parked: it may have been revoked before."""
        if task_id in revoked_tasks:
            self._orders.put(Revoke((task_id,)))

    def hear(self) -> None:
        """Look for tasks that were revoked since the last look; mingle and state files count."""
        known = set(revoked_tasks)
        news = known - self._seen
        self._seen = known
        if news:
            self._orders.put(Revoke(tuple(news)))

    def end(self, order: Revoke) -> None:
        """End those of the tasks that are parked.

        Raises:
            BackendError: Redis did not answer.
        """
        for name, token in self._store.find(order.task_ids):
            self._store.revoke(name, token, realm=self._realm, worker=self._taker())

    def free(self) -> None:
        """End the reservations of tasks that were revoked before their next attempt.

        Raises:
            BackendError: Redis did not answer.
        """
        now = self._clock.monotonic()
        for token, minded in list(self._minded.items()):
            if minded.task_id in revoked_tasks:
                self._store.release(minded.name, token, Ending.FINAL, worker=self._taker())
            if minded.task_id in revoked_tasks or minded.until <= now:
                del self._minded[token]

"""Waits in a thread of its own until replicas have what was parked: a missing one delays nobody."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.core.model import Claim, Owner, Parcel, Reply
from celery_singleton_lock.worker.agent_commands import Errand, Park
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_queue import RETRY, Tray

logger = logging.getLogger(__name__)

WAIT: Final = 1.0
"""Seconds for which one round waits for something to confirm."""


class ParkedAnswer(NamedTuple):
    """What Redis said to one message that was to be parked.

    Args:
        park: the order.
        parcel: what was sent.
        reply: the answer.
        asked_at: monotonic time of the question.
    """

    park: Park
    parcel: tuple[Owner, Claim, Parcel]
    reply: Reply
    asked_at: float

    @property
    def lock(self) -> str:
        """Name of the lock at which it is parked."""
        return self.parcel[1].name


class ReplicaWait:
    """Confirms that enough replicas have what was parked, so that the broker may forget it.

    While they do not confirm, the servers are asked every half second, whatever waits. What had to
    wait is parked again once they do, which changes nothing unless a failover has lost it.

    Args:
        store: with connections of its own.
        orders: the agent's.
        confirmed: takes what is safe, in the agent's thread.

    Attributes:
        thread: does the waiting; started with the first message.
    """

    def __init__(
        self, store: Store, *, orders: Tray, confirmed: Callable[[ParkedAnswer], None]
    ) -> None:
        """Wait for nothing yet."""
        self._store = store
        self._orders = orders
        self._confirmed = confirmed
        self._clock: Clock = store.clock
        self._asked: queue.SimpleQueue[ParkedAnswer | None] = queue.SimpleQueue()
        self._late: list[ParkedAnswer] = []
        self._missing = False
        self._stopped = False
        self.thread = BackgroundThread("singleton-lock-replicas", self._round)

    def ask(self, answer: ParkedAnswer) -> None:
        """Have a message confirmed, or parked again. Does not wait."""
        self._asked.put(answer)
        self.thread.start()

    def close(self, timeout: float) -> None:
        """End the thread; what is not confirmed stays with the broker."""
        self._stopped = True
        self._asked.put(None)
        self.thread.join(timeout)

    def _round(self) -> bool:
        new = self._take()
        if new or self._late:
            self._ask_for(new)
        return not self._stopped

    def _take(self) -> list[ParkedAnswer]:
        """Return what has come, after a wait for it."""
        taken: list[ParkedAnswer | None] = []
        with self.thread.idle(), suppress(queue.Empty):
            taken.append(self._asked.get(timeout=RETRY if self._late else WAIT))
            while True:
                taken.append(self._asked.get_nowait())
        return [answer for answer in taken if answer is not None]

    def _ask_for(self, new: list[ParkedAnswer]) -> None:
        names = sorted({answer.lock for answer in (*new, *self._late)})
        try:
            safe = {name for name, ok in zip(names, self._store.confirm(names), strict=True) if ok}
        except BackendError:
            safe = set()
        for answer in self._late:
            if answer.lock in safe:
                self._orders.put(answer.park)
        self._late = [answer for answer in self._late if answer.lock not in safe]
        for answer in new:
            if answer.lock in safe:
                self._orders.put(Errand(partial(self._confirmed, answer)))
            else:
                self._late.append(answer)
        self._tell()

    def _tell(self) -> None:
        """Log when replicas begin and cease to be missing."""
        if bool(self._late) == self._missing:
            return
        self._missing = bool(self._late)
        if self._missing:
            logger.warning(
                "celery-singleton-lock: parked messages, such as %s, stay with the broker, too, "
                "until the replicas have them. %s",
                self._late[0].park.request,
                self._store.too_few(),
            )
        else:
            logger.warning("celery-singleton-lock: the replicas have all parked messages again.")

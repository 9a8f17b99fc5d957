"""The messages that wait in the main process while the locks' Redis does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from celery.worker.state import task_ready, task_reserved

from celery_singleton_lock.worker.request import LockedRequest

MOST_SUSPENDED: Final = 1000
"""Most messages held while Redis is down for which the worker asks the broker for more."""


class Outage:
    """Holds messages unacknowledged, and has the broker send others meanwhile.

    The main loop uses it, and where a pool has threads, these do.

    Args:
        prefetch: tells the broker that more (+1) or fewer (-1) messages may be unacknowledged.

    Attributes:
        down: whether Redis does not answer.
    """

    def __init__(self, prefetch: Callable[[int], None]) -> None:
        """Hold nothing: Redis is there until somebody finds that it is not."""
        self.down = False
        self._prefetch = prefetch
        self._suspended: list[LockedRequest] = []
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        """Return how many messages are held."""
        return len(self._suspended)

    def suspend(self, request: LockedRequest) -> bool:
        """Hold a message, unless Redis answers again: then nobody would send it on.

        Returns:
            Whether it is held.
        """
        with self._mutex:
            if self.down:
                self._hold(request)
            return self.down

    def begin(self, request: LockedRequest) -> None:
        """Hold a message that has found that Redis does not answer."""
        with self._mutex:
            self.down = True
            self._hold(request)

    def _hold(self, request: LockedRequest) -> None:
        request.parking = False
        task_ready(request)
        self._suspended.append(request)
        if len(self._suspended) <= MOST_SUSPENDED:
            self._prefetch(1)

    def _take_all(self) -> list[LockedRequest]:
        held, self._suspended = self._suspended, []
        return held

    def end(self) -> list[LockedRequest]:
        """Know that Redis answers again.

        Returns:
            What was held, in the order of arrival. One that was in the pool when the outage was
            noticed was held after those behind it.
        """
        with self._mutex:
            self.down = False
            held = self._take_all()
        held.sort(key=lambda request: request.stamp.stamped_at)
        self._go_on(held, before=len(held))
        return held

    def free(self, keeps: Callable[[LockedRequest], bool]) -> list[LockedRequest]:
        """Hold those no more that do not keep their locks, and so want no Redis.

        Args:
            keeps: whether a message's lock is kept.

        Returns:
            Those.
        """
        freed: list[LockedRequest] = []
        with self._mutex:
            held = self._take_all()
            for request in held:
                (self._suspended if keeps(request) else freed).append(request)
        self._go_on(freed, before=len(held))
        return freed

    def _go_on(self, freed: list[LockedRequest], before: int) -> None:
        """Have the broker send fewer, as far as it was asked for more."""
        asked_for = min(before, MOST_SUSPENDED) - min(before - len(freed), MOST_SUSPENDED)
        for _ in range(asked_for):
            self._prefetch(-1)
        for request in freed:
            task_reserved(request)

    def abandon(self) -> list[LockedRequest]:
        """Hold nothing any more, since the broker delivers it again; return what was held."""
        with self._mutex:
            return self._take_all()

"""The way to the pool of a worker that has no event loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.worker.loop_channel import guarded
from celery_singleton_lock.worker.pools import has_room

ROOM: Final = 0.02
"""Seconds between two looks whether a full pool has room, where the pool cannot tell."""


class Usher:
    """Sends requests to the pool of a worker without an event loop, one by one, when it has room.

    There, to send one means to wait for a slot. Celery's consumer may wait, since all that it would
    do besides is to take more. Who makes the calls of the mailbox may not: the calls behind it
    would wait as well, and at a shutdown a request that waits inside the pool can be lost.

    Args:
        pool: Celery's.
        to_pool: Celery's own way to it.
    """

    def __init__(self, pool: Any, to_pool: Callable[[Any], None]) -> None:
        """Wait for the first request."""
        self._pool = pool
        self._to_pool = to_pool
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._never = threading.Event()
        self.thread: Final = BackgroundThread("singleton-lock-usher", self._send_next)

    def __call__(self, request: Any) -> None:
        """Take a request. Does not wait."""
        self._waiting.put(request)

    def close(self) -> None:
        """Send what was taken, and no more."""
        self._waiting.put(None)

    def _send_next(self) -> bool:
        """Send the next request; not one that was given back meanwhile. False: closed."""
        with self.thread.idle():
            request = self._waiting.get()
        if request is None:
            return False
        guarded(self._wait_for_room, request)  # if that fails, the request waits in the pool
        if not request.landed:
            guarded(self._to_pool, request)
        return True

    def _wait_for_room(self, request: Any) -> None:
        with self.thread.idle():
            while not request.landed and not has_room(self._pool):
                self._never.wait(ROOM)

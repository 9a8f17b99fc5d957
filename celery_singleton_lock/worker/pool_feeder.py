"""Sends tasks to the pool of a worker that has no event loop."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any, Final

from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.worker.loop_channel import guarded
from celery_singleton_lock.worker.message_stage import Stage
from celery_singleton_lock.worker.pools import has_room, wait_for_room

logger: Final = logging.getLogger(__name__)


class PoolFeeder:
    """Sends requests to the pool of a worker without an event loop, one by one, when it has room.

    Without an event loop, sending a request waits for a free slot. Celery's consumer may wait
    there. The thread of the loop channel must not: it would delay other calls, and a request that
    waits inside the pool can be lost at a shutdown.

    Args:
        pool: Celery's pool.
        to_pool: Celery's function that sends a request to the pool.
        not_sent: called with a request for which that has failed.
    """

    def __init__(
        self, pool: Any, to_pool: Callable[[Any], None], not_sent: Callable[[Any], None]
    ) -> None:
        self._pool = pool
        self._to_pool = to_pool
        self._not_sent = not_sent
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread: Final = BackgroundThread("singleton-lock-pool-feeder", self._send_next)

    def __call__(self, request: Any) -> None:
        """Queue a request. Does not wait."""
        self._waiting.put(request)

    def close(self) -> None:
        """Send the queued requests, then end the thread."""
        self._waiting.put(None)

    def _send_next(self) -> bool:
        """Send the next request, unless it was returned meanwhile. Return False once closed."""
        with self.thread.idle():
            request = self._waiting.get()
        if request is None:
            return False
        guarded(self._wait_for_room, request)  # if that fails, the request waits in the pool
        if request.stage is Stage.DISPATCHED:
            self.send(request)
        return True

    def send(self, request: Any) -> None:
        """Send a request now. Never raises: no caller could handle the error."""
        try:
            self._to_pool(request)
        except Exception:
            logger.exception("celery-singleton-lock could not send %s to the pool", request)
            guarded(self._not_sent, request)

    def _wait_for_room(self, request: Any) -> None:
        with self.thread.idle():
            while request.stage is Stage.DISPATCHED and not has_room(self._pool):
                wait_for_room(self._pool)

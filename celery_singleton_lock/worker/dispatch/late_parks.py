"""Raises the prefetch count while Redis does not store the messages that are being parked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from celery_singleton_lock.worker.request import LockedRequest

MOST: Final = 1000
"""Number of messages for which the prefetch count is raised at most."""


class LateParks:
    """Lets the broker send further messages while Redis does not store those that are being parked.

    A message is unacknowledged until it is parked. If Redis does not answer, is full, or lacks
    replicas, the messages of one busy lock could otherwise use up the prefetch count, and the
    worker would receive no other tasks.

    Args:
        prefetch: raises (+1) or lowers (-1) the worker's prefetch count.
    """

    def __init__(self, prefetch: Callable[[int], None]) -> None:
        self._prefetch = prefetch
        self._seen: set[LockedRequest] = set()
        self._of_old_connection: set[LockedRequest] = set()
        self._raised = 0
        self._mutex = threading.RLock()

    def look(self, parking: set[LockedRequest]) -> None:
        """Raise the prefetch count by one for each message that was already being parked last time.

        Args:
            parking: the messages that are being parked now.
        """
        with self._mutex:
            self._of_old_connection &= parking
            late = min(len((self._seen & parking) - self._of_old_connection), MOST)
            change = 1 if late > self._raised else -1
            for _ in range(abs(late - self._raised)):
                self._prefetch(change)
            self._raised, self._seen = late, parking

    def abandon(self, parking: set[LockedRequest]) -> None:
        """Forget the messages of a lost connection: the new one begins with its own count."""
        with self._mutex:
            self._of_old_connection, self._raised = set(parking), 0

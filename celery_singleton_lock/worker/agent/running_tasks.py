"""Lists in Redis the tasks that this worker has had for seconds, for ``why``.

A task that gets its lock at once is in no index: that would cost each task a command. So the agent
lists those that are still here at its next tick. Such a list is only a hint: a reader then checks
the lock. At intervals the whole list is written again, in case data was lost. A full Redis refuses
the list, but still accepts claims, renewals and releases. So a refusal does not end the tick of the
agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.lock_header import LockHeader, singles

WHOLE: Final = 60.0
"""Seconds between two times at which the whole list is written."""

LASTS: Final = 600.0
"""Seconds for which a dead worker's list remains. A lock with a longer lease is found by SCAN."""

MOST: Final = 1000
"""Most entries of a list."""


class RunningTasks:
    """Keeps the list of a worker up to date.

    Args:
        store: the agent's store.
        worker: id of this worker.
        in_flight: returns the headers of the messages in flight.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        in_flight: Callable[[], Iterable[LockHeader]],
    ) -> None:
        self._store = store
        self._worker = worker
        self._in_flight = in_flight
        self._clock: Clock = store.clock
        self._seen: set[str] = set()
        self._listed: frozenset[tuple[str, str, str]] = frozenset()
        self._next_whole = 0.0

    def update(self) -> None:
        """List the messages that are in flight now and were at the last call.

        Raises:
            BackendError: Redis did not answer.
        """
        headers = {header.token: header for header in self._in_flight() if header.name}
        lasting = [headers[token] for token in self._seen & headers.keys()][:MOST]
        self._seen = set(headers)
        entries = frozenset(
            (header.attempt.rsplit("/", 2)[0], one.name, one.token)
            for header in lasting
            for one in singles(header)
        )
        now = self._clock.monotonic()
        whole = bool(entries) and now >= self._next_whole
        if whole or entries != self._listed:
            gone = self._listed - entries
            new = entries if whole else entries - self._listed
            with suppress(BackendRefused):  # a full Redis; the next tick tries again
                self._store.list_running(self._worker, new, gone, LASTS)
                self._listed = entries
                self._next_whole = now + WHOLE if whole else self._next_whole

    def clear(self) -> None:
        """Delete the list: the worker stops.

        Raises:
            BackendError: Redis did not answer. The list expires.
        """
        if self._listed:
            self._store.list_running(self._worker, (), self._listed, LASTS)

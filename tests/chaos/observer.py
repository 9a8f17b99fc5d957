"""Reads locks, processes and clocks many times a second, and records them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import redis
from typing_extensions import Self

from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.errors import BackendError
from chaos.fleet import Fleet
from chaos.load import LOCKS
from integration.book import alive
from support.checked_thread import CheckedThread

PAUSE = 0.2
"""Seconds between two reads of all locks. Each read is a call to Redis."""
BRIEF = 0.02
"""Seconds between two checks of the processes."""
SLOW = 0.5
"""Seconds of a round above which this machine, or Redis, counts as stopped."""


class Observer:
    """Observes a fleet in two threads.

    Args:
        fleet: the servers and workers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ended = threading.Event()
        self._seen: dict[int, float] = {}
        self._mutex = threading.Lock()
        jobs = (self._observe_locks, self._observe_processes)
        self._threads = [CheckedThread(job) for job in jobs]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(10)

    def _observe_locks(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(PAUSE):
            try:
                free = {lock: waiting for lock in LOCKS if (waiting := self._idle(lock))}
            except (BackendError, redis.RedisError):
                before = time.monotonic()
                continue
            now = time.monotonic()
            if now - before > SLOW:
                self._fleet.journal.note("slow", since=before)
            before = now
            self._fleet.journal.note("look", free=free)

    def _idle(self, lock: str) -> int:
        """Return the number of waiters of a lock with a free permit; else 0."""
        view = self._fleet.store.inspect(lock, waiters=0)
        waiting = view.waiting + view.adrift
        if not waiting or view.waits_for in {WaitsFor.RATE, WaitsFor.PAUSE, WaitsFor.GROUP}:
            return 0
        return waiting if len(view.holders) < view.limit else 0

    def _observe_processes(self) -> None:
        """Record the end of each process of the fleet, and when it was last seen alive."""
        while not self._ended.wait(BRIEF):
            for managed in self._fleet.managed_workers:
                worker = managed.worker
                if worker is not None:
                    for pid in filter(alive, (worker.pid, *children(worker.pid))):
                        self._seen.setdefault(pid, time.monotonic())
            for pid in list(self._seen):
                now = time.monotonic()
                if alive(pid):
                    self._seen[pid] = now
                else:
                    self._fleet.journal.note("gone", victim=pid, seen=self._seen.pop(pid))


def children(pid: int) -> list[int]:
    """Return the children of a process. One may be missed while a process ends.

    psutil would read every process of the machine, which takes half a core at this rate.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # called 50 times a second
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found

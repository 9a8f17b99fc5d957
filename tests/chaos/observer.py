"""Looks at locks, processes and clocks many times a second, and notes what it sees."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import redis
from typing_extensions import Self

from celery_singleton_lock.errors import BackendError
from chaos.load import LOCKS
from chaos.fleet import Fleet
from integration.book import alive
from support.checked_thread import CandidThread

PAUSE = 0.2
"""Seconds between two looks at all locks, each of which is a call of Redis."""
BRIEF = 0.02
"""Seconds between two looks at processes."""
SLOW = 0.5
"""Seconds; a round that takes longer says that this machine, or Redis, stood still."""


class Lookout:
    """Looks until its end.

    Args:
        fleet: at what.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ended = threading.Event()
        self._seen: dict[int, float] = {}
        self._mutex = threading.Lock()
        jobs = (self._look_at_locks, self._look_at_processes)
        self._threads = [CandidThread(job) for job in jobs]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(10)

    def _look_at_locks(self) -> None:
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
        """Return how many wait although there is room."""
        view = self._fleet.store.inspect(lock, waiters=0)
        waiting = view.waiting + view.adrift
        return waiting if waiting and len(view.holders) < view.limit else 0

    def _look_at_processes(self) -> None:
        """Note the end of each process of the fleet, and when it was last seen alive."""
        while not self._ended.wait(BRIEF):
            for crew in self._fleet.crews:
                worker = crew.worker
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
    """Return the children of a process; one may be missed while another ends, or it does.

    psutil would read about every process of the machine, which took half a core at this pace.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # a pace of 50 Hz
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found

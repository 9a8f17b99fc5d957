"""Threads that ask the servers of a quorum."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

AT_ONCE: Final = 8
"""Most requests to one server at once; a dead server must not use up all threads."""


class ServerThreads:
    """Threads that ask servers. Each server has its own, so that a dead one delays no other.

    Requests about one token reach a server in the order in which they were made. A forked child
    starts without threads.

    Args:
        servers: how many.
    """

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._reset()

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._pools: list[ThreadPoolExecutor] = [
            ThreadPoolExecutor(AT_ONCE, f"csl-server-{n + 1}") for n in range(self._servers)
        ]
        self._before: dict[tuple[int, str], Future[None]] = {}
        self._pid = os.getpid()  # last, so that no other thread of a fork uses the parent's mutex

    def submit(self, server: int, about: str, ask: Callable[[], None]) -> None:
        """Call ``ask`` in a thread, after earlier requests to this server about the same token."""
        if self._pid != os.getpid():
            self._reset()
        key = (server, about)
        with self._mutex:
            before = self._before.get(key) if about else None
            try:
                future = self._pools[server].submit(_after, before, ask)
            except RuntimeError:  # closed, or the interpreter ends and starts no more threads
                future = None
            if about and future is not None:
                self._before[key] = future
        if future is None:
            _after(before, ask)
        elif about:
            future.add_done_callback(functools.partial(self._forget, key))

    def _forget(self, key: tuple[int, str], future: Future[None]) -> None:
        with self._mutex:
            if self._before.get(key) is future:
                del self._before[key]

    def close(self) -> None:
        """End the threads after the current requests."""
        if self._pid == os.getpid():
            for pool in self._pools:
                pool.shutdown(wait=False)


def _after(before: Future[None] | None, ask: Callable[[], None]) -> None:
    if before is not None:
        wait([before])
    ask()

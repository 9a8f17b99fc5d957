"""Calls from other threads, and notices from pool children, into the worker's main loop.

Two pipes, made before the pool forks, so that children inherit the writing ends. A child that took
its lock writes its token into one: a few microseconds, where Redis would be a round trip. Nobody
waits for that: the loop looks now and then (:meth:`Mailbox.hear`), for to be woken by each would
cost it more than all else that it does for a lock. Other threads append a call and write a byte
into the other, which wakes the loop at once.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

HEAR: Final = 0.05
"""Seconds between two looks for notices; a task that ends before says the same by its end."""

_CHUNK: Final = 65536


class Mailbox:
    """Two pipes into the main loop.

    Args:
        on_notice: called in the main loop with each token that a child announced.
    """

    def __init__(self) -> None:
        """Open the pipes; no end ever blocks."""
        self._reader, self._writer = _pipe()
        self._ear, self._mouth = _pipe()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._rest = b""
        self.on_notice: Callable[[str], None] = _nobody

    def fileno(self) -> int:
        """Return the end to watch for reading: a call has come."""
        return self._reader

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` in the main loop, soon. Safe from any thread."""
        self._calls.append((call, args))
        _write(self._writer, b".")

    def announce(self, token: str) -> None:
        """Tell the main loop that ``token`` holds its lock. Safe from children and threads.

        A full pipe drops the notice: the end of the task tells the same, later.
        """
        _write(self._mouth, token.encode() + b"\n")

    def drain(self, *_: Any) -> None:
        """Make the calls that have arrived. Runs in the main loop, and never raises into it."""
        _read(self._reader)
        self.hear()  # a child's notice comes before what another thread says of its task
        while self._calls:
            call, args = self._calls.popleft()
            guarded(call, *args)

    def hear(self) -> None:
        """Take the notices that have arrived. Runs in the main loop, every :data:`HEAR` seconds."""
        *lines, self._rest = (self._rest + _read(self._ear)).split(b"\n")
        for line in lines:
            guarded(self.on_notice, line.decode())


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return reader, writer


def _read(end: int) -> bytes:
    try:
        return os.read(end, _CHUNK)
    except BlockingIOError:
        return b""


def _write(end: int, line: bytes) -> None:
    try:
        os.write(end, line)
    except BlockingIOError:
        pass  # the reader is behind, and will find the call when it comes to it
    except OSError:
        logger.debug("the worker's mailbox is closed")


def guarded(call: Callable[..., None], *args: Any) -> None:
    """Call, and log what is raised: an exception in the main loop would end the worker."""
    try:
        call(*args)
    except Exception:
        logger.exception("celery-singleton-lock: %r failed in the worker's main loop", call)


def _nobody(_token: str) -> None:
    """Stand in until the worker's desk is there."""

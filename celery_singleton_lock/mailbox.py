"""Calls from other threads, and notices from pool children, into the worker's main loop.

One pipe serves both. It is made before the pool forks, so children inherit its writing end: a child
that took its lock writes its token, a few microseconds where Redis would be a round trip. Other
threads append a call and write an empty line.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

_CHUNK: Final = 65536


class Mailbox:
    """A pipe into the main loop.

    Args:
        on_notice: called in the main loop with each token that a child announced.
    """

    def __init__(self) -> None:
        """Open the pipe; neither end ever blocks."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._rest = b""
        self.on_notice: Callable[[str], None] = _nobody
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Return the end to watch for reading."""
        return self._reader

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` in the main loop, soon. Safe from any thread."""
        self._calls.append((call, args))
        self._write(b"\n")

    def announce(self, token: str) -> None:
        """Tell the main loop that ``token`` holds its lock. Safe from children and threads.

        A full pipe drops the notice: the end of the task tells the same, later.
        """
        self._write(token.encode() + b"\n")

    def drain(self, *_: Any) -> None:
        """Take all that has arrived. Runs in the main loop, and never raises into it."""
        for line in self._lines():
            if line:
                guarded(self.on_notice, line.decode())
        while self._calls:
            call, args = self._calls.popleft()
            guarded(call, *args)

    def _lines(self) -> list[bytes]:
        try:
            read = self._rest + os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return []
        *lines, self._rest = read.split(b"\n")
        return lines

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._writer, line)
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

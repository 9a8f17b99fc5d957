"""Interrupt the task of a pool child whose lock was lost.

The main process writes the token on a board, in memory that it shares with its children, and sends
a signal. The handler raises :class:`~celery_singleton_lock.errors.LockLost` in the task, if it is
the one that the token belongs to. So a signal that comes late, when the child is busy with another
task already, does nothing. (Celery's soft time limit is a bare signal, and cannot know that.)
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from contextlib import suppress
from typing import Any, Final

from celery_singleton_lock.worker.execution.tracer import TaskLock, current_lock

SIGNAL: Final = getattr(signal, "SIGUSR2", None)
"""What a child is sent. (SIGUSR1 is its soft time limit.)"""

_LINES: Final = 64
_WIDTH: Final = 160


class Board:
    """Tokens whose lock was lost: the main process writes, its children read.

    It is made before the pool forks. Only the last few losses are kept, which is enough: a child
    reads when it is signalled.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._memory = mmap.mmap(-1, _LINES * _WIDTH)
        self._line = 0

    def interrupt(self, pid: int, token: str) -> None:
        """Write a token, and signal the process whose task has it."""
        start = self._line * _WIDTH
        line = _as_line(token)
        self._memory[start : start + _WIDTH] = line.ljust(_WIDTH, b"\0")
        self._line = (self._line + 1) % _LINES
        if SIGNAL is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)

    def shows(self, token: str) -> bool:
        """Return whether a token is among the last that were written."""
        return _as_line(token) in self._memory[:]


def _as_line(token: str) -> bytes:
    return b"\n" + token.encode()[: _WIDTH - 2] + b"\n"


class Listener:
    """Hears the signal in a pool child.

    Args:
        board: what the main process writes on.
    """

    def __init__(self, board: Board) -> None:
        """Listen to nothing yet."""
        self._board = board
        self._pid = 0
        self._before: Any = None

    def listen(self) -> None:
        """Install the handler, once per process; the former one is called for other signals."""
        alone = threading.current_thread() is threading.main_thread()
        if SIGNAL is None or self._pid == os.getpid() or not alone:
            return
        self._before = signal.signal(SIGNAL, self._heard)
        self._pid = os.getpid()

    def _heard(self, signum: int, frame: Any) -> None:
        lock = current_lock()
        if isinstance(lock, TaskLock) and self._board.shows(lock.token):
            raise lock.lose()
        if callable(self._before):
            self._before(signum, frame)

"""Interrupts the task of a pool child whose lock was lost.

The main process writes the token into memory that it shares with its children, and sends a signal.
The handler raises :class:`~celery_singleton_lock.errors.LockLost` in the task if the task has this
token. So a late signal, which arrives while the child runs another task, has no effect. (The signal
of Celery's soft time limit has no such check.)
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from contextlib import suppress
from typing import Any, Final

from celery_singleton_lock.worker.execution.task_lock import TaskLock, current_lock

SIGNAL: Final = getattr(signal, "SIGUSR2", None)
"""The signal. (SIGUSR1 is Celery's soft time limit.)"""

_LINES: Final = 64
_WIDTH: Final = 160


class Board:
    """Tokens of lost locks in shared memory. The main process writes them; its children read them.

    Create it before the pool forks. It has room for the last 64 losses. That is enough, since a
    child reads them as soon as it receives the signal.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _LINES * _WIDTH)
        self._line = 0

    def interrupt(self, pid: int, token: str) -> None:
        """Write a token, and send the signal to the process whose task has it."""
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
    """Handles the signal in a pool child.

    Args:
        board: the board of the main process.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._pid = 0
        self._before: Any = None

    def listen(self) -> None:
        """Install the handler, once per process. For other tokens it calls the previous handler."""
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

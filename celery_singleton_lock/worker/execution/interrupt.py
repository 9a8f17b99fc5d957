"""Interrupts the task of a pool child whose lock was lost.

The main process writes the token into memory that it shares with its children, and sends a signal.
The handler raises :class:`~celery_singleton_lock.errors.LockLost` in the task if the task has this
token. So a late signal, which arrives while the child runs another task, has no effect. (The signal
of Celery's soft time limit has no such check.)

A spawned child does not inherit the memory. It opens it by name (:meth:`LostTokens.publish`).
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from celery_singleton_lock.worker.execution.task_lock import TaskLock, current_lock
from celery_singleton_lock.worker.loop_channel import PROC

logger: Final = logging.getLogger(__name__)

SIGNAL: Final = getattr(signal, "SIGUSR2", None)
"""The signal. (SIGUSR1 is Celery's soft time limit.)"""

PATH: Final = "CELERY_SINGLETON_LOCK_LOST_LOCKS"
"""Environment variable with the name of the shared memory for spawned children."""

_LINES: Final = 64
_WIDTH: Final = 160
_SIZE: Final = _LINES * _WIDTH
_NAME: Final = "lost-locks"


class LostTokens:
    """Tokens of lost locks in shared memory. The main process writes them; its children read them.

    Create it before the pool forks. It has room for the last 64 losses. That is enough, since a
    child reads them as soon as it receives the signal.

    Args:
        memory: the shared memory; default: a new one.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory = mmap.mmap(-1, _SIZE) if memory is None else memory
        self._line = 0

    def publish(self, channel: str) -> str:
        """Replace the memory by a file, and return its name for children that do not inherit it.

        Args:
            channel: name of the worker's loop channel: where that has a name in ``/proc``, the file
                has one too. Otherwise the file is beside it, and is removed together with it.
        """
        if channel.startswith(PROC):
            file, path = tempfile.mkstemp()
            Path(path).unlink()
            name = f"{PROC}/{os.getpid()}/fd/{file}"
        else:
            name = str(Path(channel).with_name(_NAME))
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        weakref.finalize(self, os.close, file).atexit = False
        os.ftruncate(file, _SIZE)
        self._memory = mmap.mmap(file, _SIZE)
        return name

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


class SignalHandler:
    """Handles the signal in a pool child.

    Args:
        lost_tokens: the shared memory of the main process.
    """

    def __init__(self, lost_tokens: LostTokens) -> None:
        self._lost_tokens = lost_tokens
        self._pid = 0
        self._before: Any = None

    def install(self) -> None:
        """Install the handler, once per process. For other tokens it calls the previous handler."""
        alone = threading.current_thread() is threading.main_thread()
        if SIGNAL is None or self._pid == os.getpid() or not alone:
            return
        self._before = signal.signal(SIGNAL, self._on_signal)
        self._pid = os.getpid()

    def _on_signal(self, signum: int, frame: Any) -> None:
        lock = current_lock()
        if isinstance(lock, TaskLock) and self._lost_tokens.shows(lock.token):
            raise lock.lose()
        if callable(self._before):
            self._before(signum, frame)


def signal_installer() -> Callable[[], None]:
    """Return the function that lets a spawned child be interrupted.

    In other processes it does nothing: a forked child has the memory of its parent.
    """
    name = os.environ.get(PATH)
    return _install_nothing if name is None else SignalHandler(_opened(name)).install


def _opened(name: str) -> LostTokens:
    """Return the memory of the main process. Without it, no task here is interrupted."""
    try:
        with Path(name).open("r+b") as file:
            return LostTokens(mmap.mmap(file.fileno(), _SIZE))
    except (OSError, ValueError) as error:
        logger.warning("celery-singleton-lock: the worker's file %s is closed: %s", name, error)
        return LostTokens()


def _install_nothing() -> None:
    """Do nothing: tasks cannot be interrupted here."""

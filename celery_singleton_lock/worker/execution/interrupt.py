"""Interrupts the task of a pool child whose lock was lost, or which a newer call preempts.

The main process writes the token into memory that it shares with its children, and sends a signal.
The handler raises :class:`~celery_singleton_lock.errors.LockLost` or ``LockPreempted`` in the task
if the task has this token. So a late signal, which arrives while the child runs another task, has
no effect. (The signal of Celery's soft time limit has no such check.)

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from billiard.process import current_process

from celery_singleton_lock.core.model import Preempted
from celery_singleton_lock.worker.execution.task_lock import TaskLock, current_lock
from celery_singleton_lock.worker.loop_channel import PROC

logger: Final = logging.getLogger(__name__)

SIGNAL: Final = getattr(signal, "SIGUSR2", None)
"""The signal. (SIGUSR1 is Celery's soft time limit.)"""

PATH: Final = "CELERY_SINGLETON_LOCK_LOST_LOCKS"
"""Environment variable with the name of the shared memory for spawned children."""

_LINES: Final = 64
_WIDTH: Final = 160
_LOST: Final = _LINES * _WIDTH
_CHILDREN: Final = 512
"""Most child processes whose running task is shown."""
_SIZE: Final = _LOST + _CHILDREN * _WIDTH
_NAME: Final = "lost-locks"


class LostTokens:
    """Tokens of tasks to interrupt, in memory that the main process shares with its children.

    Create it before the pool forks. It has room for the last 64 tokens. That is enough, since a
    child reads them as soon as it receives the signal. After them, each child stores the token of
    its task, if the task can be preempted.

    Args:
        memory: the shared memory; default: a new one.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory = mmap.mmap(-1, _SIZE) if memory is None else memory
        self._line = 0
        self._mutex = threading.Lock()

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
        """Write the token of a lost lock, and send the signal to the process whose task has it."""
        self.note(token)
        self.signal(pid)

    def note(self, token: str, by: str = "") -> None:
        """Write a token: of a lost lock, or of a task that the attempt ``by`` preempts."""
        with self._mutex:
            self._write(self._line * _WIDTH, _as_line(f"{token}\t{by}" if by else token))
            self._line = (self._line + 1) % _LINES

    @staticmethod
    def signal(pid: int) -> None:
        """Send the signal to a process."""
        if SIGNAL is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)

    def shows(self, token: str) -> bool:
        """Return whether the token of a lost lock is among the last that were written."""
        return self._memory.find(_as_line(token), 0, _LOST) >= 0

    def preempted_by(self, token: str) -> str:
        """Return the attempt that preempts the task with this token; empty if none is known."""
        start = b"\n" + token.encode() + b"\t"
        at = self._memory.find(start, 0, _LOST)
        if at < 0:
            return ""
        line = self._memory[at + len(start) : at + _WIDTH]
        return line.partition(b"\n")[0].decode(errors="replace")

    def show_task(self, child: int, token: str) -> None:
        """Show the task that this child process runs; with an empty token, that it runs none."""
        if 0 <= child < _CHILDREN:
            line = _as_line(f"{os.getpid()} {token}") if token else b""
            self._write(_LOST + child * _WIDTH, line)

    def runs(self, pid: int, token: str) -> bool:
        """Return whether a process shows that it runs the task with this token."""
        return self._memory.find(_as_line(f"{pid} {token}"), _LOST) >= 0

    def _write(self, start: int, line: bytes) -> None:
        self._memory[start : start + _WIDTH] = line.ljust(_WIDTH, b"\0")


def _as_line(text: str) -> bytes:
    return b"\n" + text.encode()[: _WIDTH - 2] + b"\n"


class Interrupts:
    """Tells the tasks of a process that they must end.

    Args:
        lost_tokens: the shared memory of the main process; None outside of a worker.
        signals: whether a signal interrupts them: in the child processes of a pool.
    """

    def __init__(self, lost_tokens: LostTokens | None = None, *, signals: bool = False) -> None:
        self._lost_tokens = lost_tokens
        self._signals = signals
        self._pid = 0
        self._before: Any = None

    def install(self) -> None:
        """Install the handler, once per process. For other tokens it calls the previous handler."""
        alone = threading.current_thread() is threading.main_thread()
        if not self._signals or SIGNAL is None or self._pid == os.getpid() or not alone:
            return
        self._before = signal.signal(SIGNAL, self._on_signal)
        self._pid = os.getpid()

    def preempted_by(self, token: str) -> str:
        """Return the attempt that preempts the task with this token; empty if none is known."""
        return self._lost_tokens.preempted_by(token) if self._lost_tokens else ""

    @contextmanager
    def showing(self, token: str) -> Iterator[None]:
        """Show the main process which task this process runs, so that it may kill the process."""
        child = getattr(current_process(), "index", None)
        if not self._signals or self._lost_tokens is None or child is None:
            yield
            return
        self._lost_tokens.show_task(child, token)
        try:
            yield
        finally:
            self._lost_tokens.show_task(child, "")

    def _on_signal(self, signum: int, frame: Any) -> None:
        lock, tokens = current_lock(), self._lost_tokens
        if isinstance(lock, TaskLock) and tokens is not None:
            if tokens.shows(lock.token):
                raise lock.lose()
            by = tokens.preempted_by(lock.token)
            if by:
                if not lock.interrupted and _runs_body(frame):
                    raise lock.must_end(Preempted(by))
                return
        if callable(self._before):
            self._before(signum, frame)


def interrupts_of_process() -> Interrupts:
    """Return how tasks are interrupted in a spawned child.

    In other processes they are not: a forked child has the memory of its parent.
    """
    name = os.environ.get(PATH)
    return Interrupts() if name is None else Interrupts(_opened(name), signals=True)


def _opened(name: str) -> LostTokens:
    """Return the memory of the main process. Without it, no task here is interrupted."""
    try:
        with Path(name).open("r+b") as file:
            return LostTokens(mmap.mmap(file.fileno(), _SIZE))
    except (OSError, ValueError) as error:
        logger.warning("celery-singleton-lock: the worker's file %s is closed: %s", name, error)
        return LostTokens()


def _runs_body(frame: Any) -> bool:
    """Return whether the function of a task runs, and not Celery's code before or after it.

    That code stores results and sends the next task of a chain. If it is interrupted, the task ends
    a second time. Nor does it run while Python deletes an object: exceptions are ignored there.
    """
    called = None
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return False
        if frame.f_code.co_name == "trace_task" and _module_of(frame) == "celery.app.trace":
            return called is not None and _is_body(called)
        called, frame = frame, frame.f_back
    return False


def _is_body(called: Any) -> bool:
    """Return whether Celery's tracer calls the function of a task in this frame."""
    name, module = called.f_code.co_name, _module_of(called)
    if module.partition(".")[0] in _AROUND:
        return name in _CALLS or module == "celery.app.autoretry"
    return name not in _HOOKS


def _module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


_HOOKS: Final = frozenset({"before_start", "on_success", "after_return"})
"""Methods of a task that Celery's tracer calls before and after the function."""

_AROUND: Final = frozenset({"celery", "kombu", "billiard", "vine"})
_CALLS: Final = frozenset({"__call__", "__protected_call__"})
"""Functions of Celery that call the one of the task; those of ``celery.app.autoretry`` do, too."""

"""Threads and locks of the operating system, also if gevent or eventlet has replaced them.

With these libraries a "thread" is a greenlet. It does not run while another one computes, and a
lease that it should renew ends. The watchdog of such a worker therefore needs a thread of the
operating system. Locks that it shares with greenlets must block threads, too: a green lock wakes
its waiter in the event loop of the thread that releases it.

A socket that is created in such a thread is still green. It works, because both libraries have one
event loop per thread.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def patched_by() -> str:
    """Return ``gevent`` or ``eventlet`` if it has patched this process' threads, else "".

    Neither is imported here: one that has patched the process is imported already.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return "eventlet"
    return ""


def original(module: str, name: str) -> Any:
    """Return a function or class of the standard library as it was before any patch.

    Args:
        module: such as ``os``.
        name: such as ``read``.
    """
    match patched_by():
        case "gevent":
            return sys.modules["gevent.monkey"].get_original(module, name)
        case "eventlet":
            return getattr(sys.modules["eventlet.patcher"].original(module), name)
        case _:
            return getattr(importlib.import_module(module), name)


def RLock() -> Any:  # noqa: N802  # named as in threading, for which this module stands in
    """Return a reentrant lock. All greenlets of a thread count as one owner."""
    return original("_thread", "RLock")()


class Condition(threading.Condition):
    """A condition whose waiters block their threads.

    ``threading.Condition`` creates a lock for each waiter: a green one if threads are green.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait, and acquire it again; return whether it was notified."""
        waiter = original("_thread", "allocate_lock")()
        waiter.acquire()
        self._waiters.append(waiter)  # type: ignore[attr-defined]  # of the class above
        state = self._release_save()  # type: ignore[attr-defined]
        try:
            notified: bool = waiter.acquire(True, -1 if timeout is None else timeout)  # noqa: FBT003
        finally:
            self._acquire_restore(state)  # type: ignore[attr-defined]
        if not notified:
            with suppress(ValueError):
                self._waiters.remove(waiter)  # type: ignore[attr-defined]
        return notified


class Thread:
    """A thread of the operating system, with the part of ``threading.Thread`` that is used here.

    Args:
        target: what to run.
        name: for people; the operating system does not get it.
        daemon: must be True: the interpreter does not wait for it at exit.

    Raises:
        ValueError: ``daemon`` is False.
    """

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        if not daemon:
            msg = f"The interpreter does not wait for the thread {name} at exit: use daemon=True."
            raise ValueError(msg)
        self.name = name
        self._target = target
        self._runs = original("_thread", "allocate_lock")()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the operating system cannot create one.
        """
        self._runs.acquire()
        try:
            original("_thread", "start_new_thread")(self._run, ())
        except BaseException:
            self._runs.release()
            raise

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._runs.release()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return bool(self._runs.locked())

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the end of the thread."""
        if self._runs.acquire(True, timeout):  # noqa: FBT003  # takes no keyword
            self._runs.release()

"""Threads and locks of the system, whatever gevent or eventlet has put in their place.

Under these two a "thread" is a greenlet: it stands still while another computes, and a lease that
it should renew ends. The watchdog of such a worker needs a thread that the system schedules, and
locks between that thread and the greenlets that block a thread, not a greenlet: a green lock wakes
its waiter in the loop of who releases it, which is another thread's here.

A socket that is made in such a thread is still a green one. That is no harm: both libraries keep
one loop per thread, so it waits in a loop of its own, which nobody else computes in.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def patched_by() -> str:
    """Return ``gevent`` or ``eventlet`` if that has replaced this process' threads, else nothing.

    Neither is imported here: what has patched a process is there already.
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
    """Return a lock that its thread may take again. All greenlets of a thread count as one."""
    return original("_thread", "RLock")()


class Condition(threading.Condition):
    """A condition whose waiters block as the system's threads do.

    ``threading.Condition`` makes a lock for each waiter, and makes it green where threads are.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock back, wait to be notified, take it again; return whether we were."""
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
    """A thread that the system schedules, with what the watchdog needs of ``threading.Thread``.

    Args:
        target: what to run.
        name: for people; the system does not hear of it.
        daemon: only True: no exit waits for it.
    """

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        """Start nothing yet."""
        if not daemon:
            msg = f"Nobody waits for the native thread {name} at exit: give daemon=True."
            raise ValueError(msg)
        self.name = name
        self._target = target
        self._runs = original("_thread", "allocate_lock")()

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: the system has no thread left.
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
        """Return whether it runs."""
        return bool(self._runs.locked())

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for its end."""
        if self._runs.acquire(True, timeout):  # noqa: FBT003  # takes no keyword
            self._runs.release()

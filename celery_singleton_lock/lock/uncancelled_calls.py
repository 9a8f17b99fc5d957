"""Requests that run to their end even if the asyncio task that waits for them is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from celery_singleton_lock.core import loop_tasks
from celery_singleton_lock.lock.lease_watchdog import PATIENCE

T = TypeVar("T")

logger: Final = logging.getLogger(__name__)


class UncancelledCalls:
    """Runs calls one after another, each to its end, even if the calling task is cancelled.

    If the server does not answer, a cancelled caller continues after :data:`PATIENCE`, and the call
    continues in the background.

    Use :meth:`run_cancellable` for calls that only wait or read: they end with their caller.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what the call returns.

        Raises:
            CancelledError: the caller was cancelled; the call has ended, or continues.
        """
        task = self._send(call)
        cancelled = await _await_end(task, None)
        if cancelled is None:
            return task.result()
        _log_failure(task)
        raise cancelled

    async def run_cancellable(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what the call returns; cancel it if its caller is cancelled.

        Before Python 3.12, ``asyncio.wait_for`` loses a cancellation that coincides with the end of
        its awaitable (https://github.com/python/cpython/issues/86296), and redis-py uses it. So the
        call is cancelled repeatedly until it has ended.

        Raises:
            CancelledError: the caller was cancelled.
        """
        task, clock = self._send(call), asyncio.get_running_loop().time
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            while not task.done():
                task.cancel()
                await _await_end(task, clock() + loop_tasks.AGAIN)
            raise
        return task.result()

    async def finish(self, call: Coroutine[Any, Any, T]) -> None:
        """Wait for the end of a call, at most :data:`PATIENCE`. Its result is not needed.

        Raises:
            CancelledError: the caller was cancelled.
        """
        task = self._send(call)
        cancelled = await _await_end(task, asyncio.get_running_loop().time() + PATIENCE)
        _log_failure(task)
        if cancelled is not None:
            raise cancelled

    async def join(self) -> None:
        """Wait for the end of a call that continues after its caller was cancelled."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _send(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        self._task = task = loop_tasks.start(call)
        return task


async def _await_end(task: asyncio.Task[Any], until: float | None) -> asyncio.CancelledError | None:
    """Wait for the end of a task; return the cancellation that arrived meanwhile, if any.

    Args:
        task: the task.
        until: the loop's time of the end of the wait; None: until the task has ended, or
            :data:`PATIENCE` after a cancellation.
    """
    cancelled, clock = None, asyncio.get_running_loop().time
    while not task.done() and (until is None or clock() < until):
        try:
            await asyncio.wait({task}, timeout=None if until is None else until - clock())
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            until = clock() + PATIENCE if until is None else until
    return cancelled


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Log the error of a call whose caller was cancelled."""
    if task.done() and not task.cancelled() and task.exception() is not None:
        logger.warning("a request of a cancelled task failed: %s", task.exception())

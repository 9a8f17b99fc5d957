"""asyncio tasks that need not be awaited, and that end with their event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

LAST_WAIT: Final = 1.0
"""Longest time in seconds for which a loop waits at its end for the tasks that it cancels."""

AGAIN: Final = 0.05
"""Seconds after which a task that has not ended is cancelled again."""

tasks: set[asyncio.Task[Any]] = set()
"""The tasks that have not ended; a loop has only weak references to them."""

_ends: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
"""Loop -> generator that ends its tasks. It refers to the loop: a weak key would never expire."""


def start(call: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """Run a coroutine in a task that ends with the running loop at the latest.

    asyncio does not log its error as "never retrieved".

    Args:
        call: what to run.
        name: of the task.
    """
    loop = asyncio.get_running_loop()
    _end_with(loop)
    task = loop.create_task(call, name=name)
    tasks.add(task)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[Any]) -> None:
    """Retrieve the error, if any, so that asyncio does not log it."""
    tasks.discard(task)
    if not task.cancelled():
        task.exception()


def _end_with(loop: asyncio.AbstractEventLoop) -> None:
    """Make the tasks of a running loop end with it."""
    if loop not in _ends:
        for each in list(_ends):  # a copy: other threads start and end loops meanwhile
            if each.is_closed():
                _ends.pop(each, None)
                # The loop was closed before it ran the callbacks of these tasks.
                tasks.difference_update([task for task in _of(each) if task.done()])
        _ends[loop] = generator = _until_the_loop_ends()
        with suppress(StopIteration):  # it is at its yield, and the loop has registered it
            generator.__anext__().send(None)


async def _until_the_loop_ends() -> AsyncGenerator[None, None]:
    """Stay open until the loop ends, and end its tasks then.

    ``asyncio.run`` cancels the tasks that exist. Their clean-up creates others, which would stay
    pending with an open connection if the server does not answer. A loop notifies only its
    asynchronous generators of its end.
    """
    try:
        yield
    finally:
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_WAIT
        while (mine := _of(loop)) and loop.time() < until:
            for task in mine:
                task.cancel()
            await asyncio.wait(mine, timeout=AGAIN)
        _ends.pop(loop, None)


def _of(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    return {task for task in list(tasks) if task.get_loop() is loop}

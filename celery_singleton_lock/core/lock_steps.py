"""Plans: decisions without I/O, which one driver runs in threads and another in asyncio.

A plan is a generator. It yields a request. The driver sends it the reply, or raises the error in
it. The return value of the generator is the result.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Operations = TypeVar("Operations")
Request = TypeVar("Request")

Plan = Generator[Request, Any, T]
"""Yields requests, and returns a ``T``."""


def carry_out(plan: Plan[Request, T], do: Callable[[Request], Any]) -> T:
    """Run a plan in this thread.

    Args:
        plan: what to run.
        do: carries out a request. Its error is raised in the plan, which may handle it.

    Returns:
        The result of the plan.
    """
    try:
        request = next(plan)
        while True:
            try:
                answer = do(request)
            except BaseException as error:  # noqa: BLE001  # the plan decides
                request = plan.throw(error)
            else:
                request = plan.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def carry_out_async(plan: Plan[Request, T], do: Callable[[Request], Awaitable[Any]]) -> T:
    """Run a plan in this asyncio task; see :func:`carry_out`."""
    try:
        request = next(plan)
        while True:
            try:
                answer = await do(request)
            except BaseException as error:  # noqa: BLE001  # the plan decides
                request = plan.throw(error)
            else:
                request = plan.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def by_thread(
    verb: Callable[Concatenate[Operations, P], Plan[Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a method of a store that runs an operation in the calling thread.

    Args:
        verb: the operation; it returns a plan. The method of this name of ``store.operations`` is
            called, which may override it. ``store.do`` carries out the plan's requests.
    """
    name = verb.__name__

    @functools.wraps(verb)
    def run(store: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        plan: Plan[Any, T] = getattr(store.operations, name)(*args, **kwargs)
        return carry_out(plan, store.do)

    return run


def by_task(
    verb: Callable[Concatenate[Operations, P], Plan[Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a coroutine method of a store that runs an operation; see :func:`by_thread`."""
    name = verb.__name__

    @functools.wraps(verb)
    async def run(store: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        plan: Plan[Any, T] = getattr(store.operations, name)(*args, **kwargs)
        return await carry_out_async(plan, store.do)

    return run

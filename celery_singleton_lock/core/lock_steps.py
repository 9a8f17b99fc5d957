"""Plans: what is decided, apart from how it is carried out.

A plan is a generator. It yields what it wants done, and is sent the answer, or has the error raised
in it where it waits; what it returns is the result. So one text decides for threads and for
asyncio, and these two functions are all that is written twice.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Verbs = TypeVar("Verbs")
Wish = TypeVar("Wish")

Plan = Generator[Wish, Any, T]
"""Wishes for something to be done, and returns a ``T``."""


def carry_out(plan: Plan[Wish, T], do: Callable[[Wish], Any]) -> T:
    """Carry out a plan in this thread.

    Args:
        plan: what to do.
        do: does what the plan wishes for. What it raises is raised in the plan, which may go on.

    Returns:
        What the plan returns.
    """
    try:
        wish = next(plan)
        while True:
            try:
                answer = do(wish)
            except BaseException as error:  # noqa: BLE001  # the plan decides
                wish = plan.throw(error)
            else:
                wish = plan.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def carry_out_async(plan: Plan[Wish, T], do: Callable[[Wish], Awaitable[Any]]) -> T:
    """Carry out a plan in this task; as :func:`carry_out` does."""
    try:
        wish = next(plan)
        while True:
            try:
                answer = await do(wish)
            except BaseException as error:  # noqa: BLE001  # the plan decides
                wish = plan.throw(error)
            else:
                wish = plan.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def by_thread(
    verb: Callable[Concatenate[Verbs, P], Plan[Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return the verb of a store for the thread that calls it.

    Args:
        verb: returns the plan. The store's ``verbs`` may have another one of that name; its ``do``
            does what a plan wishes for.
    """
    name = verb.__name__

    @functools.wraps(verb)
    def run(store: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        plan: Plan[Any, T] = getattr(store.verbs, name)(*args, **kwargs)
        return carry_out(plan, store.do)

    return run


def by_task(
    verb: Callable[Concatenate[Verbs, P], Plan[Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the verb of a store for the task that awaits it; as :func:`by_thread` does."""
    name = verb.__name__

    @functools.wraps(verb)
    async def run(store: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        plan: Plan[Any, T] = getattr(store.verbs, name)(*args, **kwargs)
        return await carry_out_async(plan, store.do)

    return run

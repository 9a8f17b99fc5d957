"""Priority: the head start of a task in the queue of its lock (pure).

A task with a head start of 30 s counts as having arrived 30 s earlier. So it passes only tasks that
arrived at most 30 s before it, and a task without a head start is passed only by tasks that arrive
less than their head start after it. No task waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from celery_singleton_lock.core.lock_name_errors import OF_TASK, Wording
from celery_singleton_lock.core.lock_name_template import NotComputable, Sent, compile_value
from celery_singleton_lock.errors import ConfigurationError

MOST: Final = 86_400
"""Longest head start in seconds; the shortest is its negative."""

PriorityOption: TypeAlias = float | str | Callable[..., float]
"""Seconds of head start, a template of the arguments, or a callable that takes them."""

PriorityOf = Callable[[Sequence[Any], Mapping[str, Any], Sent | None], "HeadStart"]
"""Arguments of a call -> its head start."""

_RANGE: Final = f"from -{MOST} to {MOST}"


class HeadStart(NamedTuple):
    """A head start.

    Args:
        seconds: the head start that counts.
        given: the number that was given, if it is out of range.
    """

    seconds: float
    given: float | None = None


def head_start_of(value: object) -> HeadStart | None:
    """Return the head start for seconds, as a number or as its text; None if it is not a number.

    Args:
        value: an int or float, or a text such as ``"30"``, as a template returns it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        seconds = float(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if isinstance(seconds, float) and math.isnan(seconds):
        return None
    near = float(min(max(seconds, -MOST), MOST))
    return HeadStart(near, None if near == seconds else seconds)


def microseconds(seconds: float) -> int:
    """Return a head start as the scripts take it."""
    return round(seconds * 1_000_000)


def is_computed_priority(priority: object) -> bool:
    """Return whether a priority depends on the arguments of a call."""
    return isinstance(priority, str) or callable(priority)


def checked_priority(what: str, priority: object) -> PriorityOption:
    """Return a priority as it was declared.

    Args:
        what: the option, for errors.
        priority: its value.

    Raises:
        ConfigurationError: it is neither a number in the range, nor a template with a field, nor a
            callable.
    """
    if callable(priority):
        return priority
    if isinstance(priority, str):
        if "{" in priority:
            return priority
        msg = (
            f"{what} is {priority!r}, which names no argument. Give the seconds of head start as a "
            'number, such as 30, or a template such as "{urgency}".'
        )
        raise ConfigurationError(msg)
    start = head_start_of(priority)
    if start is None or start.given is not None:
        msg = (
            f"{what} is {priority!r}: give the seconds of head start, {_RANGE}, a template such as "
            '"{urgency}", or a callable.'
        )
        raise ConfigurationError(msg)
    return start.seconds


def compile_priority(
    task_name: str,
    run: Callable[..., Any],
    priority: PriorityOption,
    option: str = "lock_priority",
    *,
    bound: bool = False,
    wording: Wording = OF_TASK,
) -> PriorityOf:
    """Check a computed priority for a task, and compile it.

    Args:
        task_name: name of the task.
        run: the task's function; its signature is used.
        priority: as :func:`checked_priority` returns it.
        option: the option, for errors.
        bound: ``run`` has a first parameter that is not an argument of the task.
        wording: words for the task in error texts.

    Returns:
        A function of the arguments of a call. It raises ConfigurationError if the priority is not a
        number, and ``ArgumentsDoNotBind`` if the task cannot be called.

    Raises:
        ConfigurationError: a template or callable does not fit the task.
    """
    if isinstance(priority, (int, float)):
        always = HeadStart(priority)
        return lambda _args, _kwargs, _sent: always
    compute = compile_value(task_name, run, priority, option, bound=bound, wording=wording)
    source = f"the template {priority!r}" if isinstance(priority, str) else "the callable"

    def head_start(args: Sequence[Any], kwargs: Mapping[str, Any], sent: Sent | None) -> HeadStart:
        try:
            value = compute(args, kwargs, sent)
        except NotComputable as error:
            raise ConfigurationError(str(error)) from error.__cause__
        start = head_start_of(value)
        if start is None:
            msg = (
                f"{wording.kind} {task_name}: {option} is {value!r:.100}, from {source}: it must "
                f"be seconds, {_RANGE}. Send a number, or use a callable that returns one."
            )
            raise ConfigurationError(msg)
        return start

    return head_start

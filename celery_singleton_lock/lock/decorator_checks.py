"""Checks of the arguments of ``@locked``, and of the function that it decorates."""

from __future__ import annotations

import inspect
from typing import Final

from celery_singleton_lock.config.argument_checks import checked_seconds, goes_on_after_its_call
from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind

CONFLICTS: Final = ("wait", "skip", "fail")
"""What a call does if its lock is busy."""

_OF_TASKS: Final = ("park", "requeue", "preempt")


def check_arguments(key: object, backend: object) -> None:
    """Refuse missing and swapped arguments.

    Args:
        key: first argument of ``@locked``.
        backend: second argument.

    Raises:
        ConfigurationError: an argument is missing, or they are swapped.
    """
    if isinstance(backend, str) and not (key is None or isinstance(key, str) or callable(key)):
        msg = (
            f"@locked has {a_kind(key)} as its key and a str as its backend: they are swapped. "
            "Write @locked(key, client)."
        )
    elif backend is None and inspect.isroutine(key) and key.__name__ != "<lambda>":
        msg = (
            f"@locked decorates {key.__qualname__} without a key and a client. Write "
            f'@locked("{key.__name__}", client), or with its arguments, such as '
            '"report:{report_id}".'
        )
    elif backend is None:
        msg = "@locked has no backend. Write @locked(key, client), with a Redis client."
    else:
        return
    raise ConfigurationError(msg)


def checked_conflict(on_conflict: object, wait_timeout: object) -> str:
    """Return what a call does if its lock is busy.

    Args:
        on_conflict: option of ``@locked``.
        wait_timeout: option of ``@locked``.

    Raises:
        ConfigurationError: one of them is invalid, or they contradict each other.
    """
    if on_conflict not in CONFLICTS:
        hint = (
            " Only a task can be parked, requeued or preempted." if on_conflict in _OF_TASKS else ""
        )
        msg = f"on_conflict is {on_conflict!r}: use one of {', '.join(CONFLICTS)}.{hint}"
        raise ConfigurationError(msg)
    if wait_timeout is not None:
        checked_seconds("wait_timeout", wait_timeout, 0.001, MAX_WAIT)
        if on_conflict != "wait":
            msg = f"wait_timeout needs on_conflict='wait': {on_conflict!r} does not wait."
            raise ConfigurationError(msg)
    return str(on_conflict)


def check_function(function: object) -> None:
    """Refuse a function whose body may run after its call has returned.

    Args:
        function: the decorated object.

    Raises:
        ConfigurationError: it is such a function, or not a function.
    """
    if isinstance(function, (classmethod, staticmethod)):
        kind = type(function).__name__
        msg = f"@locked is above @{kind}. Put it below, next to the function."
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        msg = "@locked cannot hold a lock while a generator runs. Use `with Lock(…)` in it."
    elif inspect.isfunction(function) and goes_on_after_its_call(function):
        msg = (
            f"@locked is above another decorator of {function.__qualname__}, which is a coroutine "
            "function or a generator: its body may run after the call has returned. Put @locked "
            "below that decorator, next to a coroutine function; in a generator use "
            "`with Lock(…)`."
        )
    elif not inspect.isfunction(function):
        msg = f"@locked decorates functions, not {function!r}."
    else:
        return
    raise ConfigurationError(msg)

"""Computes which calls of a task with ``lock_unique`` are alike (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from celery_singleton_lock.core.lock_name_template import NotComputable, Sent, compile_value
from celery_singleton_lock.core.redis_keys import key_name
from celery_singleton_lock.errors import LockNameError

KeyOf: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any], Sent | None], str]
"""Returns what two calls of one lock share if they are alike."""


def compile_unique_key(
    task_name: str, run: Callable[..., Any], key: str | Callable[..., object] | None
) -> KeyOf:
    """Check ``lock_unique_key``, and compile it.

    Args:
        task_name: name of the task.
        run: the task's function; its signature is used.
        key: a template or a callable with the task's parameters; None: all calls of the task with
            the same lock are alike.

    Returns:
        A function of the arguments of a call. It raises ``ArgumentsDoNotBind``, or LockNameError
        with the reason.

    Raises:
        ConfigurationError: the template or callable does not fit the task.
    """
    if key is None:
        return lambda _args, _kwargs, _sent: task_name
    compute = compile_value(task_name, run, key, "lock_unique_key")

    def key_of(args: Sequence[Any], kwargs: Mapping[str, Any], sent: Sent | None) -> str:
        try:
            return key_name(f"{task_name} {compute(args, kwargs, sent)}")
        except NotComputable as error:
            raise LockNameError(str(error)) from error
        except UnicodeEncodeError as error:
            msg = f"task {task_name}: lock_unique_key holds a lone surrogate. Send valid Unicode."
            raise LockNameError(msg) from error

    return key_of

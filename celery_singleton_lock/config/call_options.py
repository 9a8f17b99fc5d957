"""Lock options of one call. A header of its message contains them.

A retry of the task keeps them. Tasks that it sends do not inherit them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import meant

HEADER: Final = "csl-options"
"""Message header with the lock options of a call: names and values."""

PER_CALL: Final = (
    "lock_key",
    "lock_on_conflict",
    "lock_on_duplicate",
    "lock_priority",
    "lock_unique",
    "lock_wait_timeout",
)
"""Options that a call may have."""

Call = Mapping[str, Any]
"""Options of one call, by name."""

_current: ContextVar[Call | None] = ContextVar("celery_singleton_lock_call", default=None)


def take_given(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the lock options from the options of a call, and return them."""
    return {name: options.pop(name) for name in list(options) if name.startswith("lock_")}


def check_names(task_name: str, given: object) -> Call:
    """Check the lock options of a call, and return them.

    Args:
        task_name: name of the task, for errors.
        given: options by name; a message may contain anything.

    Raises:
        ConfigurationError: this is not a mapping of options that a call may have.
    """
    supported = f"A call may have {', '.join(PER_CALL)}"
    if not isinstance(given, Mapping):
        msg = f"task {task_name}: the header {HEADER} is {type(given).__name__}. {supported}."
        raise ConfigurationError(msg)
    for name in given:
        if name not in PER_CALL:
            hint = meant(name, PER_CALL, cutoff=0.8)  # an option of the task is not misspelt
            msg = (
                f"task {task_name}: {name} cannot be given to one call. {supported}; declare "
                f"others with the task.{hint}"
            )
            raise ConfigurationError(msg)
    key = given.get("lock_key", "")
    if not isinstance(key, str):
        msg = (
            f"task {task_name}: lock_key of a call is {key!r}: the message carries it, so it must "
            "be a template, not a callable."
        )
        raise ConfigurationError(msg)
    priority = given.get("lock_priority", 0)
    if callable(priority):
        msg = (
            f"task {task_name}: lock_priority of a call is {priority!r}: the message carries it, "
            "so it must be a number of seconds or a template, not a callable."
        )
        raise ConfigurationError(msg)
    return given


def current_call() -> Call | None:
    """Return the lock options of the call that runs in this context."""
    return _current.get()


@contextmanager
def calling(call: Call | None) -> Iterator[None]:
    """Apply the lock options of a call within the ``with`` block."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)

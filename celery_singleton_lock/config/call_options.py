"""Lock options of one call: they travel in a header of its message.

A retry of the task has those of its attempt; tasks that it sends have none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import meant

HEADER: Final = "csl-options"
"""Message header of a call with lock options of its own: their names and values."""

PER_CALL: Final = ("lock_key", "lock_on_conflict", "lock_wait_timeout")
"""Options that a call may have."""

Call = Mapping[str, Any]
"""Options of one call, by name."""

_current: ContextVar[Call | None] = ContextVar("celery_singleton_lock_call", default=None)


def take_given(options: dict[str, Any]) -> dict[str, Any]:
    """Take lock options out of those of a call, and return them."""
    return {name: options.pop(name) for name in list(options) if name.startswith("lock_")}


def check_names(task_name: str, given: object) -> Call:
    """Return what is given to one call, if a call may have it.

    Args:
        task_name: for errors.
        given: options by name; in a message anything may stand there.

    Raises:
        ConfigurationError: it is no mapping of such options.
    """
    supported = f"A call may have {', '.join(PER_CALL)}"
    if not isinstance(given, Mapping):
        msg = f"task {task_name}: the header {HEADER} is {type(given).__name__}. {supported}."
        raise ConfigurationError(msg)
    for name in given:
        if name not in PER_CALL:
            msg = (
                f"task {task_name}: {name} cannot be given to one call. {supported}; declare "
                f"others with the task.{meant(name, PER_CALL)}"
            )
            raise ConfigurationError(msg)
    key = given.get("lock_key", "")
    if not isinstance(key, str):
        msg = (
            f"task {task_name}: lock_key of a call is {key!r}: it travels in the message, so it "
            "must be a template, not a callable."
        )
        raise ConfigurationError(msg)
    return given


def current_call() -> Call | None:
    """Return the options of the call that runs here."""
    return _current.get()


@contextmanager
def calling(call: Call | None) -> Iterator[None]:
    """Have the options of a call count for the run inside."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)

"""Closing a lock for a time: checks of the arguments, and the text that commands show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from celery_singleton_lock.config.argument_checks import checked_seconds
from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind, encodable, printable

SHORTEST: Final = 0.001
"""Shortest close in seconds: Redis counts in milliseconds."""

LONGEST_WHY: Final = 500
"""Most characters that are stored of the text that says who closes a lock, and why."""


def checked_close(seconds: object, why: object) -> tuple[float, str]:
    """Return the arguments of a close.

    Args:
        seconds: for how long the lock is closed.
        why: the reason, for people.

    Raises:
        ConfigurationError: ``seconds`` is not a number, or is out of range; ``why`` is not a str.
    """
    if not isinstance(why, str):
        msg = f"why must be a str, which people read, not {a_kind(why)}: {why!r:.80}."
        raise ConfigurationError(msg)
    return checked_seconds("seconds", seconds, SHORTEST, MAX_WAIT), why


def described(by: str, why: str) -> str:
    """Return who closes a lock, and why, as one line.

    Args:
        by: the task with its id, or the client.
        why: the reason; may be empty.
    """
    told = f"by {by}: {' '.join(why.split())}" if why.strip() else f"by {by}"
    return printable(encodable(told), LONGEST_WHY)


def name_to_close(names: Sequence[str], name: str) -> str:
    """Return the name of the lock that a task closes.

    Args:
        names: of its locks.
        name: as given; empty if the task has one lock.

    Raises:
        ConfigurationError: the task has several locks and gives no name, or has no such lock.
    """
    found = [each for each in names if not name or each == name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(map(repr, names))
    if name:
        msg = f"name is {name!r}, and the task has no such lock. It has {known}."
    else:
        msg = f"The task has several locks ({known}). Say which one to close: name=…"
    raise ConfigurationError(msg)

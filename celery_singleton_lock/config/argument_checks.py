"""What a caller passes to a lock: each check returns it, or says what to write instead."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final, TypeVar

from celery_singleton_lock.config.limits import LONG_LEASE, MAX_COUNT, MAX_WAIT
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.errors import ConfigurationError, LockNameError
from celery_singleton_lock.message_text import count_meant, meant, seconds_meant

T = TypeVar("T")

SHORTEST_LEASE: Final = 0.1
"""Seconds; a shorter lease ends between two looks of the watchdog."""

_LEASE: Final = "how long the lock is held without a renewal is lease=…"

_ELSEWHERE: Final = {
    "timeout": f"{_LEASE}, how long to wait for it is blocking_timeout=…",
    "expire": _LEASE,
    "auto_release_time": _LEASE,
    "ttl": _LEASE,
    "sleep": "nobody polls, so leave it out",
    "auto_renewal": "whether the lease is renewed is renew=…",
    "id": "a token of your own is an argument of acquire()",
}
"""What the locks of redis-py, python-redis-lock, pottery and aioredlock call it."""

_TOKEN: Final = re.compile(r"[\w-]{16,128}\.\d{1,9}", re.ASCII)


def refuse_unknown(lock: type, options: Iterable[str]) -> None:
    """Refuse options that a lock does not have, such as another package's.

    Args:
        lock: its class.
        options: names; mostly none.

    Raises:
        ConfigurationError: there is one.
    """
    for option in options:
        known = set(inspect.signature(lock).parameters) - {"unknown"}
        remedy = f": {_ELSEWHERE[option]}." if option in _ELSEWHERE else f".{meant(option, known)}"
        msg = f"{lock.__name__} has no option {option!r}{remedy}"
        raise ConfigurationError(msg)


def goes_on_after_its_call(function: Callable[..., Any]) -> bool:
    """Return whether the body of a function runs, or may run, after a call of it has returned.

    That is so for generators, and for a coroutine function behind a decorator that is a plain
    function: whether it awaits the coroutine cannot be seen.
    """
    if inspect.iscoroutinefunction(function):
        return False
    inner = inspect.unwrap(function)
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(inner) for kind in kinds)


def finished(result: T, function: str) -> T:
    """Return what a function has returned, if its work is done.

    Args:
        result: what it has returned.
        function: its name, for the error.

    Raises:
        ConfigurationError: it is a coroutine, another awaitable, or a generator.
    """
    kinds = (inspect.isawaitable, inspect.isgenerator, inspect.isasyncgen)
    if not any(kind(result) for kind in kinds):
        return result
    kind = type(result).__name__
    if inspect.iscoroutine(result):
        result.close()  # else Python warns that nobody has awaited it
    msg = (
        f"{function} returned a {kind}, of which the work would run after the lock is released. "
        "Take the lock where that work is done: decorate the function that does it, or use "
        "`with Lock(…)` there."
    )
    raise ConfigurationError(msg)


def checked_name(name: object) -> str:
    """Return a lock's name.

    Raises:
        LockNameError: it is no text, or empty, or cannot be encoded.
    """
    if not isinstance(name, str) or not name:
        msg = f"A lock's name must be a str that is not empty, not {name!r}."
        raise LockNameError(msg)
    try:
        name.encode()
    except UnicodeEncodeError:
        msg = f"A lock's name must be valid Unicode, not {name!r}."
        raise LockNameError(msg) from None
    return name


def checked_seconds(what: str, value: object, least: float, most: float) -> float:
    """Return a number of seconds.

    A backend would read 0, a negative number or None as "no expiry" or "at once" (trap L24).

    Raises:
        ConfigurationError: it is no number between ``least`` and ``most``.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most:  # type: ignore[operator]
        use = seconds_meant(value)
        msg = f"{what} must be a number of seconds from {least:g} to {most:g}, not {value!r}" + (
            f": {use}." if use else "."
        )
        raise ConfigurationError(msg)
    return float(value)  # type: ignore[arg-type]


def warn_of_long_lease(lease: float) -> None:
    """Warn of a lease that is renewed and long all the same; once per line that asks for it.

    The text names no lock, since Python remembers each text of which it has warned.

    Args:
        lease: seconds.
    """
    if lease <= LONG_LEASE:
        return
    depth = 1
    while _is_ours(sys._getframe(depth)):  # noqa: SLF001  # Python 3.12 has skip_file_prefixes
        depth += 1
    msg = (
        f"lease is {lease:.10g} s: it need not exceed the run time, because it is renewed while "
        "the lock is held; all that it sets is for how long a crashed process blocks the lock. "
        "Use 30."
    )
    warnings.warn(msg, ConfigurationWarning, stacklevel=depth + 1)


def _is_ours(frame: FrameType) -> bool:
    inner = frame.f_back is not None  # else there is nobody else to tell
    return inner and str(frame.f_globals.get("__name__")).startswith(f"{_PACKAGE}.")


_PACKAGE: Final = __name__.partition(".")[0]


def checked_timeout(value: object) -> float | None:
    """Return the longest wait, seconds; None is for ever.

    Raises:
        ConfigurationError: it is no number over 0, or beyond :data:`MAX_WAIT`.
    """
    if value is None:
        return None
    if value == 0 and not isinstance(value, bool):
        msg = "blocking_timeout must be over 0; to try without waiting, pass blocking=False."
        raise ConfigurationError(msg)
    return checked_seconds("blocking_timeout", value, 0.001, MAX_WAIT)


def checked_limit(value: object) -> int:
    """Return a number of permits.

    Raises:
        ConfigurationError: it is no whole number between 1 and :data:`MAX_COUNT`.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= MAX_COUNT:  # type: ignore[operator]
        use = count_meant(value)
        msg = f"limit must be a whole number from 1 to {MAX_COUNT}, not {value!r}" + (
            f": {use}." if use else "."
        )
        raise ConfigurationError(msg)
    return value  # type: ignore[return-value]


def checked_bool(what: str, value: object) -> bool:
    """Return a bool.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, bool):
        msg = f"{what} must be True or False, not {value!r}."
        raise ConfigurationError(msg)
    return value


def checked_token(value: object) -> str:
    """Return an owner token.

    Raises:
        ConfigurationError: it was not made by :func:`celery_singleton_lock.new_token`.
    """
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        msg = (
            "token must come from celery_singleton_lock.new_token(), for others can be guessed or "
            f"shared: {value!r}."
        )
        raise ConfigurationError(msg)
    return value

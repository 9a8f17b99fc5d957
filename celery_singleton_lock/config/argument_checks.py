"""Checks of the arguments of locks: each returns the value, or says what to write instead."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final, TypeVar, cast

from celery_singleton_lock.config.limits import LONG_LEASE, MAX_COUNT, MAX_WAIT, NO_LIMIT
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.core.priority import checked_priority, is_computed_priority
from celery_singleton_lock.errors import ConfigurationError, LockNameError
from celery_singleton_lock.message_text import count_meant, meant, seconds_meant

T = TypeVar("T")

SHORTEST_LEASE: Final = 0.1
"""Seconds; a shorter lease would end before the watchdog renews it."""

_LEASE: Final = "lease=… is how long the lock is held without a renewal"

_ELSEWHERE: Final = {
    "timeout": f"{_LEASE}, blocking_timeout=… how long to wait for it",
    "expire": _LEASE,
    "auto_release_time": _LEASE,
    "ttl": _LEASE,
    "sleep": "this lock does not poll, so leave it out",
    "auto_renewal": "renew=… is whether the lease is renewed",
    "id": "pass a token of your own to acquire()",
}
"""Option of redis-py, python-redis-lock, pottery or aioredlock -> what to use here."""

BARE_KEY: Final = "{0}:{{{0}}}"
"""What to write if the text of a key is the name of the argument ``{0}``."""

_TOKEN: Final = re.compile(r"[\w-]{16,128}\.\d{1,9}", re.ASCII)


def refuse_unknown(lock: type, options: Iterable[str]) -> None:
    """Refuse options that a lock does not have, such as those of another package's lock.

    Args:
        lock: class of the lock.
        options: names of unknown options; usually none.

    Raises:
        ConfigurationError: there is one.
    """
    for option in options:
        known = set(inspect.signature(lock).parameters) - {"unknown"}
        remedy = f": {_ELSEWHERE[option]}." if option in _ELSEWHERE else f".{meant(option, known)}"
        msg = f"{lock.__name__} has no option {option!r}{remedy}"
        raise ConfigurationError(msg)


def goes_on_after_its_call(function: Callable[..., Any]) -> bool:
    """Return whether the body of a function may run after a call of it has returned.

    True for a generator function. Also true for a coroutine function that is wrapped by a plain
    function: it is not known whether that function awaits the coroutine.
    """
    if inspect.iscoroutinefunction(function):
        return False
    inner = inspect.unwrap(function)
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(inner) for kind in kinds)


def finished(result: T, function: str) -> T:
    """Return the result of a function, unless work of the function is still to be done.

    Args:
        result: the result.
        function: name of the function, for the error.

    Raises:
        ConfigurationError: the result is a coroutine, another awaitable, or a generator.
    """
    kinds = (inspect.isawaitable, inspect.isgenerator, inspect.isasyncgen)
    if not any(kind(result) for kind in kinds):
        return result
    kind = type(result).__name__
    if inspect.iscoroutine(result):
        result.close()  # else Python warns "was never awaited"
    msg = (
        f"{function} returned a {kind}, whose work would run after the lock is released. Acquire "
        "the lock where that work runs: decorate the inner function, or use `with Lock(…)` in it."
    )
    raise ConfigurationError(msg)


def checked_name(name: object) -> str:
    """Return a lock's name.

    Raises:
        LockNameError: it is not a str, is empty, or cannot be encoded.
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

    Redis would read 0, a negative number or None as "no expiry" or "at once" (docs/traps.md, L24).

    Raises:
        ConfigurationError: it is not a number between ``least`` and ``most``.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most:  # type: ignore[operator]
        use = seconds_meant(value)
        wanted = f"a number of seconds from {least:.10g} to {most:.10g}"
        msg = f"{what} must be {wanted}, not {value!r}" + (f": {use}." if use else ".")
        raise ConfigurationError(msg)
    return float(value)  # type: ignore[arg-type]


def warn_of_long_lease(lease: float) -> None:
    """Warn of a long lease that is renewed; once for each line that sets it.

    The text does not name the lock, because Python stores each different text of a warning.

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
        "the lock is held. A crashed process blocks the lock for this time. Use 30."
    )
    warnings.warn(msg, ConfigurationWarning, stacklevel=depth + 1)


def warn_of_bare_name(
    what: str, value: object, body: Callable[..., Any], example: str, depth: int = 1
) -> None:
    """Warn of a text that is the name of an argument, and no template of it.

    Args:
        what: what has the text, for the warning.
        value: the text, or anything else.
        body: function that has the arguments.
        example: template of an argument, with ``{0}`` for its name.
        depth: number of callers from here to the line that is warned of.
    """
    if isinstance(value, str) and value in inspect.signature(body).parameters:
        msg = (
            f"{what} is {value!r}, the same text for all calls, although an argument has this "
            f'name. For its value write "{example.format(value)}"; if the text is meant, use '
            "another one."
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=depth + 1)


def _is_ours(frame: FrameType) -> bool:
    inner = frame.f_back is not None  # the outermost frame gets the warning
    return inner and str(frame.f_globals.get("__name__")).startswith(f"{_PACKAGE}.")


_PACKAGE: Final = __name__.partition(".")[0]


def checked_timeout(value: object) -> float | None:
    """Return the longest wait in seconds; None is no limit.

    Raises:
        ConfigurationError: it is not a number above 0, or exceeds :data:`MAX_WAIT`.
    """
    if value is None:
        return None
    if value == 0 and not isinstance(value, bool):
        msg = (
            "blocking_timeout is 0: it must be above 0. To try without waiting, use blocking=False."
        )
        raise ConfigurationError(msg)
    return checked_seconds("blocking_timeout", value, 0.001, MAX_WAIT)


def checked_limit(value: object, *, has_rate: bool = False) -> int:
    """Return a number of permits.

    Args:
        value: the argument.
        has_rate: whether the lock has a rate; then None is no limit.

    Raises:
        ConfigurationError: it is not a whole number between 1 and :data:`MAX_COUNT`.
    """
    if value is None and has_rate:
        return NO_LIMIT
    if value is None:
        msg = 'limit is None: without a rate, the lock would bound nothing. Add rate="100/m".'
        raise ConfigurationError(msg)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= MAX_COUNT:  # type: ignore[operator]
        use = count_meant(value)
        msg = f"limit must be a whole number from 1 to {MAX_COUNT}, not {value!r}" + (
            f": {use}." if use else "."
        )
        raise ConfigurationError(msg)
    return value  # type: ignore[return-value]


def checked_head_start(value: object) -> float:
    """Return the seconds of head start of a lock in code.

    Raises:
        ConfigurationError: it is not a number in the range of a head start.
    """
    if is_computed_priority(value):
        msg = (
            f"priority is {value!r}, and a lock in code has no arguments from which to compute it. "
            "Give the seconds of head start as a number, or use @locked."
        )
        raise ConfigurationError(msg)
    return cast("float", checked_priority("priority", value))


def checked_on_lost(value: object) -> Any:
    """Return what is called when a lock is lost.

    Raises:
        ConfigurationError: it cannot be called, or a call of it returns a coroutine.
    """
    if value is None:
        return None
    if not callable(value):
        msg = f"on_lost must be a function of two arguments, name and token, not {value!r}."
        raise ConfigurationError(msg)
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__):
        msg = (
            "on_lost must be a plain function: nobody awaits the coroutine that a call of an "
            "async function returns, so it would not run. From on_lost, schedule the coroutine: "
            "asyncio.run_coroutine_threadsafe(…) with a Lock, loop.create_task(…) with an "
            "AsyncLock."
        )
        raise ConfigurationError(msg)
    return value


def is_pipeline(client: object) -> bool:
    """Return whether this is a pipeline of redis-py or valkey-py, which inherits from a client."""
    return any(kind.__name__ in {"Pipeline", "ClusterPipeline"} for kind in type(client).__mro__)


def checked_bool(what: str, value: object) -> bool:
    """Return a bool.

    Raises:
        ConfigurationError: it is not a bool.
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
            f"token is {value!r}: it can be guessed, or used twice. Use "
            "celery_singleton_lock.new_token()."
        )
        raise ConfigurationError(msg)
    return value

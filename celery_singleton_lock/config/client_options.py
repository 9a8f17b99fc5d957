"""Options of the Redis client: converts numbers and bools that are given as text (pure).

Command lines, environment variables and settings files provide text. redis-py accepts the text when
the client is created, and fails at the first connection, with an unrelated error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind

IN_SETTINGS: Final = f'{PREFIX}backend_options["{{}}"]'
"""How errors name an option of the client."""

FOR_SENTINELS: Final = "sentinel_kwargs"
"""The option with the options for connections to Sentinels."""


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    seconds = float(value)
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise ValueError
    return value if isinstance(value, int) else seconds


def _count(value: Any) -> int | None:
    if value is None:
        return None
    number = int(value)
    if isinstance(value, bool) or (not isinstance(value, str) and number != value) or number < 0:
        raise ValueError
    return number


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise ValueError
    return number if isinstance(value, str) else value


def _switch(value: Any) -> Any:
    return _SWITCHES[value.strip().lower()] if isinstance(value, str) else value


def _options(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else {} if value is None else value
    return {**found}


def _object(value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        raise TypeError
    return value


_SWITCHES: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}

Reader = tuple[Callable[[Any], Any], str]

_A_DURATION: Final[Reader] = (_seconds, "a number of seconds, more than 0, or None for no limit")
_A_COUNT: Final[Reader] = (_count, "a whole number, 0 or more")
_A_SWITCH: Final[Reader] = (_switch, "True or False")
_AN_OBJECT: Final[Reader] = (
    _object,
    "an object as redis-py takes it, which only settings can have",
)
_OPTIONS: Final[Reader] = (_options, "a dict of options, or JSON of one")
_READERS: Final[Mapping[str, Reader]] = {
    "socket_timeout": _A_DURATION,
    "socket_connect_timeout": _A_DURATION,
    "health_check_interval": (_number, "a number of seconds, 0 for never"),
    **dict.fromkeys(
        ("max_connections", "min_other_sentinels", "protocol", "socket_read_size"), _A_COUNT
    ),
    **dict.fromkeys(
        ("allow_eviction", "retry_on_timeout", "socket_keepalive", "ssl", "ssl_check_hostname"),
        _A_SWITCH,
    ),
    **dict.fromkeys(
        ("retry", "retry_on_error", "socket_keepalive_options", "cache", "cache_config"), _AN_OBJECT
    ),
    "maint_notifications_config": _AN_OBJECT,
    FOR_SENTINELS: _OPTIONS,
}


def read(options: Mapping[str, Any], called: str = IN_SETTINGS) -> dict[str, Any]:
    """Return the options with the types that the client needs.

    Args:
        options: by name; None is the client's default.
        called: how errors name an option, with ``{}`` for its name.

    Raises:
        ConfigurationError: one is invalid.
    """
    return {name: _read(name, value, called) for name, value in options.items()}


def _read(name: str, value: Any, called: str) -> Any:
    if name not in _READERS:
        return value
    reader, takes = _READERS[name]
    try:
        found = reader(value)
    except (TypeError, ValueError, KeyError, OverflowError):
        # Other types are not shown: a dict may contain passwords.
        plain = name != FOR_SENTINELS and isinstance(value, (str, int, float))
        shown = repr(value) if plain else a_kind(value)
        msg = f"{called.format(name)} is {shown}: it must be {takes}."
        raise ConfigurationError(msg) from None
    return read(found, f"{called.format(name)}, {{}}") if name == FOR_SENTINELS else found

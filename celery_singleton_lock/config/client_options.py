"""Options of the Redis client: numbers and switches, also as text (pure).

A command line, an environment or a file of settings gives text, and redis-py would take it until
the first connection is made, and then raise an error of Python's.
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
"""How settings call one of these options."""

FOR_SENTINELS: Final = "sentinel_kwargs"
"""The option that holds those for the connections to Sentinels."""


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


_SWITCHES: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}

Reader = tuple[Callable[[Any], Any], str]

_A_DURATION: Final[Reader] = (_seconds, "a number of seconds, more than 0, or None for no limit")
_A_COUNT: Final[Reader] = (_count, "a whole number, 0 or more")
_A_SWITCH: Final[Reader] = (_switch, "True or False")
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
    FOR_SENTINELS: _OPTIONS,
}


def read(options: Mapping[str, Any], called: str = IN_SETTINGS) -> dict[str, Any]:
    """Return the options as the client wants them.

    Args:
        options: as they were given; None for those that are to be as if they were not.
        called: how errors call an option, with ``{}`` for its name.

    Raises:
        ConfigurationError: one is not what it can be.
    """
    return {name: _read(name, value, called) for name, value in options.items()}


def _read(name: str, value: Any, called: str) -> Any:
    if name not in _READERS:
        return value
    reader, takes = _READERS[name]
    try:
        found = reader(value)
    except (TypeError, ValueError, KeyError, OverflowError):
        # What is no number may be anything; a dict holds passwords.
        plain = name != FOR_SENTINELS and isinstance(value, (str, int, float))
        shown = repr(value) if plain else a_kind(value)
        msg = f"{called.format(name)} is {shown}: it must be {takes}."
        raise ConfigurationError(msg) from None
    return read(found, f"{called.format(name)}, {{}}") if name == FOR_SENTINELS else found

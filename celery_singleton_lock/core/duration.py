"""Durations as an operator writes them (pure)."""

from __future__ import annotations

import re
from typing import Final

from celery_singleton_lock.errors import ConfigurationError

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_TEXT: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)", re.ASCII)

LONGEST: Final = 366 * 86_400.0
"""Longest time in seconds for which an operator's value can be in force."""


def seconds_of(text: str) -> float:
    """Return a duration such as ``90``, ``10m``, ``2h`` or ``3d`` in seconds.

    Raises:
        ConfigurationError: the text is not a duration.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        msg = f"{text!r} is not a duration: give 90, 10m, 2h or 3d."
        raise ConfigurationError(msg)
    return float(found[1]) * _UNITS[found[2]]


def time_in_force(text: str) -> float:
    """Return for how many seconds an operator's value is in force.

    Args:
        text: a duration, as of :func:`seconds_of`.

    Raises:
        ConfigurationError: the text is not a duration, or out of range.
    """
    seconds = seconds_of(text)
    if not 0 < seconds <= LONGEST:
        msg = f"{text!r} is {seconds:g} seconds: give a time above 0, and at most 366d."
        raise ConfigurationError(msg)
    return seconds

"""Converts values to text for errors, log lines and command output (pure)."""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Iterable
from typing import Final

_UNITS: Final = {
    "": 1,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
"""Seconds of each unit."""

_DURATION: Final = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]*)\s*", re.ASCII)


def printable(text: str, most: int | None = None) -> str:
    """Return a text that is safe for terminals and can be printed. Idempotent.

    Callers choose task ids, arguments and lock names. Control characters (C0, C1, ESC, DEL), line
    breaks, bidirectional marks and lone surrogates are shown as escapes, as in Python's source.

    Args:
        text: a text that a caller may have chosen, in part or whole.
        most: longest result in characters; None for no limit.
    """
    safe = text if text.isprintable() else "".join(map(_shown, text))
    return safe if most is None or len(safe) <= most else f"{safe[: most - 1]}…"


def is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogate, so that UTF-8 can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: lone surrogates are shown as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _shown(sign: str) -> str:
    return sign if sign.isprintable() else sign.encode("unicode_escape").decode()


def a_kind(value: object) -> str:
    """Return the type of a value, with an article: ``an int``; the value may be a secret."""
    return an(named(type(value)))


def an(noun: str) -> str:
    """Return a noun with its article: ``an int``, ``a str``."""
    return f"{'an' if noun[:1] in set('aeioAEIO') else 'a'} {noun}"


def number_of(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 message``, ``1,000 messages``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def natural(text: str) -> str:
    """Return a sort key that orders numbers in texts by value: ``a:2`` before ``a:10``.

    The key is a str, which compares fast: each number is preceded by its length.
    """
    parts = _DIGITS.split(text)
    if len(parts) > 1:
        numbers = [part.lstrip("0") for part in parts[1::2]]
        parts[1::2] = [f"{len(number):05d}{number}" for number in numbers]
    return "".join(parts)


_DIGITS: Final = re.compile(r"([0-9]+)")


def nth(number: int) -> str:
    """Return an ordinal number: ``1st``, ``2nd``, ``11th``, ``1,003rd``."""
    if number % 100 in {11, 12, 13}:
        return f"{number:,}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def named(kind: type) -> str:
    """Return the name of a class with its module: redis-py uses most class names twice."""
    module = kind.__module__
    if module == "builtins":
        return kind.__name__
    if module.startswith(("redis.", "valkey.")):
        module = module.rpartition(".")[0]
    return f"{module}.{kind.__name__}"


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question that suggests the most similar known name; empty if none is similar.

    Args:
        name: a name that is not known.
        known: the known names.
        cutoff: least similarity, from 0 to 1.
    """
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def count_meant(value: object) -> str:
    """Return what to write instead of a count that is not an int; empty if unknown."""
    if isinstance(value, int):  # out of range: the caller reports that
        return ""
    text = value.strip() if isinstance(value, str) else repr(value)
    match = _COUNT.fullmatch(text)
    return f"use {int(match[1])}" if match else ""


_COUNT: Final = re.compile(r"([1-9]\d{0,8})(?:\.0)?", re.ASCII)


def seconds_meant(value: object) -> str:
    """Return what to write instead of a duration that is not a number; empty if unknown."""
    if isinstance(value, dt.timedelta):
        return f"use its .total_seconds(), {value.total_seconds():.10g}"
    match = _DURATION.fullmatch(value.lower()) if isinstance(value, str) else None
    unit = _UNITS.get(match[2]) if match else None
    return f"use {float(match[1]) * unit:.10g}" if match and unit else ""

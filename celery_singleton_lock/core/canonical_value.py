"""Arguments as text that is the same in every process (pure).

====================================================  ============================================
value                                                 text
====================================================  ============================================
None, bool, int, str                                  JSON
float                                                 JSON; 42.0 as 42; NaN and infinity refused
Decimal, UUID                                         the JSON string ``str(value)``
datetime, date, time                                  the JSON string ``value.isoformat()``
timedelta                                             its seconds
bytes                                                 the JSON string of its base64
Enum                                                  its value
list, tuple                                           JSON array
set                                                   JSON array, sorted
dict, dataclass                                       JSON object, sorted; keys as JSON writes them
object with ``__json__`` (kombu's hook)               what that returns
====================================================  ============================================

Any other value is refused: another process could not compute the same text.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import hashlib
import json
import math
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from celery_singleton_lock.core.lock_name_errors import Unnameable
from celery_singleton_lock.message_text import a_kind

DIGEST_LENGTH: Final = 32
"""Hex digits of a digest in a name: 128 bits of SHA-256."""

_ATOMS: Final = frozenset({str, int, bool, type(None)})
"""Types that JSON writes without a conversion."""

_WIDE: Final = 2**63
"""Integers below this one are written without JSON."""

_write: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"), check_circular=False
).encode


def text_of(shown: str, value: Any) -> str:
    """Return a value as text for a template: like :func:`written`, but a str has no quotes.

    Args:
        shown: the argument as the user wrote it, for errors.
        value: the argument's value.

    Raises:
        Unnameable: the value has no canonical text.
    """
    if type(value) is str:
        return value
    if type(value) is int and -_WIDE < value < _WIDE:
        return str(value)
    return written(shown, value, lambda plain: plain if isinstance(plain, str) else _write(plain))


def written(shown: str, value: Any, write: Callable[[Any], str] = _write) -> str:
    """Return the canonical text of a value.

    Args:
        shown: the argument as the user wrote it, for errors.
        value: the argument's value.
        write: encodes plain data.

    Raises:
        Unnameable: the value has no canonical text.
    """
    try:
        return write(_plain(value))
    except Exception as error:  # the user's __json__ may raise anything
        reason = str(error) if type(error) is _NotPlain else f"{kind_of(error)} while writing it"
        msg = f"argument {shown!r} cannot be part of a lock name: {reason}. Send plain data, or "
        raise Unnameable(lambda words: msg + words.leave_out) from error


def written_all(arguments: dict[str, Any]) -> str:
    """Return the canonical text of all arguments: one JSON object."""
    pairs = [f"{_write(name)}:{written(name, arguments[name])}" for name in sorted(arguments)]
    return "{" + ",".join(pairs) + "}"


def digest(text: str) -> str:
    """Return the first :data:`DIGEST_LENGTH` digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_LENGTH]


def kind_of(value: object) -> str:
    """Return the name of a value's type. Errors omit the value, since it may be a secret."""
    return type(value).__name__


def surrogate_in(arguments: dict[str, Any]) -> str:
    """Return which argument holds a lone surrogate, which UTF-8 cannot encode."""
    for name, value in arguments.items():
        with suppress(Unnameable):  # an argument that is not part of the name
            if re.search("[\ud800-\udfff]", written(name, value)):
                return f"argument {name!r}"
    return "its lock name"


class _NotPlain(TypeError):
    """A value has no canonical text; the message says why."""


def _plain(value: Any) -> Any:
    """Return plain data for JSON: the same for a value and for its copy in a message."""
    if type(value) in _ATOMS:
        return value
    for kind, plain in _PLAIN:
        if isinstance(value, kind):
            return plain(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return {name: _plain(getattr(value, name)) for name in fields}
    if hasattr(type(value), "__json__"):
        return _plain(value.__json__())
    msg = f"{a_kind(value)} has no text that is the same in every process"
    raise _NotPlain(msg)


def _plain_float(value: float) -> float:
    # 42.0 becomes 42: senders in other languages do not tell them apart.
    if not math.isfinite(value):
        msg = f"{value} is not a finite number"
        raise _NotPlain(msg)
    return int(value) if value.is_integer() else float(value)


def _plain_decimal(value: decimal.Decimal) -> str:
    # 1.0 and 1.00 stay two values: older senders transmit only the text.
    if not value.is_finite():
        msg = f"{value} is not a finite number"
        raise _NotPlain(msg)
    return str(value)


def _plain_dict(value: Mapping[Any, Any]) -> dict[str, Any]:
    plain = {_plain_key(key): _plain(item) for key, item in value.items()}
    if len(plain) < len(value):
        msg = "two keys of its dict are the same in JSON"
        raise _NotPlain(msg)
    return plain


def _plain_key(key: Any) -> str:
    plain = _plain(key)
    if isinstance(plain, (dict, list)):
        msg = f"{a_kind(key)} cannot be a key in JSON"
        raise _NotPlain(msg)
    return plain if isinstance(plain, str) else _write(plain)


_PLAIN: Final[tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...]] = (
    (enum.Enum, lambda value: _plain(value.value)),  # before str and int: it may be one of them
    (str, str.__str__),
    (int, int),
    (float, _plain_float),
    (dict, _plain_dict),
    ((list, tuple), lambda value: [_plain(item) for item in value]),
    (decimal.Decimal, _plain_decimal),
    (uuid.UUID, str),
    ((dt.date, dt.time), lambda value: value.isoformat()),
    (dt.timedelta, lambda value: _plain_float(value.total_seconds())),
    ((bytes, bytearray), lambda value: base64.b64encode(value).decode()),
    ((set, frozenset), lambda value: sorted([_plain(item) for item in value], key=_write)),
    (Mapping, _plain_dict),
)
"""Type -> conversion to plain data; the first that fits is used."""

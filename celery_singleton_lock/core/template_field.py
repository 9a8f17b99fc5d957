"""One field of a template, such as ``{order[id]}``, and its value in a call (pure)."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from celery_singleton_lock.core.canonical_value import digest, text_of, written
from celery_singleton_lock.core.lock_name_errors import Unnameable, Wording
from celery_singleton_lock.message_text import a_kind

QUEUE: Final = "__queue__"
"""Field for the queue of the message."""

HEADERS: Final = "__headers__"
"""Field for the headers of the message."""

_TEXTS: Final = (str, bytes, bytearray)
"""Sequences whose parts a template cannot read."""

_FORMATTABLE: Final = (str, int, float, decimal.Decimal, dt.date, dt.time)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One value that is part of a lock name.

    Args:
        shown: as the user wrote it: ``order[id]``.
        first: the argument.
        path: keys to follow from there.
        rest: name of the task's ``**kwargs``, if the argument is in it.
        spec: format.
        hashed: whether the name contains a digest of the value.
    """

    shown: str
    first: str
    path: tuple[str, ...] = ()
    rest: str | None = None
    spec: str = ""
    hashed: bool = False

    def text(self, arguments: dict[str, Any]) -> str:
        """Return the value as a template shows it.

        Raises:
            Unnameable: it is missing or None, or cannot be written.
        """
        value = self._value(arguments)
        if type(value) is str and not (self.spec or self.hashed):
            return value
        if value is None and self.first == QUEUE:
            msg = f"{{{QUEUE}}} is not known: this call has come through no queue"
            raise Unnameable(lambda _: msg)
        if value is None:
            raise Unnameable(
                lambda words: (
                    f"argument {self.shown!r} is None, so {words.if_none}. "
                    f"Send a value, or use a {words.callable_key} that says what None means"
                )
            )
        text = text_of(self.shown, value)
        if self.spec:
            return self._formatted(value)
        return digest(text) if self.hashed else text

    def written(self, arguments: dict[str, Any]) -> str:
        """Return the canonical text of the value.

        Raises:
            Unnameable: it is missing, or cannot be written.
        """
        return written(self.shown, self._value(arguments))

    def _value(self, arguments: dict[str, Any]) -> Any:
        source = arguments if self.rest is None else arguments[self.rest]
        looked_into = self.first
        try:
            value = source[self.first]
            for key in self.path:
                if not isinstance(value, (Mapping, Sequence)) or isinstance(value, _TEXTS):
                    raise Unnameable(partial(self._has_no_parts, looked_into, value))
                value, looked_into = _item(value, key), f"{looked_into}[{key}]"
        except (LookupError, TypeError, ValueError) as error:
            msg = f"argument {self.shown!r} is missing from this call. Send it, or rename the field"
            if self.first == HEADERS:
                msg = (
                    f"the message has no header {self.path[0]!r}. Send it: "
                    f"apply_async(headers={{{self.path[0]!r}: …}})"
                )
            raise Unnameable(lambda _: msg) from error
        return value

    def _has_no_parts(self, looked_into: str, value: object, words: Wording) -> str:
        """Return the error's text; without the value, which may be a secret."""
        if value is None:
            return f"argument {looked_into!r} is None, so it has no {{{self.shown}}}. Send a dict"
        return (
            f"argument {looked_into!r} is {a_kind(value)}, and {{{self.shown}}} needs a dict or "
            f"list. Write {{{looked_into}}} in {words.key}, or send a dict"
        )

    def _formatted(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            value = value.value
        try:
            if not isinstance(value, _FORMATTABLE):
                raise TypeError
            return format(value, self.spec)
        except (TypeError, ValueError, ArithmeticError) as error:
            msg = f"argument {self.shown!r} is {a_kind(value)}, which {self.spec!r} cannot format"
            raise Unnameable(lambda _: msg) from error


def _item(value: Any, key: str) -> Any:
    """Return an item of a list, or of a dict; JSON has converted the keys of a dict to str."""
    if isinstance(value, Mapping):
        return value[int(key)] if key not in value and key.isdecimal() else value[key]
    return value[int(key)]

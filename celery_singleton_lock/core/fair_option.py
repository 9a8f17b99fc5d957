"""Computes the group of a task from the arguments of a call (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from celery_singleton_lock.core.fair_group import (
    LEAST_WEIGHT,
    MOST_WEIGHT,
    Group,
    group_name,
)
from celery_singleton_lock.core.lock_name_template import (
    NotComputable,
    Sent,
    compile_value,
    is_computed,
)
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind

ByOption: TypeAlias = str | Callable[..., object]
"""A name, a template of arguments, or a function of them."""

LimitOption: TypeAlias = int | str | Callable[..., object]
WeightOption: TypeAlias = float | str | Callable[..., object]

GroupOf = Callable[[Sequence[Any], Mapping[str, Any], Sent | None], Group]
"""Arguments of a call -> its group."""

MOST_LIMIT: Final = 2**31 - 1
_NUMBER: Final = re.compile(r"\d{1,10}(\.\d{1,10})?", re.ASCII)
_EXAMPLE: Final = 'lock_fair_by="{tenant}"'


class Share(NamedTuple):
    """How the tasks of a lock are divided into groups, as declared.

    Args:
        by: a template or callable that returns the name of the group.
        limit: permits that a group may hold at once; None for no limit of its own.
        weight: share of the starts, relative to the other groups.
    """

    by: ByOption
    limit: LimitOption | None = None
    weight: WeightOption = 1.0

    @property
    def fixed(self) -> Group | None:
        """The group, if it does not depend on arguments."""
        if any(map(is_computed, self)):
            return None
        return Group(group_name(str(self.by)), self.limit, self.weight)  # type: ignore[arg-type]


def checked_by(what: str, value: object) -> ByOption | None:
    """Return the option ``lock_fair_by`` or ``fair_by``: a template or callable for the group.

    Args:
        what: the option, for errors.
        value: its value.

    Raises:
        ConfigurationError: it is neither a text nor a callable.
    """
    if value is None or is_computed(value):
        return value  # type: ignore[return-value]
    if not isinstance(value, str) or not value:
        msg = f"{what} is {value!r}: it must be a template such as {_EXAMPLE}, or a callable."
        raise ConfigurationError(msg)
    return value


def checked_limit(what: str, value: object) -> LimitOption | None:
    """Return the limit of a group. Arguments and errors as of :func:`checked_by`."""
    if value is None or is_computed(value):
        return value  # type: ignore[return-value]
    return _limit_in(what, value)


def checked_weight(what: str, value: object) -> WeightOption:
    """Return the weight of a group. Arguments and errors as of :func:`checked_by`."""
    if is_computed(value):
        return value  # type: ignore[return-value]
    return _weight_in(what, value)


def _limit_in(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_LIMIT:
        _refuse(what, value, "a whole number of 1 or more, the permits of one group")
    return value


def _weight_in(what: str, value: object) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or math.isnan(value) or not LEAST_WEIGHT <= value <= MOST_WEIGHT:  # type: ignore[arg-type, operator]
        _refuse(what, value, f"a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}; 1 is usual")
    return float(value)  # type: ignore[arg-type]


def _refuse(what: str, value: object, wanted: str) -> NoReturn:
    msg = f"{what} is {value!r:.100}: it must be {wanted}."
    raise ConfigurationError(msg)


def compile_group(task_name: str, run: Callable[..., Any], share: Share) -> GroupOf:
    """Check the fairness of a task, and compile it.

    Args:
        task_name: name of the task.
        run: the task's function; its signature is used.
        share: as declared.

    Returns:
        A function of the arguments of a call. It raises ConfigurationError if a value cannot be
        used, and ``ArgumentsDoNotBind`` if the task cannot be called.

    Raises:
        ConfigurationError: a template or callable does not fit the task.
    """
    fixed = share.fixed
    if fixed is not None:
        return lambda _args, _kwargs, _sent: fixed
    who = f"task {task_name}: "
    by = _computing(task_name, run, "lock_fair_by", share.by, _name_in)
    limit = _computing(task_name, run, "lock_fair_limit", share.limit, _limit_of)
    weight = _computing(task_name, run, "lock_fair_weight", share.weight, _weight_in)

    def group_of(args: Sequence[Any], kwargs: Mapping[str, Any], sent: Sent | None) -> Group:
        try:
            return Group(*(each(args, kwargs, sent) for each in (by, limit, weight)))
        except NotComputable as error:
            raise ConfigurationError(str(error)) from error.__cause__
        except ConfigurationError as error:
            msg = f"{who}{error}"
            raise ConfigurationError(msg) from None

    return group_of


def _computing(
    task_name: str,
    run: Callable[..., Any],
    option: str,
    value: Any,
    check: Callable[[str, object], Any],
) -> Callable[[Sequence[Any], Mapping[str, Any], Sent | None], Any]:
    if not is_computed(value):
        if option == "lock_fair_by":
            value = group_name(value)
        return lambda _args, _kwargs, _sent: value
    compute = compile_value(task_name, run, value, option)
    source = f", from the template {value!r}" if isinstance(value, str) else ", from its callable"

    def computed(args: Sequence[Any], kwargs: Mapping[str, Any], sent: Sent | None) -> Any:
        found = compute(args, kwargs, sent)
        if isinstance(value, str) and option != "lock_fair_by":
            found = _number_in(found)
        try:
            return check(option, found)
        except ConfigurationError as error:
            told, remedy = str(error).split(": ", 1)
            msg = f"{told}{source}: {remedy}"
            raise ConfigurationError(msg) from None

    return computed


def _number_in(text: object) -> object:
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)


def _limit_of(what: str, value: object) -> int | None:
    return None if value is None else _limit_in(what, value)


def _name_in(what: str, value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not text:
        kind = "" if isinstance(text, str) else f", {a_kind(value)}"
        msg = f"{what} is {value!r:.100}{kind}: it must be the name of a group, as text. Send one."
        raise ConfigurationError(msg)
    try:
        return group_name(text)
    except UnicodeEncodeError:
        msg = f"{what} is {text!r:.100}: it must be text that UTF-8 can encode. Send other text."
        raise ConfigurationError(msg) from None

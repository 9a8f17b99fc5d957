"""``lock_limit`` and ``lock_rate`` that are computed from the arguments of a call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from celery_singleton_lock.config.limits import MAX_COUNT, NO_LIMIT
from celery_singleton_lock.config.option_checks import Place
from celery_singleton_lock.config.settings import LockOptions, flow_of
from celery_singleton_lock.core.lock_name_template import (
    NotComputable,
    Sent,
    compile_value,
    is_computed,
)
from celery_singleton_lock.core.rate import Rate, listed, rates_of
from celery_singleton_lock.errors import ConfigurationError

Value: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any], Sent | None], object]
"""Returns the value of an option for the arguments of a call."""


class Computed(NamedTuple):
    """The values of options that were computed from the arguments of a call.

    Args:
        limit: permits; None if the limit is not computed.
        rate: the rates, which may be none; None if they are not computed.
    """

    limit: int | None = None
    rate: tuple[Rate, ...] | None = None

    def applied(self, options: LockOptions) -> LockOptions:
        """Return the options of a task with these values."""
        fields = {field.name: getattr(options, field.name) for field in _FIELDS}
        if self.limit is not None:
            fields["limit"] = self.limit
        if self.rate is not None:
            fields["rate"] = self.rate
        return ComputedOptions(**fields, computed=self)


_FIELDS: Final = dataclasses.fields(LockOptions)


@dataclasses.dataclass(frozen=True, slots=True)
class ComputedOptions(LockOptions):
    """Options of one call, some of which were computed.

    Args:
        computed: the values.
    """

    computed: Computed = dataclasses.field(default=Computed())

    @property
    def declared_limit(self) -> int:
        """Permits that the task declares as a number."""
        return self.limit if self.computed.limit is None else NO_LIMIT

    @property
    def flow(self) -> str:
        """The flow options of its claims; the newest computed values are in force."""
        told: dict[str, Any] = json.loads(flow_of(self) or "{}")
        limit, rate = self.computed
        newest: dict[str, Any] = {} if limit is None else {"limit": limit}
        if rate is not None:
            told.pop("rates", None)
            newest["rates"] = listed(rate)
        return json.dumps({**told, "newest": newest}, separators=(",", ":"))


@dataclasses.dataclass(frozen=True, slots=True)
class Computer:
    """Computes the options of the calls of one task. Made by :func:`compile_options`."""

    _task: str
    _limit: Value | None
    _rate: Value | None

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, sent: Sent | None = None
    ) -> Computed:
        """Return the values for a call.

        Args:
            args: positional arguments, as the message has them.
            kwargs: keyword arguments, as the message has them.
            sent: what else is known of the call; None if nothing is.

        Raises:
            ConfigurationError: a value cannot be computed, or cannot be used.
            ArgumentsDoNotBind: the task cannot be called with these arguments.
        """
        limit, rate, kwargs = None, None, kwargs or {}
        if self._limit is not None:
            limit = _limit_of(Place("lock_limit", self._task), self._limit(args, kwargs, sent))
        if self._rate is not None:
            rate = _rates_of(Place("lock_rate", self._task), self._rate(args, kwargs, sent))
        return Computed(limit, rate)


def compile_options(
    task_name: str, run: Callable[..., Any], declared: Mapping[str, Any]
) -> Computer | None:
    """Compile the options of a task that are computed; return None if none is.

    Args:
        task_name: name of the task.
        run: the task's function.
        declared: the options that the task declares, by name.

    Raises:
        ConfigurationError: a declaration is wrong.
    """
    found = {
        option: _compiled(task_name, run, declared[option], option)
        for option in ("lock_limit", "lock_rate")
        if is_computed(declared.get(option))
    }
    if not found:
        return None
    return Computer(task_name, found.get("lock_limit"), found.get("lock_rate"))


def _compiled(task_name: str, run: Callable[..., Any], value: Any, option: str) -> Value:
    compute = compile_value(task_name, run, value, option)

    def computed(args: Sequence[Any], kwargs: Mapping[str, Any], sent: Sent | None) -> object:
        try:
            return compute(args, kwargs, sent)
        except NotComputable as error:
            raise ConfigurationError(str(error)) from error.__cause__

    return computed


def _limit_of(place: Place, value: object) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_COUNT:
        place.refuse(
            value,
            f"it was computed from the arguments of this call, and must be a whole number from 1 "
            f"to {MAX_COUNT}. Send another value, or compute another one",
        )
    return number


def _rates_of(place: Place, value: object) -> tuple[Rate, ...]:
    origin = f"{place}, computed from the arguments of this call"
    try:
        rates = rates_of(value)
    except ConfigurationError as error:
        msg = f"{origin}: {error}"
        raise ConfigurationError(msg) from None
    if any(rate.is_computed for rate in rates):
        msg = f"{origin}: {value!r} has a cost that is not a number. Compute the cost, too."
        raise ConfigurationError(msg)
    return rates

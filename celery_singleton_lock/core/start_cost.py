"""Computes what the start of a task costs, from the arguments of a call (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from celery_singleton_lock.core.lock_name_errors import OF_TASK, Wording
from celery_singleton_lock.core.lock_name_template import NotComputable, Sent, compile_value
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.errors import ConfigurationError, LockCostError

_NUMBER: Final = re.compile(r"\d{1,15}", re.ASCII)

RatesOf = Callable[[Sequence[Any], Mapping[str, Any], Sent | None], tuple[Rate, ...]]
"""Arguments of a call -> the rates, each with a number as its cost."""


def compile_costs(
    task_name: str,
    run: Callable[..., Any],
    rates: tuple[Rate, ...],
    *,
    bound: bool = False,
    wording: Wording = OF_TASK,
) -> RatesOf:
    """Check the costs of rates for a task, and compile them.

    Args:
        task_name: name of the task.
        run: the task's function; its signature is used.
        rates: the rates of its lock.
        bound: ``run`` is a method that gets ``self``. A callable cost gets it, too; a template
            cannot name it.
        wording: words for the task in error texts.

    Returns:
        A function of the arguments of a call. It raises LockCostError if a cost is not a whole
        number, is negative or above the rate, and ``ArgumentsDoNotBind`` if the task cannot be
        called.

    Raises:
        ConfigurationError: a template or callable does not fit the task.
    """
    if not any(rate.is_computed for rate in rates):
        return lambda _args, _kwargs, _sent: rates
    who = f"{wording.kind} {task_name}"

    def compiled(rate: Rate) -> _RateOf:
        if rate.cost is None or isinstance(rate.cost, int):
            return lambda _args, _kwargs, _sent: rate
        skips = bound and isinstance(rate.cost, str)
        option = f"cost of rate {str(rate)!r}"
        compute = compile_value(task_name, run, rate.cost, option, bound=skips, wording=wording)
        return _of_one(who, rate, compute, int(skips))

    each = [compiled(rate) for rate in rates]
    return lambda args, kwargs, sent: tuple(one(args, kwargs, sent) for one in each)


_RateOf = Callable[[Sequence[Any], Mapping[str, Any], Sent | None], Rate]


def _of_one(who: str, rate: Rate, compute: Callable[..., object], skipped: int) -> _RateOf:
    def rate_of(args: Sequence[Any], kwargs: Mapping[str, Any], sent: Sent | None) -> Rate:
        try:
            cost = compute(args[skipped:], kwargs, sent)
        except NotComputable as error:
            raise LockCostError(str(error)) from error.__cause__
        if isinstance(rate.cost, str) and isinstance(cost, str) and _NUMBER.fullmatch(cost):
            cost = int(cost)
        try:
            return rate.costing(cost)
        except ConfigurationError as error:
            msg = f"{who}: {error}"
            raise LockCostError(msg) from None

    return rate_of

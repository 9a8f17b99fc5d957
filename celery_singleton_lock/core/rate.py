"""Rates: how many starts a lock allows in a period (pure).

::

    Rate("100/m")                            # at most 100 starts in any 60 seconds
    Rate("500/m", kind="smooth", burst=20)   # one every 0.12 s, and up to 20 at once
    Rate("9000/m", cost="{tokens}")          # a start counts as many as its argument says
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.preempt import packed_preempt
from celery_singleton_lock.core.settle import Settle
from celery_singleton_lock.core.unique import UniqueCall
from celery_singleton_lock.errors import ConfigurationError

SLIDING: Final = "sliding"
SMOOTH: Final = "smooth"
KINDS: Final = (SLIDING, SMOOTH)

MAX_SLIDING: Final = 10_000
"""Most starts in the period of a sliding rate: each has an entry in Redis."""

MAX_SMOOTH: Final = 1_000_000
"""Most starts a second of a smooth rate: Redis counts in microseconds."""

MAX_PERIOD: Final = 366 * 86_400
"""Longest period in seconds."""

MAX_RATES: Final = 4
"""Most rates of one lock: each costs commands for every start."""

MAX_COST: Final = 10**12
"""Highest cost of a start, and highest amount of a charge."""

Cost: TypeAlias = int | str | Callable[..., int]
"""A number, a template of the arguments, or a callable that takes them."""

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TEXT: Final = re.compile(r"\s*(\d{1,10})\s*/\s*(\d{0,10})\s*([smhd])\s*", re.ASCII)
_LOOSE: Final = re.compile(
    r"\s*(\d{1,10})\s*(?:/|per)\s*(\d{0,10})\s*"
    r"([smhd])(?:ecs?|econds?|ins?|inutes?|rs?|ours?|ays?)?\s*",
    re.ASCII | re.IGNORECASE,
)
_FORM: Final = 'Write "100/m" (s, m, h or d), or "100/15s" for a period of 15 seconds.'


class Rate:
    """How many starts a lock allows in a period.

    Args:
        text: number and period, as ``"100/m"`` or ``"100/15s"``; the units are s, m, h and d.
        kind: ``"sliding"``: at most that number in any period, as a log of starts counts them.
            ``"smooth"``: the starts are spaced evenly (GCRA).
        burst: with ``kind="smooth"``, how many may start at once; 1 by default. At most this number
            more than that of the rate start in any period.
        cost: how much one start counts: a whole number, a template of the arguments
            (``"{tokens}"``), or a callable with the signature of the task or function that returns
            the number. None: the rate counts starts. A rate with a cost counts 1 for callers that
            declare none, and can be charged later. A rate with a cost and one without a cost are
            two different rates.

    Raises:
        ConfigurationError: the rate cannot be read, is out of range, or its options contradict.

    Attributes:
        number: starts in a period.
        period: seconds.
        kind: ``"sliding"`` or ``"smooth"``.
        burst: starts at once; 0 for a sliding rate.
        cost: as given.
    """

    __slots__ = ("burst", "cost", "kind", "number", "period")
    number: int
    period: int

    def __init__(
        self,
        text: str,
        *,
        kind: str = SLIDING,
        burst: int | None = None,
        cost: Cost | None = None,
    ) -> None:
        self.number, self.period = _read(text)
        if kind not in KINDS:
            msg = f'Rate kind is {kind!r}: use "sliding" or "smooth".'
            raise ConfigurationError(msg)
        self.kind = kind
        if kind == SLIDING:
            self.burst: int = 0
            self._check_sliding(text, burst)
        else:
            self.burst = self._checked_burst(text, 1 if burst is None else burst)
            if burst is None and cost not in {None, 1}:
                msg = (
                    f"Rate {text!r} has cost={_shown(cost)} and no burst, so no start may cost "
                    "more than 1. Give burst, the highest cost of one start."
                )
                raise ConfigurationError(msg)
        self.cost: Cost | None = cost
        if isinstance(cost, str) or callable(cost):
            if isinstance(cost, str) and "{" not in cost:
                msg = (
                    f"cost of rate {text!r} is {cost!r}, and names no argument. Write a number, or "
                    'a template such as "{tokens}".'
                )
                raise ConfigurationError(msg)
        elif cost is not None:
            self.check_cost(cost)

    def check_cost(self, cost: object) -> int:
        """Return a cost that a start may have.

        Raises:
            ConfigurationError: it is not a whole number of 0 or more, or is above the rate.
        """
        if type(cost) is not int or cost < 0:
            remedy = ". Round it, for example with math.ceil" if isinstance(cost, float) else ""
            msg = (
                f"cost of rate {str(self)!r} is {_shown(cost)}: give a whole number, from 0 to "
                f"{self.most}{remedy}."
            )
            raise ConfigurationError(msg)
        number = cost
        if number > self.most:
            what = f"the burst, {self.burst}" if self.burst else f"the rate, {self.number}"
            msg = (
                f"cost of rate {str(self)!r} is {number}, and above {what}: such a start would "
                "never be allowed. Use a higher rate or burst, or smaller pieces of work."
            )
            raise ConfigurationError(msg)
        return number

    @property
    def most(self) -> int:
        """The highest cost that one start may have."""
        return self.burst or self.number

    @property
    def is_computed(self) -> bool:
        """Whether the cost depends on the arguments of a call."""
        return self.cost is not None and not isinstance(self.cost, int)

    def costing(self, cost: object) -> Rate:
        """Return this rate with a number as its cost.

        Raises:
            ConfigurationError: as of :meth:`check_cost`.
        """
        burst = self.burst or None
        text = f"{self.number}/{_period(self.period)}"
        return Rate(text, kind=self.kind, burst=burst, cost=self.check_cost(cost))

    def _check_sliding(self, text: str, burst: object) -> None:
        if burst is not None:
            msg = (
                f"Rate {text!r} has burst={burst!r} and is sliding, so all of its starts may come "
                'at once. Leave burst out, or use kind="smooth".'
            )
            raise ConfigurationError(msg)
        if self.number > MAX_SLIDING:
            msg = (
                f"Rate {text!r} is above {MAX_SLIDING}: a sliding rate keeps an entry in Redis for "
                'each start of its period. Use kind="smooth", or a shorter period.'
            )
            raise ConfigurationError(msg)

    def _checked_burst(self, text: str, burst: object) -> int:
        if self.number > MAX_SMOOTH * self.period:
            msg = f"Rate {text!r} is above {MAX_SMOOTH} a second. Use a lower rate."
            raise ConfigurationError(msg)
        whole = isinstance(burst, int) and not isinstance(burst, bool)
        if not whole or not 1 <= burst <= self.number:  # type: ignore[operator]
            msg = (
                f"burst of rate {text!r} is {burst!r}: give a whole number from 1 to {self.number},"
                " the number of starts that may come at once."
            )
            raise ConfigurationError(msg)
        return burst  # type: ignore[return-value]

    @property
    def key(self) -> str:
        """Identifies a rate of a lock. Of two rates with one key, the lower is in force."""
        return f"{self.kind} {self.period}" + ("" if self.cost is None else " cost")

    def __str__(self) -> str:
        """As written: ``100/m``, or ``100/15s smooth, burst 20``."""
        return described(self.number, self.period, self.burst)

    def __repr__(self) -> str:
        options = f', kind="smooth", burst={self.burst}' if self.kind == SMOOTH else ""
        options += "" if self.cost is None else f", cost={_shown(self.cost)}"
        return f'Rate("{self.number}/{_period(self.period)}"{options})'

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rate):
            return NotImplemented
        return self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    @property
    def _values(self) -> tuple[object, ...]:
        return self.number, self.period, self.kind, self.burst, self.cost


def _shown(value: object) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


RateOption: TypeAlias = str | Rate | Sequence[str | Rate] | None
"""One rate, several, or none."""


def described(number: int, period: int, burst: int) -> str:
    """Return a rate as text.

    Args:
        number: starts in a period.
        period: seconds.
        burst: starts at once; 0 for a sliding rate.
    """
    text = f"{number}/{_period(period)}"
    return f"{text}{_SMOOTH}{burst}" if burst else text


def parsed(text: str) -> Rate:
    """Return the rate that :func:`described` has written; with :data:`BY_COST`, a start costs 1.

    Raises:
        ConfigurationError: it is not such a text.
    """
    plain = text.removesuffix(BY_COST)
    cost = None if plain == text else 1
    rate, smooth, burst = plain.partition(_SMOOTH)
    if not smooth:
        return Rate(plain, cost=cost)
    return Rate(rate, kind=SMOOTH, burst=int(burst) if burst.isdecimal() else 0, cost=cost)


BY_COST: Final = " by cost"
"""Text after a rate that counts the costs of starts."""


_SMOOTH: Final = " smooth, burst "


def _period(seconds: int) -> str:
    unit = next(unit for unit in "dhms" if seconds % _SECONDS[unit] == 0)
    count = seconds // _SECONDS[unit]
    return unit if count == 1 else f"{count}{unit}"


def _read(text: object) -> tuple[int, int]:
    """Return number and period in seconds.

    Raises:
        ConfigurationError: they cannot be read, or are out of range.
    """
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        msg = f"Rate {text!r} cannot be read. {_meant(text)}{_FORM}"
        raise ConfigurationError(msg)
    number, period = int(found[1]), int(found[2] or 1) * _SECONDS[found[3]]
    if number < 1:
        msg = f"Rate {text!r} allows no start. To stop a lock, pause it; else use 1 or more."
        raise ConfigurationError(msg)
    if not 1 <= period <= MAX_PERIOD:
        msg = f"The period of rate {text!r} is {period} s: use 1 s to {MAX_PERIOD // 86_400} d."
        raise ConfigurationError(msg)
    return number, period


def _meant(text: object) -> str:
    found = _LOOSE.fullmatch(text) if isinstance(text, str) else None
    return f'Did you mean "{found[1]}/{found[2]}{found[3].lower()}"? ' if found else ""


def rates_of(option: object) -> tuple[Rate, ...]:
    """Return the rates that an option means.

    Args:
        option: a text such as ``"100/m"``, a :class:`Rate`, a list of these, or None.

    Raises:
        ConfigurationError: a rate is invalid, there are too many, or two contradict.
    """
    if option is None:
        return ()
    if isinstance(option, Mapping):
        msg = f'rate is {option!r}: give a text such as "100/m", a Rate, or a list of these.'
        raise ConfigurationError(msg)
    several = isinstance(option, Iterable) and not isinstance(option, (str, bytes))
    given: list[Any] = list(option) if several else [option]  # type: ignore[call-overload]
    rates = tuple(each if isinstance(each, Rate) else Rate(each) for each in given)
    if not 1 <= len(rates) <= MAX_RATES:
        msg = f"rate is {option!r}: give 1 to {MAX_RATES} rates, or leave it out."
        raise ConfigurationError(msg)
    keys = [rate.key for rate in rates]
    for rate in rates:
        if keys.count(rate.key) > 1:
            msg = (
                f"rate is {option!r}: two {rate.kind} rates have a period of "
                f"{rate.period:g} seconds. Keep the lower one."
            )
            raise ConfigurationError(msg)
    return rates


def listed(rates: Iterable[Rate]) -> list[list[Any]]:
    """Return rates as the scripts take them: id, number, period in microseconds, burst, cost.

    A cost that is not computed yet counts as 1. A rate that counts starts has none.
    """
    return [
        [rate.key, rate.number, rate.period * 1_000_000, rate.burst]
        + ([] if rate.cost is None else [1 if rate.is_computed else rate.cost])
        for rate in rates
    ]


@functools.lru_cache(maxsize=1024)
def packed(
    rates: tuple[Rate, ...],
    head_start: int = 0,
    *,
    group: Group | None = None,
    settle: Settle | None = None,
    unique: UniqueCall | None = None,
    preempt: int | None = None,
) -> str:
    """Return the flow options of a caller for the scripts; empty if there are none.

    Args:
        rates: the rates that it declares. A cost that is not computed yet counts as 1.
        head_start: microseconds by which it counts as having arrived earlier; see
            :mod:`celery_singleton_lock.core.priority`.
        group: its group, if the lock is shared fairly.
        settle: how its message settles before it queues.
        unique: its entry among the unique calls, or the entry of the task that it follows.
        preempt: largest number of calls of its task that are preempted in a row; None: none is
            preempted.
    """
    options: dict[str, object] = {}
    if rates:
        options["rates"] = listed(rates)
    if head_start:
        options["head_start"] = head_start
    if group:
        options["group"] = group.packed
    if settle:
        options["settle"] = settle.packed
    if unique and unique.follows:
        options["follow"] = unique.packed_follow
    elif unique:
        options["unique"] = unique.packed
    if preempt:
        options["preempt"] = packed_preempt(preempt)
    return json.dumps(options, separators=(",", ":")) if options else ""


def why_never(excess: str) -> str:
    """Return why a start would never be allowed, as a clause.

    Args:
        excess: cost, number, period in microseconds and burst, as the scripts give them.
    """
    cost, number, period_us, burst = map(int, excess.split())
    rate = described(number, period_us // 1_000_000, burst)
    return f"it costs {cost}, and the rate in force, {rate}, allows at most {burst or number}"


@functools.lru_cache(maxsize=1024)
def unpacked(flow: str) -> tuple[Rate, ...]:
    """Return the rates in flow options that :func:`packed` has made."""
    found = json.loads(flow).get("rates", ()) if flow else ()
    return tuple(
        Rate(
            f"{number}/{period_us // 1_000_000}s",
            kind=SMOOTH if burst else SLIDING,
            burst=burst or None,
            cost=cost[0] if cost else None,
        )
        for _, number, period_us, burst, *cost in found
    )


@functools.lru_cache(maxsize=1024)
def overridden_by(flow: str, other: str) -> str:
    """Return flow options overridden by others; unchanged if one of the two is empty."""
    if not (flow and other):
        return flow
    return json.dumps({**json.loads(flow), **json.loads(other)}, separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def logged_later(flow: str) -> str:
    """Return flow options with which a grant does not count as a start; a later claim counts it."""
    return json.dumps({**json.loads(flow), "later": True}, separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def ending_at_rate(flow: str) -> str:
    """Return flow options of a caller that ends above the rate, also while the lock is held."""
    return json.dumps({**json.loads(flow), "ends_at_rate": True}, separators=(",", ":"))


def waiting_or_ending(flow: str, on_rate: str) -> str:
    """Return flow options of a caller that waits or ends above the rate (``lock_on_rate``)."""
    return flow if on_rate == "park" or not flow else ending_at_rate(flow)


def lowest(rates: Iterable[Rate]) -> tuple[Rate, ...]:
    """Return these rates; of rates with the same kind and period, only the lowest."""
    found: dict[str, Rate] = {}
    for rate in rates:
        known = found.setdefault(rate.key, rate)
        if (rate.number, rate.burst) < (known.number, known.burst):
            found[rate.key] = rate
    return tuple(found.values())

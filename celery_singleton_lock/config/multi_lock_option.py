"""Computes the lock set of a call from ``lock_keys`` and its arguments (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NoReturn

from celery_singleton_lock.config.limits import NO_LIMIT
from celery_singleton_lock.config.option_checks import OPTIONS, Place
from celery_singleton_lock.core.lock_name_template import (
    Namer,
    Sent,
    Wording,
    compile_name,
    fields_in,
    is_computed,
    literal_start,
)
from celery_singleton_lock.core.lock_set import Key, in_order
from celery_singleton_lock.core.rate import Rate, RateOption, rates_of
from celery_singleton_lock.errors import ConfigurationError

MOST: Final = 32
"""Largest number of locks of one task: each costs two round trips."""

SHOWN: Final = 3
"""How many locks an error shows if there are more than :data:`MOST`."""

_OF_SEVERAL: Final = Wording(
    key="lock_keys",
    has="has",
    callable_key="callable in lock_keys",
    several="lock_keys is one list of all templates",
)


class Limit:
    """How many tasks may hold one of several locks, and how many may start in a period.

    For the values of a ``lock_keys`` dict::

        lock_keys={"tenant:{tenant}": Limit(2, rate="100/m"), "llm": Limit(None, rate="500/m")}

    Args:
        number: how many may hold the lock at the same time; None, with a rate, for no limit.
        rate: how many may start in a period: a text such as ``"100/m"``, a
            :class:`~celery_singleton_lock.Rate`, a list of these, or None.

    Raises:
        ConfigurationError: the number or the rate is invalid, or neither is given.

    Attributes:
        number: permits.
        rates: the rates; empty if there is none.
    """

    __slots__ = ("number", "rates")
    number: int
    rates: tuple[Rate, ...]

    def __init__(self, number: int | None, *, rate: RateOption = None) -> None:
        self.rates = OPTIONS["rate"](Place("rate of Limit"), rate)
        for each in self.rates:
            if each.is_computed:
                Place("cost of a rate of Limit").refuse(
                    each.cost,
                    "with several locks a cost is a number. Write cost=1, and correct it in the "
                    "task with self.lock.charge(n, name=…), or use lock_key with lock_rate",
                )
        if number is None and not self.rates:
            Place("Limit").refuse(
                None, 'without a rate, the lock would bound nothing. Add rate="100/m", or use 1'
            )
        self.number = OPTIONS["limit"](Place("Limit"), number)

    def __repr__(self) -> str:
        number = None if self.number == NO_LIMIT else self.number
        rates = ", ".join(f'"{rate}"' if not rate.burst else repr(rate) for rate in self.rates)
        several = f"[{rates}]" if len(self.rates) > 1 else rates
        return f"Limit({number}, rate={several})" if rates else f"Limit({number})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Limit):
            return NotImplemented
        return (self.number, self.rates) == (other.number, other.rates)

    def __hash__(self) -> int:
        return hash((self.number, self.rates))


def rates_in(lock_keys: Any) -> dict[Any, tuple[Rate, ...]]:
    """Return the keys of the option ``lock_keys`` that have rates, each with its rates."""
    given = lock_keys.items() if isinstance(lock_keys, Mapping) else ()
    return {key: own.rates for key, own in given if isinstance(own, Limit) and own.rates}


def idle_pairs(lock_keys: Any) -> list[tuple[Any, Any]]:
    """Return pairs of keys of which a call may hold the first lock for long without using it.

    A call holds the first lock while it waits for the second one. The wait may be long, since one
    of the two has a rate. Meanwhile other calls wait for the first lock, even if their second lock
    is another one. If the template of the first contains all fields of the second, calls with the
    same first lock also have the same second lock, so such pairs are omitted.
    """
    rates = rates_in(lock_keys)
    pairs = [(one, other) for one in lock_keys for other in lock_keys] if rates else []
    return [
        (one, other)
        for one, other in pairs
        if one != other
        and {one, other} & rates.keys()
        and not _comes_before(other, one)
        and not _has_fields_of(one, other)
    ]


def _comes_before(key: Any, other: Any) -> bool:
    """Return whether each name of one key sorts before each name of another one."""
    one, two = literal_start(key), literal_start(other)
    return one.encode() < two.encode() and not two.startswith(one)


def _has_fields_of(one: Any, other: Any) -> bool:
    """Return whether equal names of one key mean equal names of another one."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    return set(fields_in(one)) >= set(fields_in(other))


@dataclasses.dataclass(frozen=True, slots=True)
class SeveralNamer:
    """Names the locks of each call of one task. Made by :func:`compile_names`."""

    _keys: tuple[tuple[Namer, int | None, tuple[Rate, ...]], ...]
    _limit: int

    def name(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        sent: Sent | None = None,
    ) -> str:
        """Return the locks of a call, in the order in which they are acquired.

        Args:
            args: positional arguments, as the message has them.
            kwargs: keyword arguments, as the message has them.
            sent: what else is known of the call.

        Returns:
            The result of :func:`~celery_singleton_lock.core.lock_set.in_order`.

        Raises:
            ArgumentsDoNotBind: the task cannot be called with these arguments.
            LockNameError: see :meth:`Namer.name`.
        """
        keys = (
            Key(namer.name(args, kwargs, sent), limit, rate) for namer, limit, rate in self._keys
        )
        return in_order(keys, self._limit)


def compile_names(
    task_name: str, run: Callable[..., Any], lock_keys: Any, limit: int = 1
) -> SeveralNamer:
    """Check the option ``lock_keys`` of a task, and compile it.

    Args:
        task_name: name of the task.
        run: the task's function; its signature is used.
        lock_keys: a list of templates or callables, each as in ``lock_key``; or a dict from them to
            limits: numbers, None, or :class:`Limit`.
        limit: the task's ``lock_limit``, for locks without a limit of their own.

    Raises:
        ConfigurationError: the declaration is wrong. The message names task and option, and says
            what to change.
    """
    place = Place("lock_keys", task_name)
    if isinstance(lock_keys, str) or not isinstance(lock_keys, (list, tuple, Mapping)):
        place.refuse(
            lock_keys,
            'it must be a list of templates, such as ["account:{a}", "account:{b}"], or a dict '
            "from templates to limits. For one lock use lock_key",
        )
    if not 1 <= len(lock_keys) <= MOST:
        _refuse_number(place, lock_keys)
    given = lock_keys.items() if isinstance(lock_keys, Mapping) else [(k, None) for k in lock_keys]
    return SeveralNamer(
        tuple((_namer(task_name, run, key), *_limit(place, key, own)) for key, own in given),
        limit,
    )


def _refuse_number(place: Place, lock_keys: Collection[Any]) -> NoReturn:
    if not lock_keys:
        place.refuse(lock_keys, f"it must name 1 to {MOST} locks. For no lock leave it out")
    few = ", ".join(map(repr, islice(lock_keys, SHOWN)))
    msg = (
        f"{place} names {len(lock_keys)} locks ({few}, …): it may name at most {MOST}, since each "
        "costs two round trips. Use one lock for what they have in common."
    )
    raise ConfigurationError(msg)


def _namer(task_name: str, run: Callable[..., Any], key: Any) -> Namer:
    if key is None:
        Place("lock_keys", task_name).refuse([None], "each lock needs a template or a callable")
    plain = key.__func__ if isinstance(key, staticmethod) else key
    return compile_name(task_name, run, lock_key=plain, wording=_OF_SEVERAL)


def _limit(place: Place, key: Any, limit: Any) -> tuple[int | None, tuple[Rate, ...]]:
    if isinstance(limit, Limit):
        return limit.number, limit.rates
    if limit is None:
        return None, ()
    own = Place(f"{place.option}[{key!r}]", place.task)
    if isinstance(limit, (str, Rate)) and _is_rate(limit):
        own.refuse(limit, f"a rate belongs into a limit: Limit(1, rate={limit!r})")
    if is_computed(limit):
        own.refuse(limit, "the limit of one of several locks must be a number. Use lock_key")
    return OPTIONS["limit"](own, limit), ()


def _is_rate(given: str | Rate) -> bool:
    try:
        return bool(rates_of(given))
    except ConfigurationError:
        return False

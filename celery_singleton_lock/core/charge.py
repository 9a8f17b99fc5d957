"""Charges: later corrections of what the start of a lock's holder has cost (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from celery_singleton_lock.core.rate import MAX_COST, Rate
from celery_singleton_lock.errors import ConfigurationError


def checked_amount(amount: object) -> int:
    """Return the amount of a charge.

    Raises:
        ConfigurationError: it is not a whole number, or is out of range.
    """
    if type(amount) is not int or not -MAX_COST <= amount <= MAX_COST:
        msg = (
            f"charge() got {amount!r}: give a whole number, what was used above the cost of the "
            "start, or below 0 to give back."
        )
        raise ConfigurationError(msg)
    return amount


def checked_id(charge_id: object) -> str:
    """Return the id of a charge; empty if there is none.

    Raises:
        ConfigurationError: it is not a text, or is empty.
    """
    if charge_id is not None and (not isinstance(charge_id, str) or not charge_id):
        msg = f"charge() got the id {charge_id!r}: give a text that is not empty, or leave it out."
        raise ConfigurationError(msg)
    return charge_id or ""


def charged_rates(name: str, rates: Sequence[Rate], rate: str | Rate | None) -> list[str]:
    """Return the keys of the rates that a charge corrects.

    Args:
        name: the lock's name.
        rates: the rates that its holder declares.
        rate: the rate to correct; None for all rates that have a cost.

    Raises:
        ConfigurationError: none of the rates has a cost, or ``rate`` is not one that has.
    """
    costed = [each for each in rates if each.cost is not None]
    if not costed:
        has = ", ".join(map(str, rates)) or "no rate"
        msg = (
            f"charge() needs a rate that counts costs, and lock {name!r} has {has}. Declare one: "
            'Rate("1000/m", cost=1).'
        )
        raise ConfigurationError(msg)
    chosen = [each.key for each in costed if rate is None or _is_same(each, rate)]
    if not chosen:
        msg = (
            f"charge() got rate={str(rate)!r}, and lock {name!r} has no such rate with a cost. Use "
            f"one of {', '.join(map(str, costed))}, or leave rate out for all of them."
        )
        raise ConfigurationError(msg)
    return chosen


class _Named(Protocol):
    @property
    def name(self) -> str:
        """Of a lock."""
        ...


Named = TypeVar("Named", bound=_Named)


def one_named(name: str, locks: Sequence[Named]) -> Named:
    """Return the lock whose start a charge corrects.

    Args:
        name: its name; may be empty if there is only one.
        locks: the locks of the task.

    Raises:
        ConfigurationError: the name is missing, or none of the locks has it.
    """
    found = [lock for lock in locks if lock.name == name] if name else list(locks)
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(lock.name) for lock in locks)
    what = f"name={name!r}, which is not a lock of this task" if name else "no name"
    msg = f"charge() got {what}. Give name=, one of {names}."
    raise ConfigurationError(msg)


def _is_same(one: Rate, other: str | Rate) -> bool:
    if isinstance(other, Rate):
        return one.key == other.key
    return other in {str(one), str(one).split()[0]}

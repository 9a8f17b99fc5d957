"""Who buys what, and when: the same crowd for each of the three runs (pure)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

STOCK: Final[Mapping[str, int]] = MappingProxyType(
    {"sneakers": 400, "headphones": 150, "backpack": 150, "watch": 150, "jacket": 150}
)
"""Units on the shelves: 1,000 in all, of one hot product and four others."""

HOT: Final = next(iter(STOCK))

DEMAND: Final = 1.35
"""Units asked for, as a multiple of the stock: each product sells out, and then some."""


@dataclass(frozen=True, slots=True)
class Order:
    """What one buyer wants.

    Args:
        number: the order's number, by which the shop knows it again.
        product: what is bought.
        units: how many.
        arrives: seconds after the doors open.
        work: seconds of work that the order takes.
    """

    number: int
    product: str
    units: int
    arrives: float
    work: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """The size of the play.

    Args:
        orders: buyers, about.
        rush: seconds within which they all arrive; a third comes at once.
        work: seconds of work per order, on average.
        kills: processes that are killed in the third run.
    """

    orders: int = 300
    rush: float = 7.0
    work: float = 0.075
    kills: int = 10

    def gather(self, seed: int) -> list[Order]:
        """Return the orders by arrival; the same for the same seed."""
        dice = random.Random(seed)  # noqa: S311  # a play, no secret
        wishes = [
            (product, units)
            for product, stock in STOCK.items()
            for units in self._split(round(stock * DEMAND), dice)
        ]
        dice.shuffle(wishes)
        arrivals = sorted(max(0.0, dice.uniform(-0.5, 1.0)) * self.rush for _ in wishes)
        return [
            Order(number, product, units, arrives, self.work * dice.uniform(0.6, 1.4))
            for number, ((product, units), arrives) in enumerate(
                zip(wishes, arrivals, strict=True), start=1
            )
        ]

    def _split(self, units: int, dice: random.Random) -> list[int]:
        """Split a product's demand into orders of some units each."""
        average = sum(STOCK.values()) * DEMAND / self.orders
        parts = []
        while units > 0:
            part = min(units, max(1, round(average * dice.uniform(0.4, 1.6))))
            parts.append(part)
            units -= part
        return parts


FULL: Final = Crowd()
SMALL: Final = Crowd(orders=120, rush=4.5, work=0.09)
"""For a Redis that is itself written in Python."""

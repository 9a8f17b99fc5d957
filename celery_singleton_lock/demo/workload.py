"""The orders, which are the same in each of the three runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

STOCK: Final[Mapping[str, int]] = MappingProxyType(
    {"sneakers": 400, "headphones": 150, "backpack": 150, "watch": 150, "jacket": 150}
)
"""Product -> units in stock: 1,000 in all, of one hot product and four others."""

HOT: Final = next(iter(STOCK))

DEMAND: Final = 1.35
"""Ordered units as a multiple of the stock, for each product."""


@dataclass(frozen=True, slots=True)
class Order:
    """One order.

    Args:
        number: number of the order, which makes it idempotent.
        product: name of the product.
        units: number of units.
        arrives: seconds after the start of the run.
        work: seconds of work to serve it.
    """

    number: int
    product: str
    units: int
    arrives: float
    work: float


@dataclass(frozen=True, slots=True)
class Workload:
    """The size of a run.

    Args:
        orders: approximate number of orders.
        arrival: seconds within which all orders arrive; a third of them arrives at once.
        work: average seconds of work per order.
        kills: number of processes to kill in the third run.
    """

    orders: int = 300
    arrival: float = 7.0
    work: float = 0.075
    kills: int = 10

    def generate(self, seed: int) -> list[Order]:
        """Return the orders by arrival. The same seed gives the same orders."""
        rng = random.Random(seed)  # noqa: S311  # no secret
        wanted = [
            (product, units)
            for product, stock in STOCK.items()
            for units in self._split(round(stock * DEMAND), rng)
        ]
        rng.shuffle(wanted)
        arrivals = sorted(max(0.0, rng.uniform(-0.5, 1.0)) * self.arrival for _ in wanted)
        return [
            Order(number, product, units, arrives, self.work * rng.uniform(0.6, 1.4))
            for number, ((product, units), arrives) in enumerate(
                zip(wanted, arrivals, strict=True), start=1
            )
        ]

    def _split(self, units: int, rng: random.Random) -> list[int]:
        """Split a product's demand into orders of some units each."""
        average = sum(STOCK.values()) * DEMAND / self.orders
        parts = []
        while units > 0:
            part = min(units, max(1, round(average * rng.uniform(0.4, 1.6))))
            parts.append(part)
            units -= part
        return parts


FULL: Final = Workload()
SMALL: Final = Workload(orders=120, arrival=4.5, work=0.09)
"""For fakeredis, which is slower."""

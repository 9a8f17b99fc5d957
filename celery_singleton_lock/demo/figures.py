"""What came of a run: stock against orders, overlaps, losses, recoveries (pure)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from celery_singleton_lock.demo.workload import STOCK, Order
from celery_singleton_lock.demo.history import History, Hold


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a kill to the next start on the same product.

    Args:
        median: over all kills.
        longest: of all kills.
    """

    median: float
    longest: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run.

    Args:
        orders: published.
        units_sold: by the orders that were recorded.
        stock_left: on the shelves at the end.
        oversold: units sold that were not there.
        mismatch: units by which stock and orders disagree.
        overlaps: tasks that began while another of the same product was at work.
        out_of_order: tasks whose fencing token is not above those of earlier ones.
        lost: orders that never reached a final state.
        kills: processes killed in mid-task.
        recovery: after these kills; None without any.
        seconds: the run took.
    """

    orders: int
    units_sold: int
    stock_left: int
    oversold: int
    mismatch: int
    overlaps: int
    out_of_order: int
    lost: int
    kills: int
    recovery: Recovery | None
    seconds: float

    @property
    def is_exact(self) -> bool:
        """Whether a run with locks is what was promised."""
        wrong = (self.oversold, self.mismatch, self.overlaps, self.out_of_order, self.lost)
        return not any(wrong) and (self.kills == 0 or self.recovery is not None)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, without what does not apply."""
        values = asdict(self)
        values["seconds"] = round(self.seconds, 2)
        del values["recovery"]
        if self.kills:
            values["recovery_seconds"] = self.recovery and {
                "median": round(self.recovery.median, 3),
                "max": round(self.recovery.longest, 3),
            }
        return values


def judge(
    orders: Iterable[Order],
    served: Mapping[int, int],
    left: Mapping[str, int],
    history: History,
    seconds: float,
) -> Figures:
    """Judge a run.

    Args:
        orders: what was published.
        served: order -> units sold, as the shop has recorded.
        left: product -> units on the shelf.
        history: who worked on what, and when.
        seconds: the run took.
    """
    published = list(orders)
    sold = dict.fromkeys(STOCK, 0)
    for order in published:
        sold[order.product] += served.get(order.number, 0)
    final = history.finished() & served.keys()
    lanes = history.lanes().values()
    return Figures(
        orders=len(published),
        units_sold=sum(sold.values()),
        stock_left=sum(left.values()),
        oversold=sum(max(0, sold[product] - STOCK[product]) for product in STOCK),
        mismatch=sum(abs(STOCK[product] - left[product] - sold[product]) for product in STOCK),
        overlaps=sum(1 for lane in lanes for _ in overlapping(lane)),
        out_of_order=sum(count_inversions(lane) for lane in lanes),
        lost=sum(order.number not in final for order in published),
        kills=len(history.kills),
        recovery=recovery_of(history),
        seconds=seconds,
    )


def overlapping(lane: Iterable[Hold]) -> Iterator[tuple[float, float]]:
    """Yield for each hold that began before an earlier one's end the time they had in common.

    Args:
        lane: the holds of one product, in order of start.
    """
    busy_until = -math.inf
    for hold in lane:
        end = math.inf if hold.end is None else hold.end
        if hold.start < busy_until:
            yield hold.start, min(end, busy_until)
        busy_until = max(busy_until, end)


def count_inversions(lane: Iterable[Hold]) -> int:
    """Return how many holds have a fencing token not above all earlier ones; 0 without locks."""
    count, highest = 0, 0
    for hold in lane:
        count += bool(hold.fence) and hold.fence <= highest
        highest = max(highest, hold.fence)
    return count


def recovery_of(history: History) -> Recovery | None:
    """Return how long products stood still after kills; None if one still does, or none did."""
    times = [kill.recovery for kill in history.kills]
    known = [time for time in times if time is not None]
    if not known or len(known) < len(times):
        return None
    return Recovery(statistics.median(known), max(known))

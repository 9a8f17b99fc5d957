"""The figures of a run: sales, overlaps, lost orders, recovery after kills."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from celery_singleton_lock.demo.history import History, Hold
from celery_singleton_lock.demo.workload import STOCK, Order


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a kill to the next start on the same product.

    Args:
        median: median of all kills.
        longest: longest of all kills.
    """

    median: float
    longest: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run.

    Args:
        orders: published orders.
        units_sold: units in the recorded orders.
        stock_left: units in stock at the end.
        oversold: units sold that were not in stock.
        mismatch: units by which stock and recorded orders differ.
        overlaps: tasks that started while another task of the same product ran.
        out_of_order: tasks whose fencing token is not greater than those of earlier tasks.
        lost: orders that did not reach a final state.
        kills: killed processes.
        recovery: time until the next task after a kill; None without kills.
        seconds: duration of the run.
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
        """Whether a run with locks has no error."""
        wrong = (self.oversold, self.mismatch, self.overlaps, self.out_of_order, self.lost)
        return not any(wrong) and (self.kills == 0 or self.recovery is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the values for JSON, without those that do not apply."""
        values = asdict(self)
        values["seconds"] = round(self.seconds, 2)
        del values["recovery"]
        if self.kills:
            values["recovery_seconds"] = self.recovery and {
                "median": round(self.recovery.median, 3),
                "max": round(self.recovery.longest, 3),
            }
        return values


def figures_of(
    orders: Iterable[Order],
    served: Mapping[int, int],
    left: Mapping[str, int],
    history: History,
    seconds: float,
) -> Figures:
    """Return the figures of a run.

    Args:
        orders: the published orders.
        served: order -> units sold, as recorded by the shop.
        left: product -> units in stock.
        history: the task runs.
        seconds: duration of the run.
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
    """Yield the start and end of each overlap with an earlier task.

    Args:
        lane: the task runs of one product, in order of start.
    """
    busy_until = -math.inf
    for hold in lane:
        end = math.inf if hold.end is None else hold.end
        if hold.start < busy_until:
            yield hold.start, min(end, busy_until)
        busy_until = max(busy_until, end)


def count_inversions(lane: Iterable[Hold]) -> int:
    """Count the tasks whose fencing token is not greater than all earlier ones; 0 without locks."""
    count, highest = 0, 0
    for hold in lane:
        count += bool(hold.fence) and hold.fence <= highest
        highest = max(highest, hold.fence)
    return count


def recovery_of(history: History) -> Recovery | None:
    """Return the times from kills to the next tasks; None without kills, or if one has none."""
    times = [kill.recovery for kill in history.kills]
    known = [time for time in times if time is not None]
    if not known or len(known) < len(times):
        return None
    return Recovery(statistics.median(known), max(known))

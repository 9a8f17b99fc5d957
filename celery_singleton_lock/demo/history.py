"""A record of which task worked on which product, and when, from the tasks' events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Hold:
    """One run of a task.

    Args:
        product: product of the order.
        order: number of the order.
        pid: process id.
        fence: fencing token; 0 without a lock.
        start: monotonic time of its start.
        end: monotonic time of its end; None while it runs.
        killed: whether its process was killed.
    """

    product: str
    order: int
    pid: int
    fence: int
    start: float
    end: float | None = None
    killed: bool = False


@dataclass(slots=True)
class Kill:
    """A process killed while it ran a task.

    Args:
        hold: the task.
        at: monotonic time of the kill.
        next_start: monotonic time at which the next task of that product started; None before that.
    """

    hold: Hold
    at: float
    next_start: float | None = None

    @property
    def recovery(self) -> float | None:
        """Seconds until the next task of that product started."""
        return None if self.next_start is None else self.next_start - self.at


@dataclass
class History:
    """All task runs and kills of a run."""

    holds: list[Hold] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    running: dict[int, Hold] = field(default_factory=dict)
    """Process id -> the task that it runs."""

    def add(self, events: Iterable[list[Any]]) -> int:
        """Add new events of tasks; return their number."""
        count = 0
        for kind, at, pid, order, product, fence in events:
            count += 1
            if kind == "start":
                self._begin(Hold(product, order, pid, fence, at))
            else:
                self.running.pop(pid).end = at
        return count

    def kill(self, pid: int, at: float) -> Kill:
        """Record that a process was killed."""
        hold = self.running.pop(pid)
        hold.end, hold.killed = at, True
        kill = Kill(hold, at)
        self.kills.append(kill)
        return kill

    def finished(self) -> set[int]:
        """Return the orders whose task has ended without a kill."""
        return {hold.order for hold in self.holds if hold.end is not None and not hold.killed}

    def holding(self, product: str) -> list[Hold]:
        """Return the tasks that work on a product now."""
        return [hold for hold in self.running.values() if hold.product == product]

    def lanes(self) -> dict[str, list[Hold]]:
        """Return the task runs of each product, in order of start."""
        lanes: dict[str, list[Hold]] = {}
        for hold in sorted(self.holds, key=lambda hold: hold.start):
            lanes.setdefault(hold.product, []).append(hold)
        return lanes

    def _begin(self, hold: Hold) -> None:
        self.holds.append(hold)
        self.running[hold.pid] = hold
        for kill in self.kills:
            if kill.next_start is None and kill.hold.product == hold.product:
                kill.next_start = hold.start

"""Who held which product, from when to when: the marks of the tasks, put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Hold:
    """One task at work.

    Args:
        product: on what.
        order: for which order.
        pid: in which process.
        fence: with which fencing token; 0 without a lock.
        start: when it began, in seconds of the machine's clock.
        end: when it ended, or was killed; None while it works.
        killed: whether it was killed.
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
    """One process killed in mid-task.

    Args:
        hold: what it was doing.
        at: when.
        next_start: when the next task of that product began; None before.
    """

    hold: Hold
    at: float
    next_start: float | None = None

    @property
    def recovery(self) -> float | None:
        """Seconds until the next task of that product began."""
        return None if self.next_start is None else self.next_start - self.at


@dataclass
class History:
    """All holds and kills of a run, fed with marks."""

    holds: list[Hold] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    at_work: dict[int, Hold] = field(default_factory=dict)
    """By process."""

    def add(self, marks: Iterable[list[Any]]) -> int:
        """Take in new marks; return how many there were."""
        count = 0
        for kind, at, pid, order, product, fence in marks:
            count += 1
            if kind == "start":
                self._begin(Hold(product, order, pid, fence, at))
            else:
                self.at_work.pop(pid).end = at
        return count

    def kill(self, pid: int, at: float) -> Kill:
        """Note that a process was killed at its work."""
        hold = self.at_work.pop(pid)
        hold.end, hold.killed = at, True
        kill = Kill(hold, at)
        self.kills.append(kill)
        return kill

    def finished(self) -> set[int]:
        """Return the orders of which a task has ended by itself."""
        return {hold.order for hold in self.holds if hold.end is not None and not hold.killed}

    def holding(self, product: str) -> list[Hold]:
        """Return who works on a product now."""
        return [hold for hold in self.at_work.values() if hold.product == product]

    def lanes(self) -> dict[str, list[Hold]]:
        """Return the holds of each product, in order of start."""
        lanes: dict[str, list[Hold]] = {}
        for hold in sorted(self.holds, key=lambda hold: hold.start):
            lanes.setdefault(hold.product, []).append(hold)
        return lanes

    def _begin(self, hold: Hold) -> None:
        self.holds.append(hold)
        self.at_work[hold.pid] = hold
        for kill in self.kills:
            if kill.next_start is None and kill.hold.product == hold.product:
                kill.next_start = hold.start

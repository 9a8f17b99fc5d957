"""The history of a storm: events, and the task runs that they describe.

An event is a line of JSON, written in one piece, with ``e`` (what), ``t`` (seconds of the machine's
monotonic clock, one for all processes) and ``pid`` (who noted it).

=========== ============================ ===========================================================
event       of                           facts
=========== ============================ ===========================================================
published   the load                     id, key (several: a list), late, after (id of the link
                                         before)
duplicate   the load                     id: a call since then was not sent, since that one counts
final       the load                     id, state
received    a worker's main process      id, attempt
discarded   a worker's main process      id: its task was revoked
asks, left  a process that has a task    id; in between it may hold the locks; to (process id)
                                         who has it from then on, if Redis did not answer
start       a body                       run, id, task, attempt, main, until, group, locks: {key:
                                         (fence, limit)}
held        a body                       run, until: it has learned that the lease is longer
lost        a body                       run: it has learned that the lock is lost
end         a body                       run
again       a body                       id, attempt: it sends itself for that attempt
later       a body                       run: it closes its lock for a time, and runs again
kill        the storm                    victim (process id)
gone        the observer                 victim, seen: when it was last seen alive
stop, cont  the storm                    victims (process ids)
cut         the storm                    nothing: the broker's connections are closed
revoke      the storm                    id, terminate
away, back  the storm                    nothing: the locks' Redis does not answer
slow        the observer                 since: this machine or the locks' Redis was stopped
stood       a worker's main process      victim (its process id), since: the machine let it stand
ready       the fleet                    worker, victim (process id of its main process)
retire      the fleet                    victim: it was asked to shut down
hung        the fleet                    victim: it did not, and was killed
died        the fleet                    victim, worker, code: it ended, and nobody had asked it to
look        the observer                 free: {lock: so many wait} of locks with a free permit
register    after the storm              key, seq, fence, run, kind, accepted, at
key         after the storm              name, type, ttl, live: a key that is left; what in it is
                                         not over, or of an index, whom it names
complaint   after the storm              worker, text: an error that the library has logged
=========== ============================ ===========================================================
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Span = tuple[float, float]

AFTERMATH = 1.0
"""Seconds after a pause in which a watchdog catches up."""

DYING = 1.0
"""Seconds that a process may go on after its kill was noted: the note comes before the signal."""


@dataclass
class Run:
    """One run of a body.

    Attributes:
        asked: when its process asked for its locks.
        start: when the body began.
        end: when it ended, was lost, or its process died; infinite while it runs.
        news: (when it was learned, until when the lease lasts), in order.
        lost: when the task was told that a lock is lost.
        killed: whether its process died in the middle.
    """

    facts: Event
    asked: float
    end: float = math.inf
    news: list[Span] = field(default_factory=list)
    lost: float | None = None
    killed: bool = False

    def __getattr__(self, name: str) -> Any:
        """Return a fact of the start: id, locks, …."""
        try:
            return self.facts[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def start(self) -> float:
        return float(self.facts["t"])

    @property
    def over(self) -> float:
        """When nobody believes any more that this run holds its locks, whatever the lease."""
        return self.end if self.lost is None else min(self.end, self.lost)

    @property
    def keys(self) -> list[str]:
        return list(self.locks)

    def fence(self, key: str) -> int:
        """Return the fencing token of one of its locks."""
        return int(self.locks[key][0])

    def limit(self, key: str) -> int:
        """Return how many may hold one of its locks, as it has declared."""
        return int(self.locks[key][1])

    def __str__(self) -> str:
        fences = ", ".join(str(fence) for fence, _ in self.locks.values())
        return f"{self.run} (fence {fences}, task {self.id})"


class History:
    """Events in the order of their time, and what follows from them.

    Args:
        events: in any order.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: event["t"])
        self._by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            self._by_kind[event["e"]].append(event)

    @classmethod
    def read(cls, path: Path) -> History:
        """Return the history in a file; a last line that is being written does not count."""
        lines = path.read_bytes().splitlines(keepends=True)
        return cls(json.loads(line) for line in lines if line.endswith(b"\n"))

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds, in order for each."""
        return [event for kind in kinds for event in self._by_kind[kind]]

    @property
    def now(self) -> float:
        """When the last event was."""
        return float(self.events[-1]["t"]) if self.events else 0.0

    @cached_property
    def runs(self) -> list[Run]:
        """All runs, by their start."""
        runs = {
            e["run"]: Run(e, self._asked(e), news=[(e["t"], e["until"])]) for e in self.of("start")
        }
        for event in self.of("held"):
            runs[event["run"]].news.append((event["t"], event["until"]))
        for event in self.of("lost"):
            runs[event["run"]].lost = event["t"]
        for event in self.of("end"):
            runs[event["run"]].end = event["t"]
        for run in runs.values():
            if math.isinf(run.end):
                self._let_die(run)
        return list(runs.values())

    def _asked(self, start: Event) -> float:
        """Return when a run's process asked for the lock; the run's start if that is not told."""
        asks = [t for t in self._asks[start["pid"], start["id"]] if t <= start["t"]]
        return asks[-1] if asks else float(start["t"])

    @cached_property
    def _asks(self) -> dict[tuple[int, str], list[float]]:
        found: dict[tuple[int, str], list[float]] = defaultdict(list)
        for event in self.of("asks"):
            found[event["pid"], event["id"]].append(event["t"])
        return found

    def _let_die(self, run: Run) -> None:
        """End a run with its process; what that still noted, it did."""
        death = self.death_of(run.pid, run.start)
        if not math.isinf(death):
            run.end, run.killed = max(death, run.news[-1][0], run.lost or 0.0), True

    def death_of(self, pid: int, after: float) -> float:
        """Return when a process died that lived then, no later than that; infinite if it lives."""
        return min((t for t in self._deaths[pid] if t >= after - DYING), default=math.inf)

    def retired(self, main: int, by: float) -> bool:
        """Whether a worker was shutting down by then."""
        return any(e["victim"] == main and e["t"] <= by for e in self.of("retire"))

    def hung(self, main: int, by: float) -> bool:
        """Whether a worker was shutting down by then, and did not come to the end of that."""
        return self.retired(main, by) and any(e["victim"] == main for e in self.of("hung"))

    @cached_property
    def _deaths(self) -> dict[int, list[float]]:
        found: dict[int, list[float]] = defaultdict(list)
        for event in self.of("kill"):
            found[event["victim"]].append(event["t"])
        for event in self.of("gone"):
            found[event["victim"]].append(event["seen"])
        return found

    @cached_property
    def stops(self) -> dict[int, list[Span]]:
        """Process -> when it stood still: stopped by the storm or the machine, or killed."""
        found: dict[int, list[Span]] = defaultdict(list)
        begun: dict[int, float] = {}
        for event in sorted(self.of("stop", "cont"), key=lambda e: e["t"]):
            for victim in event["victims"]:
                if event["e"] == "stop":
                    begun.setdefault(victim, event["t"])
                elif victim in begun:
                    found[victim].append((begun.pop(victim), event["t"]))
        for victim, since in begun.items():
            found[victim].append((since, math.inf))
        for event in self.of("kill"):
            found[event["victim"]].append((event["t"], math.inf))
        for event in self.of("stood"):
            found[event["victim"]].append((event["since"], event["t"]))
        return found

    @cached_property
    def outages(self) -> list[Span]:
        """When nobody could renew a lease: the locks' Redis was away, or all was slow."""
        found = [(event["since"], event["t"]) for event in self.of("slow")]
        begun = None
        for event in sorted(self.of("away", "back"), key=lambda e: e["t"]):
            if event["e"] == "away":
                begun = event["t"] if begun is None else begun
            elif begun is not None:
                found.append((begun, event["t"]))
                begun = None
        return sorted([*found, *([] if begun is None else [(begun, math.inf)])])

    def disturbed(self, run: Run, until: float | None = None) -> bool:
        """Whether something that cannot be helped kept a run's lease from being renewed.

        Args:
            run: any.
            until: what comes later does not count; when the run was over, unless given.
        """
        end = run.over if until is None else until
        pauses = [*self.outages, *self.stops[run.pid], *self.stops[run.main]]
        return any(since <= end and run.asked <= till + AFTERMATH for since, till in pauses)

    def left(self, run: Run) -> float:
        """Return when its process had given back a run's locks; infinite if it never has."""
        return min((t for t in self._lefts[run.pid, run.id] if t >= run.end), default=math.inf)

    @cached_property
    def _lefts(self) -> dict[tuple[int, str], list[float]]:
        found: dict[tuple[int, str], list[float]] = defaultdict(list)
        for event in self.of("left"):
            found[event["pid"], event["id"]].append(event["t"])
        return found

    def belief(self, run: Run) -> list[Span]:
        """Return when a run was right to believe that it holds its locks, all of them.

        Nothing was in the way: from its start to its end, since its worker renews the lease.
        Otherwise it was paused, or could not reach Redis: as far as its lease lasts, as it knows.
        """
        until = min(run.over, self.now)
        if not self.disturbed(run):
            return [(run.start, until)]
        known = [(learned, min(till, until)) for learned, till in run.news]
        return joined([span for span in known if span[0] < span[1]])

    @cached_property
    def beliefs(self) -> list[tuple[Run, Span]]:
        """All beliefs of all runs, by their begin."""
        found = [(run, span) for run in self.runs for span in self.belief(run)]
        return sorted(found, key=lambda each: each[1])


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans with those made one that touch."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found

"""Row ``rates`` of :mod:`benchmarks.flow`: tasks that start at a rate.

Each rate has two workers of each peer. Its tasks share one key, and are in the queue before the
workers go on. Meanwhile the workers also receive plain tasks of another queue, at a steady pace.
The peers run in turn.

- *starts in a period*: the most body starts in any period of the rate, less 20 ms for the way from
  Redis to the body. At most the number of the rate is allowed.
- *share of the rate*: starts in whole periods after the first one, of those that the rate allows.
- *others*: from sending a plain task to its start; *alone* is the same without tasks of the rate.
- *calls*: what clients send to the locks' Redis for a task that had to wait, and for one that did
  not, in runs of their own, less what idle workers send.
- *idle*, *in between*: what they send in a second without tasks, and while tasks wait.
"""

from __future__ import annotations

import argparse
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks import report
from benchmarks.board import Ran
from benchmarks.meter import Monitor
from benchmarks.peers import TITLES, number_and_period
from benchmarks.rig import Job, Rig, Worker

PEERS: Final = ("rated", "rate_limit", "throttle", "cool_down")
RATES: Final = {"200/s": 2000, "1/s": 12, "1/3s": 5}
"""Rate -> number of tasks."""

WAY: Final = 0.02
"""Most seconds from the decision in Redis to the start of the body."""

PACE: Final = 0.02
"""Seconds between two plain tasks."""

ALONE: Final = 100
"""Plain tasks that are sent alone."""

LISTEN: Final = 10.0
"""Seconds for which the commands of idle workers are counted."""

RELEASED: Final = 0.3
"""Seconds until the locks of tasks that have ended are released."""

COUNTED: Final = 100
"""Tasks whose calls are counted."""

Found = dict[str, Any]


def rates(asked: argparse.Namespace, peers: Sequence[str]) -> Found:
    """Return rate -> peer -> row."""
    found = {}
    for rate in asked.rates:
        able = [peer for peer in peers if not cannot(peer, rate)]
        with Rig(able, asked.processes, 2 * RATES[rate] + 1000, workers=2, rate=rate) as rig:
            found[rate] = measure(rig, rate, asked.rounds, quiet=asked.json)
    return found


def cannot(peer: str, rate: str) -> str:
    """Return why a peer cannot keep a rate, or an empty string."""
    number, period = number_and_period(rate)
    if peer == "cool_down" and number > period:
        return "python-redis-lock expires after whole seconds"
    return ""


def measure(rig: Rig, rate: str, rounds: int, *, quiet: bool) -> dict[str, Found]:
    """Return the row of each peer."""
    laps: list[dict[str, Found]] = []
    for number in range(rounds):
        order = list(rig.workers) if number % 2 == 0 else list(reversed(rig.workers))
        lap = {peer: timed(rig, rig.workers[peer], rate, number) for peer in order}
        laps.append(lap)
        if not quiet:
            each = "  ".join(f"{peer} {lap[peer]['share']:.2f}" for peer in rig.workers)
            print(f"{rate}, round {number + 1}: share of the rate: {each}", file=sys.stderr)
    rows = {}
    for peer, worker in rig.workers.items():
        worst = ("most_starts", "not_run_once")
        own = [lap[peer] for lap in laps]
        rows[peer] = {
            "title": TITLES[peer],
            **{name: report.median([each[name] for each in own]) for name in own[0]},
            **{name: max(each[name] for each in own) for name in worst},
            **calls(rig, worker, rate),
        }
    return rows


def timed(rig: Rig, worker: Worker, rate: str, number: int) -> Found:
    """Run the tasks of a rate beside others."""
    rig.settle()
    worker.board.clear()
    alone = delays(worker, 0, ALONE)
    worker.wait(ALONE, 60.0)
    tasks = RATES[rate]
    allowed, period = number_and_period(rate)
    others = int((tasks / allowed - 1) * period / PACE)
    worker.board.clear()
    with worker.held_back():
        worker.publish(jobs(f"{rate}-{number}", tasks))
    beside = delays(worker, tasks, min(others, 900))
    ran = worker.wait(tasks, 300.0)
    starts = sorted(each.start for each in ran)
    return {
        "most_starts": most_in(starts, period - WAY),
        "share": share(starts, allowed, period),
        "alone_p50_ms": report.percentile(alone, 50),
        "alone_p99_ms": report.percentile(alone, 99),
        "others_p50_ms": report.percentile(beside, 50),
        "others_p99_ms": report.percentile(beside, 99),
        "not_run_once": sum(each.runs != 1 for each in ran),
    }


def jobs(key: str, count: int, first: int = 0) -> list[Job]:
    return [(slot, key, 0.0) for slot in range(first, first + count)]


def delays(worker: Worker, first: int, count: int) -> list[float]:
    """Send plain tasks at a steady pace; return the milliseconds from sending to start."""
    sent = []
    began = time.monotonic()
    for number, job in enumerate(jobs("other", count, first)):
        time.sleep(max(0.0, began + number * PACE - time.monotonic()))
        sent.append(time.monotonic())
        worker.publish_others([job])
    ran = [worker.board.await_start(first + number, 60.0) for number in range(count)]
    return [1000 * (each.start - at) for each, at in zip(ran, sent, strict=True)]


def most_in(starts: Sequence[float], period: float) -> int:
    """Return the most starts in any period."""
    return max(bisect_left(starts, start + period) - number for number, start in enumerate(starts))


def share(starts: Sequence[float], number: int, period: float) -> float:
    """Return the starts in whole periods, of those that the rate allows."""
    periods = len(starts) // number - 1
    return bisect_left(starts, starts[0] + periods * period) / (periods * number)


# -- calls to Redis -------------------------------------------------------------------------------


def calls(rig: Rig, worker: Worker, rate: str) -> Found:
    """Return the calls to the locks' Redis.

    Those of a task are counted at high rates only: at low ones, idle workers send most.
    """
    number, period = number_and_period(rate)
    rig.settle()
    idle, seconds = heard(rig, worker, lambda: time.sleep(LISTEN))
    found: Found = {"calls_idle": round(idle / seconds, 1)}
    if number >= COUNTED:
        first, took = heard(rig, worker, lambda: run(worker, jobs(f"{rate}-free", COUNTED)))
        free = (first - idle / seconds * took) / COUNTED
        every, took = heard(rig, worker, lambda: run(worker, jobs(f"{rate}-late", 2 * number)))
        late = (every - free * number - idle / seconds * took) / number
        found |= {"calls_free": round(free, 2), "calls_waited": round(late, 2)}
    if number == 1:
        waiting = jobs(f"{rate}-between", int(LISTEN / period) + 3)
        between, seconds = heard(rig, worker, lambda: run_none(worker, waiting))
        found["calls_between"] = round(between / seconds, 1)
    return found


def heard(rig: Rig, worker: Worker, act: Callable[[], object]) -> tuple[int, float]:
    """Return the calls to the locks' Redis while something is done, and for how many seconds."""
    with Monitor(rig.locks) as monitor:
        act()
        time.sleep(RELEASED)
    counted = monitor.heard(rig.owners(worker))
    return counted.calls("main", "child", "other"), counted.seconds


def run(worker: Worker, batch: list[Job]) -> list[Ran]:
    worker.board.clear()
    worker.publish(batch)
    return worker.wait(len(batch), 120.0)


def run_none(worker: Worker, batch: list[Job]) -> None:
    """Let tasks wait. The few that start are among what is counted."""
    worker.board.clear()
    worker.publish(batch)
    time.sleep(LISTEN)


# -- the result -----------------------------------------------------------------------------------


def rate_targets(found_rates: dict[str, dict[str, Found]]) -> list[Found]:
    found = []
    for rate, rows in found_rates.items():
        ours = rows.get("rated")
        if ours is None:
            continue
        number, _ = number_and_period(rate)
        found += [
            report.target(f"{rate}: most starts in a period", ours["most_starts"], most=number),
            report.target(f"{rate}: share of the rate", ours["share"], least=0.97),
            report.target(f"{rate}: not run exactly once", ours["not_run_once"], most=0),
        ]
        if "calls_free" in ours:
            waited, free = ours["calls_waited"], ours["calls_free"]
            found += [
                report.target(f"{rate}: calls of a task that waited", waited, most=6),
                report.target(f"{rate}: calls of a task that did not", free, most=2.05),
            ]
        others = round(ours["others_p50_ms"] / ours["alone_p50_ms"], 2)
        found.append(report.target(f"{rate}: others, of others alone", others, most=1.1))
    return found


def rate_table(found_rates: dict[str, dict[str, Found]]) -> str:
    heads = ["tasks of one key", "starts in a period", "share of the rate", "others p50 / p99, ms"]
    heads += ["alone p50 / p99, ms", "calls: waited", "did not", "idle, /s", "in between, /s"]
    rows = [
        [
            f"{rate}: {row['title']}",
            f"{row['most_starts']}",
            f"{row['share']:.3f}",
            f"{row['others_p50_ms']:.1f} / {row['others_p99_ms']:.1f}",
            f"{row['alone_p50_ms']:.1f} / {row['alone_p99_ms']:.1f}",
            row.get("calls_waited", ""),
            row.get("calls_free", ""),
            row["calls_idle"],
            row.get("calls_between", ""),
        ]
        for rate, rows in found_rates.items()
        for row in rows.values()
    ]
    return report.table(heads, rows)

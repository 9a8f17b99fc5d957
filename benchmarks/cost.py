"""``python -m benchmarks.cost``: the cost of a call, and of a task, with many waiters.

Redis counts the commands (``INFO commandstats``, which includes those of scripts): for each method
of the store with 10, 1,000 and 100,000 waiters, and for a task of a real worker from its arrival to
its end, with 10 and 1,000 parked tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks import report
from benchmarks.meter import command_counts, grown
from benchmarks.parked import Lot
from benchmarks.rig import Rig
from celery_singleton_lock.demo.redis_server import RedisServer
from tests.support.script_costs import SIZES, Cost, costs, grows, warm_up

FEW, MANY = 10, 1_000
REPEAT = 20
"""Repetitions with few parked tasks, so that periodic commands have the same small share."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args(arguments)
    with RedisServer() as server, server.client(decode_responses=False) as client:
        warm_up(client)
        verbs = {size: costs(client, size) for size in SIZES}
        machine = report.machine(server.describe())
    found: dict[str, Any] = {
        "benchmark": "cost",
        "machine": machine,
        "verbs": {size: {what: vars(c) for what, c in at.items()} for size, at in verbs.items()},
        "per_task": per_task(asked.processes),
    }
    found["targets"] = [
        report.target("verbs whose commands grow with the queue", len(grows(verbs)), most=0),
        report.target("scripts per task, at many parked of few", _ratio(found), most=1.1),
    ]
    print(json.dumps(found, indent=2) if asked.json else shown(found, verbs))
    return 0 if all(target["met"] for target in found["targets"]) else 1


def per_task(processes: int) -> dict[int, dict[str, float]]:
    """Return the commands at the locks' Redis per parked task, from its arrival to its end."""
    with Rig(["locked"], processes, MANY + 100, store_results=False) as rig:
        lot = Lot(rig)
        lot.park_and_run(100)
        return {count: _counted(lot, count, times) for count, times in ((FEW, REPEAT), (MANY, 1))}


def _counted(lot: Lot, count: int, times: int) -> dict[str, float]:
    before = command_counts(lot.locks)
    for _ in range(times):
        lot.park_and_run(count)
    growth = grown(before, command_counts(lot.locks))
    scripts = growth.pop("evalsha", 0)
    tasks = times * (count + 1)
    return {
        "scripts": round(scripts / tasks, 2),
        "commands": round(sum(growth.values()) / tasks, 1),
    }


def _ratio(found: dict[str, Any]) -> float:
    few, many = (found["per_task"][count]["scripts"] for count in (FEW, MANY))
    return round(many / few, 2)


def shown(found: dict[str, Any], verbs: dict[int, dict[str, Cost]]) -> str:
    heads = ["verb", "sent", *(f"in scripts, {size:,}" for size in SIZES)]
    heads += [f"us, {size:,}" for size in SIZES]
    rows = []
    for what, few in verbs[SIZES[0]].items():
        at = [verbs[size][what] for size in SIZES]
        rows.append([what, few.sent, *(c.inside for c in at), *(c.usec or "-" for c in at)])
    tasks = [
        [f"{count:,} parked", each["scripts"], each["commands"]]
        for count, each in found["per_task"].items()
    ]
    return "\n".join(
        [
            report.describe(found["machine"]),
            "",
            report.table(heads, rows),
            "",
            report.table(["a task of a real worker", "scripts", "other commands"], tasks),
            "",
            report.verdicts(found["targets"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

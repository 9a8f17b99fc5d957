"""``python -m benchmarks.contended``: many tasks of one key among others, and the delay of others.

Every third task is hot: the hot tasks share a key, each of the others has its own. All are in the
queue before the worker starts. The benchmark measures how the waiting of hot tasks delays the other
tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks import report
from benchmarks.board import Ran
from benchmarks.meter import Monitor, command_counts, grown
from benchmarks.peers import TITLES, add_peers, taking_part
from benchmarks.rig import Job, Rig, Worker

PEERS = ("plain", "locked", "redis_py", "redis_lock", "retry")
EXCLUSIVE = [peer for peer in PEERS if peer != "plain"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contended", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--hot", type=int, default=200, help="number of tasks that share one key")
    parser.add_argument("--cold", type=int, default=400, help="number of tasks with their own keys")
    parser.add_argument("--hold", type=float, default=0.01, help="duration of each task in seconds")
    parser.add_argument("--processes", type=int, default=8, help="pool processes of each worker")
    parser.add_argument("--rounds", type=int, default=5)
    add_peers(parser, PEERS)
    asked = parser.parse_args(arguments)
    asked.peers, skipped = taking_part(asked.peers, PEERS)
    batch = mixed(asked.hot, asked.cold, asked.hold)
    with Rig(asked.peers, asked.processes, len(batch)) as rig:
        found = {
            "benchmark": "contended",
            "command": report.command("contended"),
            "machine": report.machine(rig.locks.describe()),
            "settings": {key: value for key, value in vars(asked).items() if key != "json"},
            "optimum_seconds": optimum(asked.hot, asked.cold, asked.hold, asked.processes),
        }
        found["peers"] = measure(rig, batch, asked.rounds, found["optimum_seconds"], asked.json)
    found["skipped"] = skipped
    found["targets"] = targets(found["peers"])
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0


def mixed(hot: int, cold: int, hold: float) -> list[Job]:
    """Return hot and cold tasks, evenly mixed."""
    total = hot + cold
    is_hot = [(slot + 1) * hot // total > slot * hot // total for slot in range(total)]
    return [(slot, "hot" if is_hot[slot] else f"cold{slot}", hold) for slot in range(total)]


def optimum(hot: int, cold: int, hold: float, slots: int) -> float:
    """Return the shortest possible makespan: the hot tasks in a row, or all tasks in all slots."""
    return max(hot * hold, (hot + cold) * hold / slots)


def measure(
    rig: Rig, batch: list[Job], rounds: int, best: float, quiet: bool
) -> dict[str, dict[str, Any]]:
    laps: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        order = list(rig.workers) if number % 2 == 0 else list(reversed(rig.workers))
        lap = {peer: timed(rig, rig.workers[peer], batch, best) for peer in order}
        laps.append(lap)
        if not quiet:
            spans = "  ".join(f"{peer} {lap[peer]['of_optimum']:.2f}" for peer in rig.workers)
            print(f"round {number + 1}: makespan of the optimum: {spans}", file=sys.stderr)
    calls = {peer: count(rig, worker, batch) for peer, worker in rig.workers.items()}
    return {
        peer: {"title": TITLES[peer], **summed([lap[peer] for lap in laps]), **calls[peer]}
        for peer in rig.workers
    }


def timed(rig: Rig, worker: Worker, batch: list[Job], best: float) -> dict[str, Any]:
    """Run the tasks; return their runs in order of start."""
    rig.settle()
    with rig.locks.client() as locks:
        before = command_counts(locks)
        ran = worker.run(batch)
        rig.settle()
        lock_commands = grown(before, command_counts(locks))
    hot = [each for each, job in zip(ran, batch, strict=True) if job[1] == "hot"]
    cold = [each for each, job in zip(ran, batch, strict=True) if job[1] != "hot"]
    began = min(each.start for each in ran)
    makespan = max(each.end for each in ran) - began
    gaps = report.gaps(hot)
    return {
        "makespan": makespan,
        "of_optimum": makespan / best,
        "last_cold": max((each.end for each in cold), default=began) - began,
        "overlaps": overlaps(hot),
        "inversions": report.inversions(hot),
        "overtaken": overtaken(hot),
        "not_run_once": sum(each.runs != 1 for each in ran),
        "gap_p50_ms": report.percentile(gaps, 50),
        "gap_p99_ms": report.percentile(gaps, 99),
        "lock_commandstats": lock_commands,
    }


def overlaps(chain: Sequence[Ran]) -> int:
    """Return how many tasks started before an earlier one had ended."""
    found, busy_until = 0, 0.0
    for ran in sorted(chain, key=lambda each: each.start):
        found += ran.start < busy_until
        busy_until = max(busy_until, ran.end)
    return found


def overtaken(chain: Sequence[Ran]) -> int:
    """Return how many tasks ran after one that was published later."""
    found, furthest = 0, -1
    for ran in sorted(chain, key=lambda each: each.start):
        found += ran.slot < furthest
        furthest = max(furthest, ran.slot)
    return found


def count(rig: Rig, worker: Worker, batch: list[Job]) -> dict[str, Any]:
    """Run the tasks once more, without timing, and record the commands of both servers."""
    rig.settle()
    worker.board.clear()
    with ExitStack() as listening:
        with worker.held_back():
            worker.publish(batch)
            broker = listening.enter_context(Monitor(rig.broker))
            locks = listening.enter_context(Monitor(rig.locks))
        worker.wait(len(batch), 120)
        time.sleep(0.3)
    owners = rig.owners(worker)
    at_broker, at_locks = broker.heard(owners), locks.heard(owners)
    tasks = len(batch)
    return {
        "broker_calls_per_task": round(at_broker.calls("main", "child") / tasks, 2),
        "lock_calls_per_task": round(at_locks.calls("main", "child") / tasks, 2),
        "calls_per_task": round(
            (at_broker.calls("main", "child") + at_locks.calls("main", "child")) / tasks, 2
        ),
        "commands_in_scripts_per_task": round(at_locks.in_scripts / tasks, 1),
        "lock_calls_in_main_by_verb": dict(at_locks.by["main"]),
        "lock_calls_in_children_by_verb": dict(at_locks.by["child"]),
    }


def summed(laps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of timed values, and the maximum of error counts."""
    times = ("makespan", "of_optimum", "last_cold", "gap_p50_ms", "gap_p99_ms")
    faults = ("overlaps", "inversions", "overtaken", "not_run_once")
    return {
        **{name: report.median([lap[name] for lap in laps]) for name in times},
        "of_optimum_each_round": [round(lap["of_optimum"], 2) for lap in laps],
        "last_cold_each_round": [round(lap["last_cold"], 2) for lap in laps],
        **{name: max(lap[name] for lap in laps) for name in faults},
        "lock_commandstats_last_round": laps[-1]["lock_commandstats"],
    }


def targets(peers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    ours, plain = peers.get("locked"), peers.get("plain")
    if not ours or not plain:
        return []
    makespan = []
    if "redis_lock" in peers:
        ratio = ratio_of(ours, peers["redis_lock"], "of_optimum_each_round")
        makespan = [report.target("makespan, of python-redis-lock's", ratio, most=1.1)]
    return [
        report.target("overlaps in any round", ours["overlaps"], most=0),
        report.target("order inversions in any round", ours["inversions"], most=0),
        report.target("tasks not run exactly once", ours["not_run_once"], most=0),
        *makespan,
        report.target(
            "last cold task, of plain's (noise: 10 %)",
            ratio_of(ours, plain, "last_cold_each_round"),
            most=1.05,
        ),
    ]


def ratio_of(mine: dict[str, Any], other: dict[str, Any], each_round: str) -> float:
    """Return the median of one peer's value, of another's in the same round."""
    pairs = zip(mine[each_round], other[each_round], strict=True)
    return report.median([ours / theirs for ours, theirs in pairs])


def shown(found: dict[str, Any]) -> str:
    rows = [
        [
            row["title"],
            f"{row['of_optimum']:.2f}" if peer in EXCLUSIVE else "",
            f"{row['makespan']:.2f}",
            f"{row['last_cold']:.2f}",
            row["overlaps"],
            row["inversions"],
            f"{row['gap_p50_ms']:.1f} / {row['gap_p99_ms']:.1f}" if peer in EXCLUSIVE else "",
            f"{row['calls_per_task']:.1f}",
            f"{row['lock_calls_per_task']:.1f}",
        ]
        for peer, row in found["peers"].items()
    ]
    asked = found["settings"]
    first = f"{asked['hot']} hot + {asked['cold']} cold, {1000 * asked['hold']:g} ms"
    heads = [first, "makespan / optimum", "makespan, s", "last cold, s", "overlaps", "inversions"]
    heads += ["hot gap p50 / p99, ms", "calls/task", "at the locks' Redis"]
    skipped = [f"skipped: {TITLES[peer]}: {why}" for peer, why in found["skipped"].items()]
    return "\n".join(
        [
            report.describe(found["machine"]),
            f"optimum {found['optimum_seconds']:.2f} s with {asked['processes']} processes",
            "",
            report.table(heads, rows),
            "",
            *skipped,
            report.verdicts(found["targets"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.hand_over``: the time from the end of one task to the start of the next.

All hot tasks share a key. They run on two workers, so that a lock also goes from one worker to the
other. There are two scenes: ``beside``, where tasks of other keys use the remaining slots, and
``alone``, where these slots are idle. All tasks are in the queue before the workers start.

In ``beside``, the tasks of other keys end before the last hot ones. The hand-overs until then are
also shown by themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from benchmarks import report
from benchmarks.board import Ran
from benchmarks.contended import mixed, overlaps
from benchmarks.peers import TITLES, add_peers, taking_part
from benchmarks.rig import Job, Rig, Worker

PEERS: Final = ("locked", "redis_py", "redis_lock")
REACH: Final = {"beside": (1.6, 20.0), "alone": (1.0, 5.0)}
"""Scene -> largest p50 and p99 in milliseconds."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hand_over", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--hot", type=int, default=200, help="number of tasks that share one key")
    parser.add_argument("--cold", type=int, default=400, help="number of tasks with their own keys")
    parser.add_argument("--hold", type=float, default=0.01, help="duration of each task in seconds")
    parser.add_argument("--workers", type=int, default=2, help="workers of each peer")
    parser.add_argument("--processes", type=int, default=4, help="pool processes of each worker")
    parser.add_argument("--rounds", type=int, default=5)
    add_peers(parser, PEERS)
    asked = parser.parse_args(arguments)
    asked.peers, skipped = taking_part(asked.peers, PEERS)
    scenes = {
        "beside": mixed(asked.hot, asked.cold, asked.hold),
        "alone": mixed(asked.hot, 0, asked.hold),
    }
    with Rig(asked.peers, asked.processes, asked.hot + asked.cold, workers=asked.workers) as rig:
        found: dict[str, Any] = {
            "benchmark": "hand_over",
            "command": report.command("hand_over"),
            "machine": report.machine(rig.locks.describe()),
            "settings": {key: value for key, value in vars(asked).items() if key != "json"},
            "scenes": {
                scene: measure(rig, scene, batch, asked.rounds, quiet=asked.json)
                for scene, batch in scenes.items()
            },
        }
    found["skipped"] = skipped
    found["targets"] = targets(found["scenes"])
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0


def measure(
    rig: Rig, scene: str, batch: list[Job], rounds: int, *, quiet: bool
) -> dict[str, dict[str, Any]]:
    """Return one scene: the row of each peer."""
    laps: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        order = list(rig.workers) if number % 2 == 0 else list(reversed(rig.workers))
        lap = {peer: timed(rig, rig.workers[peer], batch) for peer in order}
        laps.append(lap)
        if not quiet:
            each = "  ".join(f"{peer} {lap[peer]['p50_ms']:.2f}" for peer in rig.workers)
            print(f"{scene}, round {number + 1}: p50 in ms: {each}", file=sys.stderr)
    return {
        peer: {"title": TITLES[peer], **summed([lap[peer] for lap in laps])} for peer in rig.workers
    }


def timed(rig: Rig, worker: Worker, batch: list[Job]) -> dict[str, Any]:
    """Run the tasks; return the gaps of the hot key."""
    rig.settle()
    ran = worker.run(batch)
    hot = [each for each, job in zip(ran, batch, strict=True) if job[1] == "hot"]
    cold = [each for each, job in zip(ran, batch, strict=True) if job[1] != "hot"]
    began = min(each.start for each in ran)
    gaps = report.gaps(hot)
    until = report.gaps(before(hot, max((each.end for each in cold), default=0.0))) or gaps
    return {
        "p50_ms": report.percentile(gaps, 50),
        "p99_ms": report.percentile(gaps, 99),
        "worst_ms": max(gaps),
        "while_others_run_p50_ms": report.percentile(until, 50),
        "while_others_run_p99_ms": report.percentile(until, 99),
        "while_others_run": len(until),
        "hot_per_second": len(hot) / (max(each.end for each in hot) - began),
        "overlaps": overlaps(hot),
        "inversions": report.inversions(hot),
        "not_run_once": sum(each.runs != 1 for each in ran),
    }


def before(chain: Sequence[Ran], moment: float) -> list[Ran]:
    """Return the tasks that started before a moment."""
    return [ran for ran in chain if ran.start < moment]


def summed(laps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of times over the rounds, and the maximum of error counts."""
    faults = ("overlaps", "inversions", "not_run_once")
    medians = {name: report.median([lap[name] for lap in laps]) for name in laps[0]}
    return {
        **medians,
        **{name: max(lap[name] for lap in laps) for name in faults},
        "p50_ms_each_round": [round(lap["p50_ms"], 2) for lap in laps],
        "p99_ms_each_round": [round(lap["p99_ms"], 2) for lap in laps],
    }


def targets(scenes: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    found = []
    for scene, (p50, p99) in REACH.items():
        ours = scenes[scene].get("locked")
        if ours is None:
            return []
        found += [
            report.target(f"{scene}: p50 in ms", ours["p50_ms"], most=p50),
            report.target(f"{scene}: p99 in ms", ours["p99_ms"], most=p99),
            report.target(f"{scene}: overlaps in any round", ours["overlaps"], most=0),
            report.target(f"{scene}: not run exactly once", ours["not_run_once"], most=0),
        ]
    return found


def shown(found: dict[str, Any]) -> str:
    asked = found["settings"]
    heads = ["end of one to start of the next", "p50, ms", "p99, ms", "worst, ms"]
    heads += ["p50 / p99 while others run, ms", "hot tasks/s", "overlaps", "inversions"]
    rows = [
        [
            f"{scene}: {row['title']}",
            f"{row['p50_ms']:.2f}",
            f"{row['p99_ms']:.1f}",
            f"{row['worst_ms']:.1f}",
            f"{row['while_others_run_p50_ms']:.2f} / {row['while_others_run_p99_ms']:.1f}"
            if scene == "beside"
            else "",
            f"{row['hot_per_second']:.0f}",
            row["overlaps"],
            row["inversions"],
        ]
        for scene, peers in found["scenes"].items()
        for row in peers.values()
    ]
    setting = (
        f"{asked['workers']} workers of {asked['processes']}; {asked['hot']} hot tasks of "
        f"{1000 * asked['hold']:g} ms, beside {asked['cold']} of other keys, or alone"
    )
    skipped = [f"skipped: {TITLES[peer]}: {why}" for peer, why in found["skipped"].items()]
    return "\n".join(
        [
            report.describe(found["machine"]),
            setting,
            "",
            report.table(heads, rows),
            "",
            *skipped,
            report.verdicts(found["targets"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.uncontended``: the cost of a lock without contention.

No-op tasks, each with its own key. Each peer has its own worker with the same settings. The peers
run in turn, and each run is compared with the other runs of the same round: with plain tasks, and
with redis-py's lock in the body, which is what a user would write instead.

``--delay 0.001`` delays all data to and from the locks' Redis by 1 ms, ``--body 0.005`` makes each
task sleep for 5 ms.

The memory layout of a process makes it up to 3 % faster or slower until it ends, so the rounds of
one pair of workers differ less from each other than from those of another pair. Therefore all
processes are restarted several times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any, Final

import psutil

from benchmarks import report
from benchmarks.meter import Heard, Monitor, command_counts, grown
from benchmarks.peers import TITLES, add_peers, taking_part
from benchmarks.rig import Job, Rig, Worker

PEERS: Final = ("plain", "locked", "redis_py", "redis_lock")
PARTS: Final = ("main", "children", "broker", "locks")
CALM: Final = 0.1
"""Largest share of the CPU that other processes may use in a valid round."""

COUNTED: Final = 200
"""Number of tasks in the run with MONITOR."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uncontended", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--tasks", type=int, default=1000, help="tasks of each peer in each round")
    parser.add_argument("--processes", type=int, default=2, help="pool processes of each worker")
    parser.add_argument(
        "--starts", type=int, default=4, help="number of restarts of all servers and workers"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds after each restart")
    parser.add_argument("--body", type=float, default=0.0, help="seconds that each task sleeps")
    parser.add_argument(
        "--delay", type=float, default=0.0, help="seconds to the locks' Redis, each way"
    )
    parser.add_argument("--no-results", action="store_true", help="task_ignore_result = True")
    add_peers(parser, PEERS)
    asked = parser.parse_args(arguments)
    asked.peers, skipped = taking_part(asked.peers, PEERS)
    machine: dict[str, Any] = {}
    laps: list[dict[str, dict[str, Any]]] = []
    for start in range(1, asked.starts + 1):
        with Rig(
            asked.peers,
            asked.processes,
            asked.tasks,
            store_results=not asked.no_results,
            delay=asked.delay,
        ) as rig:
            machine = machine or report.machine(rig.locks.describe())
            trips = rig.delayed.measure() if rig.delayed else []
            laps += measured(rig, asked.tasks, asked.rounds, asked.body, quiet=asked.json)
            if start == asked.starts:  # each start would count the same
                counted = {peer: count(rig, worker) for peer, worker in rig.workers.items()}
    found: dict[str, Any] = {
        "benchmark": "uncontended",
        "command": report.command("uncontended"),
        "machine": machine,
        "settings": {key: value for key, value in vars(asked).items() if key != "json"},
        "peers": {peer: summed(peer, laps, counted[peer], asked.tasks) for peer in asked.peers},
        "skipped": skipped,
    }
    if trips:
        found["delayed_round_trip_ms"] = {
            "median": report.median(trips),
            "p99": round(report.percentile(trips, 99), 3),
        }
    found["targets"] = targets(found["peers"], *reach(asked.body, asked.delay))
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0


def measured(
    rig: Rig, tasks: int, rounds: int, body: float = 0.0, *, quiet: bool
) -> list[dict[str, dict[str, Any]]]:
    """Return the rounds after one start: the result of each peer."""
    laps: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        order = list(rig.workers) if number % 2 == 0 else list(reversed(rig.workers))
        lap = {peer: timed(rig, rig.workers[peer], jobs(tasks, number, body)) for peer in order}
        laps.append(lap)
        if not quiet:
            rates = "  ".join(f"{peer} {lap[peer]['per_second']:.0f}" for peer in rig.workers)
            noise = max(lap[peer]["others"] for peer in rig.workers)
            print(f"round {number + 1}: {rates} tasks/s; others: {noise:.0%}", file=sys.stderr)
    return laps


def jobs(tasks: int, number: int, body: float = 0.0) -> list[Job]:
    return [(slot, f"{number}-{slot}", body) for slot in range(tasks)]


def timed(rig: Rig, worker: Worker, batch: list[Job]) -> dict[str, Any]:
    """Run a batch; return its speed, its CPU time, and the CPU time of other processes."""
    rig.settle()
    worker.board.clear()
    with rig.locks.client() as locks:
        with worker.held_back():
            worker.publish(batch)
            before, began = command_counts(locks), processor_time(rig, worker)
            at_first = time.monotonic()
        ran = worker.wait(len(batch), 120)
        watched = time.monotonic() - at_first
        used = {name: now - began[name] for name, now in processor_time(rig, worker).items()}
        rig.settle()
        after = command_counts(locks)
    if any(each.runs != 1 for each in ran):
        msg = f"{worker.peer}: a task ran {max(each.runs for each in ran)} times"
        raise RuntimeError(msg)
    elapsed = max(each.end for each in ran) - min(each.start for each in ran)
    everything = used.pop("machine")
    others = everything - sum(used.values())
    return {
        "per_second": len(ran) / elapsed,
        **{part: 1e6 * used[part] / len(ran) for part in (*PARTS, "delay")},
        "others": max(0.0, others) / watched / (psutil.cpu_count() or 1),
        "commandstats": grown(before, after),
    }


def processor_time(rig: Rig, worker: Worker) -> dict[str, float]:
    """Return the CPU seconds of each part, and of the machine, so far."""
    main, children = worker.processor_time()
    machine = psutil.cpu_times()
    return {
        "main": main,
        "children": children,
        "broker": sum(psutil.Process(rig.broker.pid).cpu_times()[:2]),
        "locks": sum(psutil.Process(rig.locks.pid).cpu_times()[:2]),
        "delay": rig.delayed.cpu_seconds() if rig.delayed else 0.0,
        "driver": sum(psutil.Process().cpu_times()[:2]),
        "machine": sum(machine) - machine.idle - getattr(machine, "iowait", 0.0),
    }


def count(rig: Rig, worker: Worker) -> dict[str, Heard]:
    """Record the commands of both servers in a short run, and for the same time without tasks."""
    rig.settle()
    worker.board.clear()
    with ExitStack() as listening:
        with worker.held_back():
            worker.publish(jobs(COUNTED, -1))
            locks = listening.enter_context(Monitor(rig.locks))
            broker = listening.enter_context(Monitor(rig.broker))
        worker.wait(COUNTED, 60)
        time.sleep(2)  # long enough to count periodic commands
    with Monitor(rig.locks) as idle_locks, Monitor(rig.broker) as idle_broker:
        time.sleep(3)
    owners = rig.owners(worker)
    return {
        "locks": locks.heard(owners),
        "broker": broker.heard(owners),
        "idle": idle_locks.heard(owners),
        "idle_broker": idle_broker.heard(owners),
    }


def summed(
    peer: str, laps: list[dict[str, dict[str, Any]]], heard: dict[str, Heard], tasks: int
) -> dict[str, Any]:
    """Return one peer's row."""
    locks, broker = heard["locks"], heard["broker"]
    calm = calm_laps(laps, peer)
    mean_calls = [sum(lap[peer]["commandstats"].values()) / tasks for lap in laps]
    return {
        "title": TITLES[peer],
        "tasks_per_second": report.median([lap[peer]["per_second"] for lap in calm], 1),
        **compared(laps, peer, "plain"),
        **compared(laps, peer, "redis_py"),
        "rounds": len(laps),
        "calm_rounds": len(calm),
        "machine_used_by_others": report.median([lap[peer]["others"] for lap in calm], 2),
        "cpu_us_per_task": {
            part: round(statistics.median(lap[peer][part] for lap in calm))
            for part in (*PARTS, "delay")
        },
        "lock_calls_per_task": round(per_task(locks, heard["idle"]), 3),
        "lock_calls_per_task_in_main": round(per_task(locks, heard["idle"], "main"), 3),
        "lock_calls_in_main_by_verb": dict(locks.by["main"]),
        "lock_calls_in_children_by_verb": dict(locks.by["child"]),
        "lock_calls_per_second_idle": round(
            heard["idle"].calls("main", "child") / heard["idle"].seconds, 2
        ),
        "broker_calls_per_task": round(per_task(broker, heard["idle_broker"]), 3),
        "commands_in_scripts_per_task": round(locks.in_scripts / COUNTED, 1),
        "lock_commandstats_per_task": round(statistics.median(mean_calls), 2),
        "lock_commandstats_last_round": laps[-1][peer]["commandstats"],
    }


def compared(laps: list[dict[str, dict[str, Any]]], peer: str, other: str) -> dict[str, Any]:
    """Return a peer's rate and CPU time, of another's in the same round; 2: twice as good."""
    calm = calm_laps(laps, peer, other)
    pairs = [(lap[peer], lap[other]) for lap in calm if other in lap]
    ratios = [mine["per_second"] / theirs["per_second"] for mine, theirs in pairs]
    by_cpu = [spent(theirs) / spent(mine) for mine, theirs in pairs if spent(mine)]
    return {
        f"of_{other}": report.median(ratios) if ratios else None,
        f"of_{other}_each_round": [round(ratio, 3) for ratio in ratios],
        f"of_{other}_by_cpu": report.median(by_cpu) if by_cpu else None,
    }


def calm_laps(
    laps: list[dict[str, dict[str, Any]]], peer: str, other: str = "plain"
) -> list[dict[str, dict[str, Any]]]:
    """Return the rounds without load from other processes, or the half with the least load."""

    def noise(lap: dict[str, dict[str, Any]]) -> float:
        return max(lap[name]["others"] for name in {peer, other} & lap.keys())

    calm = [lap for lap in laps if noise(lap) < CALM]
    return calm if len(calm) >= 3 else sorted(laps, key=noise)[: (len(laps) + 1) // 2]


def spent(lap: dict[str, Any]) -> float:
    """Return the CPU microseconds per task of the worker and both servers."""
    return sum(lap[part] for part in PARTS)


def per_task(busy: Heard, idle: Heard, *who: str) -> float:
    """Return the calls per task, without the periodic calls of the worker's threads."""
    who = who or ("main", "child")
    background = idle.calls(*who) / idle.seconds * busy.seconds
    return max(0.0, busy.calls(*who) - background) / COUNTED


def reach(body: float, delay: float) -> tuple[float, float | None]:
    """Return the least rate, and the least CPU time, of redis-py's lock; None: no target."""
    if delay:
        return 1.15, None
    return (1.05, None) if body else (1.0, 0.98)


def targets(
    peers: dict[str, dict[str, Any]], least: float, least_by_cpu: float | None
) -> list[dict[str, Any]]:
    ours, plain = peers.get("locked"), peers.get("plain")
    if not ours or not plain:
        return []
    in_children = sum(ours["lock_calls_in_children_by_verb"].values()) / COUNTED
    extra = ours["broker_calls_per_task"] - plain["broker_calls_per_task"]
    about_tasks = ("acquire", "release", "claim", "park")
    in_main = sum(
        count
        for verb, count in ours["lock_calls_in_main_by_verb"].items()
        if verb.split()[-1] in about_tasks
    )
    by_cpu = []
    if least_by_cpu is not None:
        ratio = ours["of_redis_py_by_cpu"]
        by_cpu = [report.target("CPU, redis-py's lock's of ours", ratio, least=least_by_cpu)]
    return [
        report.target("rate, of redis-py's lock in the body", ours["of_redis_py"], least=least),
        *by_cpu,
        report.target("extra round trips per task, in children, at most", in_children, most=2),
        report.target("extra round trips per task, in children, at least", in_children, least=2),
        report.target("extra calls at the broker per task", round(max(0.0, extra), 2), most=0.05),
        report.target("calls about a task by the main process", in_main, most=0),
    ]


def shown(found: dict[str, Any]) -> str:
    rows = [
        [
            row["title"],
            f"{row['tasks_per_second']:.0f}",
            *(
                "-" if row[ratio] is None else f"{row[ratio]:.2f}"
                for ratio in ("of_plain", "of_plain_by_cpu", "of_redis_py", "of_redis_py_by_cpu")
            ),
            f"{row['calm_rounds']} of {row['rounds']}",
            f"{row['lock_calls_per_task']:.2f}",
            f"{row['lock_calls_per_task_in_main']:.2f}",
            f"{row['broker_calls_per_task']:.1f}",
            f"{row['commands_in_scripts_per_task']:.0f}",
            " + ".join(str(row["cpu_us_per_task"][part]) for part in PARTS),
        ]
        for row in found["peers"].values()
    ]
    asked = found["settings"]
    work = f"tasks of {1000 * asked['body']:g} ms" if asked["body"] else "no-op tasks"
    heads = [work, "tasks/s", "of plain", "by CPU", "of redis-py's lock", "by CPU", "rounds"]
    heads += ["lock calls/task", "in main", "broker calls/task"]
    heads += ["inside scripts", "CPU us/task: main + children + broker + locks"]
    skipped = [f"skipped: {TITLES[peer]}: {why}" for peer, why in found["skipped"].items()]
    return "\n".join(
        [
            report.describe(found["machine"]),
            *delay_of(found),
            "",
            report.table(heads, rows),
            "",
            *skipped,
            report.verdicts(found["targets"]),
        ]
    )


def delay_of(found: dict[str, Any]) -> list[str]:
    """Return a line about the delay, with the cost of the proxy; nothing without a delay."""
    trip = found.get("delayed_round_trip_ms")
    if trip is None:
        return []
    milliseconds = 1000 * found["settings"]["delay"]
    used = max(row["cpu_us_per_task"]["delay"] for row in found["peers"].values())
    told = (
        f"{milliseconds:g} ms each way to the locks' Redis: a round trip takes {trip['median']} ms "
        f"(p99 {trip['p99']}). The proxy used at most {used} us of CPU per task, not counted below"
    )
    return [told]


if __name__ == "__main__":
    sys.exit(main())

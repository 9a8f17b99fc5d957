"""``python -m benchmarks.parked``: ten thousand tasks wait for one lock.

One task holds the lock until a gate opens; all other tasks of its key are parked. Measured with few
and with many waiters: the memory of the worker's main process, the commands at Redis while they
wait, the delay of a task with another key, the cost of a release in Redis, and the time from the
end of one task to the start of the next.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from typing import Any

import redis

from benchmarks import report
from benchmarks.meter import Monitor, script_cost
from benchmarks.rig import Job, Rig, Worker
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.scripts import load_scripts

KEY = "hot"
FEW = 10
LISTEN = 5.0
SLOW_US = 15
"""Threshold of the slow log in microseconds. Commands inside scripts are below it."""

_KEYS = Keyspace().lock(f"bench:{KEY}")
_VERBS = {script.sha: verb for verb, script in load_scripts().items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parked", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--tasks", type=int, default=10_000, help="number of tasks to park")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=30, help=f"times that {FEW} are parked")
    asked = parser.parse_args(arguments)
    with Rig(["locked"], asked.processes, asked.tasks + 100, store_results=False) as rig:
        found: dict[str, Any] = {
            "benchmark": "parked",
            "machine": report.machine(rig.locks.describe()),
            "settings": {key: value for key, value in vars(asked).items() if key != "json"},
        }
        lot = Lot(rig)
        lot.warm_up()
        steps = sorted({FEW, asked.tasks // 10, asked.tasks})
        found["few"] = lot.measured(FEW, asked.repeat)
        found["many"] = lot.measured(asked.tasks, 1)
        found["memory"] = lot.memory_at(steps)
    found["targets"] = targets(found)
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0


class Lot:
    """One worker with parked tasks."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.worker: Worker = rig.workers["locked"]
        self.board = self.worker.board
        self.locks: redis.Redis = rig.locks.client()

    def warm_up(self) -> None:
        """Warm up, so that tables and the allocator of the worker have their final size."""
        self.measured(300, 1)

    def measured(self, count: int, times: int) -> dict[str, Any]:
        """Park ``count`` tasks, measure, and let them run; several times if they are few."""
        rounds = [self._round(count, look=number == 0) for number in range(times)]
        first = rounds[0]
        costs: dict[str, list[int]] = defaultdict(list)
        for each in rounds:
            for verb, taken in each["costs"].items():
                costs[verb] += taken
        hand_overs = [gap for each in rounds for gap in each["gaps"]]
        calls = sum(each["script_calls"] for each in rounds)
        return {
            "waiters": count,
            "parked_per_second": first["parked_per_second"],
            **{key: first[key] for key in first if key.startswith(("waiting_", "unrelated_"))},
            "usec_per_script": round(sum(each["script_usec"] for each in rounds) / calls, 1),
            "usec_by_verb": {
                verb: report.median(taken, 1)
                for verb, taken in sorted(costs.items())
                if verb in ("release", "claim")
            },
            "gap_p50_ms": round(report.percentile(hand_overs, 50), 2),
            "gap_p99_ms": round(report.percentile(hand_overs, 99), 2),
            "hand_overs": len(hand_overs),
            "inversions": sum(each["inversions"] for each in rounds),
        }

    def memory_at(self, steps: list[int]) -> dict[str, Any]:
        """Return the memory of the main process for a growing number of parked tasks."""
        self._hold()
        rows = [{"parked": 0, "bytes": self.worker.memory()}]
        for done, step in zip([0, *steps], steps):  # noqa: B905
            self.worker.publish(self._waiters(done + 1, step + 1))
            self._await_parked(step)
            rows.append({"parked": step, "bytes": self.worker.memory()})
        few, many = rows[1], rows[-1]
        added = many["parked"] - few["parked"]
        return {
            "at": rows,
            "bytes_per_parked_task": round((many["bytes"] - few["bytes"]) / added, 1),
        }

    def park_and_run(self, count: int) -> None:
        """Park ``count`` tasks behind one, and let them run, without measuring."""
        self._hold()
        self.worker.publish(self._waiters(1, count + 1))
        self._await_parked(count)
        self.board.open_gate()
        self.worker.wait(count + 1, 300)

    # -- one round --------------------------------------------------------------------------------

    def _round(self, count: int, *, look: bool) -> dict[str, Any]:
        self._hold()
        began = time.monotonic()
        self.worker.publish(self._waiters(1, count + 1))
        right_behind = self._unrelated(count + 1) if look else 0.0
        self._await_parked(count)
        found: dict[str, Any] = {
            "parked_per_second": round(count / (time.monotonic() - began)),
            "unrelated_sent_behind_them_seconds": round(right_behind, 3),
        }
        if look:
            found.update(self._while_they_wait(count))
        return {**found, **self._drain(count)}

    def _hold(self) -> None:
        """Clear the board, and start task 0, which holds the lock until the gate opens."""
        self.board.clear()
        self.worker.publish([(0, KEY, -1.0)])
        self.board.await_start(0, 30)

    def _waiters(self, first: int, last: int) -> list[Job]:
        return [(slot, KEY, 0.0) for slot in range(first, last)]

    def _await_parked(self, count: int) -> None:
        deadline = time.monotonic() + 120
        while self.locks.zcard(_KEYS.queue) < count:
            if time.monotonic() > deadline:
                msg = f"{self.locks.zcard(_KEYS.queue)} of {count} tasks were parked"
                raise RuntimeError(msg)
            time.sleep(0.01)
        time.sleep(0.2)

    def _unrelated(self, slot: int) -> float:
        """Send a task of another key; return the seconds until it starts."""
        sent = time.monotonic()
        self.worker.publish([(slot, f"other{slot}", 0.0)])
        return self.board.await_start(slot, 60).start - sent

    def _while_they_wait(self, count: int) -> dict[str, Any]:
        with Monitor(self.rig.locks) as locks, Monitor(self.rig.broker) as broker:
            time.sleep(LISTEN)
        owners = self.rig.owners(self.worker)
        at_locks, at_broker = locks.heard(owners), broker.heard(owners)
        delays = [self._unrelated(count + 2 + number) for number in range(20)]
        return {
            "waiting_lock_calls_per_second": round(at_locks.calls("main", "child") / LISTEN, 2),
            "waiting_lock_calls_by_verb": dict(at_locks.by["main"] + at_locks.by["child"]),
            "waiting_commands_in_scripts_per_second": round(at_locks.in_scripts / LISTEN, 1),
            "waiting_broker_calls_per_second": round(at_broker.calls("main", "child") / LISTEN, 2),
            "unrelated_sent_while_they_wait_seconds": report.median(delays, 4),
            "unrelated_worst_seconds": round(max(delays), 4),
        }

    def _drain(self, count: int) -> dict[str, Any]:
        """Open the gate, and measure the handovers."""
        self.locks.config_set("slowlog-max-len", 100_000)
        self.locks.slowlog_reset()
        self.locks.config_set("slowlog-log-slower-than", SLOW_US)
        calls, usec = script_cost(self.locks)
        self.board.open_gate()
        chain = self.worker.wait(count + 1, 300)
        time.sleep(0.2)
        calls_after, usec_after = script_cost(self.locks)
        self.locks.config_set("slowlog-log-slower-than", -1)
        return {
            "gaps": report.gaps(chain),
            "inversions": report.inversions(chain),
            "script_calls": calls_after - calls,
            "script_usec": usec_after - usec,
            "costs": self._costs(),
        }

    def _costs(self) -> dict[str, list[int]]:
        costs: dict[str, list[int]] = defaultdict(list)
        for entry in self.locks.slowlog_get(100_000):
            words = entry["command"].split(b" ", 2)
            if words[0].upper() == b"EVALSHA":
                costs[_VERBS.get(words[1].decode(), "other")].append(entry["duration"])
        return costs


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    few, many = found["few"], found["many"]
    cost = many["usec_by_verb"].get("release", 0) / few["usec_by_verb"].get("release", 1)
    calls = many["waiting_lock_calls_per_second"] - few["waiting_lock_calls_per_second"]
    return [
        report.target(
            "main process, bytes per parked task", found["memory"]["bytes_per_parked_task"], most=50
        ),
        report.target("more Redis calls per second at many waiters", round(calls, 2), most=1),
        report.target("release at many waiters, of few", round(cost, 2), most=1.2),
        report.target(
            "unrelated task sent while they wait, worst, s", many["unrelated_worst_seconds"], most=1
        ),
        report.target(
            "main process, MiB more at the last than at the first", grown_mib(found), most=1
        ),
        report.target("order inversions", few["inversions"] + many["inversions"], most=0),
    ]


def grown_mib(found: dict[str, Any]) -> float:
    """Return the growth of the main process from no parked task to all."""
    rows = found["memory"]["at"]
    return round((rows[-1]["bytes"] - rows[0]["bytes"]) / 2**20, 2)


def shown(found: dict[str, Any]) -> str:
    few, many = found["few"], found["many"]
    labels = {
        "parked_per_second": "parked per second (sending included)",
        "waiting_lock_calls_per_second": "calls/s at the locks' Redis while they wait",
        "waiting_commands_in_scripts_per_second": "commands/s inside scripts meanwhile",
        "waiting_broker_calls_per_second": "calls/s at the broker meanwhile",
        "unrelated_sent_while_they_wait_seconds": "start of an unrelated task, s, median of 20",
        "unrelated_worst_seconds": "the same, worst",
        "unrelated_sent_behind_them_seconds": "the same, sent right behind them, received after",
        "usec_per_script": "us per script while they run, all verbs",
        "gap_p50_ms": "end of one to start of the next, p50, ms",
        "gap_p99_ms": "the same, p99",
        "hand_overs": "hand-overs measured",
    }
    rows = [[label, few[key], many[key]] for key, label in labels.items()]
    for verb in ("release", "claim"):
        costs = [each["usec_by_verb"].get(verb, "-") for each in (few, many)]
        rows.append([f"us per {verb}, median", *costs])
    memory = [[row["parked"], f"{row['bytes'] / 2**20:.2f}"] for row in found["memory"]["at"]]
    return "\n".join(
        [
            report.describe(found["machine"]),
            "",
            report.table(
                ["parked on one key", f"{few['waiters']} waiters", f"{many['waiters']} waiters"],
                rows,
            ),
            "",
            report.table(["parked", "main process, MiB"], memory),
            f"{found['memory']['bytes_per_parked_task']} bytes per parked task",
            "",
            report.verdicts(found["targets"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

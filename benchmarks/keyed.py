"""Runs tasks of many keys, checks the rules of each key, and measures how long free locks idle."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from benchmarks import report
from benchmarks.board import Ran
from benchmarks.contended import overlaps, overtaken
from benchmarks.peers import TITLES
from benchmarks.rig import Job, Rig, Worker
from benchmarks.uncontended import PARTS, processor_time

FAULTS: Final = ("overlaps", "overtaken", "not_run_once")

Chains = dict[str, list[Ran]]
"""Key -> its tasks, in order of start."""


def measure(
    rig: Rig,
    rounds: int,
    batch_of: Callable[[int], list[Job]],
    *,
    quiet: bool,
    look: Callable[[str, Chains], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Run each peer in turn in each round; return the row of each peer.

    Args:
        rig: the workers.
        rounds: number of rounds.
        batch_of: returns the tasks of a round. All peers get the same.
        quiet: print nothing.
        look: called with the peer and the runs of the last round.
    """
    laps: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        batch = batch_of(number)
        order = list(rig.workers) if number % 2 == 0 else list(reversed(rig.workers))
        lap: dict[str, dict[str, Any]] = {}
        for peer in order:
            lap[peer], chains = timed(rig, rig.workers[peer], batch)
            if look and number == rounds - 1:
                look(peer, chains)
        laps.append(lap)
        if not quiet:
            rates = "  ".join(f"{peer} {lap[peer]['per_second']:.0f}" for peer in rig.workers)
            print(f"round {number + 1}: {rates} tasks/s", file=sys.stderr)
    return {peer: {"title": TITLES[peer], **summed(peer, laps)} for peer in rig.workers}


def timed(rig: Rig, worker: Worker, batch: list[Job]) -> tuple[dict[str, Any], Chains]:
    """Run the tasks, which are all queued before the worker starts them."""
    rig.settle()
    began = processor_time(rig, worker)
    ran = worker.run(batch)
    used = {name: now - began[name] for name, now in processor_time(rig, worker).items()}
    chains = chains_of(ran, batch)
    span = max(each.end for each in ran) - min(each.start for each in ran)
    gaps = [gap for chain in chains.values() for gap in report.gaps(chain)] or [0.0]
    idle = idle_locks(ran, batch, worker.slots) or [0.0]
    return {
        "per_second": len(ran) / span,
        "cpu_us_per_task": sum(1e6 * used[part] / len(ran) for part in PARTS),
        "of_optimum": span / optimum(batch, worker.slots),
        "overlaps": sum(overlaps(chain) for chain in chains.values()),
        "overtaken": sum(overtaken(chain) for chain in chains.values()),
        "not_run_once": sum(each.runs != 1 for each in ran),
        "gap_p50_ms": report.percentile(gaps, 50),
        "gap_p99_ms": report.percentile(gaps, 99),
        "idle_p50_ms": report.percentile(idle, 50),
        "idle_p99_ms": report.percentile(idle, 99),
    }, chains


def chains_of(ran: Iterable[Ran], batch: Iterable[Job]) -> Chains:
    """Return the tasks of each key, in order of start."""
    chains: Chains = {}
    for each, (_, key, _) in zip(ran, batch, strict=True):
        chains.setdefault(key, []).append(each)
    return {key: sorted(chain, key=lambda ran: ran.start) for key, chain in chains.items()}


def optimum(batch: Sequence[Job], slots: int) -> float:
    """Return the shortest makespan: the tasks of one key in a row, or all tasks in all slots."""
    per_key: dict[str, float] = {}
    for _, key, hold in batch:
        per_key[key] = per_key.get(key, 0.0) + hold
    return max(*per_key.values(), sum(per_key.values()) / slots)


def idle_locks(ran: Sequence[Ran], batch: Sequence[Job], slots: int) -> list[float]:
    """Return for each hand-over for how many milliseconds the lock was free for no reason.

    That is while its next task is one of those that should run: with two free slots, the first two
    queued tasks whose keys are free. All tasks are queued from the beginning. A slot counts as free
    unless the body of a task runs in it.
    """
    key_of = {slot: key for slot, key, _ in batch}
    running: Counter[str] = Counter()
    idle: dict[str, float] = {}  # of keys that have been used
    waiting = sorted(key_of)
    found, last = [], 0.0
    events = [(each.start, True, each.slot) for each in ran]
    events += [(each.end, False, each.slot) for each in ran]
    for moment, starts, slot in sorted(events):
        for key in _startable(waiting, key_of, running, slots):
            if key in idle:
                idle[key] += moment - last
        key, last = key_of[slot], moment
        if starts:
            running[key] += 1
            waiting.remove(slot)
            if key in idle:
                found.append(1000 * idle[key])
        else:
            running[key] -= 1
        idle[key] = 0.0
    return found


def _startable(
    waiting: Iterable[int], key_of: dict[int, str], running: Counter[str], slots: int
) -> set[str]:
    """Return the keys of the first queued tasks that could start, one for each free slot."""
    free = slots - running.total()
    found: set[str] = set()
    for slot in waiting:
        if len(found) >= free:
            break
        if not running[key_of[slot]]:
            found.add(key_of[slot])
    return found


def summed(peer: str, laps: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the median of times over the rounds, and the maximum of error counts."""
    mine = [lap[peer] for lap in laps]
    return {
        **{name: report.median([lap[name] for lap in mine]) for name in mine[0]},
        **{name: max(lap[name] for lap in mine) for name in FAULTS},
        **{
            f"of_{other}": _ratios(mine, [lap[other] for lap in laps])
            for other in ("plain", "redis_py")
            if other in laps[0]
        },
        "rate_each_round": [round(lap["per_second"]) for lap in mine],
    }


def _ratios(mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return rate and CPU time, of another peer's in the same round; 2: twice as good."""
    pairs = list(zip(mine, theirs, strict=True))
    rates = [a["per_second"] / b["per_second"] for a, b in pairs]
    used = "cpu_us_per_task"  # 0 for a few tasks: the kernel counts in units of 10 ms
    by_cpu = [b[used] / a[used] for a, b in pairs if a[used]]
    return {"rate": report.median(rates), "cpu": report.median(by_cpu or [0.0])}


HEADS: Final = (
    "tasks/s",
    "of plain, by rate / CPU",
    "of redis-py's, by rate / CPU",
    "makespan / optimum",
    "at once",
    "out of order",
    "lock idle p50 / p99, ms",
)


def cells(peer: str, row: dict[str, Any]) -> list[Any]:
    """Return a row of the table with :data:`HEADS`. Without a lock there is no hand-over."""
    ratios = [
        f"{row[other]['rate']:.2f} / {row[other]['cpu']:.2f}" if other in row else "-"
        for other in ("of_plain", "of_redis_py")
    ]
    idle = f"{row['idle_p50_ms']:.1f} / {row['idle_p99_ms']:.1f}"
    return [
        row["title"],
        f"{row['per_second']:.0f}",
        *ratios,
        f"{row['of_optimum']:.2f}",
        row["overlaps"],
        row["overtaken"],
        idle if peer != "plain" else "",
    ]


def faults(ours: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets that must be met in each round."""
    return [
        report.target("two tasks of a key at once", ours["overlaps"], most=0),
        report.target("tasks that ran after a later one of their key", ours["overtaken"], most=0),
        report.target("tasks not run exactly once", ours["not_run_once"], most=0),
    ]

"""``python -m benchmarks.legs``: where the time of a hand-over goes, step by step.

Runs hot tasks alone on two workers, as ``benchmarks.hand_over`` does, and writes the time of each
step to a file. Each line costs a few microseconds, so the sum is slightly longer than the hand-over
without it. Steps are shown as medians. The last column says whose code a step runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks import report

ENVIRONMENT: Final = "CSL_BENCHMARK_LEGS"
"""Environment variable with the file for the steps; a worker without it writes none."""

STEPS: Final = (
    ("body ended", ""),
    ("tracer returned", "Celery: stores the result"),
    ("release sent", "ours: sends the release"),
    ("grant received", "Redis: the script; kernel: two switches of processes"),
    ("main loop has it", "ours: a switch of threads"),
    ("sent to the pool", "ours: the request and its header; Celery: the job"),
    ("pool process has it", "Celery: the pool's pipe"),
    ("claimed", "Redis: the script; kernel: two switches of processes"),
    ("body began", "Celery: its tracer"),
)
"""Step -> whose code has run since the step before."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.legs", description=__doc__)
    parser.add_argument("--hot", type=int, default=200, help="number of tasks that share one key")
    parser.add_argument("--hold", type=float, default=0.01, help="duration of each task in seconds")
    parser.add_argument("--workers", type=int, default=2, help="number of workers")
    parser.add_argument("--processes", type=int, default=4, help="pool processes of each worker")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(arguments)
    from benchmarks.contended import mixed  # noqa: PLC0415  # a worker imports this module, too
    from benchmarks.rig import Rig  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "steps")
        path.touch()
        os.environ[ENVIRONMENT] = str(path)
        with Rig(["locked"], asked.processes, asked.hot, workers=asked.workers) as rig:
            for _ in range(asked.rounds):
                rig.settle()
                rig.workers["locked"].run(mixed(asked.hot, 0, asked.hold))
            machine = report.machine(rig.locks.describe())
        lines = path.read_text(encoding="ascii").splitlines()
    legs = legs_of((float(at), int(step)) for at, step in map(str.split, lines))
    rows = [
        [STEPS[step][0], f"{report.median(leg):.2f}", STEPS[step][1]]
        for step, leg in enumerate(legs)
        if step and leg
    ]
    whole = [sum(each) for each in zip(*legs[1:], strict=True)]
    rows.append([f"in all, {len(whole)} hand-overs", f"{report.median(whole or [0.0]):.2f}", ""])
    print(report.describe(machine), "", report.table(["step", "ms, p50", "runs"], rows), sep="\n")
    return 0


def legs_of(marks: Iterable[tuple[float, int]]) -> list[list[float]]:
    """Return for each step the milliseconds since the step before, of complete hand-overs."""
    found: list[list[float]] = [[] for _ in STEPS]
    chain: list[float] = []
    for at, step in sorted(marks):
        if step == 0:
            chain = []
        if step == len(chain):
            chain.append(at)
        if len(chain) == len(STEPS):
            for number in range(1, len(STEPS)):
                found[number].append(1000 * (chain[number] - chain[number - 1]))
            chain = []
    return found


def trace() -> None:
    """Let this worker write its steps. Call it before the worker starts."""
    from benchmarks.board import Board  # noqa: PLC0415
    from celery_singleton_lock.worker.agent.grant_inbox import GrantInbox  # noqa: PLC0415
    from celery_singleton_lock.worker.dispatch.dispatcher import Dispatcher  # noqa: PLC0415
    from celery_singleton_lock.worker.execution.late_releases import LateReleases  # noqa: PLC0415
    from celery_singleton_lock.worker.execution.tracer import LockTracer  # noqa: PLC0415
    from celery_singleton_lock.worker.runtime import Runtime  # noqa: PLC0415

    file = os.open(os.environ[ENVIRONMENT], os.O_WRONLY | os.O_APPEND)

    def mark(step: str) -> None:
        number = next(i for i, (name, _) in enumerate(STEPS) if name == step)
        os.write(file, f"{time.monotonic():.6f} {number}\n".encode("ascii"))

    def put(owner: Any, method: str, before: str = "", after: str = "") -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            if before:
                mark(before)
            result = original(*args, **kwargs)
            if after:
                mark(after)
            return result

        setattr(owner, method, marked)

    put(Board, "begin", before="body began")
    put(Board, "end", after="body ended")
    put(LockTracer, "leave", before="tracer returned")
    put(LateReleases, "send", after="release sent")
    put(GrantInbox, "_arrive", before="grant received")
    put(Runtime, "receive", before="main loop has it")
    put(Dispatcher, "_send", after="sent to the pool")
    put(LockTracer, "trace", before="pool process has it")
    put(LockTracer, "_take", after="claimed")


if __name__ == "__main__":
    sys.exit(main())

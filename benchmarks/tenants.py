"""Row ``tenants`` of :mod:`benchmarks.flow`: a small tenant beside a large one, with real workers.

All tasks of both tenants share one lock, and each takes the same time: the service time. Two
workers have parked the tasks of the large tenant before the first task of the small one is sent.
Each further one is sent when the one before has started.

- *wait*: from sending a task of the small tenant to its start, in service times.
- *starts of the large tenant*: how many of its tasks start in that time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

from benchmarks import report
from benchmarks.backlog import left
from benchmarks.peers import TITLES
from benchmarks.rates import jobs
from benchmarks.rig import Rig, Worker

PEERS: Final = ("fair", "in_order")
SERVICE: Final = 0.02
"""Seconds that each task takes."""

SMALL: Final = 10
"""Tasks of the small tenant."""

TIMEOUT: Final = 300.0

Found = dict[str, Any]


def tenants(asked: argparse.Namespace) -> Found:
    """Return peer -> what the small tenant waits for."""
    with Rig(PEERS, asked.processes, asked.backlog + SMALL, workers=2) as rig:
        return {peer: beside(rig, worker, asked.backlog) for peer, worker in rig.workers.items()}


def beside(rig: Rig, worker: Worker, backlog: int) -> Found:
    rig.settle()
    worker.board.clear()
    with worker.held_back():
        worker.publish([(slot, key, SERVICE) for slot, key, _ in jobs("large", backlog)])
    with rig.broker.client() as client:
        while left(client, worker) > 2 * worker.slots:  # some wait in a pool process
            time.sleep(0.01)
    spans = []
    for slot, key, _ in jobs("small", SMALL, backlog):
        sent = time.monotonic()
        worker.publish([(slot, key, SERVICE)])
        spans.append((sent, worker.board.await_start(slot, TIMEOUT).start))
    ran = worker.wait(backlog + SMALL, TIMEOUT)
    waits = [(start - sent) / SERVICE for sent, start in spans]
    large = [each.start for each in ran[:backlog]]
    starts = [sum(sent < each < start for each in large) for sent, start in spans]
    return {
        "title": TITLES[worker.peer],
        "wait_p50": round(report.percentile(waits, 50), 1),
        "wait_most": round(max(waits), 1),
        "starts_of_large_most": max(starts),
        "not_run_once": sum(each.runs != 1 for each in ran),
    }


def tenant_targets(found: Found) -> list[Found]:
    return [
        report.target(
            "wait of a small tenant, at most, in tasks", found["fair"]["wait_most"], most=3
        ),
        report.target("its tasks that did not run once", found["fair"]["not_run_once"], most=0),
    ]


def tenant_table(found: Found) -> str:
    heading = [
        "a small tenant beside a large one",
        "wait p50",
        "at most",
        "starts of the large one",
    ]
    rows = [
        [row["title"], row["wait_p50"], row["wait_most"], row["starts_of_large_most"]]
        for row in found.values()
    ]
    return report.table(heading, rows)

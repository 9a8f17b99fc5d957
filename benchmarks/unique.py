"""``python -m benchmarks.unique``: what it costs to send a unique call, and many senders at once.

In one process, with a Redis for broker and locks: each round sends as many calls with each library,
the libraries interleaved. ``sent`` calls have all other arguments; ``refused`` ones are like one
that was sent before. Then 50 threads send the same call at once: how many messages the broker has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import Singleton

from benchmarks import report
from celery_singleton_lock import LockedTask
from celery_singleton_lock.demo.redis_server import RedisServer

CALLS, ROUNDS, SENDERS = 500, 7, 50

Send = Callable[[int], object]


def body(number: int) -> int:
    return number


def senders(url: str) -> dict[str, Send]:
    """Return library -> a function that sends a call with this argument."""
    app = Celery("unique", broker=url, backend=url)
    app.conf.update(singleton_lock_backend=url, singleton_backend_url=url, task_ignore_result=True)
    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": url, "default_timeout": 3600},
    }
    plain = app.task(body, name="plain", shared=False)
    locked = app.task(body, name="locked", base=LockedTask, lock_unique="until_done", shared=False)
    singleton = app.task(body, name="singleton", base=Singleton, shared=False)
    once = app.task(body, name="once", base=QueueOnce, shared=False)

    def send_once(number: int) -> object:
        try:
            return once.delay(number)
        except AlreadyQueued:
            return None

    return {
        "plain": plain.delay,
        "locked": locked.delay,
        "celery-singleton": singleton.delay,
        "celery-once": send_once,
    }


def measured(client: redis.Redis, send: Send, numbers: range) -> dict[str, float]:
    """Return microseconds and commands of Redis for each call."""
    before = _commands(client)
    start = time.perf_counter()
    for number in numbers:
        send(number)
    took = time.perf_counter() - start
    return {
        "us": took / len(numbers) * 1e6,
        "commands": (_commands(client) - before - 1) / len(numbers),
    }


def _commands(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])


def at_once(client: redis.Redis, send: Send, number: int) -> int:
    """Return how many messages the broker has after many threads have sent one call."""
    before, barrier = client.llen("celery"), threading.Barrier(SENDERS)

    def one() -> None:
        barrier.wait()
        send(number)

    threads = [threading.Thread(target=one) for _ in range(SENDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(client.llen("celery") - before)


def run(calls: int, rounds: int) -> dict[str, Any]:
    with RedisServer() as server, server.client(decode_responses=False) as client:
        libraries = senders(server.url)
        for send in libraries.values():
            send(-1)
        taken: dict[str, dict[str, list[dict[str, float]]]] = {
            what: {name: [] for name in libraries} for what in ("sent", "refused")
        }
        for number in range(rounds):
            numbers = range(number * calls, (number + 1) * calls)
            for what in taken:
                for name, send in libraries.items():
                    taken[what][name].append(measured(client, send, numbers))
        crowd = {name: at_once(client, send, -2) for name, send in libraries.items()}
        machine = report.machine(server.describe())
    rows = {
        what: {
            name: {key: statistics.median(each[key] for each in found) for key in found[0]}
            for name, found in by_library.items()
        }
        for what, by_library in taken.items()
    }
    return {
        "benchmark": "unique",
        "machine": machine,
        "calls": calls,
        "rounds": rounds,
        "rows": rows,
        "at_once": crowd,
        "targets": [
            report.target("messages of 50 threads that send one call", crowd["locked"], most=1),
        ],
    }


def shown(found: dict[str, Any]) -> str:
    heads = ["library", "sent: us", "commands", "refused: us", "commands", "50 threads: messages"]
    sent, refused = found["rows"]["sent"], found["rows"]["refused"]
    rows = [
        [
            name,
            round(sent[name]["us"]),
            round(sent[name]["commands"], 1),
            round(refused[name]["us"]) if name != "plain" else "-",
            round(refused[name]["commands"], 1) if name != "plain" else "-",
            messages,
        ]
        for name, messages in found["at_once"].items()
    ]
    parts = [report.describe(found["machine"]), report.table(heads, rows)]
    return "\n\n".join([*parts, report.verdicts(found["targets"])])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unique", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args(arguments)
    found = run(asked.calls, asked.rounds)
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0 if all(target["met"] for target in found["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())

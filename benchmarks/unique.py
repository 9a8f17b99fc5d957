"""``python -m benchmarks.unique``: what it costs to send a unique call, and many senders at once.

In one process, with a Redis for broker and locks: each round sends as many calls with each library,
the libraries interleaved. ``sent`` calls have all other arguments; ``refused`` ones are like one
that was sent before. Then 50 threads send the same call at once: how many messages the broker has;
and again while a process that sends it, too, is killed at any moment. Last, a worker ends
duplicates that follow a call, and calls of which the newest is to run (``benchmarks.bursts``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
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

from benchmarks import bursts, report
from benchmarks.meter import commands
from celery_singleton_lock import LockedTask
from celery_singleton_lock.demo.redis_server import RedisServer

CALLS, ROUNDS, SENDERS, DEATHS = 500, 7, 50, 30
SLOWEST = 0.03
"""Seconds from the beginning of its call after which a sender is killed at the latest."""

Send = Callable[[int], object]
Step = Callable[[], object]


def _nothing() -> None:
    pass


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
    before = commands(client)
    start = time.perf_counter()
    for number in numbers:
        send(number)
    took = time.perf_counter() - start
    return {
        "us": took / len(numbers) * 1e6,
        "commands": (commands(client) - before - 1) / len(numbers),
    }


def at_once(
    client: redis.Redis, send: Send, number: int, start: Step = _nothing, end: Step = _nothing
) -> int:
    """Return how many messages the broker has after many threads have sent one call.

    Args:
        client: of the broker.
        send: sends a call.
        number: its argument.
        start: called before the threads send.
        end: called while they send.
    """
    before, barrier = client.llen("celery"), threading.Barrier(SENDERS + 1)

    def one() -> None:
        barrier.wait()
        send(number)

    threads = [threading.Thread(target=one) for _ in range(SENDERS)]
    for thread in threads:
        thread.start()
    start()
    barrier.wait()
    end()
    for thread in threads:
        thread.join()
    return int(client.llen("celery") - before)


def beside_a_death(client: redis.Redis, url: str, library: str, send: Send, number: int) -> int:
    """Return how many messages the broker has, if one more sender is killed at any moment."""
    (ready, tell_ready), (go, tell_go) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            own = senders(url)[library]
            own(-1)  # imports and connects
            os.write(tell_ready, b"!")
            os.read(go, 1)
            own(number)
        finally:
            os._exit(0)
    os.read(ready, 1)

    def kill() -> None:
        time.sleep(random.uniform(0, SLOWEST))  # the moment of the kill is tried
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    messages = at_once(client, send, number, lambda: os.write(tell_go, b"!"), kill)
    for end in (ready, tell_ready, go, tell_go):
        os.close(end)
    return messages


def run(asked: argparse.Namespace) -> dict[str, Any]:
    calls, rounds = asked.calls, asked.rounds
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
        deaths = {
            name: [
                beside_a_death(client, server.url, name, send, -3 - number)
                for number in range(asked.deaths)
            ]
            for name, send in libraries.items()
            if name != "plain"
        }
        machine = report.machine(server.describe())
    ended = {
        "followers": bursts.followers(asked.followers, asked.processes),
        "debounce": bursts.debounce(asked.messages, asked.keys, asked.quiet, asked.processes),
    }
    rows = {
        what: {
            name: {key: statistics.median(each[key] for each in found) for key in found[0]}
            for name, found in by_library.items()
        }
        for what, by_library in taken.items()
    }
    return {
        "benchmark": "unique",
        "command": report.command("unique"),
        "machine": machine,
        "settings": {key: value for key, value in vars(asked).items() if key != "json"},
        "calls": calls,
        "rounds": rounds,
        "rows": rows,
        "at_once": crowd,
        "beside_a_death": {name: [min(found), max(found)] for name, found in deaths.items()},
        **ended,
        "targets": [
            report.target("messages of 50 threads that send one call", crowd["locked"], most=1),
            report.target("the same, if one more sender dies: most", max(deaths["locked"]), most=2),
            report.target("and fewest", min(deaths["locked"]), least=1),
            *bursts.targets(ended),
        ],
    }


def shown(found: dict[str, Any]) -> str:
    heads = ["library", "sent: us", "commands", "refused: us", "commands", "50 threads: messages"]
    heads += ["one more dies: messages"]
    deaths = found["beside_a_death"]
    sent, refused = found["rows"]["sent"], found["rows"]["refused"]
    rows = [
        [
            name,
            round(sent[name]["us"]),
            round(sent[name]["commands"], 1),
            round(refused[name]["us"]) if name != "plain" else "-",
            round(refused[name]["commands"], 1) if name != "plain" else "-",
            messages,
            " to ".join(map(str, deaths[name])) if name in deaths else "-",
        ]
        for name, messages in found["at_once"].items()
    ]
    parts = [report.describe(found["machine"]), report.table(heads, rows), *bursts.tables(found)]
    return "\n\n".join([*parts, report.verdicts(found["targets"])])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unique", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--deaths", type=int, default=DEATHS, help="senders that are killed")
    parser.add_argument("--followers", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=10_000, help="calls that are debounced")
    parser.add_argument("--keys", type=int, default=100, help="their keys")
    parser.add_argument("--quiet", type=float, default=2.0, help="their quiet period, seconds")
    parser.add_argument("--processes", type=int, default=4, help="pool processes of the worker")
    asked = parser.parse_args(arguments)
    found = run(asked)
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0 if all(target["met"] for target in found["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())

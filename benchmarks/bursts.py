"""Two rows of ``benchmarks.unique``: many calls that a worker ends without running them.

- ``followers``: duplicates of one call wait for its result (``lock_on_duplicate="follow"``).
- ``debounce``: many calls of few keys, of which the newest one of each key is to run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis
from celery import Celery
from celery.result import AsyncResult

from benchmarks import report
from benchmarks.meter import commands
from celery_singleton_lock import LockedTask
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.store.operator.redis import RedisAdminStore

ROOT: Final = Path(__file__).parents[1]
SETUP: Final = "CSL_BENCHMARK_BURSTS"
"""Environment variable that carries the Redis and the quiet period to the worker."""

PATIENCE: Final = 300.0
PAUSE: Final = 0.02


def make_app(url: str, quiet: float) -> Celery:
    """Return the app of the worker, and of those who call its tasks."""
    made = Celery("bursts", broker=url, backend=url)
    made.conf.update(singleton_lock_backend=url, worker_hijack_root_logger=False)
    client = redis.Redis.from_url(url, socket_timeout=None)

    @made.task(
        base=LockedTask,
        name="follow",
        lock_key="report",
        lock_unique="until_done",
        lock_on_duplicate="follow",
        shared=False,
    )
    def follow() -> int:
        """Run until the benchmark says so; return how often this was run."""
        runs = client.incr("runs")
        client.blpop(["go"], int(PATIENCE))
        return int(runs)

    @made.task(
        base=LockedTask, name="index", lock_key="doc:{key}", lock_debounce=quiet, shared=False
    )
    def index(key: int, version: int) -> None:
        client.rpush("ran", f"{key} {version} {time.time()}")

    return made


if SETUP in os.environ:
    app = make_app(os.environ[SETUP].split()[0], float(os.environ[SETUP].split()[1]))


@contextmanager
def worker(url: str, quiet: float, processes: int) -> Iterator[Celery]:
    """Run a worker; return the app."""
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.bursts", "worker"]
    command += ["--concurrency", str(processes), "--without-gossip", "--without-mingle"]
    with (
        subprocess.Popen(
            [*command, "--loglevel", "ERROR"],
            env={**os.environ, SETUP: f"{url} {quiet}"},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        ) as process,
        make_app(url, quiet) as made,
    ):
        try:
            _until(lambda: made.control.ping(timeout=0.5), process)
            yield made
        finally:
            process.terminate()


def _until(fact: Callable[[], Any], process: subprocess.Popen[bytes] | None = None) -> Any:
    """Return the first true answer.

    Raises:
        RuntimeError: there is none in time, or the worker has ended.
    """
    deadline = time.monotonic() + PATIENCE
    while not (answer := fact()):
        if time.monotonic() > deadline or (process and process.poll() is not None):
            msg = "the worker has ended, or does not what is measured"
            raise RuntimeError(msg)
        time.sleep(PAUSE)
    return answer


def followers(number: int, processes: int) -> dict[str, Any]:
    """Let duplicates follow one call, and end it when all are parked."""
    with (
        RedisServer() as server,
        server.client(decode_responses=False) as client,
        worker(server.url, 1.0, processes) as made,
    ):
        store, task = RedisAdminStore(client), made.tasks["follow"]
        first = task.delay()
        _until(lambda: client.get("runs"))
        began = time.perf_counter()
        results = [task.delay() for _ in range(number)]
        sent = time.perf_counter() - began
        _until(lambda: [call.followers for call in store.list_calls("report")] == [number])
        parked = time.perf_counter() - began
        before, idle = commands(client), 5.0
        time.sleep(idle)  # while nothing happens
        waiting = (commands(client) - before) / idle
        before, began = commands(client), time.perf_counter()
        client.rpush("go", 1)
        ended = _all_ended(client, results)
        took = time.perf_counter() - began
        return {
            "followers": number,
            "sent_us": sent / number * 1e6,
            "parked_after": parked,
            "commands_while_waiting": waiting,
            "ended_after": took,
            "commands_each": (commands(client) - before) / number,
            "runs": int(client.get("runs") or 0),
            "same": ended == {first.get(timeout=PATIENCE)},
        }


def _all_ended(client: redis.Redis, results: list[AsyncResult]) -> set[Any]:
    """Return the different results, when each task has one."""
    keys = [results[0].backend.get_key_for_task(each.id) for each in results]
    _until(lambda: None not in client.mget(keys))
    return {each.get(timeout=PATIENCE) for each in results}


def debounce(messages: int, keys: int, quiet: float, processes: int) -> dict[str, Any]:
    """Call a task many times for few keys; see which calls run."""
    with (
        RedisServer() as server,
        server.client(decode_responses=True) as client,
        worker(server.url, quiet, processes) as made,
    ):
        store, task = RedisAdminStore(client), made.tasks["index"]
        names = [f"doc:{key}" for key in range(keys)]
        before, began = commands(client), time.time()
        for number in range(messages):
            task.apply_async((number % keys, number // keys))
        sent = time.time() - began
        _until(lambda: not client.llen("celery") and not client.hlen("unacked"))
        received = time.time() - began
        _until(lambda: client.llen("ran") >= keys)
        _until(lambda: not any(lock.bodies for lock in store.summarise_named(names)))
        ended = time.time() - began
        cost = commands(client) - before
        ran = [each.split() for each in client.lrange("ran", 0, -1)]
        newest = str(messages // keys - 1)
        return {
            "messages": messages,
            "keys": keys,
            "quiet": quiet,
            "sent_after": sent,
            "received_after": received,
            "last_start": max(float(at) for *_, at in ran) - began,
            "ended_after": ended,
            "commands_each": cost / messages,
            "runs": len(ran),
            "newest": len({key for key, version, _ in ran if version == newest}),
        }


def targets(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what must hold of these rows."""
    follow, burst = rows["followers"], rows["debounce"]
    return [
        report.target("runs of a call that others follow", follow["runs"], most=1),
        report.target("whether all have its result", int(follow["same"]), least=1),
        report.target("runs of debounced calls, per key", burst["runs"] / burst["keys"], most=1),
        report.target("keys whose newest call ran", burst["newest"], least=burst["keys"]),
    ]


def tables(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the rows as tables."""
    follow, burst = rows["followers"], rows["debounce"]
    return [
        report.table(
            ["followers", "sent: us", "parked, s", "idle commands/s", "ended, s", "commands each"],
            [
                [
                    follow["followers"],
                    round(follow["sent_us"]),
                    round(follow["parked_after"], 2),
                    round(follow["commands_while_waiting"], 1),
                    round(follow["ended_after"], 2),
                    round(follow["commands_each"], 1),
                ]
            ],
        ),
        report.table(
            ["debounced", "sent, s", "received, s", "last start, s", "ended, s", "commands each"],
            [
                [
                    f"{burst['messages']} for {burst['keys']} keys, {burst['quiet']:g} s",
                    round(burst["sent_after"], 2),
                    round(burst["received_after"], 2),
                    round(burst["last_start"], 2),
                    round(burst["ended_after"], 2),
                    round(burst["commands_each"], 1),
                ]
            ],
        ),
    ]

"""The app of a benchmark's worker: one task, which takes its lock with the peer's library.

Only this task is declared, so the worker of plain tasks does not use this library. All peers have
the same arguments, settings and body.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from celery import Celery

from benchmarks.board import Board
from celery_singleton_lock import LockedTask

ENVIRONMENT = "CSL_BENCHMARK"
"""Environment variable that carries :class:`Setup` to the worker, as JSON."""

LEASE = 30
RETRY_AFTER = 0.5


@dataclass(frozen=True)
class Setup:
    """The configuration of a worker."""

    peer: str
    broker: str
    locks: str
    board: str
    store_results: bool = True

    def task(self) -> str:
        return f"benchmarks.{self.peer}"


TITLES = {
    "plain": "plain Task",
    "locked": "LockedTask",
    "redis_py": "redis-py lock in the body",
    "redis_lock": "python-redis-lock in the body",
    "retry": f"self.retry(countdown={RETRY_AFTER})",
}


def missing(peer: str) -> str:
    """Return why a peer cannot run here, or an empty string."""
    if peer == "redis_lock" and importlib.util.find_spec("redis_lock") is None:
        return "python-redis-lock is not installed (pip install python-redis-lock)"
    return ""


def add_peers(parser: argparse.ArgumentParser, peers: Sequence[str]) -> None:
    """Add the option that selects peers; the default is all that are installed.

    Who asks for one that is not installed is told so, and nothing runs.
    """

    def peer(name: str) -> str:
        if why := missing(name):
            raise argparse.ArgumentTypeError(why)
        return name

    parser.add_argument("--peers", nargs="+", type=peer, choices=peers, metavar="PEER")
    parser.epilog = f"peers: {', '.join(peers)}; by default, all that are installed"


def taking_part(
    asked: Sequence[str] | None, peers: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the selected peers, and those that cannot run with the reason."""
    skipped = {} if asked else {peer: why for peer in peers if (why := missing(peer))}
    return [peer for peer in asked or peers if peer not in skipped], skipped


def make_app(setup: Setup) -> Celery:
    app = Celery("benchmarks", broker=setup.broker, backend=setup.broker)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        singleton_lock_backend=setup.locks,
        singleton_lock_lease=LEASE,
        task_ignore_result=not setup.store_results,
        worker_hijack_root_logger=True,
    )
    _DECLARE[setup.peer](app, setup)
    return app


def _worker_body(setup: Setup) -> Callable[[int, float], None]:
    board = Board(setup.board)

    def work(slot: int, hold: float) -> None:
        """Do nothing, sleep, or (negative) wait until the driver opens the gate."""
        board.begin(slot, os.getpid())
        if hold < 0:
            board.await_gate()
        elif hold:
            time.sleep(hold)
        board.end(slot)

    return work


def _plain(app: Celery, setup: Setup) -> None:
    work = _worker_body(setup)

    @app.task(name=setup.task())
    def plain(slot: int, key: str, hold: float) -> None:  # noqa: ARG001
        work(slot, hold)


def _locked(app: Celery, setup: Setup) -> None:
    work = _worker_body(setup)

    @app.task(name=setup.task(), base=LockedTask, lock_key="bench:{key}")
    def locked(slot: int, key: str, hold: float) -> None:  # noqa: ARG001
        work(slot, hold)


def _redis_py(app: Celery, setup: Setup) -> None:
    work, client = _worker_body(setup), _client_of(setup)

    @app.task(name=setup.task())
    def redis_py(slot: int, key: str, hold: float) -> None:
        with client().lock(f"bench:{key}", timeout=LEASE):
            work(slot, hold)


def _redis_lock(app: Celery, setup: Setup) -> None:
    import redis_lock as library  # noqa: PLC0415  # optional

    work, client = _worker_body(setup), _client_of(setup)

    @app.task(name=setup.task())
    def redis_lock(slot: int, key: str, hold: float) -> None:
        with library.Lock(client(), f"bench:{key}", expire=LEASE, auto_renewal=True):
            work(slot, hold)


def _retry(app: Celery, setup: Setup) -> None:
    work, client = _worker_body(setup), _client_of(setup)

    @app.task(name=setup.task(), bind=True, max_retries=None)
    def retry(self: Any, slot: int, key: str, hold: float) -> None:
        lock = client().lock(f"bench:{key}", timeout=LEASE)
        if not lock.acquire(blocking=False):
            raise self.retry(countdown=RETRY_AFTER)
        try:
            work(slot, hold)
        finally:
            lock.release()


def _client_of(setup: Setup) -> Callable[[], redis.Redis]:
    @cache
    def client() -> redis.Redis:  # first called in a pool child, so each has its own
        return redis.Redis.from_url(setup.locks)

    return client


_DECLARE: dict[str, Callable[[Celery, Setup], None]] = {
    "plain": _plain,
    "locked": _locked,
    "redis_py": _redis_py,
    "redis_lock": _redis_lock,
    "retry": _retry,
}

if ENVIRONMENT in os.environ:
    app = make_app(Setup(**json.loads(os.environ[ENVIRONMENT])))

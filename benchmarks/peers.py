"""The app of a benchmark's worker: one task, which takes its lock with the peer's library.

Only this task is declared, so the worker of plain tasks does not use this library. All peers have
the same arguments, settings and body.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from celery import Celery

from benchmarks import legs
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
    rate: str = ""
    """Starts a second or in some seconds, such as ``200/s`` or ``1/3s``, for the peers of rates."""

    workers: int = 1

    def task(self) -> str:
        return f"benchmarks.{self.peer}"

    def other(self) -> str:
        """Name of a plain task that runs beside, and its queue."""
        return f"{self.task()}.other"


TITLES = {
    "plain": "plain Task",
    "locked": "LockedTask",
    "redis_py": "redis-py lock in the body",
    "redis_lock": "python-redis-lock in the body",
    "retry": f"self.retry(countdown={RETRY_AFTER})",
    "rated": "LockedTask(lock_rate)",
    "rate_limit": "Celery's rate_limit, divided by the workers",
    "throttle": "INCR a period, and self.retry",
    "cool_down": "python-redis-lock left to expire, and self.retry",
    "fair": "LockedTask(lock_fair_by)",
    "in_order": "LockedTask, in the order of arrival",
}


def missing(peer: str) -> str:
    """Return why a peer cannot run here, or an empty string."""
    if peer in ("redis_lock", "cool_down") and importlib.util.find_spec("redis_lock") is None:
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
    if setup.rate:
        _other(app, setup)
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


def _rated(app: Celery, setup: Setup) -> None:
    work = _worker_body(setup)

    @app.task(
        name=setup.task(),
        base=LockedTask,
        lock_key="bench:{key}",
        lock_limit=None,
        lock_rate=setup.rate,
    )
    def rated(slot: int, key: str, hold: float) -> None:  # noqa: ARG001
        work(slot, hold)


def _rate_limit(app: Celery, setup: Setup) -> None:
    work, (number, period) = _worker_body(setup), number_and_period(setup.rate)
    each_hour = 3600 * number / period / setup.workers

    @app.task(name=setup.task(), rate_limit=f"{each_hour:g}/h")
    def rate_limit(slot: int, key: str, hold: float) -> None:  # noqa: ARG001
        work(slot, hold)


def _throttle(app: Celery, setup: Setup) -> None:
    work, client = _worker_body(setup), _client_of(setup)
    number, period = number_and_period(setup.rate)

    @app.task(name=setup.task(), bind=True, max_retries=None)
    def throttle(self: Any, slot: int, key: str, hold: float) -> None:
        window, passed = divmod(time.time(), period)
        name = f"throttle:{key}:{window:.0f}"
        with client().pipeline() as pipe:
            started, _ = pipe.incr(name).expire(name, 2 * period).execute()
        if started > number:
            raise self.retry(countdown=period - passed + random.random() * period)
        work(slot, hold)


def _cool_down(app: Celery, setup: Setup) -> None:
    import redis_lock as library  # noqa: PLC0415  # optional

    work, client = _worker_body(setup), _client_of(setup)
    number, period = number_and_period(setup.rate)

    @app.task(name=setup.task(), bind=True, max_retries=None)
    def cool_down(self: Any, slot: int, key: str, hold: float) -> None:
        lock = library.Lock(client(), f"bench:{key}", expire=max(1, period // number))
        if not lock.acquire(blocking=False):
            raise self.retry(countdown=period / number * (1 + random.random()))
        work(slot, hold)


def _fair(app: Celery, setup: Setup) -> None:
    work = _worker_body(setup)

    @app.task(name=setup.task(), base=LockedTask, lock_key="bench", lock_fair_by="{key}")
    def fair(slot: int, key: str, hold: float) -> None:  # noqa: ARG001
        work(slot, hold)


def _in_order(app: Celery, setup: Setup) -> None:
    work = _worker_body(setup)

    @app.task(name=setup.task(), base=LockedTask, lock_key="bench")
    def in_order(slot: int, key: str, hold: float) -> None:  # noqa: ARG001
        work(slot, hold)


def _other(app: Celery, setup: Setup) -> None:
    work = _worker_body(setup)

    @app.task(name=setup.other())
    def other(slot: int, key: str, hold: float) -> None:  # noqa: ARG001
        work(slot, hold)


def number_and_period(rate: str) -> tuple[int, int]:
    """Return the number of starts, and the period in seconds, of ``200/s`` or ``1/3s``."""
    number, period = rate.removesuffix("s").split("/")
    return int(number), int(period or 1)


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
    "rated": _rated,
    "rate_limit": _rate_limit,
    "throttle": _throttle,
    "cool_down": _cool_down,
    "fair": _fair,
    "in_order": _in_order,
}

if ENVIRONMENT in os.environ:
    if legs.ENVIRONMENT in os.environ:
        legs.trace()
    app = make_app(Setup(**json.loads(os.environ[ENVIRONMENT])))

"""The servers and workers of a storm."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import redis
from typing_extensions import Self

from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.demo.redis_provider import find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.store.redis.sync import RedisStore
from chaos.broker import BROKERS, RedisBroker
from chaos.fault_plan import LEASE
from chaos.tasks import build
from integration.taskbook import Journal
from support.older_version import OlderVersion
from support.proxy import Proxy
from support.waiting import eventually
from support.workers import QUICK, CeleryWorker

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
SHUTDOWN = 15.0
"""Seconds for a warm shutdown; then the worker is killed. Celery's own can hang: a child that is
killed, or struck by a soft time limit, while it writes a result leaves a part of it in the pipe, on
which the main process then blocks (see _flush_outqueue in celery/concurrency/asynpool.py)."""

CRY = 0.3
"""Seconds in which a worker that hangs may log that; then it is killed."""

CREWS = (("prefork", 3), ("threads", 4), ("prefork", 3), ("threads", 4))
"""Pool and concurrency of each worker."""


def settings(locks: str, transport: Mapping[str, Any] = RedisBroker.options) -> dict[str, Any]:
    """Return the app's settings.

    Args:
        locks: URL of the locks' Redis.
        transport: options of the broker's transport.
    """
    return {
        "singleton_lock_backend": locks,
        "singleton_lock_lease": LEASE,
        "broker_connection_retry_on_startup": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_prefetch_multiplier": 2,
        "broker_transport_options": dict(transport),
    }


class ManagedWorker:
    """One place for a worker, in which one follows the other.

    Args:
        name: node name of each.
        start: makes a worker, not started.
        journal: for what becomes of them.
    """

    def __init__(self, name: str, start: Callable[[], CeleryWorker], journal: Journal) -> None:
        self.name = name
        self._new = start
        self._journal = journal
        self.worker: CeleryWorker | None = None
        self.past: list[CeleryWorker] = []
        self.ready = False
        self.asked_to_end = False
        self._end_by = math.inf
        self.stopped: list[int] = []

    def start(self) -> None:
        """Start a worker; :meth:`look` notes when it is ready."""
        self.worker = self._new().start(wait=False)
        self.past.append(self.worker)
        self.ready, self.asked_to_end, self.stopped = False, False, []
        self._end_by = math.inf

    def look(self) -> None:
        """Note that the worker has become ready, or that it has died of itself."""
        worker = self.worker
        if worker is None or self.stopped:
            return
        if worker.returncode is not None:
            if not self.asked_to_end:
                about = {"victim": worker.pid, "worker": self.name, "code": worker.returncode}
                self._journal.note("died", **about, last=worker.log_tail())
                print(f"{self.name} died; its log ends with:\n{worker.log_tail()}", flush=True)
            self.worker, self.ready = None, False
        elif not self.ready and " ready." in worker.log():
            self.ready = True
            self._journal.note("ready", worker=self.name, victim=worker.pid)
        elif time.monotonic() > self._end_by:
            self._journal.note("hung", worker=self.name, victim=worker.pid)
            worker.signal(signal.SIGUSR1)  # Celery logs where each thread stands
            time.sleep(CRY)
            self.kill()

    @property
    def strikable(self) -> bool:
        """Whether a fault may strike: it is ready, and not struck just now."""
        return self.worker is not None and self.ready and not (self.stopped or self.asked_to_end)

    def stop(self, pids: list[int]) -> None:
        """SIGSTOP processes."""
        self._journal.note("stop", victims=pids, worker=self.name)
        self.stopped = pids
        for pid in pids:
            _signal(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT what was stopped."""
        pids, self.stopped = self.stopped, []
        for pid in pids:
            _signal(pid, signal.SIGCONT)
        self._journal.note("cont", victims=pids, worker=self.name)

    def kill_child(self, pid: int) -> None:
        """SIGKILL a child."""
        self._journal.note("kill", victim=pid, worker=self.name)
        _signal(pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL the main process; its children die with it."""
        self.asked_to_end = True
        self._journal.note("kill", victim=self.worker.pid, worker=self.name)
        self.worker.kill()
        self.worker, self.ready = None, False

    def retire(self) -> None:
        """Ask for a warm shutdown."""
        self.asked_to_end, self._end_by = True, time.monotonic() + SHUTDOWN
        self._journal.note("retire", victim=self.worker.pid, worker=self.name)
        self.worker.terminate()


class Fleet:
    """A broker behind a proxy, workers, a Redis of results, and one of locks that keeps its data.

    Args:
        folder: for the history, the registers and, at the end, the logs.
        broker: one of :data:`chaos.broker.BROKERS`.
        broken: variant of the library that the workers run; see :mod:`chaos.defects`.
        managed_workers: pool and concurrency of each worker.
        past: an older version of this repository, which every second worker runs.
        flow: whether there are tasks with flow control.
    """

    def __init__(
        self,
        folder: Path,
        *,
        broker: str = "redis",
        broken: str = "",
        managed_workers: tuple[tuple[str, int], ...] = CREWS,
        past: OlderVersion | None = None,
        flow: bool = False,
    ) -> None:
        self.folder = folder
        self._flow = flow
        self.journal = Journal(folder)
        self._broken = broken
        self._exit = contextlib.ExitStack()
        provider = find_provider(os.environ.get("CSL_TEST_REDIS") or None)
        self.broker = BROKERS[broker](folder)
        self._results = RedisServer(provider)
        self.locks = RedisServer(provider, args=DURABLE)
        self.managed_workers = [
            ManagedWorker(
                f"c{n}", self._maker(f"c{n}", pool, slots, past if n % 2 else None), self.journal
            )
            for n, (pool, slots) in enumerate(managed_workers)
        ]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.broker)
            stack.enter_context(self._results)
            stack.enter_context(self.locks)
            self.proxy = stack.enter_context(Proxy(self.broker.port))
            self.conf = settings(self.locks.url, self.broker.options)
            self.app = build(
                self.broker.url, self._results.url, self.folder, self.conf, flow=self._flow
            )
            stack.callback(self.app.close)
            self.app.backend.on_task_call = lambda *_: None  # no subscription per task
            self.results = stack.enter_context(redis.Redis.from_url(self._results.url))
            client = redis.Redis.from_url(self.locks.url, socket_timeout=2, retry=None)
            self.store = RedisStore(stack.enter_context(client), Keyspace())
            stack.callback(self._end_workers)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def worker(
        self, name: str, pool: str, slots: int, past: OlderVersion | None = None, **options: Any
    ) -> CeleryWorker:
        """Return a worker of this fleet, not started."""
        return CeleryWorker(
            "chaos.worker_app",
            self.broker.url.replace(f":{self.broker.port}/", f":{self.proxy.port}/"),
            backend=self._results.url,
            pool=pool,
            concurrency=slots,
            name=name,
            args=QUICK,
            env={
                "CHAOS_FOLDER": str(self.folder),
                "CHAOS_FLOW": "1" if self._flow else "",
                "CHAOS_CONF": json.dumps(self.conf),
                "CHAOS_BROKEN": self._broken,
                "C_FORCE_ROOT": "1",
                **(past.environment if past else {}),
            },
            cwd=past.folder if past else None,
            **options,
        )

    def _maker(
        self, name: str, pool: str, slots: int, past: OlderVersion | None
    ) -> Callable[[], CeleryWorker]:
        return lambda: self.worker(name, pool, slots, past)

    def start(self) -> None:
        """Start all workers, and wait until they are ready."""
        for managed in self.managed_workers:
            managed.start()
        self.await_ready()

    def await_ready(self) -> None:
        """Wait until all workers that are being started are ready."""

        def ready() -> bool:
            for managed in self.managed_workers:
                managed.look()
            return all(managed.ready for managed in self.managed_workers)

        eventually(
            ready, 60, lambda: "\n".join(c.past[-1].log_tail() for c in self.managed_workers)
        )

    def heal(self) -> None:
        """End all faults, and have all workers run."""
        for managed in self.managed_workers:
            if managed.stopped:
                managed.go_on()
        for managed in self.managed_workers:
            if managed.asked_to_end and managed.worker is not None:
                eventually(
                    lambda managed=managed: managed.look() or managed.worker is None, 2 * SHUTDOWN
                )
            if managed.worker is None:
                managed.start()
        self.await_ready()

    def stop(self) -> None:
        """Shut all workers down, warmly and at once."""
        for managed in self.managed_workers:
            if managed.worker is not None:
                managed.retire()
        eventually(self._ended, 2 * SHUTDOWN, "all workers have ended")

    def _ended(self) -> bool:
        for managed in self.managed_workers:
            managed.look()
        return all(managed.worker is None for managed in self.managed_workers)

    def complaints(self) -> Iterator[tuple[str, str]]:
        """Yield (worker, line) of each failure that the library has logged."""
        for managed in self.managed_workers:
            for worker in managed.past:
                for line in worker.log().splitlines():
                    if any(sign in line for sign in FAILURES):
                        yield managed.name, line[:400]

    def keep_logs(self) -> None:
        """Copy the workers' logs into the folder."""
        for managed in self.managed_workers:
            for number, worker in enumerate(managed.past):
                (self.folder / f"{managed.name}-{number}.log").write_text(worker.log())
        (self.folder / "locks.log").write_text(self.locks.log)

    def _end_workers(self) -> None:
        for managed in self.managed_workers:
            for worker in managed.past:
                worker.forget()
                if worker in CeleryWorker.started:
                    CeleryWorker.started.remove(worker)


FAILURES = (
    "celery-singleton-lock could not handle",
    "in the worker's main loop",
    "the agent failed at",
    "a step of the agent failed",
    "the watchdog continues after an error",
    "failed, trying again",
    "on_lost of lock",
)
"""How the library logs that something of its own went wrong (an outage is none)."""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

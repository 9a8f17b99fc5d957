"""The servers and workers of a benchmark: its own, on free ports, stopped at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from celery import Celery

from benchmarks.board import Board, Ran
from benchmarks.delay import DelayedRedis
from benchmarks.peers import ENVIRONMENT, Setup, missing
from celery_singleton_lock.demo.redis_server import RedisServer

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parent.parent
START_TIMEOUT = 60.0
STOP_TIMEOUT = 15.0

Job = tuple[int, str, float]
"""Arguments of a task: slot on the board, key, seconds to hold (negative: until the gate opens)."""


class Worker:
    """One or more prefork workers that run the task of one peer, from its own queue.

    Args:
        setup: the peer and the addresses.
        processes: number of pool processes of each worker.
        folder: folder of the logs.
        workers: number of workers, each with its own main process.
    """

    def __init__(self, setup: Setup, processes: int, folder: Path, workers: int = 1) -> None:
        self.setup = setup
        self.peer = setup.peer
        self.board = Board(setup.board)
        self._processes = processes
        self._logs = [folder / f"{setup.peer}{number}.log" for number in range(workers)]
        self._publisher = Celery("driver", broker=setup.broker, set_as_current=False)
        self._mains: list[subprocess.Popen[bytes]] = []
        self._family: list[psutil.Process] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def slots(self) -> int:
        """Number of tasks that run at once."""
        return self._processes * len(self._logs)

    def log(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self._logs if log.exists())

    # -- life -------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._mains = [self._started(log) for log in self._logs]
        self._warm_up()
        mains = [psutil.Process(main.pid) for main in self._mains]
        self._family = [*mains, *(child for main in mains for child in main.children())]

    def _started(self, path: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.peers", "worker"]
        command += ["--pool", "prefork", "--concurrency", str(self._processes)]
        queues = f"{self.peer},{self.setup.other()}" if self.setup.rate else self.peer
        command += ["--queues", queues, "--hostname", f"{path.stem}@bench"]
        command += ["--loglevel", "WARNING"]
        # Messages between workers would count as commands of the tasks.
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        environment = {
            **os.environ,
            ENVIRONMENT: json.dumps(dataclasses.asdict(self.setup)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        with path.open("wb") as log:
            return subprocess.Popen(
                command,
                env=environment,
                cwd=path.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _warm_up(self) -> None:
        """Make each pool process run tasks, so that none connects or imports in a measured run.

        Raises:
            RuntimeError: the worker has ended, or a task or child of it has failed.
        """
        self.board.clear()
        count = 20 * self.slots
        jobs = [(slot, f"warm{slot}", 0.005) for slot in range(count)]
        if self.setup.rate:  # which Celery's own applies to all keys
            self.publish_others(jobs)
        else:
            self.publish(jobs)
        self.wait(count, START_TIMEOUT, self._is_well)
        # The second one of a worker is blocked, and imports what only blocked tasks need.
        blocked = 2 * len(self._logs)
        for slot in range(count, count + blocked):
            self.publish([(slot, "warm", 0.01)])
        self.wait(count + blocked, START_TIMEOUT, self._is_well)

    def stop(self) -> None:
        """Stop with a warm shutdown, then kill the remaining processes."""
        if not self._mains:
            return
        for main in self._mains:
            if main.poll() is None:
                main.send_signal(signal.SIGCONT)
                main.terminate()
        for main in self._mains:
            with contextlib.suppress(subprocess.TimeoutExpired):
                main.wait(STOP_TIMEOUT)
            main.kill()  # its pool processes end with it
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for main in self._mains:
            main.wait(STOP_TIMEOUT)
        self._mains = []
        self._publisher.close()

    # -- work -------------------------------------------------------------------------------------

    def publish(self, jobs: Iterable[Job]) -> None:
        """Send tasks, in this order."""
        self._send(self.setup.task(), self.peer, jobs)

    def publish_others(self, jobs: Iterable[Job]) -> None:
        """Send plain tasks to the other queue, in this order."""
        self._send(self.setup.other(), self.setup.other(), jobs)

    def _send(self, task: str, queue: str, jobs: Iterable[Job]) -> None:
        with self._publisher.producer_pool.acquire(block=True) as producer:
            for job in jobs:
                self._publisher.send_task(task, job, queue=queue, producer=producer)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Pause the main processes (SIGSTOP), so that all tasks are queued when they go on."""
        for main in self._mains:
            main.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for main in self._mains:
                main.send_signal(signal.SIGCONT)

    def run(self, jobs: Sequence[Job], timeout: float = 120.0) -> list[Ran]:
        """Send all tasks at once, and return their runs when all have ended."""
        self.board.clear()
        with self.held_back():
            self.publish(jobs)
        return self.wait(len(jobs), timeout)

    def wait(
        self, count: int, timeout: float, alive: Callable[[], bool] | None = None
    ) -> list[Ran]:
        """Wait until the first ``count`` tasks on the board have ended.

        Raises:
            RuntimeError: they have not in ``timeout`` seconds, or cannot any more.
        """
        try:
            return self.board.await_all(count, timeout, alive or self._is_running)
        except TimeoutError as error:
            codes = [main.returncode for main in self._mains if main.poll() is not None]
            state = f"has ended with {codes[0]}" if codes else "runs"
            msg = f"{self.peer}: {error}, and the worker {state}. Its log:\n{self.log()[-3000:]}"
            raise RuntimeError(msg) from None

    def _is_running(self) -> bool:
        return bool(self._mains) and all(main.poll() is None for main in self._mains)

    def _is_well(self) -> bool:
        """Whether it runs, and its log has no dead pool process and no failed task."""
        return self._is_running() and "ERROR/" not in self.log()

    # -- its processes ----------------------------------------------------------------------------

    def processor_time(self) -> tuple[float, float]:
        """Return the CPU seconds of the main processes and all pool processes so far."""
        seconds = [sum(process.cpu_times()[:2]) for process in self._family]
        return sum(seconds[: len(self._mains)]), sum(seconds[len(self._mains) :])

    def memory(self) -> int:
        """Return the memory of the first main process in bytes."""
        return int(self._family[0].memory_info().rss)

    def ports(self) -> dict[int, str]:
        """Return local port -> owner: ``main`` or ``child``."""
        owners: dict[int, str] = {}
        for number, process in enumerate(self._family):
            role = "main" if number < len(self._mains) else "child"
            for connection in _connections(process):
                owners[connection.laddr.port] = role
        return owners


def _connections(process: psutil.Process) -> list[psutil._common.pconn]:
    ask = getattr(process, "net_connections", None) or process.connections  # before psutil 6
    return [found for found in ask(kind="inet") if found.laddr]


class Rig:
    """Two Redis servers, a board, and a worker for each peer.

    Args:
        peers: who takes part.
        processes: size of each pool.
        slots: most tasks of one run.
        store_results: whether workers store the tasks' results, as is Celery's default.
        workers: number of workers of each peer.
        rate: starts of each key, for the peers of rates.
        delay: seconds by which each message between workers and the locks' Redis is delayed, in
            each direction.

    Raises:
        RuntimeError: a peer is not installed here, or its worker does not start.
    """

    def __init__(
        self,
        peers: Sequence[str],
        processes: int,
        slots: int,
        *,
        store_results: bool = True,
        workers: int = 1,
        rate: str = "",
        delay: float = 0.0,
    ) -> None:
        lacking = list(filter(None, map(missing, peers)))
        if lacking:
            raise RuntimeError("; ".join(lacking))
        self.broker = RedisServer()
        self.locks = RedisServer()
        self.delayed: DelayedRedis | None = None
        self.workers: dict[str, Worker] = {}
        self._peers = peers
        self._processes = processes
        self._slots = slots
        self._store_results = store_results
        self._workers = workers
        self._rate = rate
        self._delay = delay
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._exit:
            folder = Path(tempfile.mkdtemp(prefix="csl-benchmark-"))
            self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
            self._exit.enter_context(self.broker)
            self._exit.enter_context(self.locks)
            if self._delay:
                self.delayed = DelayedRedis(self.locks.port, self._delay, folder)
                self._exit.enter_context(self.delayed)
            locks = self.delayed.url if self.delayed else self.locks.url
            board = folder / "board"
            Board.create(board, max(self._slots, 1000))
            for peer in self._peers:
                setup = Setup(
                    peer,
                    self.broker.url,
                    locks,
                    str(board),
                    self._store_results,
                    self._rate,
                    self._workers,
                )
                worker = Worker(setup, self._processes, folder, self._workers)
                self.workers[peer] = self._exit.enter_context(worker)
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def owners(self, worker: Worker) -> dict[int, str]:
        """Return port of a connection, as a server sees it -> owner; see :meth:`Worker.ports`."""
        owners = worker.ports()
        through = self.delayed.ports() if self.delayed else {}
        return {**owners, **{out: owners[port] for out, port in through.items() if port in owners}}

    def settle(self) -> None:
        """Wait until the processes of the last run are idle."""
        time.sleep(0.3)

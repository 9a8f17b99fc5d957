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
    """A prefork worker that runs the task of one peer, from its own queue.

    Args:
        setup: the peer and the addresses.
        processes: number of pool processes.
        folder: folder of its log.
    """

    def __init__(self, setup: Setup, processes: int, folder: Path) -> None:
        self.setup = setup
        self.peer = setup.peer
        self.board = Board(setup.board)
        self._processes = processes
        self._log = folder / f"{setup.peer}.log"
        self._publisher = Celery("driver", broker=setup.broker, set_as_current=False)
        self._process: subprocess.Popen[bytes] | None = None
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
    def pid(self) -> int:
        """The main process."""
        return self._process.pid if self._process else 0

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    # -- life -------------------------------------------------------------------------------------

    def _start(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.peers", "worker"]
        command += ["--pool", "prefork", "--concurrency", str(self._processes)]
        command += ["--queues", self.peer, "--hostname", f"{self.peer}@bench"]
        command += ["--loglevel", "WARNING"]
        # Messages between workers would count as commands of the tasks.
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        environment = {
            **os.environ,
            ENVIRONMENT: json.dumps(dataclasses.asdict(self.setup)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._warm_up()
        self._family = [psutil.Process(self.pid), *self.children()]

    def _warm_up(self) -> None:
        """Make each pool process run tasks, so that none connects or imports in a measured run.

        Raises:
            RuntimeError: the worker has ended, or a task or child of it has failed.
        """
        self.board.clear()
        count = 20 * self._processes
        jobs = [(slot, f"warm{slot}", 0.005) for slot in range(count)]
        self.publish(jobs)
        self.wait(count, START_TIMEOUT, self._is_well)
        for slot in range(2):  # the second one is blocked, and imports what only blocked tasks need
            self.publish([(count + slot, "warm", 0.01)])
        self.wait(count + 2, START_TIMEOUT, self._is_well)

    def stop(self) -> None:
        """Stop with a warm shutdown, then kill the remaining processes."""
        if self._process is None:
            return
        if self._is_running():
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)
        self._process.kill()  # its pool processes end with it
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(STOP_TIMEOUT)
        self._process = None
        self._publisher.close()

    # -- work -------------------------------------------------------------------------------------

    def publish(self, jobs: Iterable[Job]) -> None:
        """Send tasks, in this order."""
        with self._publisher.producer_pool.acquire(block=True) as producer:
            for job in jobs:
                self._publisher.send_task(
                    self.setup.task(), job, queue=self.peer, producer=producer
                )

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Pause the main process (SIGSTOP), so that all tasks are queued when it goes on."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

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
            state = "runs" if self._is_running() else f"has ended with {self._exit_code()}"
            msg = f"{self.peer}: {error}, and the worker {state}. Its log:\n{self.log()[-3000:]}"
            raise RuntimeError(msg) from None

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _is_well(self) -> bool:
        """Whether it runs, and its log has no dead pool process and no failed task."""
        return self._is_running() and "ERROR/" not in self.log()

    def _exit_code(self) -> int | None:
        return self._process.poll() if self._process else None

    # -- its processes ----------------------------------------------------------------------------

    def processor_time(self) -> tuple[float, float]:
        """Return the CPU seconds of the main process and all pool processes so far."""
        main, *children = [sum(process.cpu_times()[:2]) for process in self._family]
        return main, sum(children)

    def memory(self) -> int:
        """Return the memory of the main process in bytes."""
        return int(self._family[0].memory_info().rss)

    def ports(self) -> dict[int, str]:
        """Return local port -> owner: ``main`` or ``child``."""
        owners: dict[int, str] = {}
        for process in self._family:
            role = "main" if process.pid == self.pid else "child"
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

    Raises:
        RuntimeError: a peer is not installed here, or its worker does not start.
    """

    def __init__(
        self, peers: Sequence[str], processes: int, slots: int, *, store_results: bool = True
    ) -> None:
        lacking = list(filter(None, map(missing, peers)))
        if lacking:
            raise RuntimeError("; ".join(lacking))
        self.broker = RedisServer()
        self.locks = RedisServer()
        self.workers: dict[str, Worker] = {}
        self._peers = peers
        self._processes = processes
        self._slots = slots
        self._store_results = store_results
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._exit:
            folder = Path(tempfile.mkdtemp(prefix="csl-benchmark-"))
            self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
            self._exit.enter_context(self.broker)
            self._exit.enter_context(self.locks)
            board = folder / "board"
            Board.create(board, max(self._slots, 1000))
            for peer in self._peers:
                setup = Setup(
                    peer, self.broker.url, self.locks.url, str(board), self._store_results
                )
                worker = Worker(setup, self._processes, folder)
                self.workers[peer] = self._exit.enter_context(worker)
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def settle(self) -> None:
        """Wait until the processes of the last run are idle."""
        time.sleep(0.3)

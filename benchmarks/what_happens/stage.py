"""The stage of a scene: two Redis servers, prefork workers, a caller, and what can be seen."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from benchmarks.what_happens.app import ENVIRONMENT, Journal, Setup, build
from benchmarks.what_happens.packages import TASK, Wanted
from celery_singleton_lock.demo.redis_server import RedisServer

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 60.0
STOP_TIMEOUT = 10.0
PATIENCE = 25.0
"""Seconds after which something that did not happen counts as: it does not."""

T = TypeVar("T")


def when(fact: Callable[[], T], timeout: float = PATIENCE) -> T | None:
    """Return the first true answer; None if there is none in time."""
    deadline = time.monotonic() + timeout
    while not (answer := fact()):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return answer


@dataclass(frozen=True)
class Call:
    """What the caller got.

    Args:
        id: of the task that was sent; empty if none was.
        answer: ``sent``, or what came instead.
    """

    id: str
    answer: str = "sent"


@dataclass(frozen=True)
class Run:
    """One time that the body ran; ``ended`` is None while it runs, and if it was killed."""

    id: str
    key: str
    n: int
    retries: int
    pid: int
    began: float
    ended: float | None
    lost: bool | None


@dataclass(frozen=True)
class Next:
    """When the key's next task began.

    Args:
        after: seconds; None if it did not within ``PATIENCE``.
        refused: calls that were not sent before.
    """

    after: float | None
    refused: int

    @property
    def brief(self) -> str:
        if self.after is None:
            return f"next does not run within {PATIENCE:.0f} s"
        return f"next runs after {max(0.0, self.after):.1f} s"

    @property
    def told(self) -> str:
        refused = f" ({self.refused} x not sent before)" if self.refused else ""
        return f"{self.brief}{refused}"


class Worker:
    """A prefork worker, in a process group of its own."""

    def __init__(self, setup: Setup, name: str, concurrency: int) -> None:
        self._log = Path(setup.folder) / f"{name}.log"
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.what_happens.app", "worker"]
        command += ["--concurrency", str(concurrency), "--hostname", f"{name}@stage"]
        command += ["--loglevel", "INFO", "--without-gossip", "--without-mingle"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, ENVIRONMENT: setup.to_json(), "PYTHONPATH": path},
                cwd=setup.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Raise RuntimeError, with its log, if it does not start."""
        ready = when(
            lambda: " ready." in self.log() or self._process.poll() is not None, START_TIMEOUT
        )
        if not ready or self._process.poll() is not None:
            msg = f"a worker does not start:\n{self.log()[-3000:]}"
            raise RuntimeError(msg)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def has(self, pid: int) -> bool:
        """Whether a process is one of its children."""
        return pid in [child.pid for child in psutil.Process(self._process.pid).children()]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it do nothing meanwhile."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill main process and children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT)


class Stage:
    """Where a scene is played, for one package.

    Args:
        package: a key of ``PACKAGES``.
        wanted: the task's declaration.
        workers: how many.
        concurrency: slots of each.
    """

    def __init__(
        self, package: str, wanted: Wanted, workers: int = 1, concurrency: int = 2
    ) -> None:
        self._exit = contextlib.ExitStack()
        self._plan = (package, wanted, workers, concurrency)
        self._known: set[str] = set()

    def __enter__(self) -> Self:
        package, wanted, workers, concurrency = self._plan
        with self._exit:
            folder = tempfile.mkdtemp(prefix="csl-what-happens-")
            self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
            self.broker = self._exit.enter_context(RedisServer())
            self.locks = self._exit.enter_context(RedisServer())
            setup = Setup(package, self.broker.url, self.locks.url, folder, wanted)
            self.setup = setup
            self.app = build(setup)
            self.journal = Journal(folder)
            self.workers = []
            for number in range(workers):
                worker = Worker(setup, f"w{number}", concurrency)
                self.workers.append(worker)
                self._exit.callback(worker.kill)
            for worker in self.workers:
                worker.await_ready()
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    # -- the caller -------------------------------------------------------------------------------

    def call(
        self, key: str, n: int = 0, hold: Any = 0, end: str = "return", **options: Any
    ) -> Call:
        """Call the task with positional arguments, and options of Celery's own."""
        return self._apply((key, n, hold, end), {}, options)

    def know(self, task_id: str) -> None:
        """Count a task that somebody else has called as one that was called before."""
        self._known.add(task_id)

    def call_by_name(self, key: str, n: int = 0, hold: Any = 0, end: str = "return") -> Call:
        """Call the task with the same arguments by name."""
        return self._apply((), {"key": key, "n": n, "hold": hold, "end": end}, {})

    def _apply(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> Call:
        try:
            result = self.app.tasks[TASK].apply_async(args, kwargs, **options)
        except Exception as error:  # noqa: BLE001  # whatever the package raises is the observation
            return Call("", f"raises `{type(error).__name__}`")
        if result.id is None:
            return Call("", f"a result that is {result.state}")
        if result.id in self._known:
            return Call("", "returns the first one's `AsyncResult`")
        self._known.add(result.id)
        return Call(result.id)

    def first(self, key: str, hold: Any = "first", end: str = "return") -> Run:
        """Call the task, and return when it runs.

        Raises:
            RuntimeError: it does not; then there is nothing to see.
        """
        call = self.call(key, 1, hold, end)
        run = when(lambda: self.run_of(call.id), START_TIMEOUT)
        if run is None:
            msg = f"the first task does not run ({call.answer})"
            raise RuntimeError(msg)
        return run

    def next_of(self, key: str, since: float) -> Next:
        """Call the task for this key until it is sent, and tell when it has begun."""
        refused, call = 0, Call("", "")
        while time.monotonic() < since + PATIENCE:
            if not call.id:
                call = self.call(key, 2)
                refused += not call.id
            run = when(lambda: self.run_of(call.id), 0.1)  # noqa: B023
            if run:
                return Next(run.began - since, refused)
        return Next(None, refused)

    def state(self, task_id: str) -> str:
        return str(self.app.AsyncResult(task_id).state)

    def await_state(self, task_id: str, *states: str) -> str:
        """Return the state of a task once it is one of these; or what it is after ``PATIENCE``."""
        when(lambda: self.state(task_id) in states)
        return self.state(task_id)

    # -- what was seen ----------------------------------------------------------------------------

    def runs(self, key: str = "") -> list[Run]:
        """Return all runs (of a key), in the order in which they began."""
        lines = self.journal.lines()
        ends = {line["run"]: line for line in lines if line["event"] == "end"}
        return [
            Run(
                line["id"],
                line["key"],
                line["n"],
                line["retries"],
                line["pid"],
                line["t"],
                end["t"] if end else None,
                end["lost"] if end else None,
            )
            for line in lines
            if line["event"] == "begin" and key in {"", line["key"]}
            for end in [ends.get(line["run"])]
        ]

    def run_of(self, task_id: str) -> Run | None:
        return next((run for run in self.runs() if run.id == task_id), None)

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.journal.lines() if line["event"] == event]


def overlap(one: Run, other: Run) -> float:
    """Return for how many seconds two runs ran at the same time."""
    now = time.monotonic()
    ends = [run.ended or now for run in (one, other)]
    return max(0.0, min(ends) - max(one.began, other.began))

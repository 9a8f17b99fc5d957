# it waits for processes, in seconds of the real clock
"""Plays one run: a worker, a crowd of orders, and a killer."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from celery_singleton_lock.demo.workload import HOT, STOCK, Order
from celery_singleton_lock.demo.history import History, Hold, Kill
from celery_singleton_lock.demo.shop import DIRECTORY, READY, Marks, Shop, app
from celery_singleton_lock.demo.signals import TICK, tick, undisturbed
from celery_singleton_lock.demo.figures import Figures, judge

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

PROCESSES: Final = 4
START_TIMEOUT: Final = 30.0
STOP_TIMEOUT: Final = 0.5
"""Seconds after SIGKILL, which nobody survives: what is left only waits for init to reap it."""

STALLED: Final = 12.0
"""Seconds without any sign of work after which a run is given up; what is open then is lost."""

STOPPING: Final = 0.005
"""Seconds that a process is given to come to a halt once it has been told to."""


class DemoError(RuntimeError):
    """The play cannot go on; the message says why."""


# --- the worker -----------------------------------------------------------------------------------


class Worker:
    """A prefork Celery worker with four processes, in a session of its own.

    The terminal's Ctrl-C does not reach it: the demo ends it. If the demo itself is killed, the
    worker ends because its standard input does.

    Args:
        url: of the broker, which keeps the locks as well.
        directory: where the shops are.
    """

    def __init__(self, url: str, directory: Path) -> None:
        """Keep what :meth:`__enter__` needs."""
        self._url = url
        self._directory = directory
        self._log = directory / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start, and return when it takes orders."""
        try:
            with self._log.open("wb") as log, undisturbed():
                self._process = self._launch(log)
            self._await_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it, with all of its processes."""
        self.end()

    def ensure_running(self) -> None:
        """Look whether it is there.

        Raises:
            DemoError: it has ended; the message ends with its log.
        """
        if self._process is None or self._process.poll() is not None:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            msg = f"The Celery worker has ended by itself. Its log ends with:\n{tail}"
            raise DemoError(msg)

    def end(self) -> None:
        """Kill the whole process group, and wait until it is gone. Twice is once."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill_group(process.pid)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        deadline = time.monotonic() + STOP_TIMEOUT
        while _kill_group(process.pid) and time.monotonic() < deadline:
            time.sleep(TICK)

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "celery", "-A", f"{__package__}.shop", "worker"]
        command += ["--pool", "prefork", "--concurrency", str(PROCESSES), "--loglevel", "WARNING"]
        command += ["--hostname", "flash-sale@%h", "--without-gossip", "--without-mingle"]
        # Settings of the user's own Celery, such as another broker, stay out of it.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CELERY_")}
        return subprocess.Popen(  # noqa: S603  # our own interpreter, with our own arguments
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self._directory,
            start_new_session=True,
            env={
                **inherited,
                "CELERY_BROKER_URL": self._url,
                DIRECTORY: str(self._directory),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not (self._directory / READY).exists():
            self.ensure_running()
            if time.monotonic() > deadline:
                msg = f"The Celery worker was not ready after {START_TIMEOUT:.0f} s."
                raise DemoError(msg)
            tick()


def _kill_group(leader: int) -> bool:
    """Kill a process group; return whether there was anybody left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
        return True
    return False


# --- the killer -----------------------------------------------------------------------------------


class Killer:
    """Kills processes in mid-task, spread over the run.

    Args:
        kills: how many.
        orders: in the course of how many orders.
        seed: of the choice.
    """

    def __init__(self, kills: int, orders: int, seed: int) -> None:
        """Lay down after how many orders each kill is due; the last ones are left in peace."""
        self._due = deque(round(orders * 0.85 * (i + 1) / (kills + 1)) for i in range(kills))
        self._dice = random.Random(seed)  # noqa: S311  # a play, no secret

    def strike(self, history: History, marks: Marks) -> Kill | None:
        """Kill a process if it is time and one is in mid-task."""
        if not self._due or len(history.finished()) < self._due[0]:
            return None
        victim = self._choose(history)
        if victim is None:
            return None
        kill = _kill_in_mid_task(victim, history, marks)
        if kill is not None:
            self._due.popleft()
        return kill

    def _choose(self, history: History) -> Hold | None:
        """Choose who dies, every second time from the hot product."""
        hot = history.holding(HOT) if len(self._due) % 2 == 0 else []
        candidates = hot or list(history.at_work.values())
        return self._dice.choice(candidates) if candidates else None


def _kill_in_mid_task(victim: Hold, history: History, marks: Marks) -> Kill | None:
    """Stop the process, look whether it is still at that task, and only then kill it."""
    try:
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(STOPPING)
        history.add(marks.read())
        if history.at_work.get(victim.pid) is not victim:
            os.kill(victim.pid, signal.SIGCONT)
            return None
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return history.kill(victim.pid, time.monotonic())


# --- a run ----------------------------------------------------------------------------------------


class Audience(Protocol):
    """Who watches."""

    def watch(self, run: Run) -> None:
        """Show how it stands; called often."""
        ...


@dataclass(frozen=True, slots=True)
class Scene:
    """What is played.

    Args:
        name: ``plain``, ``locked`` or ``killed``.
        title: for people.
        task: the task that buys.
        kills: processes that are killed meanwhile.
    """

    name: str
    title: str
    task: Any
    kills: int = 0

    @property
    def is_locked(self) -> bool:
        """Whether its tasks take locks."""
        return self.name != "plain"


class Run:
    """One scene on stage.

    Args:
        scene: what is played.
        orders: by arrival.
        worker: who serves them.
        url: of the broker.
        directory: where the shops are.
        seed: of the kills.
    """

    def __init__(
        self,
        scene: Scene,
        orders: list[Order],
        worker: Worker,
        *,
        url: str,
        directory: Path,
        seed: int,
    ) -> None:
        """Fill the shelves."""
        self.scene = scene
        self.orders = orders
        self.history = History()
        self.started = 0.0
        self.ended = 0.0
        self.shop = Shop(directory, scene.name)
        self.shop.open_doors(STOCK)
        self._marks = Marks(directory, scene.name)
        self._worker = worker
        self._url = url
        self._killer = Killer(scene.kills, len(orders), seed)
        self._outside = deque(orders)
        self._stirred = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since it began, until now or its end."""
        return (self.ended or time.monotonic()) - self.started

    @property
    def published(self) -> int:
        """How many orders have been sent."""
        return len(self.orders) - len(self._outside)

    def play(self, audience: Audience, until: float) -> Figures:
        """Let the crowd in, and wait until every order is served.

        Args:
            audience: who watches.
            until: the machine's monotonic time at which it is given up.

        Raises:
            DemoError: the worker has ended.
        """
        self.started = self._stirred = time.monotonic()
        # The URL is given here, because CELERY_BROKER_URL may name the broker of the user's own.
        with app.connection_for_write(self._url) as connection, connection.Producer() as producer:
            while not self._is_over(until):
                self._admit(lambda order: self.scene.task.apply_async((), order, producer=producer))
                self._look()
                audience.watch(self)
                tick()
        self.ended = time.monotonic()
        return self._figures()

    def _is_over(self, until: float) -> bool:
        now = time.monotonic()
        served = not self._outside and len(self.history.finished()) == len(self.orders)
        return served or now > until or now - self._stirred > STALLED

    def _admit(self, send: Callable[[dict[str, object]], object]) -> None:
        while self._outside and self._outside[0].arrives <= self.seconds:
            order = self._outside.popleft()
            send(
                {
                    "run": self.scene.name,
                    "order": order.number,
                    "product": order.product,
                    "units": order.units,
                    "work": order.work,
                }
            )
            self._stirred = time.monotonic()

    def _look(self) -> None:
        self._worker.ensure_running()
        if self.history.add(self._marks.read()):
            self._stirred = time.monotonic()
        self._killer.strike(self.history, self._marks)

    def _figures(self) -> Figures:
        sent = self.orders[: self.published]
        return judge(sent, self.shop.orders(), self.shop.left(), self.history, self.seconds)

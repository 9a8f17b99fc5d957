"""Real Celery workers as processes.

::

    with CeleryWorker("support_app", broker=redis_url, pool="prefork", concurrency=2) as worker:
        ...
        worker.kill()

All processes of a worker end with the test. Its log is attached to the report of a failing test
(``pytest_runtest_makereport`` in conftest.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import ClassVar

import psutil

from support import fork_server
from support.waiting import eventually

TESTS = fork_server.TESTS
QUICK = ("--without-mingle", "--without-gossip")
"""Saves a second per start."""
START_TIMEOUT = 30
STOP_TIMEOUT = 120


class CeleryWorker:
    """One worker process with its pool.

    Args:
        app: argument of ``celery -A``; modules in tests/ can be imported.
        broker: URL of the broker, passed as CELERY_BROKER_URL.
        backend: URL of the result backend, passed as CELERY_RESULT_BACKEND; default: the broker.
        pool: prefork, threads, solo, gevent, eventlet.
        concurrency: number of slots of the pool.
        name: node name before the ``@``; default: a new one.
        queues: names, for ``-Q``.
        args: further arguments of ``celery worker``; a test of what they leave out gives ``()``.
        env: further environment variables.
        loglevel: level of the worker's log.
        cwd: working directory; default: that of the test.
    """

    started: ClassVar[list[CeleryWorker]] = []
    _numbers: ClassVar = itertools.count(1)

    def __init__(
        self,
        app: str,
        broker: str,
        *,
        backend: str | None = None,
        pool: str = "prefork",
        concurrency: int = 2,
        name: str | None = None,
        queues: str | Sequence[str] = (),
        args: Sequence[str] = QUICK,
        env: Mapping[str, str] | None = None,
        loglevel: str = "INFO",
        cwd: str | Path | None = None,
    ):
        self.name = name or f"w{next(self._numbers)}"
        self.app, self.pool, self.concurrency = app, pool, concurrency
        self._queues = [queues] if isinstance(queues, str) else list(queues)
        self._args, self._loglevel, self._cwd = tuple(args), loglevel, cwd
        self._env = {
            **os.environ,
            "CELERY_BROKER_URL": broker,
            "CELERY_RESULT_BACKEND": backend or broker,
            "PYTHONPATH": fork_server.path(),
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        self._log_file = Path(tempfile.gettempdir(), f"csl-{self.name}-{token_hex(8)}.log")
        self._process: subprocess.Popen[bytes] | fork_server.ForkedWorker | None = None
        self._family: list[psutil.Process] = []

    def __repr__(self):
        return f"<CeleryWorker {self.name} {self.app} -P {self.pool} -c {self.concurrency}>"

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    @property
    def command(self) -> list[str]:
        """The whole command line."""
        command = [sys.executable, "-m", "celery", "-A", self.app, "worker", "-P", self.pool]
        command += ["-c", str(self.concurrency), "-n", f"{self.name}@%h"]
        command += ["--loglevel", self._loglevel]
        if self._queues:
            command += ["-Q", ",".join(self._queues)]
        return [*command, *self._args]

    @property
    def environment(self) -> dict[str, str]:
        """Its environment, for other commands of the same app."""
        return dict(self._env)

    @property
    def node_name(self) -> str:
        """Its name with the host, as remote control addresses it."""
        return f"{self.name}@{socket.gethostname()}"

    @property
    def pid(self) -> int:
        """Process id of the worker's main process."""
        return self._main.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the main process, None while it runs."""
        return self._main.poll()

    @property
    def is_running(self) -> bool:
        """Whether the main process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> CeleryWorker:
        """Start it, and return when its log says that it is ready."""
        assert not self.is_running, "it is running already"
        with self._log_file.open("ab") as log:
            self._process = self._launch(log.fileno())
        self.started.append(self)
        if wait:
            self.await_ready()
        return self

    def await_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait for "ready." in the log; fail at once if it has ended."""
        eventually(
            lambda: " ready." in self.log() or self._main.poll() is not None,
            timeout,
            lambda: f"{self} ready; its log ends with:\n{self.log_tail()}",
        )
        if self._main.poll() is not None:
            text = f"{self} ended with {self.returncode} at start; log:\n{self.log_tail()}"
            self.end()
            raise AssertionError(text)

    def await_log(self, text: str, timeout: float = 10) -> None:
        """Wait until ``text`` is in the log."""
        eventually(lambda: text in self.log(), timeout, f"{text!r} in the log of {self}")

    def child_pids(self) -> list[int]:
        """Process ids of the pool's children, without what they started themselves."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.pid).children()]
        return []

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process: SIGSTOP, SIGCONT, SIGQUIT, …."""
        self._remember()
        self._main.send_signal(number)

    def terminate(self) -> None:
        """Ask for a warm shutdown (SIGTERM): running tasks may end. Does not wait."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill only the main process (SIGKILL), and wait for its end."""
        self.signal(signal.SIGKILL)
        self._main.wait(STOP_TIMEOUT)

    def wait(self, timeout: float = STOP_TIMEOUT) -> int:
        """Wait for the main process' end, and return its exit code."""
        return self._main.wait(timeout)

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Warm shutdown, then kill what is left of the whole tree."""
        if self.is_running:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._main.wait(timeout)
        self.end()

    def end(self) -> None:
        """Kill the whole process tree, and wait for its end. May be called again."""
        self._remember()
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        eventually(lambda: not any(map(_runs, self._family)), STOP_TIMEOUT, "its processes end")
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT)
        self._family = []

    def log(self) -> str:
        """What it has printed so far."""
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    def log_tail(self, lines: int = 60) -> str:
        """The last lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def forget(self) -> None:
        """End, and remove the log. An illegal move of a message in it is a failure."""
        self.end()
        illegal = [line for line in self.log().splitlines() if "illegal move: " in line]
        self._log_file.unlink(missing_ok=True)
        assert not illegal

    def _launch(self, log: int) -> subprocess.Popen[bytes] | fork_server.ForkedWorker:
        """Start the main process: forked if possible, which is cheaper, else by its command."""
        if fork_server.fits(self.pool, self._env):
            cwd = str(Path(self._cwd or "").resolve())
            return fork_server.fork_server().start(self.command[3:], self._env, cwd, log)
        return subprocess.Popen(
            self.command,
            env=self._env,
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The kernel ties this to the thread: another one may outlive a killed test run.
            preexec_fn=fork_server.end_with_parent if _in_main_thread() else None,  # noqa: PLW1509  # it only makes a system call
        )

    @property
    def _main(self) -> subprocess.Popen[bytes] | fork_server.ForkedWorker:
        if self._process is None:
            text = f"{self} has not been started"
            raise AssertionError(text)
        return self._process

    def _remember(self) -> None:
        """Record the process tree while its root runs: later, orphans cannot be found."""
        if self.is_running:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(self.pid)
                for process in [root, *root.children(recursive=True)]:
                    if process not in self._family:
                        self._family.append(process)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

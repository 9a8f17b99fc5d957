"""The Celery worker of the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from celery_singleton_lock.demo.shop import DIRECTORY, READY
from celery_singleton_lock.demo.signals import TICK, tick, undisturbed

if TYPE_CHECKING:
    from typing_extensions import Self

PROCESSES: Final = 4
START_TIMEOUT: Final = 30.0
STOP_TIMEOUT: Final = 0.5
"""Seconds within which init removes the processes after SIGKILL."""


class DemoError(RuntimeError):
    """The demo cannot start or continue. The message says why."""


class Worker:
    """A prefork Celery worker with four pool processes, in a session of its own.

    Ctrl-C in the terminal does not reach it, so the demo ends it. If the demo is killed, the worker
    ends because its standard input is closed.

    Args:
        url: URL of the Redis for the broker and the locks.
        directory: directory of the shops.
    """

    def __init__(self, url: str, directory: Path) -> None:
        """Create it. :meth:`__enter__` starts the process."""
        self._url = url
        self._directory = directory
        self._log = directory / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the worker, and return when it is ready."""
        try:
            with self._log.open("wb") as log, undisturbed():
                self._process = self._launch(log)
            self._await_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the worker and its pool processes."""
        self.end()

    def ensure_running(self) -> None:
        """Check that the worker runs.

        Raises:
            DemoError: it has ended. The message ends with its log.
        """
        if self._process is None or self._process.poll() is not None:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            msg = f"The Celery worker has ended unexpectedly. Its log ends with:\n{tail}"
            raise DemoError(msg)

    def end(self) -> None:
        """Kill the process group, and wait for its end. May be called again."""
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
        # Without the user's Celery settings, which may name another broker.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CELERY_")}
        return subprocess.Popen(  # noqa: S603  # this interpreter, with fixed arguments
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
    """Kill a process group; return whether it had processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
        return True
    return False

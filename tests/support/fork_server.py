"""A fork server: it has imported Celery, and forks a process for each worker under test.

Two thirds of the CPU time of a worker's start are imports of Celery, kombu and redis-py, and the
suite starts some hundreds of workers. So each process of the test run has one fork server::

    pytest ── socket ──> fork server (this file) ── fork ──> worker

A forked worker is a process in a session of its own, with its command line, environment and working
directory. It imports the app and this library itself. It differs from a started one in the modules
that are imported already, in its parent, and in the hash seed, which all forks share. A worker that
cannot be forked is started by its command: see :func:`fits`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

POOLS: Final = ("prefork", "threads", "solo")
"""Pools whose workers can be forked. Gevent and eventlet must patch modules before any import."""
OURS: Final = re.compile(
    r"(BOOK|CHAOS|PYTEST|FLASH_SALE|LEDGER|QUORUM|REPORT|README|SITE)_\w+|BAD|BREAK"
    r"|CELERY_(BROKER_URL|RESULT_BACKEND)|C_FORCE_ROOT|DJANGO_SETTINGS_MODULE"
    r"|_MP_FORK_LOG\w+|CELERY_LOG_\w+"  # left by a worker in a thread of this process
)
"""Environment variables that no import of Celery reads."""
MEASURED: Final = bool({"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"} & set(os.environ))
"""Whether coverage is measured in all processes."""
LIMIT: Final = 1 << 20  # bytes of a message
MODULES: Final = """
celery.app.amqp celery.app.builtins celery.app.control celery.app.events celery.app.log
celery.apps.worker celery.backends.redis celery.backends.rpc
celery.bin.amqp celery.bin.control celery.bin.events celery.bin.multi celery.bin.purge
celery.bin.shell celery.bin.upgrade celery.bin.worker
celery.concurrency.prefork celery.concurrency.solo celery.concurrency.thread
celery.contrib.abortable celery.events.state celery.loaders.app celery.worker.autoscale
celery.worker.components celery.worker.consumer celery.worker.loops celery.worker.pidbox
celery.worker.strategy dateutil.parser kombu.transport.pyamqp kombu.transport.redis
psutil
asyncio ctypes dataclasses importlib.metadata inspect secrets sqlite3 typing uuid
"""
"""Modules to import first. Not celery.bin.celery, which may load this library's commands."""


TESTS: Final = Path(__file__).parents[1]


def path() -> str:
    """Return the PYTHONPATH of all workers under test."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(TESTS), str(TESTS / "support/stubs"), *filter(None, [given])])


class ForkedWorker:
    """A forked worker, with the methods of :class:`subprocess.Popen` that the tests use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._server = server

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self._server.listen(0.1 if left is None else min(left, 0.1))
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The test's side of the socket. The fork server ends when the socket is closed."""

    def __init__(self) -> None:
        self._socket, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []
        self._lock = threading.RLock()
        self._environment = dict(os.environ)
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other_end.fileno())],
                env={**os.environ, "PYTHONPATH": path(), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                start_new_session=True,
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return whether the imports would be the same with this environment."""
        then = {**self._environment, "PYTHONPATH": path(), "PYTHONUNBUFFERED": "1"}
        changed = {name for name in {*then, *env} if then.get(name) != env.get(name)}
        return all(OURS.fullmatch(name) for name in changed)

    def start(
        self, arguments: list[str], env: Mapping[str, str], cwd: str, log: int
    ) -> ForkedWorker:
        """Start a worker with the arguments of ``python -m celery``."""
        request = json.dumps({"arguments": arguments, "env": dict(env), "cwd": cwd}).encode()
        with self._lock:
            socket.send_fds(self._socket, [request], [log])
            while not self._pids:
                self.listen(None)
            return ForkedWorker(self, self._pids.pop())

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker, None while it runs."""
        self.listen(0)
        return self._codes.get(pid)

    def listen(self, timeout: float | None) -> None:
        """Read messages of the fork server for some seconds; None: until the first message."""
        with self._lock:
            while select.select([self._socket], [], [], timeout)[0]:
                received = self._socket.recv(LIMIT)
                if not received:
                    raise AssertionError("the fork server has ended; see stderr")
                message = json.loads(received)
                if "started" in message:
                    self._pids.append(message["started"])
                    self._codes.pop(message["started"], None)  # of an earlier process with this id
                else:
                    self._codes[message["ended"]] = message["code"]
                timeout = 0


@functools.cache
def fork_server() -> ForkServer:
    """Return the fork server of this process."""
    return ForkServer()


def fits(pool: str, env: Mapping[str, str]) -> bool:
    """Return whether a worker may be forked.

    Not if its pool patches imported modules, nor if its environment could change imports, nor if
    coverage is measured, which starts with the interpreter.
    """
    unusable = MEASURED or sys.platform != "linux"
    return pool in POOLS and not unusable and fork_server().fits(env)


# --- the fork server's side -----------------------------------------------------------------------

_SAFE: Final = getattr(sys.flags, "safe_path", False)  # Python 3.11: nothing before PYTHONPATH


def main(channel: socket.socket) -> None:
    """Fork workers on request, and report their ends. Only a forked worker returns from here."""
    if not _SAFE:
        del sys.path[0]  # this folder
    rest = sys.path[len(os.environ["PYTHONPATH"].split(os.pathsep)) :]
    for name in MODULES.split():
        with contextlib.suppress(ImportError):  # another version of Celery
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    while True:
        readable, _, _ = select.select([channel, reader], [], [])
        if reader in readable:
            os.read(reader, 4096)
            report_ends(channel)
        if channel in readable:
            request, fds, _, _ = socket.recv_fds(channel, LIMIT, 1)
            if not request:
                os._exit(0)
            pid = os.fork()
            if not pid:
                os.close(reader)
                os.close(writer)
                channel.close()
                become_worker(json.loads(request), fds[0], rest)
                return
            os.close(fds[0])
            channel.send(json.dumps({"started": pid}).encode())


def report_ends(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            channel.send(json.dumps({"ended": pid, "code": code}).encode())


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, such as a killed test run."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def become_worker(request: dict[str, Any], log: int, rest: list[str]) -> None:
    """Set up this fork as ``python -m celery …`` would be at its first line."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent()
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    here = [] if _SAFE else [request["cwd"]]
    sys.path[:] = [*here, *request["env"]["PYTHONPATH"].split(os.pathsep), *rest]
    sys.argv[:] = ["celery", *request["arguments"]]
    importlib.invalidate_caches()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("celery", run_name="__main__", alter_sys=True)

"""Starts workers that need not import Celery anew: they are forks of a process that has.

Two thirds of the processor time of a worker's start are imports of Celery, kombu and redis-py, and
the suite starts some hundreds of workers. So each process of the test run has one nursery::

    pytest ── socket ──> nursery (this file; has imported third parties) ── fork ──> worker

What is born there is a worker like any other: a process of its own in a session of its own, with
its command line, environment and working directory, that imports the app and this library itself,
and ends as the interpreter ends. It differs in what is imported already, in its parent, and in a
hash seed that it shares with its siblings. ``CSL_TEST_FULL=1`` starts all workers by their command
instead; so does whatever a fork could not be: see :func:`fits`.
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
"""Gevent and eventlet patch the standard library before anything else is imported."""
OURS: Final = re.compile(
    r"(BOOK|CHAOS|PYTEST|FLASH_SALE|LEDGER|QUORUM|REPORT|README|SITE)_\w+|BAD|BREAK"
    r"|CELERY_(BROKER_URL|RESULT_BACKEND)|C_FORCE_ROOT|DJANGO_SETTINGS_MODULE"
    r"|_MP_FORK_LOG\w+|CELERY_LOG_\w+"  # a worker that ran in a thread here leaves them behind
)
"""Variables that nobody reads while third parties are imported."""
MEASURED: Final = bool({"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"} & set(os.environ))
"""Whether coverage is measured in all processes."""
LIMIT: Final = 1 << 20  # of a message
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
"""Not celery.bin.celery: it loads the commands of installed packages, which may be this library."""


TESTS: Final = Path(__file__).parents[1]


def path() -> str:
    """Return the PYTHONPATH of all workers under test."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(TESTS), str(TESTS / "support/light"), *filter(None, [given])])


class Born:
    """A worker of the nursery, to the test: what of :class:`subprocess.Popen` is used here."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self._nursery.listen(0.1 if left is None else min(left, 0.1))
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Nursery:
    """The test's end: the nursery ends with its process, since the socket closes then."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []
        self._lock = threading.RLock()
        self._environment = dict(os.environ)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": path(), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return whether what is imported already would be the same with this environment."""
        then = {**self._environment, "PYTHONPATH": path(), "PYTHONUNBUFFERED": "1"}
        changed = {name for name in {*then, *env} if then.get(name) != env.get(name)}
        return all(OURS.fullmatch(name) for name in changed)

    def bear(self, arguments: list[str], env: Mapping[str, str], cwd: str, log: int) -> Born:
        """Start a worker: the arguments are those of ``python -m celery``."""
        order = json.dumps({"arguments": arguments, "env": dict(env), "cwd": cwd}).encode()
        with self._lock:
            socket.send_fds(self._socket, [order], [log])
            while not self._pids:
                self.listen(None)
            return Born(self, self._pids.pop())

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker, None while it runs."""
        self.listen(0)
        return self._codes.get(pid)

    def listen(self, timeout: float | None) -> None:
        """Hear what the nursery says within so many seconds; None: until it says something."""
        with self._lock:
            while select.select([self._socket], [], [], timeout)[0]:
                said = self._socket.recv(LIMIT)
                if not said:
                    raise AssertionError("the nursery of workers has ended; see stderr")
                told = json.loads(said)
                if "born" in told:
                    self._pids.append(told["born"])
                    self._codes.pop(told["born"], None)  # of an earlier process with this number
                else:
                    self._codes[told["ended"]] = told["code"]
                timeout = 0


@functools.cache
def nursery() -> Nursery:
    """Return the nursery of this process."""
    return Nursery()


def fits(pool: str, env: Mapping[str, str]) -> bool:
    """Return whether a worker may come from the nursery.

    Not if its pool patches what has been imported, nor if its environment could change what is
    imported; nor where coverage is measured, which begins with an interpreter.
    """
    cold = MEASURED or "CSL_TEST_FULL" in os.environ or sys.platform != "linux"
    return pool in POOLS and not cold and nursery().fits(env)


# --- the nursery's end ----------------------------------------------------------------------------

_SAFE: Final = getattr(sys.flags, "safe_path", False)  # Python 3.11: nothing before PYTHONPATH


def main(channel: socket.socket) -> None:
    """Fork workers as told, and tell of their ends. Only a worker returns from here."""
    if not _SAFE:
        del sys.path[0]  # this folder
    rest = sys.path[len(os.environ["PYTHONPATH"].split(os.pathsep)) :]
    for name in MODULES.split():
        with contextlib.suppress(ImportError):  # another version of Celery
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    while True:
        heard, _, _ = select.select([channel, ear], [], [])
        if ear in heard:
            os.read(ear, 4096)
            tell_of_ends(channel)
        if channel in heard:
            order, fds, _, _ = socket.recv_fds(channel, LIMIT, 1)
            if not order:
                os._exit(0)
            pid = os.fork()
            if not pid:
                os.close(ear)
                os.close(mouth)
                channel.close()
                become(json.loads(order), fds[0], rest)
                return
            os.close(fds[0])
            channel.send(json.dumps({"born": pid}).encode())


def tell_of_ends(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            channel.send(json.dumps({"ended": pid, "code": code}).encode())


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone: a test run that was killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def become(order: dict[str, Any], log: int, rest: list[str]) -> None:
    """Turn this fork into what ``python -m celery …`` would be at its first line."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent()
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    here = [] if _SAFE else [order["cwd"]]
    sys.path[:] = [*here, *order["env"]["PYTHONPATH"].split(os.pathsep), *rest]
    sys.argv[:] = ["celery", *order["arguments"]]
    importlib.invalidate_caches()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("celery", run_name="__main__", alter_sys=True)

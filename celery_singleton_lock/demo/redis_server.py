"""Starts a Redis server for the demo, the tests and the benchmarks. Not for production.

The server is a child process of a small supervisor::

    owner (demo, pytest) ── pipe ──> redis_supervisor (its own session) ──> server

The server must end with its owner, even if the owner is killed with SIGKILL. It must not end on the
Ctrl-C with which the owner begins to clean up. So the supervisor is the leader of its own session,
and ends the server when the pipe closes or when its parent process changes. The owner cannot use
PR_SET_PDEATHSIG: the signal is sent when the *thread* that started the child ends, and setting it
needs a ``preexec_fn`` in a process with threads. The supervisor has one thread, so it can use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from redis import Redis

from celery_singleton_lock.demo import redis_supervisor
from celery_singleton_lock.demo.redis_provider import (
    REMEDY,
    EmbeddedRedisError,
    Provider,
    find_provider,
)

if TYPE_CHECKING:
    from typing_extensions import Self

FAKEREDIS: Final = "celery_singleton_lock.demo.fakeredis_server"
HOST: Final = "127.0.0.1"
START_TIMEOUT: Final = 60.0
STOP_TIMEOUT: Final = 5.0
PORT_ATTEMPTS: Final = 5

READY: Final = re.compile("ready to accept connections", re.IGNORECASE)
"""Log line of a ready server. An answer on the port is not enough: it may be another server's."""

PORTS: Final = range(20_000, 30_000)
"""Ports to use: below the ephemeral range (from 32768 or 49152).

Another process may take an ephemeral port during a restart, or a client that reconnects to it may
connect to itself.
"""


class RedisServer:
    """A Redis server as a context manager. It ends when this process ends, whatever the cause.

    Args:
        provider: which Redis; None: the first that is installed.
        port: port on 127.0.0.1; None: a free port, which stays the same over restarts.
        args: further arguments of the server, such as ``("--maxmemory", "10mb")``.
        dir: working directory; None: a temporary one, which :meth:`stop` removes.
        password: password of the default user. For more users: ``args=("--user", "name on >…")``.
    """

    def __init__(
        self,
        provider: Provider | None = None,
        *,
        port: int | None = None,
        args: Sequence[str] = (),
        dir: str | Path | None = None,  # noqa: A002  # as tempfile names it
        password: str | None = None,
    ) -> None:
        """Check the arguments. :meth:`start` starts the server."""
        self.provider: Provider = provider or find_provider()
        if not self.is_real and (args or password):
            msg = f"fakeredis accepts no server arguments and no password. {REMEDY}"
            raise EmbeddedRedisError(msg)
        self.password = password
        self._args = tuple(args)
        self._port = port
        self._dir = None if dir is None else Path(dir)
        self._scratch: Path | None = None
        self._supervisor: subprocess.Popen[str] | None = None
        self._server_pid = 0
        self._owner_pid = os.getpid()

    def __enter__(self) -> Self:
        """Start the server. If that fails, remove everything."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        self.stop()

    @property
    def is_real(self) -> bool:
        """False for fakeredis."""
        return self.provider.is_real

    @property
    def is_running(self) -> bool:
        """Whether the process exists, paused or not."""
        return self._supervisor is not None and self._supervisor.poll() is None

    @property
    def pid(self) -> int:
        """The server's process id.

        Raises:
            EmbeddedRedisError: it is not running.
        """
        if not self.is_running:
            msg = f"{self.describe()} is not running: call start() first."
            raise EmbeddedRedisError(msg)
        return self._server_pid

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1.

        Raises:
            EmbeddedRedisError: it has none before the first start.
        """
        if self._port is None:
            msg = f"{self.describe()} has no port yet: call start() first."
            raise EmbeddedRedisError(msg)
        return self._port

    @property
    def url(self) -> str:
        """URL for Celery and redis-py, with the password if there is one."""
        credentials = f":{self.password}@" if self.password else ""
        return f"redis://{credentials}{HOST}:{self.port}/0"

    @property
    def log(self) -> str:
        """The server's output since its last start."""
        with contextlib.suppress(OSError):
            return self._log_path.read_text(errors="replace")
        return ""

    def describe(self) -> str:
        """Return a display text, such as ``redis-server 7.0.15 (/usr/bin/redis-server)``."""
        return str(self.provider)

    def client(self, **options: Any) -> Redis:
        """Return a new redis-py client; ``options`` are those of :class:`redis.Redis`."""
        options.setdefault("password", self.password)
        return Redis(host=HOST, port=self.port, **options)

    def start(self) -> None:
        """Start the server, and return when it answers.

        Raises:
            EmbeddedRedisError: it ended or did not answer. The message ends with its log.
        """
        if self.is_running:
            return
        if self._port is not None:
            self._launch(self._port)
            return
        for port in free_ports(PORT_ATTEMPTS):
            try:
                self._launch(port)
            except _PortTakenError:
                continue
            self._port = port
            return
        msg = f"{self.describe()} found no free port: {PORT_ATTEMPTS} were taken when it started."
        raise EmbeddedRedisError(msg)

    def stop(self) -> None:
        """Stop it with SIGTERM, and remove its temporary directory. May be called again."""
        self._end(signal.SIGTERM)
        if self._scratch is not None and os.getpid() == self._owner_pid:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def kill(self) -> None:
        """Kill it with SIGKILL. Its files stay for the next :meth:`start`."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Pause its process (SIGSTOP): connections stay open, but it does not answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the paused process (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self, *, keep_data: bool) -> None:
        """Stop it, and start it on the same port.

        Args:
            keep_data: True: save to disk first if it runs, and load the file. False: start empty.

        Raises:
            EmbeddedRedisError: ``keep_data`` with fakeredis, which cannot save.
        """
        if keep_data and not self.is_real:
            msg = f"fakeredis cannot keep its data over a restart. {REMEDY}"
            raise EmbeddedRedisError(msg)
        if keep_data and self.is_running:
            with self.client() as client:
                client.save()
        self._end(signal.SIGTERM)
        if not keep_data:
            self._delete_data()
        self.start()

    @property
    def _home(self) -> Path:
        """The server's working directory."""
        if self._dir is not None:
            return self._dir
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="csl-redis-"))
        return self._scratch

    @property
    def _log_path(self) -> Path:
        return self._home / "server.log"

    def _command(self, port: int) -> list[str]:
        if self.provider.path is None:
            return [sys.executable, "-m", FAKEREDIS, "--host", HOST, "--port", str(port)]
        command = [self.provider.path, "--save", "", "--appendonly", "no", "--bind", HOST]
        command += ["--port", str(port), "--dir", str(self._home)]
        if self.password:
            command += ["--requirepass", self.password]
        return [*command, *self._args]

    def _launch(self, port: int) -> None:
        """Start supervisor and server, and return when the server answers on ``port``."""
        self._owner_pid = os.getpid()
        supervise = [sys.executable, "-I", "-S", redis_supervisor.__file__]
        supervise += ["--owner", str(self._owner_pid)]
        if self._dir is None:
            supervise += ["--scratch", str(self._home)]
        with self._log_path.open("w") as log:
            self._supervisor = subprocess.Popen(
                [*supervise, "--", *self._command(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                # fakeredis needs the import path of this process.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            assert self._supervisor.stdout is not None  # noqa: S101  # for the type checker: PIPE
            self._server_pid = int(self._supervisor.stdout.readline() or 0)
            self._await_answer(port)
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    def _await_answer(self, port: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if not self.is_running:
                raise self._ended_early()
            if READY.search(self.log) and _answers(port):
                return
            time.sleep(0.01)
        msg = f"{self.describe()} did not answer within {START_TIMEOUT:.0f} s.{self._end_of_log()}"
        raise EmbeddedRedisError(msg)

    def _ended_early(self) -> EmbeddedRedisError:
        kind = _PortTakenError if "in use" in self.log else EmbeddedRedisError
        return kind(f"{self.describe()} ended while it started.{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return f" Its log ends with:\n{self.log[-2000:]}"

    def _end(self, how: signal.Signals) -> None:
        """Send a signal to the server, and wait for the end of server and supervisor."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None or os.getpid() != self._owner_pid:
            return  # not started; or this is a forked child, and the server belongs to its parent
        if supervisor.poll() is None and self._server_pid:
            _signal(self._server_pid, how)
            _signal(self._server_pid, signal.SIGCONT)  # a paused process does not handle SIGTERM
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(STOP_TIMEOUT)
        for pipe in (supervisor.stdin, supervisor.stdout):
            if pipe is not None:
                pipe.close()  # when stdin closes, the supervisor kills the server
        supervisor.wait(STOP_TIMEOUT)

    def _delete_data(self) -> None:
        for found in self._home.iterdir():
            if found.is_dir():
                shutil.rmtree(found)
            elif found.suffix in {".rdb", ".aof"}:
                found.unlink()


class _PortTakenError(EmbeddedRedisError):
    """Another process uses the port by now."""


def free_ports(count: int) -> Iterator[int]:
    """Yield up to ``count`` different ports that are free at this moment."""
    untried = list(PORTS)
    while untried and count:
        port = untried.pop(secrets.randbelow(len(untried)))
        if _is_free(port):
            count -= 1
            yield port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _answers(port: int) -> bool:
    """Return whether the server answers PING, also with an error since there is no password."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1) as link:
        link.sendall(b"*1\r\n$4\r\nPING\r\n")
        return link.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

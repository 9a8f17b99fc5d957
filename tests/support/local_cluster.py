r"""Local processes instead of pytest-celery's containers.

pytest-celery drives its brokers, backends and workers through a handle: docker-py's ``Container``,
inside one of its own wrappers. Here the handle is a process of this machine, so the wrappers,
nodes, clusters and ``celery_setup`` are used as they are, and no Docker daemon is needed::

    celery_setup ── node ── wrapper (RedisContainer, …) ── handle ── process
    \_______________ pytest-celery _________________/     \____ this file ____/

As with docker-py, ``status`` and ``attrs`` are what the last ``reload`` saw.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pytest_celery import CeleryWorkerContainer, RedisContainer

from celery_singleton_lock.demo.redis_server import HOST, RedisServer
from support.waiting import eventually
from support.workers import START_TIMEOUT, TESTS, CeleryWorker

EXEC_TIMEOUT = 120.0


class ExecResult(NamedTuple):
    """What a command in a container answered; docker-py's type of the same name."""

    exit_code: int
    output: bytes


class LocalHandle(ABC):
    """A process of this machine that looks like docker-py's ``Container``.

    Args:
        name: of the container, for people.
        folder: its working directory, where ``exec_run`` runs.
        env: what ``exec_run`` finds in its environment besides this process' own.
    """

    def __init__(self, name: str, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.id = secrets.token_hex(32)
        self.name = f"{name}-{self.id[:6]}"
        self.status = "created"
        self._folder, self._env = folder, dict(env or {})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.status}>"

    @property
    def short_id(self) -> str:
        """The part of the id that a container has as its host name."""
        return self.id[:12]

    @property
    def attrs(self) -> dict[str, Any]:
        """What ``docker inspect`` tells of a container on the host's own network."""
        return {
            "Id": self.id,
            "Name": f"/{self.name}",
            "State": {"Status": self.status, "Running": self.status == "running"},
            "Config": {
                "Hostname": self.short_id,
                "Env": [f"{name}={value}" for name, value in self._env.items()],
            },
            "HostConfig": {"NetworkMode": "host", "PortBindings": {}},
            "NetworkSettings": {"Networks": {"host": {"IPAddress": HOST}}, "Ports": {}},
        }

    def reload(self) -> None:
        """Look again."""
        self.status = "running" if self._runs() else "exited"

    def start(self) -> None:
        """Start, and return when it is ready."""
        self._start()
        self.reload()

    def kill(self, signal: str | int | None = None) -> None:  # docker-py's signature
        """Send a signal: to all processes if it is SIGKILL, as a container ends whole."""
        if not self._runs():
            text = f"{self!r} is not running, so it cannot be sent {signal or 'SIGKILL'}"
            raise RuntimeError(text)
        self._kill(number_of(signal))

    def stop(self, timeout: float = 10) -> None:
        """Ask it to end, and kill what is left after ``timeout`` seconds."""
        self._stop(timeout)
        self.reload()

    def restart(self, timeout: float = 10) -> None:
        """Stop it if it runs, and start it again."""
        self.stop(timeout)
        self.start()

    def exec_run(self, cmd: str | Sequence[str], **_: Any) -> ExecResult:
        """Run a command in its folder, with its environment and this Python first on the path."""
        command = shlex.split(cmd) if isinstance(cmd, str) else list(cmd)
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env={**os.environ, **self._env, "PATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=EXEC_TIMEOUT,
            check=False,
        )
        return ExecResult(done.returncode, done.stdout)

    @abstractmethod
    def logs(self) -> bytes:
        """Return what it has printed."""

    @abstractmethod
    def _runs(self) -> bool: ...

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _stop(self, timeout: float) -> None: ...

    @abstractmethod
    def _kill(self, number: signal.Signals) -> None: ...


class RedisHandle(LocalHandle):
    """A Redis server.

    Args:
        name: of the container, for people.
        server: not started. It keeps its port over a restart, and no data, like pytest-celery's.
        folder: where ``exec_run`` runs.
    """

    def __init__(self, name: str, server: RedisServer, folder: Path) -> None:
        super().__init__(name, folder)
        self.server = server

    def logs(self) -> bytes:
        return self.server.log.encode()

    def _runs(self) -> bool:
        return self.server.is_running

    def _start(self) -> None:
        self.server.start()

    def _stop(self, timeout: float) -> None:
        self.server.kill()  # it has nothing to save

    def _kill(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self.server.kill()
        else:
            os.kill(self.server.pid, number)


class WorkerHandle(LocalHandle):
    """A Celery worker with its pool.

    Args:
        name: of the container, for people.
        command: as the container would run it: ``celery -A app worker -n name@%h …``.
        env: as the container would get it.
        content: files of its volume, by path.
        folder: an empty one that takes the volume's place.
    """

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str],
        env: Mapping[str, str],
        content: Mapping[str, bytes],
        folder: Path,
    ) -> None:
        paths = [str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**env, "PYTHONPATH": os.pathsep.join(paths)}
        super().__init__(name, folder, env)
        for path, source in content.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(source)
        words = [word.replace("%h", self.short_id) for word in command]
        self.worker = _Worker(words, env, folder, name=self.name)

    def logs(self) -> bytes:
        return self.worker.log().encode()

    def _runs(self) -> bool:
        return self.worker.is_running

    def _start(self) -> None:
        seen = len(self.worker.log())  # a container's log goes on over restarts
        self.worker.start(wait=False)
        eventually(
            lambda: " ready." in self.worker.log()[seen:] or not self._runs(),
            START_TIMEOUT,
            lambda: f"{self!r} ready; its log ends with:\n{self.worker.log_tail()}",
        )

    def _stop(self, timeout: float) -> None:
        self.worker.stop(timeout)

    def _kill(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self.worker.end()
        else:
            self.worker.signal(number)


class _Worker(CeleryWorker):
    """A worker whose command line is given, word by word."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], folder: Path, *, name: str
    ) -> None:
        broker, backend = env["CELERY_BROKER_URL"], env["CELERY_RESULT_BACKEND"]
        super().__init__("app", broker, backend=backend, name=name, env=env, cwd=folder)
        self._words = list(words)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", *self._words]


class LocalRedis(RedisContainer):
    """pytest-celery's Redis, reached at the port of its process."""

    @property
    def port(self) -> int:
        return int(self._container.server.port)

    @property
    def url(self) -> str:
        return str(self._container.server.url)

    @property
    def host_url(self) -> str:
        return self.url

    @property
    def hostname(self) -> str:
        return HOST

    def teardown(self) -> None:
        """End the server, and remove its files."""
        self._container.server.stop()


class LocalWorker(CeleryWorkerContainer):
    """pytest-celery's worker, with two children, and a start without needless waits."""

    @classmethod
    def command(cls, *args: str, **options: Any) -> list[str]:
        quick = ("--concurrency=2", "--without-mingle", "--without-gossip")
        return super().command(*quick, *args, **options)

    def teardown(self) -> None:
        """End the worker and all that it started."""
        self._container.worker.end()


def number_of(name: str | int | None) -> signal.Signals:
    """Return a signal as docker takes it: a number, a name with or without SIG, or none: KILL."""
    if name is None:
        return signal.SIGKILL
    with contextlib.suppress(ValueError):
        return signal.Signals(int(name))
    return signal.Signals["SIG" + str(name).upper().removeprefix("SIG")]

"""A proxy in its own process that delays all data between clients and a Redis server.

It stands for the way to a server on another machine. Each direction of a connection is a line on
which data arrives a fixed time after it was sent, so pipelined requests are delayed once.

``time.sleep`` and ``epoll`` may wake a process late by the timer slack (50 us) or a whole
millisecond. The proxy uses ``select``, whose time-out has microseconds, and sets the slack to
1 us. :meth:`DelayedRedis.measure` shows the round trip that clients see, and :meth:`cpu_seconds`
what the proxy itself uses.
"""

from __future__ import annotations

import ctypes
import select
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
import redis

if TYPE_CHECKING:
    from typing_extensions import Self

HOST: Final = "127.0.0.1"
CHUNK: Final = 1 << 18
SLACK: Final = 29
"""``PR_SET_TIMERSLACK`` of Linux."""


class DelayedRedis:
    """The address of a Redis server as if it were further away.

    Args:
        port: port of the server on this machine.
        seconds: delay of each direction.
        folder: for the list of connections.
    """

    def __init__(self, port: int, seconds: float, folder: Path) -> None:
        self._port = port
        self._seconds = seconds
        self._ports = folder / "delayed-ports"
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._ports.touch()
        command = [sys.executable, __file__, str(self._port), str(self._seconds), str(self._ports)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = f"redis://{HOST}:{int(self._process.stdout.readline())}/0"
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def ports(self) -> dict[int, int]:
        """Return port at the server -> port of the client, for all connections so far."""
        lines = [line.split() for line in self._ports.read_text().splitlines()]
        return {int(at_server): int(of_client) for of_client, at_server in lines}

    def cpu_seconds(self) -> float:
        assert self._process is not None
        return float(sum(psutil.Process(self._process.pid).cpu_times()[:2]))

    def measure(self, times: int = 200) -> list[float]:
        """Return the milliseconds of single round trips."""
        took = []
        with redis.Redis.from_url(self.url) as client:
            client.ping()
            for _ in range(times):
                began = time.perf_counter()
                client.ping()
                took.append(1000 * (time.perf_counter() - began))
        return took


class _Line:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.waiting: deque[tuple[float, bytes]] = deque()


class _Proxy:
    def __init__(self, port: int, seconds: float, ports: Path) -> None:
        self._port = port
        self._seconds = seconds
        self._ports = ports.open("a", buffering=1)
        self._listener = socket.create_server((HOST, 0), backlog=512)
        self._lines: dict[socket.socket, _Line] = {}

    def serve(self) -> None:
        """Forward until standard input closes: the owner has ended."""
        print(self._listener.getsockname()[1], flush=True)
        while True:
            due = min(
                (line.waiting[0][0] for line in self._lines.values() if line.waiting), default=0
            )
            pause = max(0.0, due - time.monotonic()) if due else None
            ready, _, _ = select.select([sys.stdin, self._listener, *self._lines], [], [], pause)
            if sys.stdin in ready:
                return
            arrived = time.monotonic()
            for source in ready:
                if source is self._listener:
                    self._accept()
                elif source in self._lines:
                    self._read(self._lines[source], arrived)
            self._write()

    def _accept(self) -> None:
        client, (_, port) = self._listener.accept()
        server = socket.create_connection((HOST, self._port))
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ports.write(f"{port} {server.getsockname()[1]}\n")
        self._lines[client], self._lines[server] = _Line(client, server), _Line(server, client)

    def _read(self, line: _Line, arrived: float) -> None:
        try:
            data = line.source.recv(CHUNK)
        except OSError:
            data = b""
        if data:
            line.waiting.append((arrived + self._seconds, data))
        else:
            self._close(line)

    def _write(self) -> None:
        now = time.monotonic()
        for line in list(self._lines.values()):
            try:
                while line.waiting and line.waiting[0][0] <= now:
                    line.sink.sendall(line.waiting.popleft()[1])
            except OSError:
                self._close(line)

    def _close(self, line: _Line) -> None:
        for each in (line.source, line.sink):
            self._lines.pop(each, None)
            each.close()


def _serve(port: str, seconds: str, ports: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SLACK, 1000, 0, 0, 0)
    _Proxy(int(port), float(seconds), Path(ports)).serve()


if __name__ == "__main__":
    _serve(*sys.argv[1:])

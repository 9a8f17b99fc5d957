"""A TCP proxy that a test can delay, stall, cut, redirect, or make lose a reply.

The outage is simulated; the client and the server are real.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from typing_extensions import Self

CHUNK = 65536
TICK = 0.005


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class _Pipe:
    """One direction of a connection: data that was read, and when it may be written."""

    source: socket.socket
    sink: socket.socket
    replies: bool
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)


class Proxy:
    """Forwards connections to a port of this machine, with faults on request.

    Args:
        port: port of the server.

    Attributes:
        target: port to which new connections go.
        delay: delay of all data in each direction, in seconds.
        stalled: forward no data; connections are accepted and stay open.
        stall_after: number of replies to forward before it stalls; None: it does not count.
        stall_at: stall after a request with these bytes: the server executes it, and no client gets
            the reply.
        lose_reply: number of the reply to drop, 1 is the next, and close its connection: the server
            has executed the request, and the client does not know it.
        lose_reply_to: drop the reply to a request with these bytes in the same way.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.delay = 0.0
        self.stalled = False
        self.stall_after: int | None = None
        self.stall_at: bytes | None = None
        self.lose_reply: int | None = None
        self.lose_reply_to: bytes | None = None
        self._losing_reply_to: socket.socket | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0)
        self.port = int(self._listener.getsockname()[1])
        self._pipes: list[_Pipe] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._cut = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        """Address of the proxied Redis."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(5)

    def cut(self) -> None:
        """Close all connections. New ones are accepted."""
        self._cut.set()
        while self._cut.is_set() and self._thread.is_alive():
            time.sleep(TICK)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                if self._cut.is_set():
                    self._close(list(self._pipes))
                    self._cut.clear()
                self._accept()
                if self.stalled:
                    time.sleep(TICK)
                else:
                    self._read()
                    self._write()
        finally:
            self._close(list(self._pipes))
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=1)
            except OSError:
                client.close()
                return
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((client, server), (server, client)):
                pipe = _Pipe(source, sink, replies=source is server)
                self._pipes.append(pipe)
                self._selector.register(source, selectors.EVENT_READ, pipe)

    def _read(self) -> None:
        """Wait a moment for input, and read it."""
        for key, _ in self._selector.select(TICK):
            if key.data is not None:
                self._take(key.data)

    def _take(self, pipe: _Pipe) -> None:
        try:
            data = pipe.source.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(pipe.source)
        pipe.waiting.append((time.monotonic() + self.delay, data))

    def _write(self) -> None:
        now = time.monotonic()
        for pipe in list(self._pipes):
            while pipe.waiting and pipe.waiting[0][0] <= now and not self.stalled:
                _, data = pipe.waiting.popleft()
                self._match(pipe, data)
                if not data or self._drops(pipe) or not self._sent(pipe.sink, data):
                    self._close([p for p in self._pipes if pipe.source in (p.source, p.sink)])
                    break

    def _match(self, pipe: _Pipe, data: bytes) -> None:
        """Check for the request that triggers a fault. The request itself is forwarded."""
        if self.lose_reply_to is not None and not pipe.replies and self.lose_reply_to in data:
            self.lose_reply_to, self._losing_reply_to = None, pipe.sink
        if self.stall_at is not None and not pipe.replies and self.stall_at in data:
            self.stall_at, self.stalled = None, True

    def _drops(self, pipe: _Pipe) -> bool:
        """Count a reply; return whether to drop it."""
        if not pipe.replies:
            return False
        if pipe.source is self._losing_reply_to:
            self._losing_reply_to = None
            return True
        if self.stall_after is not None:
            self.stall_after -= 1
        if self.lose_reply is not None:
            self.lose_reply -= 1
        if self.stall_after == 0:
            self.stall_after, self.stalled = None, True
        if self.lose_reply == 0:
            self.lose_reply = None
            return True
        return False

    @staticmethod
    def _sent(sink: socket.socket, data: bytes) -> bool:
        try:
            sink.sendall(data)
        except OSError:
            return False
        return True

    def _close(self, pipes: list[_Pipe]) -> None:
        for pipe in pipes:
            with contextlib.suppress(KeyError, ValueError):  # it was closed before
                self._selector.unregister(pipe.source)
            self._pipes.remove(pipe)
        for pipe in pipes:
            pipe.source.close()
            pipe.sink.close()

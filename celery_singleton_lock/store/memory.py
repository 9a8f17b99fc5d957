"""A server for locks in the memory of this process, for tests: fakeredis runs the scripts.

:class:`~celery_singleton_lock.store.redis.sync.RedisStore` uses it like any other server, so its
guarantees are the same. Only the server's clock differs: tests move it.

This module needs the extra ``testing``. :func:`celery_singleton_lock.store.connect.in_memory`
imports it for a ``memory://`` URL.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import fakeredis
import lupa  # noqa: F401  # fakeredis runs scripts with it, and has no EVAL without it
import redis
from fakeredis._core._database import Database
from fakeredis._socket import FakeSocket

from celery_singleton_lock.core.clock import MovableClock
from celery_singleton_lock.errors import ConfigurationError

VERSION: Final = (7, 4)
"""Version of Redis that fakeredis emulates."""

LONGEST_WAIT: Final = 3600.0
"""Longest sleep of a thread in seconds; some systems do not allow a longer one."""


class MemoryServer(fakeredis.FakeServer):
    """A Redis in the memory of this process, whose clock tests move.

    Args:
        name: the text after ``memory://``.

    Attributes:
        lock: held while a command runs; its holder may send further commands.
        clock: the clock of the server and its clients.
    """

    def __init__(self, name: str) -> None:
        super().__init__(version=VERSION)
        self.name = name
        self.pid: int = os.getpid()
        self.clock: MovableClock = MovableClock()
        self.lock: Any = threading.RLock()
        self.dbs: defaultdict[int, Any] = defaultdict(partial(_Database, self))

    @property
    def data(self) -> Any:
        """The keys; locks in memory use one database only."""
        return self.dbs[0]

    def advance(self, seconds: float) -> None:
        """Move the clock; blocking commands check whether their time is over."""
        with self.lock:
            self.clock.advance(seconds)
            self.data.condition.notify_all()


class _Database(Database):
    """Keys that expire by the server's clock."""

    def __init__(self, server: MemoryServer) -> None:
        self._clock = server.clock
        super().__init__(server.lock)

    @property
    def time(self) -> float:
        return self._clock.microseconds() / 1_000_000

    @time.setter
    def time(self, _machine: float) -> None:
        """Ignore the machine's time, which fakeredis sets before each command."""


class _Socket(FakeSocket):
    """A connection whose commands use the server's clock."""

    _server: MemoryServer

    def shutdown(self, how: Any) -> None:
        """Close the connection. A thread that blocks in a command ends by itself."""
        with suppress(ValueError):  # fakeredis closes a generator that runs in that thread
            super().shutdown(how)

    def time(self) -> list[bytes]:
        """Answer TIME."""
        whole, micro = divmod(self._server.clock.tick(), 1_000_000)
        return [b"%d" % whole, b"%d" % micro]

    def _blocking(
        self,
        timeout: float | None,
        look: Callable[[bool], Any],
        shape: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Answer a blocking command; fakeredis itself would use the machine's time."""
        found = look(True)  # noqa: FBT003  # fakeredis' signature
        if found is None and not self._in_transaction:
            found = self._await(timeout or math.inf, look)
        return found if shape is None else shape(found)

    def _await(self, timeout: float, look: Callable[[bool], Any]) -> Any:
        clock, changed, found = self._server.clock, self._db.condition, None
        until = clock.monotonic() + timeout
        while found is None and (left := until - clock.monotonic()) > 0:
            changed.wait(min(left, LONGEST_WAIT))
            found = look(False)  # noqa: FBT003  # fakeredis' signature
        return found


class _Connection(fakeredis.FakeRedisConnection):
    """The connection class of a client."""

    def _connect(self) -> _Socket:
        server: Any = self._server
        if server.pid != os.getpid():
            msg = (
                f"The locks of memory://{server.name} are in the memory of process {server.pid}. "
                f"Its forked child {os.getpid()} has only a copy, which would exclude no other "
                "process. Use threads, or a Redis."
            )
            raise ConfigurationError(msg)
        return _Socket(
            server,
            client_class=self._client_class,
            db=self.db,
            lua_modules=self._lua_modules,
            client_info=self._client_info,
        )


class MemoryClient(fakeredis.FakeRedis):
    """A redis-py client of a server in memory.

    Args:
        server: which.
    """

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server=server, connection_class=_Connection, socket_timeout=None)
        self.server: Final = server
        self.lock_clock: Final = server.clock


# A module global, since all apps of a process share the server of a memory:// URL.
_servers: dict[str, MemoryServer] = {}


def server_of(name: str) -> MemoryServer:
    """Return the server of that name in this process; the first call creates it."""
    found = _servers.get(name)
    return found or _servers.setdefault(name, MemoryServer(name))


def is_known(name: str) -> bool:
    """Return whether this process has used the server of that name."""
    return name in _servers


def client_of(server: MemoryServer) -> redis.Redis:
    """Return a new client of a server."""
    return MemoryClient(server)

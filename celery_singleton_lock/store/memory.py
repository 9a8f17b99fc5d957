"""A server for locks in the memory of this process, for tests: our own scripts, on fakeredis.

:class:`~celery_singleton_lock.store.redis.sync.RedisStore` works on it as on any other server, so what
it promises is the same by construction. Only the server's time is its own: tests move it.

Needs the extra ``testing``; imported when there is a ``memory://`` alone, by
:func:`celery_singleton_lock.store.connect.in_memory`.
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
import lupa  # noqa: F401  # what fakeredis runs scripts with: without it, it knows no EVAL
import redis
from fakeredis._core._database import Database
from fakeredis._socket import FakeSocket

from celery_singleton_lock.core.clock import MovableClock
from celery_singleton_lock.errors import ConfigurationError

VERSION: Final = (7, 4)
"""Of the Redis that is played."""

LONGEST_WAIT: Final = 3600.0
"""Most seconds for which a thread sleeps without a look; some systems know no longer sleep."""


class MemoryServer(fakeredis.FakeServer):
    """A Redis in the memory of this process, of which tests move the time.

    Args:
        name: what stands behind ``memory://``.

    Attributes:
        lock: held while a command runs. Who holds it may send commands of its own in between.
        clock: its time, and that of those who use it.
    """

    def __init__(self, name: str) -> None:
        """Be empty."""
        super().__init__(version=VERSION)
        self.name = name
        self.pid = os.getpid()
        self.clock = MovableClock()
        self.lock: Any = threading.RLock()
        self.dbs = defaultdict(partial(_Database, self))

    @property
    def data(self) -> Any:
        """Its keys; locks in memory use no other database."""
        return self.dbs[0]

    def advance(self, seconds: float) -> None:
        """Let time pass; commands that block see whether theirs is over."""
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
        """Disregard the machine's time, which fakeredis notes before each command."""


class _Socket(FakeSocket):
    """One connection, whose commands go by the server's clock."""

    _server: MemoryServer

    def shutdown(self, how: Any) -> None:
        """End it. A thread that blocks in a command ends by itself."""
        with suppress(ValueError):  # fakeredis closes a generator, which runs in that thread
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
        """Answer a command that blocks: fakeredis' own goes by the machine's time."""
        found = look(True)  # noqa: FBT003  # fakeredis'
        if found is None and not self._in_transaction:
            found = self._await(timeout or math.inf, look)
        return found if shape is None else shape(found)

    def _await(self, timeout: float, look: Callable[[bool], Any]) -> Any:
        clock, changed, found = self._server.clock, self._db.condition, None
        until = clock.monotonic() + timeout
        while found is None and (left := until - clock.monotonic()) > 0:
            changed.wait(min(left, LONGEST_WAIT))
            found = look(False)  # noqa: FBT003  # fakeredis'
        return found


class _Connection(fakeredis.FakeRedisConnection):
    """What a client opens."""

    def _connect(self) -> _Socket:
        server: Any = self._server
        if server.pid != os.getpid():
            msg = (
                f"The locks of memory://{server.name} live in the process {server.pid}, and this "
                f"is {os.getpid()}, forked from it: they would exclude nobody here. Use threads, "
                "or a Redis."
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
        """Connect with the first command."""
        super().__init__(server=server, connection_class=_Connection, socket_timeout=None)
        self.server: Final = server
        self.lock_clock: Final = server.clock


# A module global, and shared by all apps of the process: that is what a name behind memory:// says.
_servers: dict[str, MemoryServer] = {}


def server_of(name: str) -> MemoryServer:
    """Return the server of that name in this process; the first call makes it."""
    found = _servers.get(name)
    return found or _servers.setdefault(name, MemoryServer(name))


def is_known(name: str) -> bool:
    """Return whether anybody in this process has used the server of that name."""
    return name in _servers


def client_of(server: MemoryServer) -> redis.Redis:
    """Return a new client of a server."""
    return MemoryClient(server)

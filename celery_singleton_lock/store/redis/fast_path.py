"""Sends single scripts without redis-py's client, for processes that run short tasks.

For each command redis-py's client takes a connection from its pool, checks it for unread data,
encodes each argument by itself, and updates its metrics. That was half of the cost of a lock in a
pool child. redis-py still opens the connections, and reads the answers of connections that are more
than plain sockets.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.store.error_mapping import demoted
from celery_singleton_lock.store.requests import Attempts
from celery_singleton_lock.store.scripts import Argument, Script, packed_keys, words

_PLAIN: Final = (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection)
"""Classes of connections whose answers can be read from their socket without redis-py."""

_CHUNK: Final = 65536
_BULK, _ERROR = b"$-"


class FastPath:
    """Runs scripts on its own connections.

    An answer that was not read must not be taken for that of the next call. A soft time limit can
    interrupt the reading between any two lines, so any exception closes the connection, and the
    next call opens a new one.

    There are as many connections as calls have run at the same time. A connection belongs to no
    thread: a greenlet runs only one task, so each task would open a connection.

    Args:
        client: its address and options are used, but not its connections.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._kwargs = dict(self._pool.connection_kwargs)
        self._exchange_on: Callable[[Any, bytes], bytes] = _by_redis_py
        if is_plain(self._pool):
            self._exchange_on = _by_socket
            self._kwargs["protocol"] = 2  # without push messages between the answers
            for name in [name for name in self._kwargs if name.startswith("maint_notifications")]:
                del self._kwargs[name]
        self._retry = self._pool.connection_kwargs.get("retry") or Retry(NoBackoff(), 1)
        self._idle: list[Any] = []  # append and pop are atomic between threads

    def ask(self, command: bytes, attempts: Attempts | None = None) -> bytes:
        """Send an encoded command and return the answer.

        If the connection is closed, it is opened again as often as the client's retry policy says.

        Args:
            command: what to send.
            attempts: notes whether it was repeated.

        Raises:
            redis.RedisError: what redis-py's client would raise.
        """
        try:
            return self._exchange(command)
        except redis.ConnectionError:
            if attempts is not None:
                attempts.repeated = True
            answer: bytes = copy.deepcopy(self._retry).call_with_retry(
                lambda: self._exchange(command), lambda _error: None
            )
            return answer

    def _exchange(self, command: bytes) -> bytes:
        connection = self._take()
        try:
            answer = self._exchange_on(connection, command)
        except redis.ResponseError as error:
            if demoted(error):
                self._close(connection)
            else:
                self._idle.append(connection)  # an answer, which was read
            raise
        except BaseException:
            self._close(connection)
            raise
        self._idle.append(connection)
        return answer

    def _take(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def _connect(self) -> Any:
        """Connect explicitly: a send would connect to the old address without asking a Sentinel."""
        connection = self._pool.connection_class(**self._kwargs)
        connection.connect()
        return connection

    def _close(self, connection: Any) -> None:
        """Close it and all idle ones: what broke one connection has usually broken all."""
        connection.disconnect()
        self.close()

    def close(self) -> None:
        """Close idle connections."""
        with suppress(IndexError):
            while True:
                self._idle.pop().disconnect()


def is_plain(pool: redis.ConnectionPool) -> bool:
    """Return whether connections of a pool can be used without redis-py.

    They cannot with a connection class of the user, or if idle ones are checked before use.
    """
    return pool.connection_class in _PLAIN and not pool.connection_kwargs.get(
        "health_check_interval"
    )


def _by_redis_py(connection: Any, command: bytes) -> bytes:
    connection.send_packed_command([command])
    answer: bytes = connection.read_response()
    return answer


def _by_socket(connection: Any, command: bytes) -> bytes:
    """Send a command and return its answer, a bulk string; raise redis-py's errors."""
    sock = connection._sock  # noqa: SLF001  # opened by redis-py, with its options
    try:
        sock.sendall(command)
        data: bytes = sock.recv(_CHUNK)
        while (end := data.find(b"\r\n")) < 0:
            data += _more(sock)
        if data[0] == _BULK:
            until = end + 4 + int(data[1:end])
            while len(data) < until:
                data += _more(sock)
            if len(data) == until:
                return data[end + 2 : -2]
    except TimeoutError as error:
        msg = "Timeout on the socket"
        raise redis.TimeoutError(msg) from error
    except OSError as error:
        msg = f"Error on the socket: {error}"
        raise redis.ConnectionError(msg) from error
    if data[0] == _ERROR and len(data) == end + 2:
        raise connection._parser.parse_error(data[1:end].decode("utf-8", "replace"))  # noqa: SLF001
    msg = "the answer is neither a bulk string nor an error"
    raise redis.InvalidResponse(msg)


def _more(sock: Any) -> bytes:
    """Return what has arrived."""
    more: bytes = sock.recv(_CHUNK)
    if not more:
        msg = "Connection closed by server."
        raise redis.ConnectionError(msg)
    return more


def packed(
    script: Script, prefix: str, name: str, own: Iterable[Argument], usual: tuple[Argument, ...]
) -> bytes:
    """Return the EVALSHA of a lock's script in the Redis protocol.

    Args:
        script: what to run; its keys are those of one lock.
        prefix: of the keys.
        name: the lock's name.
        own: the first arguments, which differ from call to call.
        usual: the other arguments, the same for all calls of a task in a process; their encoding is
            cached.
    """
    return b"".join((script.head, packed_keys(prefix, name), words(own), _usual(usual)))


_usual = functools.lru_cache(maxsize=1024)(words)

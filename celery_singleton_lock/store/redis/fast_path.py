"""One connection, one script, one answer: the short way for who runs one task at a time.

redis-py's client takes a connection from its pool for each command, looks whether data lies on it,
packs each argument by calls of its own, and counts for its metrics. Around a task that does
nothing, this was half of what a lock cost a pool child. redis-py still opens the connections, and
reads where it knows more of them than that they are sockets.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.store.scripts import Argument, Call, Script, packed_keys, words
from celery_singleton_lock.store.message_operations import Attempts

_PLAIN: Final = (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection)
"""Connections that are a socket and no more; redis-py does more at each answer of a Sentinel's."""

_CHUNK: Final = 65536
_BULK, _ERROR = b"$-"

POOL_WANTS: Final = (
    ("EVALSHA",)
    if signature(redis.ConnectionPool.get_connection).parameters["command_name"].default
    is Parameter.empty
    else ()
)
"""What a pool is told of the command when it is asked for a connection: before redis-py 5.3."""

_DEMOTED: Final = re.compile(r"\b(READONLY|UNBLOCKED)\b")


class Wire:
    """Runs scripts on connections with the address and the options of a client.

    An answer that was not read, whatever interrupted the reading (a soft time limit can strike
    between any two lines), must not be taken for the next one's: so any exception closes the
    connection, and the next call opens it again.

    As many connections are open as calls have run at once. They belong to no thread: a greenlet
    lives for one task, and would open a connection for it.

    Args:
        client: whose address and options to take; its connections are left alone.
    """

    def __init__(self, client: redis.Redis) -> None:
        """Connect with the first call."""
        self._pool = client.connection_pool
        self._kwargs = dict(self._pool.connection_kwargs)
        self._talk: Callable[[Any, bytes], bytes] = _by_redis_py
        if is_plain(self._pool):
            self._talk = _by_socket
            self._kwargs["protocol"] = 2  # no messages of the server's own between the answers
            for name in [name for name in self._kwargs if name.startswith("maint_notifications")]:
                del self._kwargs[name]
        self._retry = self._pool.connection_kwargs.get("retry") or Retry(NoBackoff(), 1)
        self._idle: list[Any] = []  # its append and pop are single steps, for threads

    def ask(self, command: bytes, attempts: Attempts | None = None) -> bytes:
        """Send a packed command and return the answer.

        A connection that turns out to be closed is opened again as often as the client's options
        say.

        Args:
            command: what to send.
            attempts: notes whether it was sent again.

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
            answer = self._talk(connection, command)
        except redis.ResponseError as error:
            if demoted(error):
                self._close(connection)
            else:
                self._idle.append(connection)  # that is an answer, and it was read
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
        """Connect. Sending would do it too, but to where it was: no Sentinel would be asked."""
        connection = self._pool.connection_class(**self._kwargs)
        connection.connect()
        return connection

    def _close(self, connection: Any) -> None:
        """Close it, and those that nobody uses: what ended one has mostly ended all."""
        connection.disconnect()
        self.close()

    def close(self) -> None:
        """Close the connections that no call uses now."""
        with suppress(IndexError):
            while True:
                self._idle.pop().disconnect()


class Relay:
    """Asks for the next thing before the last answers are used, so that the server is never idle.

    Args:
        client: whose address and options to take; its connections are left alone.
    """

    def __init__(self, client: redis.Redis) -> None:
        """Connect with the first question."""
        self._pool = client.connection_pool
        self._connection: Any = None
        self._asked: Sequence[bytes] = ()

    def ask(self, commands: Sequence[bytes]) -> None:
        """Send packed commands, which may be sent twice; :meth:`answers` reads what is answered.

        Raises:
            redis.RedisError: there is no connection.
        """
        self._asked = commands
        try:
            self._send()
        except redis.ConnectionError:  # a server closes what nobody has used for long
            self.close()
            self._send()

    def answers(self) -> list[Any]:
        """Return an answer for each command: also an error that is the answer to one.

        Raises:
            redis.RedisError: the server does not answer.
        """
        try:
            return self._read()
        except redis.ConnectionError:  # likewise
            self.close()
        self._send()
        return self._read()

    def _send(self) -> None:
        if self._connection is None:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            connection.connect()
            self._connection = connection
        self._connection.send_packed_command(self._asked)

    def _read(self) -> list[Any]:
        return [self._answer() for _ in self._asked]

    def _answer(self) -> Any:
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            return error

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


def send_counted(
    pool: redis.ConnectionPool,
    words: Sequence[Any],
    attempts: Attempts,
    wants: Sequence[str] = POOL_WANTS,
) -> Any:
    """Send a command as redis-py's client does, with its retries, and note whether it had any.

    Args:
        pool: of the client.
        words: the command; its answer is not converted.
        attempts: notes whether it was sent again.
        wants: what the pool is told of the command.

    Raises:
        redis.RedisError: what redis-py's client would raise.
    """
    connection: Any = pool.get_connection(*wants)

    def exchange() -> Any:
        connection.send_command(*words)
        return connection.read_response()

    def failed(_error: Exception) -> None:
        attempts.repeated = True
        connection.disconnect()

    try:
        return connection.retry.call_with_retry(exchange, failed)
    except redis.ResponseError:
        raise  # an answer, and it was read
    except BaseException:
        connection.disconnect()  # the answer may still come
        raise
    finally:
        pool.release(connection)


def is_plain(pool: redis.ConnectionPool) -> bool:
    """Return whether nothing is lost if connections are used past redis-py.

    It is with a class of the user's own, or where idle ones are looked at before their use.
    """
    return pool.connection_class in _PLAIN and not pool.connection_kwargs.get(
        "health_check_interval"
    )


def _by_redis_py(connection: Any, command: bytes) -> bytes:
    connection.send_packed_command([command])
    answer: bytes = connection.read_response()
    return answer


def _by_socket(connection: Any, command: bytes) -> bytes:
    """Send a command and return the text that answers it; the errors are redis-py's."""
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
    msg = "the answer is neither a text nor an error"
    raise redis.InvalidResponse(msg)


def _more(sock: Any) -> bytes:
    """Return what has come."""
    more: bytes = sock.recv(_CHUNK)
    if not more:
        msg = "Connection closed by server."
        raise redis.ConnectionError(msg)
    return more


def demoted(error: Exception) -> bool:
    """Return whether a server says that it is no master any more.

    Its connections must be closed: who connects anew is led to the new master, by a Sentinel, or
    by an address that has moved. Redis 6.2 says it in the sentence of a script's error.
    """
    return isinstance(error, redis.ReadOnlyError) or bool(_DEMOTED.search(str(error)))


def packed(
    script: Script, prefix: str, name: str, own: Iterable[Argument], usual: tuple[Argument, ...]
) -> bytes:
    """Return the EVALSHA of a lock's script as the server reads it.

    Args:
        script: what to run; its keys are those of one lock.
        prefix: of the keys.
        name: the lock's name.
        own: the arguments that differ from call to call.
        usual: those behind them, which are the same for all calls of a task in a process.
    """
    return b"".join((script.head, packed_keys(prefix, name), words(own), _usual(usual)))


def packed_command(parts: Sequence[Argument]) -> bytes:
    """Return a command as the server reads it."""
    return b"*%d\r\n" % len(parts) + words(parts)


def packed_call(call: Call) -> bytes:
    """Return the EVALSHA of a script likewise."""
    return packed_command(["EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments])


_usual = functools.lru_cache(maxsize=1024)(words)

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
from typing import Any, Final, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.store.error_mapping import demoted
from celery_singleton_lock.store.requests import Attempts
from celery_singleton_lock.store.scripts import Argument, Script, packed_keys, words

_PLAIN: Final = (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection)
"""Classes of connections whose answers can be read from their socket without redis-py."""

_WITH_PUSH: Final = 3
"""Protocol in which the server may send messages between two answers."""

_CHUNK: Final = 65536
_BULK, _ERROR, _LIST = b"$-*"
_NEITHER: Final = "the answer is neither a bulk string nor an error"

OnReply = Callable[[bytes | Exception], None]
"""Called later with a reply that the sender did not wait for, or with an error."""


class FastConnection:
    """A connection, and the function that gets the reply that the sender did not wait for.

    Attributes:
        connection: of redis-py.
        sent_at: monotonic time at which the unread reply was asked for.
    """

    __slots__ = ("_on_reply", "connection", "sent_at")

    def __init__(self, connection: Any) -> None:
        self.connection: Any = connection
        self.sent_at: float = 0.0
        self._on_reply: OnReply | None = None

    @property
    def has_unread_reply(self) -> bool:
        """Whether a reply was not read yet."""
        return self._on_reply is not None

    def expect_reply(self, on_reply: OnReply, sent_at: float) -> None:
        """Record that a reply is unread, and which function gets it."""
        self._on_reply, self.sent_at = on_reply, sent_at

    def deliver_reply(self, reply: bytes | Exception) -> None:
        """Pass the unread reply on, or why there is none. Has no effect if none is unread."""
        on_reply = self._on_reply
        if on_reply is not None:
            on_reply(reply)
            self._on_reply = None  # last: if this was interrupted, it is repeated

    def __del__(self) -> None:
        """Report that the reply is never read: a call was interrupted, and this object is lost."""
        self.deliver_reply(redis.ConnectionError("A call on the connection was interrupted."))


class FastPath:
    """Runs scripts on its own connections.

    An answer that was not read must not be taken for that of the next call. A soft time limit can
    interrupt the reading between any two lines, so any exception closes the connection, and the
    next call opens a new one.

    There are as many connections as calls have run at the same time. A connection belongs to no
    thread: a greenlet runs only one task, so each task would open a connection.

    Args:
        client: its address and options are used, but not its connections.

    Attributes:
        defers: whether :meth:`send` can be used.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._kwargs = dict(self._pool.connection_kwargs)
        self._exchange_on: Callable[[Any, bytes], bytes] = _by_redis_py
        self.defers: bool = is_plain(self._pool)
        if self.defers:
            self._exchange_on = _by_socket
            self._kwargs = _without_push_messages(self._pool)
        self._retry = self._pool.connection_kwargs.get("retry") or Retry(NoBackoff(), 1)
        self._idle: list[FastConnection] = []  # append, pop and remove are atomic between threads

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

    def send(self, command: bytes, on_reply: OnReply, sent_at: float) -> None:
        """Send an encoded command, and do not wait for its reply.

        The next call on the same connection reads the reply, or :meth:`read_unread_replies`.

        Args:
            command: what to send.
            on_reply: called with the reply, or with the error that Redis replied or for which the
                reply was not read; again, with an error, if that was interrupted. It must neither
                wait nor raise.
            sent_at: monotonic time now.

        Raises:
            redis.RedisError: it could not be sent. ``on_reply`` is not called.
        """
        conn = self._take()
        try:
            _read_unread_reply(conn)
            _send(conn.connection, command)
            conn.expect_reply(on_reply, sent_at)
        except BaseException:
            self._close(conn)
            raise
        self._idle.append(conn)

    def pop(self, key: str, seconds: float) -> bytes | None:
        """Wait for an element of a list (BLPOP). It is not tried again: that could lose an element.

        Args:
            key: of the list.
            seconds: for which to wait at most; less than the socket's timeout.

        Raises:
            redis.RedisError: what redis-py's client would raise. The connection may have been
                closed while it was idle.
        """
        conn = self._take()
        try:
            _send(conn.connection, b"*3\r\n" + words(("BLPOP", key, str(seconds))))
            element = _element(conn.connection)
        except BaseException:
            self._close(conn)
            raise
        self._idle.append(conn)
        return element

    def read_unread_replies(self, sent_before: float) -> bool:
        """Read the unread replies of idle connections.

        Args:
            sent_before: monotonic time; read only replies that were asked for before.

        Returns:
            Whether later replies are unread.
        """
        for conn in list(self._idle):
            if conn.has_unread_reply and conn.sent_at <= sent_before:
                try:
                    self._idle.remove(conn)
                except ValueError:  # a call has taken it
                    continue
                self._read_and_put_back(conn)
        return any(conn.has_unread_reply for conn in list(self._idle))

    def _read_and_put_back(self, conn: FastConnection) -> None:
        try:
            _read_unread_reply(conn)
        except redis.RedisError:  # on_reply() has the error
            self._close(conn)
        except BaseException:
            self._close(conn)
            raise
        else:
            self._idle.append(conn)

    def _exchange(self, command: bytes) -> bytes:
        conn = self._take()
        try:
            exchange_on = _after_unread_reply(conn) if conn.has_unread_reply else self._exchange_on
            answer = exchange_on(conn.connection, command)
        except redis.ResponseError as error:
            if demoted(error):
                self._close(conn)
            else:
                self._idle.append(conn)  # an answer, which was read
            raise
        except BaseException:
            self._close(conn)
            raise
        self._idle.append(conn)
        return answer

    def _take(self) -> FastConnection:
        try:
            return self._idle.pop()
        except IndexError:
            return FastConnection(self._connect())

    def _connect(self) -> Any:
        """Connect explicitly: a send would connect to the old address without asking a Sentinel."""
        connection = self._pool.connection_class(**self._kwargs)
        connection.connect()
        return connection

    def _close(self, conn: FastConnection) -> None:
        """Close it and all idle ones: the cause has usually broken all connections."""
        _hang_up(conn)
        self.close()

    def close(self) -> None:
        """Close idle connections."""
        with suppress(IndexError):
            while True:
                _hang_up(self._idle.pop())


def is_plain(pool: redis.ConnectionPool) -> bool:
    """Return whether connections of a pool can be used without redis-py.

    They cannot with a connection class of the user, or if idle ones are checked before use.
    """
    return pool.connection_class in _PLAIN and not pool.connection_kwargs.get(
        "health_check_interval"
    )


def _without_push_messages(pool: redis.ConnectionPool) -> dict[str, Any]:
    """Return the arguments of a pool's connections, for protocol 2: nothing between two answers.

    With protocol 3 redis-py logs in as the user ``default`` if only a password is given. With
    protocol 2 it names no user, and a server without a password would refuse that.
    """
    kwargs: dict[str, Any] = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if not name.startswith("maint_notifications")
    }
    if pool.connection_class(**kwargs).protocol == _WITH_PUSH:
        if kwargs.get("credential_provider"):
            kwargs["credential_provider"] = _NamesUser(kwargs["credential_provider"])
        elif kwargs.get("password"):
            kwargs["username"] = kwargs.get("username") or "default"
    return {**kwargs, "protocol": 2}


class _NamesUser(redis.CredentialProvider):
    """Credentials of another provider, with the user ``default`` if they are a password alone."""

    def __init__(self, provider: redis.CredentialProvider) -> None:
        self._provider = provider

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        given = self._provider.get_credentials()
        return ("default", given[0]) if len(given) == 1 else given


def _by_redis_py(connection: Any, command: bytes) -> bytes:
    connection.send_packed_command([command])
    answer: bytes = connection.read_response()
    return answer


def _by_socket(connection: Any, command: bytes) -> bytes:
    """Send a command and return its answer, a bulk string; raise redis-py's errors."""
    _send(connection, command)
    return _only(connection, _next_answer(connection, b""))


def _after_unread_reply(conn: FastConnection) -> Callable[[Any, bytes], bytes]:
    """Return a function that sends a command, and reads the unread reply before its answer."""

    def exchange(connection: Any, command: bytes) -> bytes:
        _send(connection, command)
        unread = _next_answer(connection, b"")
        conn.deliver_reply(_value(connection, unread))
        return _only(connection, _next_answer(connection, unread.rest))

    return exchange


def _read_unread_reply(conn: FastConnection) -> None:
    """Read the unread reply of a connection, if there is one.

    Raises:
        redis.RedisError: there is none.
    """
    if conn.has_unread_reply:
        unread = _next_answer(conn.connection, b"")
        if unread.rest:
            raise redis.InvalidResponse(_NEITHER)
        conn.deliver_reply(_value(conn.connection, unread))


def _hang_up(conn: FastConnection) -> None:
    try:
        conn.connection.disconnect()
    finally:  # a soft time limit may interrupt the line above
        conn.deliver_reply(redis.ConnectionError("The connection was closed before Redis replied."))


def _send(connection: Any, command: bytes) -> None:
    try:
        connection._sock.sendall(command)  # noqa: SLF001
    except OSError as error:
        raise _as_redis_py(error) from error


class _Answer(NamedTuple):
    """An answer, and what has arrived after it."""

    text: bytes
    rest: bytes
    is_error: bool = False


def _next_answer(connection: Any, data: bytes) -> _Answer:
    """Return the next answer.

    Args:
        connection: where it arrives.
        data: what has arrived of it.

    Raises:
        redis.RedisError: it did not arrive, or is neither a bulk string nor an error.
    """
    sock = connection._sock  # noqa: SLF001  # opened by redis-py, with its options
    while (end := data.find(b"\r\n")) < 0:
        data += _more(sock)
    if data[0] == _ERROR:
        return _Answer(data[1:end], data[end + 2 :], is_error=True)
    if data[0] != _BULK:
        raise redis.InvalidResponse(_NEITHER)
    until = end + 4 + int(data[1:end])
    while len(data) < until:
        data += _more(sock)
    return _Answer(data[end + 2 : until - 2], data[until:])


def _element(connection: Any) -> bytes | None:
    """Return the element in the answer to BLPOP; None if the list stayed empty."""
    data = b""
    while (end := data.find(b"\r\n")) < 0:
        data += _more(connection._sock)  # noqa: SLF001
    if data == b"*-1\r\n":
        return None
    if data[0] != _LIST:
        return _only(connection, _next_answer(connection, data))  # raises: it is an error
    key = _next_answer(connection, data[end + 2 :])
    return _only(connection, _next_answer(connection, key.rest))


def _only(connection: Any, answer: _Answer) -> bytes:
    """Return the text of an answer after which nothing has arrived; raise it if it is an error.

    No variable refers to the error: its traceback would keep the store alive.
    """
    if answer.rest:
        raise redis.InvalidResponse(_NEITHER)
    if answer.is_error:
        raise _error_of(connection, answer)
    return answer.text


def _value(connection: Any, answer: _Answer) -> bytes | Exception:
    return _error_of(connection, answer) if answer.is_error else answer.text


def _error_of(connection: Any, answer: _Answer) -> Exception:
    text = answer.text.decode("utf-8", "replace")
    error: Exception = connection._parser.parse_error(text)  # noqa: SLF001
    return error


def _as_redis_py(error: OSError) -> redis.RedisError:
    """Return redis-py's error for an error of a socket."""
    if isinstance(error, TimeoutError):
        return redis.TimeoutError("Timeout on the socket")
    return redis.ConnectionError(f"Error on the socket: {error}")


def _more(sock: Any) -> bytes:
    """Return what has arrived."""
    try:
        more: bytes = sock.recv(_CHUNK)
    except OSError as error:
        raise _as_redis_py(error) from error
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

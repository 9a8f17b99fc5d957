"""One connection, one script, one answer: the short way for who runs one task at a time.

redis-py's client takes a connection from its pool for each command, looks whether data lies on it,
packs each argument by calls of its own, and counts for its metrics. Around a task that does
nothing, this was half of what a lock cost a pool child.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.keys import encoded
from celery_singleton_lock.store.scripts import Argument, Script, words

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
        self._retry = self._pool.connection_kwargs.get("retry") or Retry(NoBackoff(), 1)
        self._idle: list[Any] = []  # its append and pop are single steps, for threads

    def ask(self, command: bytes) -> Any:
        """Send a packed command and return the answer.

        A connection that turns out to be closed is opened again as often as the client's options
        say.

        Raises:
            redis.RedisError: what redis-py's client would raise.
        """
        try:
            return self._exchange(command)
        except redis.ConnectionError:
            return copy.deepcopy(self._retry).call_with_retry(
                lambda: self._exchange(command), lambda _error: None
            )

    def _exchange(self, command: bytes) -> Any:
        connection = self._take()
        try:
            connection.send_packed_command([command])
            answer = connection.read_response()
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
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        connection.connect()
        return connection

    def _close(self, connection: Any) -> None:
        """Close it, and those that nobody uses: what ended one has mostly ended all."""
        connection.disconnect()
        with suppress(IndexError):
            while True:
                self._idle.pop().disconnect()


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
    return b"".join((script.head, _keys(prefix, name), words(own), _usual(usual)))


@functools.lru_cache(maxsize=4096)
def _keys(prefix: str, name: str) -> bytes:
    return words(encoded(prefix, name))


_usual = functools.lru_cache(maxsize=1024)(words)

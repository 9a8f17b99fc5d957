"""One connection per thread, one script, one answer: the short way for who runs one task at a time.

redis-py's client takes a connection from its pool for each command, looks whether data lies on it,
packs each argument by calls of its own, and counts for its metrics. Around a task that does
nothing, this was half of what a lock cost a pool child.
"""

from __future__ import annotations

import threading
from typing import Any

import redis

from celery_singleton_lock.store.scripts import Call


class Wire:
    """Runs scripts on connections with the address and the options of a client.

    An answer that was not read, whatever interrupted the reading (a soft time limit can strike
    between any two lines), must not be taken for the next one's: so any exception closes the
    connection, and the next call opens it again.

    Args:
        client: whose address and options to take; its connections are left alone.
    """

    def __init__(self, client: redis.Redis) -> None:
        """Connect with the first call of each thread."""
        self._pool = client.connection_pool
        self._here = threading.local()

    def ask(self, call: Call) -> Any:
        """Run a script by its digest, again as often as the client's options say.

        Raises:
            redis.RedisError: what redis-py's client would raise.
        """
        command, connection = packed(call), self._connection()
        return connection.retry.call_with_retry(
            lambda: self._exchange(connection, command), lambda _error: None
        )

    def _connection(self) -> Any:
        connection = getattr(self._here, "connection", None)
        if connection is None:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            self._here.connection = connection
        return connection

    @staticmethod
    def _exchange(connection: Any, command: bytes) -> Any:
        try:
            connection.send_packed_command([command])
            return connection.read_response()
        except redis.ResponseError:
            raise  # that is an answer, and it was read
        except BaseException:
            connection.disconnect()
            raise


def packed(call: Call) -> bytes:
    """Return the EVALSHA of a script as the server reads it."""
    words = [b"EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments]
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)

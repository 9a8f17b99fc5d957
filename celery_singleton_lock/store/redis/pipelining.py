"""Sends the next commands before the caller has used the last answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from celery_singleton_lock.store.scripts import Argument, Call, words


class PipelinedConnection:
    """A connection that sends the next commands before the caller has used the last answers.

    So the server works while the caller does. All commands must be safe to repeat.

    Args:
        client: its address and options are used, but not its connections.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._connection: Any = None
        self._asked: Sequence[bytes] = ()

    def ask(self, commands: Sequence[bytes]) -> None:
        """Send encoded commands; :meth:`answers` reads their answers.

        Raises:
            redis.RedisError: the connection cannot be opened.
        """
        self._asked = commands
        try:
            self._send()
        except redis.ConnectionError:  # the server closed an idle connection
            self.close()
            self._send()

    def answers(self) -> list[Any]:
        """Return an answer for each command; the answer to one may be an error.

        Raises:
            redis.RedisError: the server does not answer.
        """
        try:
            return self._read()
        except redis.ConnectionError:  # as above
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


def packed_command(parts: Sequence[Argument]) -> bytes:
    """Return a command in the Redis protocol."""
    return b"*%d\r\n" % len(parts) + words(parts)


def packed_call(call: Call) -> bytes:
    """Return the EVALSHA of a script in the Redis protocol."""
    return packed_command(["EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments])

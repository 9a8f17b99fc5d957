"""Sends a command with the client's retries, and notes whether it was repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from inspect import Parameter, signature
from typing import Any, Final

import redis

from celery_singleton_lock.store.error_mapping import FAILED
from celery_singleton_lock.store.requests import Attempts

POOL_WANTS: Final = (
    ("EVALSHA",)
    if signature(redis.ConnectionPool.get_connection).parameters["command_name"].default
    is Parameter.empty
    else ()
)
"""Arguments of a pool's ``get_connection``: before redis-py 5.3, the name of the command."""


def send_counted(
    pool: redis.ConnectionPool,
    words: Sequence[Any],
    attempts: Attempts,
    wants: Sequence[str] = POOL_WANTS,
) -> Any:
    """Send a command with the client's retries, and note whether it was repeated.

    Args:
        pool: of the client.
        words: the command; its answer is not converted.
        attempts: notes whether it was repeated.
        wants: arguments of the pool's ``get_connection``.

    Raises:
        redis.RedisError: what redis-py's client would raise.
    """
    try:
        connection: Any = pool.get_connection(*wants)
    except BaseException:  # an interruption may leave a connection in the middle of its handshake
        close_idle(pool)
        raise
    try:
        return exchange_counted(connection, words, attempts)
    finally:
        pool.release(connection)


def close_idle(pool: Any) -> None:
    """Close the idle connections of a pool."""
    try:
        pool.disconnect(inuse_connections=False)
    except TypeError:  # BlockingConnectionPool before redis-py 7, and of valkey-py
        _close_queued(pool.pool)


@contextmanager
def closing_if_interrupted(client: Any) -> Iterator[None]:
    """Close connections of a client if its call is interrupted, as by a soft time limit.

    The client has put the connection back into its pool. The next call on it would take the late
    reply for its own, or find an unfinished handshake.

    Args:
        client: of redis-py or valkey-py, also for a Cluster.
    """
    try:
        yield
    except FAILED:
        raise  # of the client, which has read the reply or closed the connection
    except BaseException:
        for each in _clients_in(client):
            if each.connection is not None:  # with single_connection_client
                each.connection.disconnect()
            close_idle(each.connection_pool)
        raise


def _clients_in(client: Any) -> list[Any]:
    """Return the client of each node of a Cluster; else the client itself."""
    if not hasattr(client, "get_nodes"):
        return [client]
    made = (node.redis_connection for node in client.get_nodes())
    return [each for each in made if each is not None]


def _close_queued(idle: Any) -> None:
    """Close idle connections in a queue, and keep them there: a closed one can be reopened."""
    with getattr(idle, "mutex", nullcontext()):  # so that nobody takes one meanwhile
        for connection in filter(None, idle.queue):
            connection.disconnect()


def without_single_connection(client: Any) -> Any:
    """Return the client, or with ``single_connection_client`` a copy that uses its pool.

    A thread renews leases while the caller uses that connection. redis-py before 5.3 and valkey-py
    let both send at once, so each would read answers of the other. Newer versions would let the
    renewal wait until a blocking command of the caller has ended.
    """
    if client.connection is None:
        return client
    made = copy(client)
    made.connection, made.auto_close_connection_pool = None, False
    made._single_connection_client = False  # noqa: SLF001  # redis-py 5.3 and later read it
    return made


def exchange_counted(connection: Any, words: Sequence[Any], attempts: Attempts) -> Any:
    """Send a command with the connection's retries, and note whether it was repeated."""

    def exchange() -> Any:
        connection.send_command(*words)
        return connection.read_response()

    def failed(_error: Exception) -> None:
        attempts.repeated = True
        connection.disconnect()

    try:
        return connection.retry.call_with_retry(exchange, failed)
    except redis.ResponseError:
        raise  # an answer, which was read
    except BaseException:
        connection.disconnect()  # the answer may still arrive
        raise

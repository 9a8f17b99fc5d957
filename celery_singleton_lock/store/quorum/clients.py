"""Clients of the servers of a quorum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.config.argument_checks import is_pipeline
from celery_singleton_lock.config.redis_url import check_server, for_redis_py
from celery_singleton_lock.config.url_text import safe_url
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind, named
from celery_singleton_lock.store.connect import checked


def node_client(
    number: int,
    server: object,
    timeout: float,
    kind: type[Any] = redis.Redis,
    retry: type[Any] = Retry,
) -> Any:
    """Return a client of one server of a quorum, with short time-outs and one retry.

    The retry is for an idle connection that the server has closed.

    Args:
        number: of the server, for errors.
        server: a URL, or a client.
        timeout: seconds within which the server must answer.
        kind: class of redis-py's client, for threads or for asyncio.
        retry: class of its retry policy.

    Raises:
        ConfigurationError: ``server`` is neither a URL nor such a client.
    """
    if isinstance(server, kind) and not is_pipeline(server):
        return server
    where = f"Server {number} of the quorum"
    if not isinstance(server, str):
        other = {"redis.Redis": "threads have Lock", "redis.asyncio.Redis": "asyncio has AsyncLock"}
        hint = other.get(named(type(server)), "")
        url = "a URL or " if kind is redis.Redis else ""  # an AsyncLock takes clients only
        msg = f"{where} is {a_kind(server)}: give {url}a {named(kind)} client" + (
            f"; {hint}." if hint else "."
        )
        raise ConfigurationError(msg)
    check_server(server, where)
    once_more = retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    try:
        client = kind.from_url(
            for_redis_py(server),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=once_more,
        )
    except ValueError:  # its text may contain the password
        msg = f"{where} is {safe_url(server)!r}: redis-py cannot read the options after the ?."
        raise ConfigurationError(msg) from None
    return checked(client, f"{where}, {safe_url(server)!r},")


def addresses_of(clients: Iterable[Any]) -> list[str]:
    """Return the addresses of clients, without passwords.

    Raises:
        ConfigurationError: two addresses are the same.
    """
    found: list[str] = []
    for client in clients:
        options = client.connection_pool.connection_kwargs
        host, port = options.get("host", "localhost"), options.get("port", 6379)  # as redis-py
        address = options.get("path") or f"{host}:{port}"
        if address in found:
            msg = (
                f"{address} is given twice in a quorum, and would vote twice (databases of one "
                "server are not separate servers). Give the address of another server."
            )
            raise ConfigurationError(msg)
        found.append(str(address))
    return found

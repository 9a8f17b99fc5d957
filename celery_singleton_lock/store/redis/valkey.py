"""Stores on clients of valkey-py, which have redis-py's methods and their own error classes.

This module does not import valkey-py: a caller with such a client has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

import redis
from redis import exceptions as failures

from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.redis.aio import send_counted as send_counted_async
from celery_singleton_lock.store.redis.aio import send_counted_alone as send_counted_alone_async
from celery_singleton_lock.store.redis.blocking import blocking_client
from celery_singleton_lock.store.redis.counted import send_counted
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.requests import Command, Counted, Request

_WANTS: Final = ("EVALSHA",)
"""Argument of ``get_connection`` of a pool of valkey-py: the name of the command."""


class ValkeyClient(Protocol):
    """Type of a client of valkey-py for threads."""

    connection_pool: Any

    def get_connection_kwargs(self) -> dict[Any, Any]:
        """Return the options of its connections."""
        ...

    def __enter__(self) -> Any: ...


class AsyncValkeyClient(Protocol):
    """Type of a client of valkey-py for asyncio."""

    connection_pool: Any

    def get_connection_kwargs(self) -> dict[str, Any]:
        """Return the options of its connections."""
        ...

    async def aclose(self) -> None:
        """Close its connections."""
        ...


def is_valkey(client: object, *, asyncio: bool = False) -> bool:
    """Return whether this is a client of valkey-py for one server.

    Args:
        client: any object.
        asyncio: look for a client for asyncio, else for threads.
    """
    module = "valkey.asyncio.client" if asyncio else "valkey.client"
    return any(
        (kind.__module__, kind.__name__) == (module, "Valkey") for kind in type(client).__mro__
    )


@contextmanager
def errors_of_redis() -> Iterator[None]:
    """Raise redis-py's error of the same name for an error of valkey-py."""
    try:
        yield
    except Exception as error:
        same = as_redis_error(error)
        if same is error:
            raise
        raise same from error


def as_redis_error(error: Exception) -> Exception:
    """Return redis-py's error of the same name for an error of valkey-py; else the error itself."""
    for kind in type(error).__mro__:
        if kind.__module__ != "valkey.exceptions":
            continue
        same = getattr(failures, kind.__name__.replace("Valkey", "Redis"), None)
        if same is not None:
            found: Exception = same(*error.args)
            found.__cause__ = error
            return found
    return error


class ValkeyStore(RedisStore):
    """Locks on one server, with a client of valkey-py."""

    def _done(self, request: Request) -> Any:
        with errors_of_redis():
            return super()._done(request)

    def _counted(self, request: Counted) -> Any:
        return send_counted(
            self.client.connection_pool, request.command.words, request.attempts, _WANTS
        )

    def _sent(self, commands: Sequence[Command]) -> list[Any]:
        return _with_redis_errors(super()._sent(commands))

    def _copier(self) -> Callable[[float], redis.Redis]:
        valkey = sys.modules["valkey"]
        return partial(
            blocking_client, self.client, kind=valkey.Valkey, pool_kind=valkey.ConnectionPool
        )


class AsyncValkeyStore(AsyncRedisStore):
    """Locks on one server, with a client of valkey-py for asyncio."""

    async def _done(self, request: Request) -> Any:
        with errors_of_redis():
            return await super()._done(request)

    async def _counted(self, request: Counted) -> Any:
        if self.client.single_connection_client:
            return await send_counted_alone_async(self.client, request)
        return await send_counted_async(self.client.connection_pool, request, _WANTS)

    async def _sent(self, commands: Sequence[Command]) -> list[Any]:
        return _with_redis_errors(await super()._sent(commands))


def _with_redis_errors(answers: list[Any]) -> list[Any]:
    return [as_redis_error(each) if isinstance(each, Exception) else each for each in answers]

"""Clients of valkey-py: the interface is redis-py's, and the errors are classes of its own.

Nothing here imports valkey-py. A client of it has done that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import redis
from redis import exceptions as failures

from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.redis.aio import send_counted as send_counted_async
from celery_singleton_lock.store.redis.sync import RedisStore, blocking_twin
from celery_singleton_lock.store.message_operations import Command, Counted, Wish
from celery_singleton_lock.store.redis.fast_path import send_counted

_WANTS: Final = ("EVALSHA",)
"""What a pool of valkey-py is told of the command when it is asked for a connection."""


class ValkeyClient(Protocol):
    """What tells type checkers a client of valkey-py for threads."""

    connection_pool: Any

    def get_connection_kwargs(self) -> dict[Any, Any]:
        """Return the options of its connections."""
        ...

    def __enter__(self) -> Any: ...


class AsyncValkeyClient(Protocol):
    """What tells type checkers a client of valkey-py for asyncio."""

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
        client: whatever it is.
        asyncio: whether it is to be one for asyncio; else one for threads.
    """
    module = "valkey.asyncio.client" if asyncio else "valkey.client"
    return any(
        (kind.__module__, kind.__name__) == (module, "Valkey") for kind in type(client).__mro__
    )


@contextmanager
def errors_of_redis() -> Iterator[None]:
    """Raise redis-py's error of the same name for one of valkey-py's."""
    try:
        yield
    except Exception as error:
        twin = as_redis_error(error)
        if twin is error:
            raise
        raise twin from error


def as_redis_error(error: Exception) -> Exception:
    """Return redis-py's error of the same name for one of valkey-py's; any other as it is."""
    for kind in type(error).__mro__:
        if kind.__module__ != "valkey.exceptions":
            continue
        twin = getattr(failures, kind.__name__.replace("Valkey", "Redis"), None)
        if twin is not None:
            found: Exception = twin(*error.args)
            found.__cause__ = error
            return found
    return error


class ValkeyStore(RedisStore):
    """Locks on one server, by a client of valkey-py."""

    def _done(self, wish: Wish) -> Any:
        with errors_of_redis():
            return super()._done(wish)

    def _counted(self, wish: Counted) -> Any:
        if self.client.connection is not None:
            return self._command(wish.command)
        return send_counted(self.client.connection_pool, wish.command.words, wish.attempts, _WANTS)

    def _sent(self, commands: Sequence[Command]) -> list[Any]:
        return _told_as_redis(super()._sent(commands))

    def _twin(self, longest: float) -> redis.Redis:
        valkey = sys.modules["valkey"]
        return blocking_twin(self.client, longest, valkey.Valkey, valkey.ConnectionPool)


class AsyncValkeyStore(AsyncRedisStore):
    """Locks on one server, by a client of valkey-py for asyncio."""

    async def _done(self, wish: Wish) -> Any:
        with errors_of_redis():
            return await super()._done(wish)

    async def _counted(self, wish: Counted) -> Any:
        if self.client.single_connection_client:
            return await self._command(wish.command)
        return await send_counted_async(self.client.connection_pool, wish, _WANTS)

    async def _sent(self, commands: Sequence[Command]) -> list[Any]:
        return _told_as_redis(await super()._sent(commands))


def _told_as_redis(answers: list[Any]) -> list[Any]:
    return [as_redis_error(each) if isinstance(each, Exception) else each for each in answers]

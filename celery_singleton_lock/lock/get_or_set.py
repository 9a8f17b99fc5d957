"""A value that is dear to compute: one computes it, the others wait for it and read.

::

    page = get_or_set(client, "page:42", lambda: render(42), expire=60)
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import redis
import redis.asyncio

from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.config.argument_checks import checked_seconds
from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.errors import (
    BackendRefused,
    ConfigurationError,
    LockNotOwned,
    LockReentered,
)
from celery_singleton_lock.lock.base import Holding, checked_client
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.core.lock_steps import Plan, carry_out, carry_out_async
from celery_singleton_lock.store.error_mapping import FAILED, explain
from celery_singleton_lock.store.redis.valkey import AsyncValkeyClient, ValkeyClient, as_redis_error

T = TypeVar("T")

_NAME: Final = "get_or_set:"
"""How the names of these locks begin."""


_computing: set[tuple[object, ...]] = set()
"""Who computes which value, in this process."""


@contextmanager
def _once_by(who: object, value: _Value) -> Iterator[None]:
    """Let nobody compute a value for which it would have to wait itself.

    Raises:
        LockReentered: this thread or task computes it already.
    """
    mine = (who, *value.place())
    if mine in _computing:
        msg = (
            f"The compute of get_or_set for the key {value.key!r} asked for that key itself, and "
            "would wait for its own end. Let compute return the value without get_or_set."
        )
        raise LockReentered(msg, _NAME + value.key)
    _computing.add(mine)
    try:
        yield
    finally:
        _computing.discard(mine)


class _Value(NamedTuple):
    """Where a value is kept, and how."""

    client: Any
    key: str
    expire: float
    dumps: Callable[[Any], str | bytes]
    loads: Callable[[Any], Any]

    def place(self) -> tuple[object, ...]:
        """Return what tells this value from any other: its server and its key."""
        pool = getattr(self.client, "connection_pool", None)
        options = getattr(pool, "connection_kwargs", {})
        server = tuple(options.get(name) for name in ("host", "port", "path", "db"))
        return (*server, self.key) if any(server) else (id(self.client), self.key)

    def reading(self) -> Plan[Callable[[], Any], tuple[bool, Any]]:
        """Return whether it is there, and it."""
        raw = yield from self.asking(lambda: self.client.get(self.key))
        if raw is None:
            return False, None
        try:
            return True, self.loads(raw)
        except ValueError as error:
            msg = (
                f"get_or_set: loads cannot read what stands at the key {self.key!r} "
                f"({type(error).__name__}). Another program, or other dumps, wrote it: delete that "
                "key, or use another one."
            )
            raise ConfigurationError(msg) from error

    def asking(self, call: Callable[[], Any]) -> Plan[Callable[[], Any], Any]:
        """Ask Redis; its errors are told as ours."""
        try:
            return (yield call)
        except Exception as found:
            error = as_redis_error(found)
            if not isinstance(error, FAILED):
                raise
            if "WRONGTYPE" in str(error):
                msg = (
                    f"The key {self.key!r} holds something other than a value of get_or_set "
                    "(WRONGTYPE): use another key."
                )
                raise BackendRefused(msg) from found
            raise explain(error) from found

    def filling(self, lock: Holding, compute: Callable[[], Any]) -> Plan[Callable[[], Any], Any]:
        """Return it: of who was quicker, or computed; and kept, unless the lock was lost."""
        there, value = yield from self.reading()
        if there:
            return value
        value = yield compute
        if lock.held:  # else another has computed it meanwhile, and knows better
            ms, kept = round(self.expire * 1000), self.dumps(value)
            yield from self.asking(lambda: self.client.set(self.key, kept, px=ms))
        return value


def _value(
    client: Any,
    key: str,
    expire: float,
    dumps: Callable[[Any], str | bytes],
    loads: Callable[[Any], Any],
) -> _Value:
    return _Value(client, key, checked_seconds("expire", expire, 0.001, MAX_WAIT), dumps, loads)


def get_or_set(
    client: redis.Redis | ValkeyClient,
    key: str,
    compute: Callable[[], T],
    *,
    expire: float,
    lease: float = 30.0,
    wait_timeout: float | None = None,
    prefix: str | None = None,
    dumps: Callable[[Any], str | bytes] = json.dumps,
    loads: Callable[[Any], Any] = json.loads,
) -> T:
    """Return a value that is kept in Redis; if it is not there, one computes it for all.

    Who comes meanwhile waits, and reads. If who computes dies, the next computes, at the latest
    when the lease has ended. Who has lost the lock meanwhile returns its value, and does not keep
    it.

    Args:
        client: redis-py client, or one of valkey-py.
        key: of the value, as it stands in Redis.
        compute: returns the value. What it raises is raised here, and the next one computes.
        expire: seconds for which the value is kept.
        lease: seconds for which a dead computer is waited for; renewed while it computes.
        wait_timeout: most seconds to wait; None for as long as it takes.
        prefix: first part of the lock's keys, "csl" unless given.
        dumps: writes the value.
        loads: reads it.

    Returns:
        The value.

    Raises:
        LockTimeout: it was waited for as long as was allowed.
        LockReentered: ``compute`` asked for the same key, and would wait for itself.
        BackendError: the lock's Redis did not answer, or refused.
        ConfigurationError: an argument is not usable, or ``loads`` raised a ValueError on what
            stands at the key.
    """
    checked_client("get_or_set", client, redis.Redis, redis.RedisCluster)
    if inspect.iscoroutinefunction(compute):
        msg = "get_or_set calls compute, and this is a coroutine function: use async_get_or_set."
        raise ConfigurationError(msg)
    value = _value(client, key, expire, dumps, loads)
    there, found = carry_out(value.reading(), _call)
    if there:
        return found  # type: ignore[no-any-return]  # whatever was kept
    options: dict[str, Any] = {"lease": lease, "blocking_timeout": wait_timeout, "prefix": prefix}
    filled: list[T] = []
    try:
        with (
            _once_by(threading.get_ident(), value),
            Lock(client, _NAME + key, **options) as lock,
        ):
            filled.append(carry_out(value.filling(lock, compute), _call))
    except LockNotOwned:  # lost while it computed: what it has is good for itself
        if not filled:
            raise
    return filled[0]


async def async_get_or_set(
    client: redis.asyncio.Redis | AsyncValkeyClient,
    key: str,
    compute: Callable[[], Awaitable[T]],
    *,
    expire: float,
    lease: float = 30.0,
    wait_timeout: float | None = None,
    prefix: str | None = None,
    dumps: Callable[[Any], str | bytes] = json.dumps,
    loads: Callable[[Any], Any] = json.loads,
) -> T:
    """Return a value that is kept in Redis; as :func:`get_or_set` does, for asyncio.

    Args:
        client: redis-py client for asyncio.
        key: of the value.
        compute: coroutine function that returns the value.
        expire: seconds for which the value is kept.
        lease: seconds for which a dead computer is waited for.
        wait_timeout: most seconds to wait; None for as long as it takes.
        prefix: first part of the lock's keys.
        dumps: writes the value.
        loads: reads it.

    Returns:
        The value.

    Raises:
        LockTimeout: it was waited for as long as was allowed.
        LockReentered: ``compute`` asked for the same key, and would wait for itself.
        BackendError: the lock's Redis did not answer, or refused.
        ConfigurationError: an argument is not usable, or ``loads`` raised a ValueError on what
            stands at the key.
    """
    checked_client("async_get_or_set", client, redis.asyncio.Redis, redis.asyncio.RedisCluster)
    value = _value(client, key, expire, dumps, loads)
    there, found = await carry_out_async(value.reading(), _await)
    if there:
        return found  # type: ignore[no-any-return]  # whatever was kept
    options: dict[str, Any] = {"lease": lease, "blocking_timeout": wait_timeout, "prefix": prefix}
    filled: list[T] = []
    try:
        with _once_by(asyncio.current_task(), value):
            async with AsyncLock(client, _NAME + key, **options) as lock:
                filled.append(await carry_out_async(value.filling(lock, compute), _await))
    except LockNotOwned:  # lost while it computed: what it has is good for itself
        if not filled:
            raise
    return filled[0]


def _call(what: Callable[[], Any]) -> Any:
    return what()


async def _await(what: Callable[[], Any]) -> Any:
    answer = what()
    return await answer if inspect.isawaitable(answer) else answer

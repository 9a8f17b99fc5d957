"""A cached value that one caller computes: other callers wait for it and read it.

::

    page = get_or_set(client, "page:42", lambda: render(42), expire=60)
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import redis
import redis.asyncio

from celery_singleton_lock.config.argument_checks import checked_seconds
from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.core.lock_steps import Plan, carry_out, carry_out_async
from celery_singleton_lock.errors import (
    BackendRefused,
    ConfigurationError,
    LockNotOwned,
    LockReentered,
)
from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.lock.backends import checked_client
from celery_singleton_lock.lock.base import LockBase
from celery_singleton_lock.lock.running_calls import noted
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.error_mapping import FAILED, explain
from celery_singleton_lock.store.redis.counted import closing_if_interrupted
from celery_singleton_lock.store.redis.valkey import AsyncValkeyClient, ValkeyClient, as_redis_error

T = TypeVar("T")

_NAME: Final = "get_or_set:"
"""Prefix of the names of these locks."""


_computing: set[tuple[object, ...]] = set()
"""Each running computation: its process, its thread or task, and its value."""


def _once_by(who: object, value: _Value) -> AbstractContextManager[None]:
    """Refuse a computation that would wait for itself.

    Raises:
        LockReentered: this thread or task already computes the value.
    """
    mine = (os.getpid(), who, *value.place())
    if mine in _computing:
        msg = (
            f"compute for the key {value.key!r} called get_or_set for the same key, and would wait "
            "for itself. Return the value from compute without get_or_set."
        )
        raise LockReentered(msg, _NAME + value.key)
    return noted(_computing, mine)


class _Value(NamedTuple):
    """A value in Redis."""

    client: Any
    key: str
    expire: float
    dumps: Callable[[Any], str | bytes]
    loads: Callable[[Any], Any]

    def place(self) -> tuple[object, ...]:
        """Return the server and the key of the value, which identify it."""
        pool = getattr(self.client, "connection_pool", None)
        options = getattr(pool, "connection_kwargs", {})
        server = tuple(options.get(name) for name in ("host", "port", "path", "db"))
        return (*server, self.key) if any(server) else (id(self.client), self.key)

    def reading(self) -> Plan[Callable[[], Any], tuple[bool, Any]]:
        """Return whether the value exists, and the value."""
        raw = yield from self.asking(lambda: self.client.get(self.key))
        if raw is None:
            return False, None
        try:
            return True, self.loads(raw)
        except ValueError as error:
            msg = (
                f"get_or_set: loads cannot read the value of the key {self.key!r} "
                f"({type(error).__name__}). Another program, or another dumps, has written it. "
                "Delete the key, or use another one."
            )
            raise ConfigurationError(msg) from error

    def asking(self, call: Callable[[], Any]) -> Plan[Callable[[], Any], Any]:
        """Call Redis, and translate its errors."""
        try:
            return (yield partial(self._sent, call))
        except Exception as found:
            error = as_redis_error(found)
            if not isinstance(error, FAILED):
                raise
            if "WRONGTYPE" in str(error):
                msg = (
                    f"The key {self.key!r} is not a value of get_or_set, but has another type "
                    "(WRONGTYPE). Use another key."
                )
                raise BackendRefused(msg) from found
            raise explain(error) from found

    def _sent(self, call: Callable[[], Any]) -> Any:
        with closing_if_interrupted(self.client):
            return call()

    def filling(self, lock: LockBase, compute: Callable[[], Any]) -> Plan[Callable[[], Any], Any]:
        """Return the value; compute it if it does not exist, and store it if the lock is held."""
        there, value = yield from self.reading()
        if there:
            return value
        value = yield compute
        if lock.held:  # else another caller has computed it meanwhile
            ms, written = round(self.expire * 1000), self.dumps(value)
            yield from self.asking(lambda: self.client.set(self.key, written, px=ms))
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
    """Return a value from Redis. If it does not exist, one caller computes it for all.

    Callers that arrive meanwhile wait, and read the value. If the computing process dies, the next
    caller computes, at the latest when the lease has ended. A caller that loses the lock while it
    computes returns its value and does not store it.

    Args:
        client: client of redis-py or valkey-py.
        key: Redis key of the value.
        compute: returns the value. Its error is raised here, and the next caller computes.
        expire: seconds for which the value is stored.
        lease: seconds after which others stop waiting for a dead process; it is renewed while
            ``compute`` runs.
        wait_timeout: longest wait in seconds; None for no limit.
        prefix: first part of the lock's keys; "csl" by default.
        dumps: encodes the value.
        loads: decodes it.

    Returns:
        The value.

    Raises:
        LockTimeout: the wait has timed out.
        LockReentered: ``compute`` called this for the same key, and would wait for itself.
        BackendError: Redis did not answer, or refused.
        ConfigurationError: an argument is invalid, or ``loads`` raised a ValueError.
    """
    checked_client("get_or_set", client, redis.Redis, redis.RedisCluster)
    if inspect.iscoroutinefunction(compute):
        msg = (
            "compute is a coroutine function, which get_or_set cannot await. Use async_get_or_set."
        )
        raise ConfigurationError(msg)
    value = _value(client, key, expire, dumps, loads)
    there, found = carry_out(value.reading(), _call)
    if there:
        return found  # type: ignore[no-any-return]  # as loads returns it
    options: dict[str, Any] = {"lease": lease, "blocking_timeout": wait_timeout, "prefix": prefix}
    filled: list[T] = []
    try:
        with (
            _once_by(threading.get_ident(), value),
            Lock(client, _NAME + key, **options) as lock,
        ):
            filled.append(carry_out(value.filling(lock, compute), _call))
    except LockNotOwned:  # lost meanwhile: the value is still valid for this caller
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
    """Return a value from Redis, or compute it; :func:`get_or_set` for asyncio.

    Args:
        client: asyncio client of redis-py or valkey-py.
        key: Redis key of the value.
        compute: coroutine function that returns the value.
        expire: seconds for which the value is stored.
        lease: seconds after which others stop waiting for a dead process.
        wait_timeout: longest wait in seconds; None for no limit.
        prefix: first part of the lock's keys; "csl" by default.
        dumps: encodes the value.
        loads: decodes it.

    Returns:
        The value.

    Raises:
        LockTimeout: the wait has timed out.
        LockReentered: ``compute`` called this for the same key, and would wait for itself.
        BackendError: Redis did not answer, or refused.
        ConfigurationError: an argument is invalid, or ``loads`` raised a ValueError.
    """
    checked_client("async_get_or_set", client, redis.asyncio.Redis, redis.asyncio.RedisCluster)
    value = _value(client, key, expire, dumps, loads)
    there, found = await carry_out_async(value.reading(), _await)
    if there:
        return found  # type: ignore[no-any-return]  # as loads returns it
    options: dict[str, Any] = {"lease": lease, "blocking_timeout": wait_timeout, "prefix": prefix}
    filled: list[T] = []
    try:
        with _once_by(asyncio.current_task(), value):
            async with AsyncLock(client, _NAME + key, **options) as lock:
                filled.append(await carry_out_async(value.filling(lock, compute), _await))
    except LockNotOwned:  # lost meanwhile: the value is still valid for this caller
        if not filled:
            raise
    return filled[0]


def _call(what: Callable[[], Any]) -> Any:
    return what()


async def _await(what: Callable[[], Any]) -> Any:
    answer = what()
    return await answer if inspect.isawaitable(answer) else answer

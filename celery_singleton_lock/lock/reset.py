"""Resets all locks at once, for example after an incident, or before a test."""

from __future__ import annotations

from functools import partial
from typing import Any

import redis
import redis.asyncio

from celery_singleton_lock.core.lock_steps import carry_out, carry_out_async
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.redis_keys import keyspace_with
from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.lock.backends import checked_client
from celery_singleton_lock.message_text import a_kind
from celery_singleton_lock.store.cluster.aio import AsyncClusterStore
from celery_singleton_lock.store.factory import store_on
from celery_singleton_lock.store.operations import Operations
from celery_singleton_lock.store.operator.listing import SCANNED, fits, glance_calls, match_of
from celery_singleton_lock.store.operator.redis import ClusterAdminStore
from celery_singleton_lock.store.operator.replies import glances_of
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.redis.valkey import (
    AsyncValkeyClient,
    AsyncValkeyStore,
    ValkeyClient,
    is_valkey,
)
from celery_singleton_lock.store.requests import Command, Request, Steps
from celery_singleton_lock.store.scripts import load_admin_scripts


def reset_all(
    client: redis.Redis | redis.RedisCluster | ValkeyClient,
    pattern: str = "",
    *,
    prefix: str | None = None,
) -> int:
    """Take all locks from their holders, and grant them to the next waiters.

    SCAN finds the locks, so Redis serves other clients meanwhile. Parked tasks stay parked. The
    command ``celery locks`` shows the locks first, and writes an audit entry.

    Args:
        client: redis-py client.
        pattern: part of the names; a glob pattern for whole names, if it has one of ``*?[``.
        prefix: first part of the keys; "csl" by default.

    Returns:
        The number of holders that lost a lock.

    Raises:
        BackendError: Redis did not answer, or refused.
        ConfigurationError: the client or the pattern has a wrong type.
    """
    checked_client("reset_all", client, redis.Redis, redis.RedisCluster)
    _check_pattern(pattern)
    keyspace = keyspace_with(None, prefix)
    if isinstance(client, redis.RedisCluster):
        nodes, call = ClusterAdminStore(client, keyspace), new_token()
        return sum(
            nodes.reset(found.name, call=call)
            for found in nodes.summarise_locks(pattern)
            if found.held
        )
    store = store_on(client, keyspace)
    return carry_out(_resetting_all(store.operations, pattern, new_token()), store.do)


async def async_reset_all(
    client: redis.asyncio.Redis | redis.asyncio.RedisCluster | AsyncValkeyClient,
    pattern: str = "",
    *,
    prefix: str | None = None,
) -> int:
    """Take all locks from their holders; :func:`reset_all` for asyncio.

    Args:
        client: redis-py client for asyncio.
        pattern: part of the names; a glob pattern for whole names, if it has one of ``*?[``.
        prefix: first part of the keys; "csl" by default.

    Returns:
        The number of holders that lost a lock.

    Raises:
        BackendError: Redis did not answer, or refused.
        ConfigurationError: the client or the pattern has a wrong type.
    """
    checked_client("async_reset_all", client, redis.asyncio.Redis, redis.asyncio.RedisCluster)
    _check_pattern(pattern)
    keyspace = keyspace_with(None, prefix)
    if isinstance(client, redis.asyncio.RedisCluster):
        return await _reset_all_of_cluster(AsyncClusterStore(client, keyspace), pattern)
    kind = AsyncValkeyStore if is_valkey(client, asyncio=True) else AsyncRedisStore
    given: Any = client
    store = kind(given, keyspace)
    return await carry_out_async(_resetting_all(store.operations, pattern, new_token()), store.do)


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, str):
        msg = f"pattern must be a str, a part of the locks' names, not {a_kind(pattern)}."
        raise ConfigurationError(msg)


async def _reset_all_of_cluster(nodes: AsyncClusterStore, pattern: str) -> int:
    # SCAN is sent to each master, everything else to the master that has the lock by then.

    async def do(master: Any, request: Request) -> Any:
        if isinstance(request, Command) and request.words[0] == "SCAN":
            return await nodes.scan(master, request.words)
        return await nodes.do(request)

    taken, call = 0, new_token()
    for master in await nodes.masters():
        resetting = _resetting_all(nodes.operations, pattern, call)
        taken += await carry_out_async(resetting, partial(do, master))
    return taken


def _resetting_all(operations: Operations, pattern: str, call: str) -> Steps[int]:
    """Reset the locks that SCAN finds; with one id, a lock that is found twice is reset once."""
    operations.scripts.update(load_admin_scripts())
    yield from operations.refuse_cluster_node()
    taken, cursor, match = 0, 0, match_of(operations.keyspace.prefix)
    seen: set[str] = set()
    while True:
        wanted = ("SCAN", cursor, "MATCH", match, "COUNT", SCANNED)
        cursor, metas = yield Command(wanted)
        for name in (yield from _held(operations, metas)):
            if name not in seen and fits(name, pattern):
                seen.add(name)
                taken += yield from operations.reset(name, call=call)
        if not int(cursor):
            return taken


def _held(operations: Operations, metas: list[Any]) -> Steps[list[str]]:
    """Return the names of the locks that are held."""
    held = []
    for answer in (yield from operations.run_many(glance_calls(operations, metas, 0))):
        if isinstance(answer, BackendError):
            raise answer
        held += [found.name for found in glances_of(answer) if found.held]
    return held

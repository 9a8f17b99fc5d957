"""All locks at once, taken from whoever holds them: after a mishap, and before a test."""

from __future__ import annotations

from functools import partial
from typing import Any

import redis
import redis.asyncio

from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.lock.base import checked_client
from celery_singleton_lock.core.redis_keys import keyspace_with
from celery_singleton_lock.core.lock_steps import carry_out, carry_out_async
from celery_singleton_lock.store.cluster.aio import AsyncClusterStore
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.factory import store_on
from celery_singleton_lock.store.operator.redis import (
    SCANNED,
    ClusterAdminStore,
    fits,
    glance_calls,
    glances_of,
    match_of,
)
from celery_singleton_lock.store.scripts import load_admin_scripts
from celery_singleton_lock.store.redis.valkey import (
    AsyncValkeyClient,
    AsyncValkeyStore,
    ValkeyClient,
    is_valkey,
)
from celery_singleton_lock.store.message_operations import Command, Verb, Verbs, Wish
from celery_singleton_lock.message_text import a_kind


def reset_all(
    client: redis.Redis | redis.RedisCluster | ValkeyClient,
    pattern: str = "",
    *,
    prefix: str | None = None,
) -> int:
    """Take all locks from their holders, whoever they are, and hand them to who is next.

    They are found by SCAN, so Redis serves others meanwhile. What is parked stays parked. To look
    first, and to leave a note of who did it: ``celery locks``.

    Args:
        client: redis-py client.
        pattern: only names that hold this text; that fit it, if it has one of ``*?[``.
        prefix: first part of the keys, "csl" unless given.

    Returns:
        How many held one.

    Raises:
        BackendError: no answer, or refused.
        ConfigurationError: it is no such client, or the pattern is no text.
    """
    checked_client("reset_all", client, redis.Redis, redis.RedisCluster)
    _check_pattern(pattern)
    keyspace = keyspace_with(None, prefix)
    if isinstance(client, redis.RedisCluster):
        nodes = ClusterAdminStore(client, keyspace)
        return sum(nodes.reset(found.name) for found in nodes.glances(pattern) if found.held)
    store = store_on(client, keyspace)
    return carry_out(_resetting_all(store.verbs, pattern), store.do)


async def async_reset_all(
    client: redis.asyncio.Redis | redis.asyncio.RedisCluster | AsyncValkeyClient,
    pattern: str = "",
    *,
    prefix: str | None = None,
) -> int:
    """Take all locks from their holders; as :func:`reset_all` does, for asyncio.

    Args:
        client: redis-py client for asyncio.
        pattern: only names that hold this text; that fit it, if it has one of ``*?[``.
        prefix: first part of the keys, "csl" unless given.

    Returns:
        How many held one.

    Raises:
        BackendError: no answer, or refused.
        ConfigurationError: it is no such client, or the pattern is no text.
    """
    checked_client("async_reset_all", client, redis.asyncio.Redis, redis.asyncio.RedisCluster)
    _check_pattern(pattern)
    keyspace = keyspace_with(None, prefix)
    if isinstance(client, redis.asyncio.RedisCluster):
        return await _reset_all_of_cluster(AsyncClusterStore(client, keyspace), pattern)
    kind = AsyncValkeyStore if is_valkey(client, asyncio=True) else AsyncRedisStore
    given: Any = client
    store = kind(given, keyspace)
    return await carry_out_async(_resetting_all(store.verbs, pattern), store.do)


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, str):
        msg = f"pattern must be a part of the locks' names, or a pattern, not {a_kind(pattern)}."
        raise ConfigurationError(msg)


async def _reset_all_of_cluster(nodes: AsyncClusterStore, pattern: str) -> int:
    """Go from master to master: SCAN is asked there, all else where the lock is by then."""

    async def do(master: Any, wish: Wish) -> Any:
        if isinstance(wish, Command) and wish.words[0] == "SCAN":
            return await nodes.scan(master, wish.words)
        return await nodes.do(wish)

    taken = 0
    for master in await nodes.masters():
        resetting = _resetting_all(nodes.verbs, pattern)
        taken += await carry_out_async(resetting, partial(do, master))
    return taken


def _resetting_all(verbs: Verbs, pattern: str) -> Verb[int]:
    """Scan, look at what was found, and reset what is held."""
    verbs.scripts.update(load_admin_scripts())
    yield from verbs.be_whole()
    taken, cursor, match = 0, 0, match_of(verbs.keyspace.prefix)
    while True:
        wanted = ("SCAN", cursor, "MATCH", match, "COUNT", SCANNED)
        cursor, metas = yield Command(wanted)
        for name in (yield from _held(verbs, metas)):
            if fits(name, pattern):
                taken += yield from verbs.reset(name)
        if not int(cursor):
            return taken


def _held(verbs: Verbs, metas: list[Any]) -> Verb[list[str]]:
    """Return the names of those that somebody holds."""
    held = []
    for answer in (yield from verbs.run_many(glance_calls(verbs, metas, 0))):
        if isinstance(answer, BackendError):
            raise answer
        held += [found.name for found in glances_of(answer) if found.held]
    return held

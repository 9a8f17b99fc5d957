"""All locks at once, taken from whoever holds them: after a mishap, and before a test."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio

from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.hold import checked_client
from celery_singleton_lock.keys import keyspace_with
from celery_singleton_lock.plans import carry_out, carry_out_async
from celery_singleton_lock.store.async_redis import AsyncRedisStore
from celery_singleton_lock.store.redis import RedisStore
from celery_singleton_lock.store.redis_admin import (
    GLANCED,
    SCANNED,
    ClusterAdminStore,
    fits,
    glances_of,
    match_of,
)
from celery_singleton_lock.store.scripts import Call, load_admin_scripts
from celery_singleton_lock.store.verbs import Command, Verb, Verbs


def reset_all(
    client: redis.Redis | redis.RedisCluster, pattern: str = "", *, prefix: str | None = None
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
        ConfigurationError: it is no such client.
    """
    checked_client("reset_all", client, redis.Redis, redis.RedisCluster)
    keyspace = keyspace_with(None, prefix)
    if isinstance(client, redis.RedisCluster):
        nodes = ClusterAdminStore(client, keyspace)
        return sum(nodes.reset(found.name) for found in nodes.glances(pattern) if found.held)
    store = RedisStore(client, keyspace)
    return carry_out(_resetting_all(store.verbs, pattern), store.do)


async def async_reset_all(
    client: redis.asyncio.Redis, pattern: str = "", *, prefix: str | None = None
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
        ConfigurationError: it is a Cluster's, or no such client.
    """
    given: object = client  # may be anything, whatever the annotation says
    if isinstance(given, redis.asyncio.RedisCluster):
        msg = "async_reset_all resets the locks of one server; those of a Cluster reset_all does."
        raise ConfigurationError(msg)
    checked_client("async_reset_all", client, redis.asyncio.Redis)
    store = AsyncRedisStore(client, keyspace_with(None, prefix))
    return await carry_out_async(_resetting_all(store.verbs, pattern), store.do)


def _resetting_all(verbs: Verbs, pattern: str) -> Verb[int]:
    """Scan, look at what was found, and reset what is held."""
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
    script = load_admin_scripts()["glance"]
    parts = [metas[start : start + GLANCED] for start in range(0, len(metas), GLANCED)]
    held = []
    for answer in (yield from verbs.run_many([Call(script, part, [0]) for part in parts])):
        if isinstance(answer, BackendError):
            raise answer
        held += [found.name for found in glances_of(answer) if found.held]
    return held

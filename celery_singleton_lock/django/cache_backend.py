"""The cache that holds a lock: a store for a Redis cache, or a key in another cache."""

from __future__ import annotations

import hashlib
import logging
import re
from typing import Any, Final

from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.base import InvalidCacheBackendError
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache
from django.core.cache.backends.locmem import LocMemCache

from celery_singleton_lock.config.django_cache_alias import SCHEME, found_by_alias, is_redis_cache
from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.redis.sync import RedisStore

logger: Final = logging.getLogger(__name__)

PATIENCE: Final = 2.0
"""Seconds to wait for a reply of the cache's Redis."""

LONGEST_KEY: Final = 240
"""Largest number of bytes of a key with the cache's prefix. Memcached allows 250."""

PLAIN: Final = re.compile(r"[!-~]+")
"""Characters that memcached allows in a key: ASCII without spaces and control characters."""

_stores: dict[str, tuple[Any, RedisStore | None]] = {}
"""Alias -> the settings of the cache, and its store. Entries are replaced if settings change.

A module global, like Django's caches: all locks of a cache in this process share one connection
pool and one watchdog.
"""


def store_of(alias: str) -> RedisStore | None:
    """Return the store of a cache on Redis; None for any other cache that can hold a lock.

    Args:
        alias: alias in ``CACHES``.

    Raises:
        ConfigurationError: no cache has that alias, or the cache cannot hold a lock.
    """
    params = dict(settings.CACHES.get(alias, {}))
    known = _stores.get(alias)
    if known is None or known[0] != params:
        known = _stores[alias] = (params, _new_store(alias, params))
    return known[1]


def _new_store(alias: str, params: dict[str, Any]) -> RedisStore | None:
    try:
        cache = caches[alias]
    except InvalidCacheBackendError:
        known = ", ".join(settings.CACHES)
        msg = (
            f"CACHES has no cache {alias!r}, or its BACKEND cannot be imported. "
            f"CACHES has: {known}."
        )
        raise ConfigurationError(msg) from None
    if is_redis_cache(str(params["BACKEND"])):
        url, source, options = found_by_alias(f"{SCHEME}://{alias}", "CacheLock")
        client = connect(parse_backend_url(url, source), options, patience=PATIENCE)
        prefix = getattr(settings, "CELERY_SINGLETON_LOCK_PREFIX", "csl")
        store = RedisStore(client, Keyspace(prefix))
        _warn_of_eviction(alias, store)
        return store
    _refuse_unusable(alias, cache)
    return None


def _warn_of_eviction(alias: str, store: RedisStore) -> None:
    """Warn if Redis evicts keys when it is full, as many caches do."""
    try:
        policy = store.describe()["eviction"]
    except BackendError:
        return  # acquire() raises the same error
    if policy not in {"noeviction", "unknown"}:
        logger.warning(
            "celery-singleton-lock: the Redis of the cache %r evicts keys when it is full "
            "(maxmemory-policy %s), which would free a CacheLock that is held. Use a Redis with "
            "noeviction for locks.",
            alias,
            policy,
        )


def _refuse_unusable(alias: str, cache: Any) -> None:
    """Refuse caches whose ``add`` is not atomic. Warn if it is atomic in one process only."""
    if isinstance(cache, DummyCache):
        msg = (
            f"CACHES[{alias!r}] is a DummyCache, which stores nothing: every caller would get the "
            "lock. Use Redis, a database or memcached."
        )
        raise ConfigurationError(msg)
    if isinstance(cache, FileBasedCache):
        msg = (
            f"CACHES[{alias!r}] is a FileBasedCache, whose add() is not atomic: two processes "
            "could get the lock. Use Redis, a database or memcached."
        )
        raise ConfigurationError(msg)
    if isinstance(cache, LocMemCache) and not settings.DEBUG:
        logger.warning(
            "celery-singleton-lock: the cache %r is local memory, so a CacheLock on it excludes "
            "only threads of the same process. Use Redis, a database or memcached.",
            alias,
        )


def key_of(alias: str, name: str) -> str:
    """Return a key that every cache accepts. A name that is too long is replaced by a digest.

    Args:
        alias: alias in ``CACHES``.
        name: name of the lock.

    Raises:
        ConfigurationError: with the cache's prefix the key is still too long.
    """
    for key in (f"lock:{name}", f"lock:sha256-{hashlib.sha256(name.encode()).hexdigest()}"):
        if _is_accepted(alias, key):
            return key
    msg = (
        f"The KEY_PREFIX of CACHES[{alias!r}] is too long: with the key of a lock it has more than "
        f"{LONGEST_KEY} bytes, or characters that memcached refuses. Shorten it."
    )
    raise ConfigurationError(msg)


def _is_accepted(alias: str, key: str) -> bool:
    made = str(caches[alias].make_key(key))
    return len(made) <= LONGEST_KEY and PLAIN.fullmatch(made) is not None

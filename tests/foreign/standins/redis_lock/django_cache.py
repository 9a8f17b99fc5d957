"""What python-redis-lock's tests use as a cache: Django's own, with `CacheLock`."""

from __future__ import annotations

from django.core.cache.backends import redis

from celery_singleton_lock import get_or_set, reset_all
from celery_singleton_lock.django import CacheLock


class Lock(CacheLock):
    """A `CacheLock` that takes ``blocking``."""

    def acquire(self, blocking=True):
        return super().acquire(None if blocking else 0)


class RedisCache(redis.RedisCache):
    """Django's cache, with python-redis-lock's methods."""

    def lock(self, key):
        return Lock(key)

    def locked_get_or_set(self, key, value_creator):
        return get_or_set(self._cache.get_client(), key, value_creator, expire=60)

    def reset_all(self):
        reset_all(self._cache.get_client())

"""A redis-py client without a Redis."""

from __future__ import annotations

import redis

from celery_singleton_lock.store.connect import in_memory


def memory_client(name: str = "") -> redis.Redis:
    """Return a redis-py client of the Redis in this process' memory that locks of a name live in.

    ``Lock(memory_client(), "account:42")`` is a lock among the threads of this process.

    Args:
        name: what stands behind ``memory://``. The same name is the same Redis.

    Raises:
        ConfigurationError: the extra ``testing`` is not installed.
    """
    return in_memory(name)

"""A redis-py client without a Redis."""

from __future__ import annotations

import redis

from celery_singleton_lock.store.connect import in_memory


def memory_client(name: str = "") -> redis.Redis:
    """Return a redis-py client for a Redis in the memory of this process.

    ``Lock(memory_client(), "account:42")`` is a lock between the threads of this process.

    Args:
        name: the part of the URL after ``memory://``. Clients with the same name share the data.

    Returns:
        The client.

    Raises:
        ConfigurationError: the extra ``testing`` is not installed.
    """
    return in_memory(name)

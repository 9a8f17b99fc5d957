"""redis-py's lock tests, with `Lock` and `AsyncLock` in the place of ``redis.lock.Lock``.

Its tests look at the key of a lock, which is a string there. Here that is answered by the lock.
"""

from __future__ import annotations

from types import SimpleNamespace

import redis
import redis.asyncio
import redis.asyncio.lock
import redis.lock

import celery_singleton_lock as ours


def _as_ours(options):
    """Translate redis-py's options. A lock with a time-out is not renewed there."""
    lease = options.pop("timeout", None)
    del options["sleep"]
    return options if lease is None else {**options, "lease": lease, "renew": False}


class _Local:
    @property
    def local(self):
        return SimpleNamespace(token=self.token.encode() or None)


class Lock(_Local, ours.Lock):
    """`Lock`, made as redis-py's client makes it."""

    def __init__(self, client, name, **options):
        super().__init__(client, name, **_as_ours(options))


class AsyncLock(_Local, ours.AsyncLock):
    """`AsyncLock`, made as redis-py's client makes it."""

    def __init__(self, client, name, **options):
        options["task_local"] = options.pop("thread_local")
        super().__init__(client, name, **_as_ours(options))


def _token(holder):
    return None if holder is None else holder.token.encode()


def _pttl(holder):
    return -2 if holder is None else int(holder.expires_in * 1000)


def get(client, name):
    """Return the token of the holder."""
    return _token(ours.Lock(client, name).owner())


def pttl(client, name):
    """Return the milliseconds that are left of the lease."""
    return _pttl(ours.Lock(client, name).owner())


def ttl(client, name):
    """Return the seconds that are left of the lease."""
    return pttl(client, name) // 1000


def pexpire(client, name, milliseconds):
    """Leave the holder a shorter lease."""
    lock = ours.Lock(client, name, lease=milliseconds / 1000, renew=False)
    token = lock.owner().token
    lock.reset()
    return lock.acquire(blocking=False, token=token)


def set_(client, name, value):
    """Give the lock to somebody else."""
    lock = ours.Lock(client, name, renew=False)
    lock.reset()
    lock.acquire(blocking=False)


async def async_get(client, name):
    """As `get`."""
    return _token(await ours.AsyncLock(client, name).owner())


async def async_pttl(client, name):
    """As `pttl`."""
    return _pttl(await ours.AsyncLock(client, name).owner())


async def async_ttl(client, name):
    """As `ttl`."""
    return await async_pttl(client, name) // 1000


async def async_pexpire(client, name, milliseconds):
    """As `pexpire`."""
    lock = ours.AsyncLock(client, name, lease=milliseconds / 1000, renew=False)
    token = (await lock.owner()).token
    await lock.reset()
    return await lock.acquire(blocking=False, token=token)


async def async_set(client, name, value):
    """As `set_`."""
    lock = ours.AsyncLock(client, name, renew=False)
    await lock.reset()
    await lock.acquire(blocking=False)


redis.lock.Lock = Lock
redis.asyncio.lock.Lock = AsyncLock
redis.exceptions.LockError = ours.LockError
redis.exceptions.LockNotOwnedError = ours.LockNotOwned
redis.Redis.get, redis.Redis.set, redis.Redis.pexpire = get, set_, pexpire
redis.Redis.ttl, redis.Redis.pttl = ttl, pttl
redis.asyncio.Redis.get, redis.asyncio.Redis.set = async_get, async_set
redis.asyncio.Redis.ttl, redis.asyncio.Redis.pttl = async_ttl, async_pttl
redis.asyncio.Redis.pexpire = async_pexpire

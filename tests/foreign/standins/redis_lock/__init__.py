"""What python-redis-lock's tests import as ``redis_lock``: its names, on `Lock` and `reset_all`.

Its tests look at the key of a lock, which is a string there. Here that is answered by the lock.
"""

from __future__ import annotations

import contextlib
import logging
import re

import redis

import celery_singleton_lock as ours

__all__ = [
    "AlreadyAcquired",
    "InvalidTimeout",
    "Lock",
    "NotAcquired",
    "NotExpirable",
    "TimeoutNotUsable",
    "TimeoutTooLarge",
    "reset_all",
]

logger = logging.getLogger(__name__)
reset_all = ours.reset_all
InvalidTimeout = ours.ConfigurationError
PREFIX = "lock:"
TOKEN = re.compile(r"[\w-]{16,128}\.\d{1,9}")


class AlreadyAcquired(RuntimeError):
    """In the place of LockReentered."""


class NotAcquired(RuntimeError):
    """In the place of LockNotOwned and LockTimeout."""


class TimeoutNotUsable(RuntimeError):
    """Not raised here: ``blocking=False`` wins."""


class TimeoutTooLarge(RuntimeError):
    """Not raised here: a wait may be longer than the lease."""


class NotExpirable(RuntimeError):
    """Not raised here: every lock has a lease."""


@contextlib.contextmanager
def _translated():
    try:
        yield
    except ours.LockReentered as error:
        raise AlreadyAcquired from error
    except (ours.LockNotOwned, ours.LockTimeout) as error:
        raise NotAcquired from error


class Lock:
    """A `Lock` with python-redis-lock's names. A lock with ``expire`` is not renewed unless asked.

    Its ``id`` is the owner token; an id that is none is replaced by a new one. An object with the
    id of another uses that one's lease.
    """

    def __init__(self, redis_client, name, expire=None, id=None, auto_renewal=False, blocking=None):  # noqa: A002
        if auto_renewal and expire is None:
            raise ValueError("auto_renewal needs expire")
        self._name = PREFIX + name
        self.id = id if TOKEN.fullmatch(str(id)) else ours.new_token()
        self.blocking = blocking is not False
        options = {"lease": int(expire), "renew": auto_renewal} if expire else {}
        self._lock = ours.Lock(redis_client, name, **options)

    def acquire(self, blocking=True, timeout=None):
        logger.debug("Acquiring Lock(%r) ...", self._name)
        wait = int(timeout) or None if timeout else None
        with _translated():
            held = self._lock.acquire(blocking=blocking, blocking_timeout=wait, token=self.id)
        logger.info("Acquired Lock(%r)." if held else "Failed to acquire Lock(%r).", self._name)
        return held

    def release(self):
        logger.debug("Releasing Lock(%r).", self._name)
        self._share()
        with _translated():
            self._lock.release()

    def extend(self, expire=None):
        self._share()
        with _translated():
            if expire is None:
                self._lock.reacquire()
            else:
                self._lock.extend(expire, replace_ttl=True)

    def _share(self):
        """Hold what another object holds with the same token: acquire() is idempotent."""
        if not self._lock.token and self.get_owner_id() == self.id:
            self._lock.acquire(blocking=False, token=self.id)

    def get_owner_id(self):
        holder = self._lock.owner()
        return None if holder is None else holder.token

    def locked(self):
        return self._lock.locked()

    def reset(self):
        self._lock.reset()

    def __enter__(self):
        if not self.acquire(blocking=self.blocking):
            raise NotAcquired
        return self

    def __exit__(self, *_):
        self.release()


_get, _ttl = redis.Redis.get, redis.Redis.ttl


def _holder(client, key):
    return ours.Lock(client, key.removeprefix(PREFIX)).owner()


def get(client, key):
    """Return the token of the holder, where the key is that of a lock."""
    if not key.startswith(PREFIX):
        return _get(client, key)
    holder = _holder(client, key)
    return None if holder is None else holder.token


def ttl(client, key):
    """Return the seconds that are left of the lease."""
    holder = _holder(client, key)
    return -2 if holder is None else int(holder.expires_in)


redis.Redis.get, redis.Redis.ttl = get, ttl

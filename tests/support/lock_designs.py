"""Short models of known lock designs and of this library's, with the same interface.

Each model has only the steps of its design that matter for a defect. The models show that a test
which this library passes can detect the defect.
"""

from __future__ import annotations

import time
from typing import ClassVar, Protocol
from uuid import uuid4

import redis

from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.redis.sync import RedisStore

NAME = "scene"
CLAIM = 0.5
"""Seconds in which a waiter of ours must claim its grant."""


class Design(Protocol):
    """One client of a lock.

    Attributes:
        fence: number of its grant; 0 where the design has none.
    """

    fence: int

    def __init__(self, client: redis.Redis, lease: float) -> None:
        """Hold nothing yet."""
        ...

    def take(self) -> bool:
        """Try once."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait for it."""
        ...

    def give_back(self) -> None:
        """Release it, or hand it over."""
        ...

    def renew(self) -> bool:
        """Hold it for another lease; return whether it is held."""
        ...


class Ours:
    """This library: one script per step; a hand-over writes the next one in as holder."""

    def __init__(self, client: redis.Redis, lease: float) -> None:
        self._store = RedisStore(client, claim_lease=CLAIM)
        self._lock = self._named(NAME, lease)
        with self._named("another", lease):
            pass  # its connection is open from here on

    def _named(self, name: str, lease: float) -> Lock:
        return Lock(self._store, name, lease=lease, renew=False, thread_local=False)

    @property
    def fence(self) -> int:
        return self._lock.fencing_token

    def take(self) -> bool:
        return self._lock.acquire(blocking=False)

    def wait(self, timeout: float) -> bool:
        return self._lock.acquire(blocking_timeout=timeout)

    def give_back(self) -> None:
        self._lock.release()

    def renew(self) -> bool:
        return self._lock.reacquire()


class SetIfAbsent:
    """``SET NX PX`` with a random value, compared when it is deleted (redis-py's ``Lock``)."""

    fence = 0
    _RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
    _RENEW = (
        "return redis.call('GET', KEYS[1]) == ARGV[1]"
        " and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or 0"
    )

    def __init__(self, client: redis.Redis, lease: float) -> None:
        self._redis, self._ms, self._token = client, int(lease * 1000), str(uuid4())
        client.ping()

    def take(self) -> bool:
        return bool(self._redis.set(NAME, self._token, nx=True, px=self._ms))

    def wait(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while not (taken := self.take()) and time.monotonic() < until:
            time.sleep(0.02)  # that is the design: it polls
        return taken

    def give_back(self) -> None:
        self._redis.eval(self._RELEASE, 1, NAME, self._token)

    def renew(self) -> bool:
        return bool(self._redis.eval(self._RENEW, 1, NAME, self._token, self._ms))


class OneOwnerPerHost(SetIfAbsent):
    """The same, with an owner id that all clients of a host share."""

    def __init__(self, client: redis.Redis, lease: float) -> None:
        super().__init__(client, lease)
        self._token = "host-1"


class Signal(SetIfAbsent):
    """Waiters sleep on one list, into which the releaser puts one signal (python-redis-lock)."""

    SIGNAL_MS: ClassVar = 200
    _RELEASE = (
        "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2])"
        " redis.call('LPUSH', KEYS[2], '1') redis.call('PEXPIRE', KEYS[2], ARGV[2]) end"
    )

    def wait(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while not self.take():
            left = until - time.monotonic()
            if left <= 0 or not self._redis.blpop(["signal"], timeout=left):
                return False
        return True

    def give_back(self) -> None:
        self._redis.eval(self._RELEASE, 2, NAME, "signal", self._token, self.SIGNAL_MS)


class Baton(SetIfAbsent):
    """Two levels: a key for the owner, a list of waiters to whom a baton goes (care4redis)."""

    def wait(self, timeout: float) -> bool:
        if self.take():
            return True
        self._redis.rpush("waiters", self._token)
        if self._redis.blpop([f"baton:{self._token}"], timeout=timeout):
            return bool(self._redis.set(NAME, self._token, px=self._ms))
        self._redis.lrem("waiters", 1, self._token)
        return False

    def give_back(self) -> None:
        if self._redis.get(NAME) != self._token.encode():
            return
        following = self._redis.lpop("waiters")
        if following is None:
            self._redis.delete(NAME)
        else:
            self._redis.rpush(f"baton:{following.decode()}", "1")


class Heartbeat(SetIfAbsent):
    """Holders in a sorted set by the end of their lease; a renewal is a plain ``ZADD`` (docket)."""

    _TAKE = (
        "redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[2])"
        " if redis.call('ZCARD', KEYS[1]) > 0 then return 0 end"
        " return redis.call('ZADD', KEYS[1], ARGV[3], ARGV[1])"
    )

    def take(self) -> bool:
        now = int(time.time() * 1000)
        return bool(self._redis.eval(self._TAKE, 1, NAME, self._token, now, now + self._ms))

    def give_back(self) -> None:
        self._redis.zrem(NAME, self._token)

    def renew(self) -> bool:
        self._redis.zadd(NAME, {self._token: int(time.time() * 1000) + self._ms})
        return True

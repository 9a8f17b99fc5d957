"""Control of the clock of locks in memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from celery_singleton_lock.config.argument_checks import checked_seconds
from celery_singleton_lock.core.model import ALIVE
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.lock.lease_watchdog import Watchdog, watchdogs
from celery_singleton_lock.store.connect import in_memory
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.script_arguments import LONGEST_LEASE

if TYPE_CHECKING:
    from celery_singleton_lock.store.memory import MemoryServer

STEPS: Final = 1000
"""Largest number of steps of one :meth:`LockTime.advance`."""

PATIENCE: Final = 5.0
"""Longest wait, in real seconds, until workers have claimed their grants."""

_PREFIX: Final = re.compile(rb"(.+?):(?:\{b\d\d\}|fleet):")
_LOOK: Final = 0.005
_AFTER: Final = 0.002
"""Seconds after the end of a lease at which it has certainly expired."""


class LockTime:
    """The clock of leases and wait timeouts. Tests can move and stop it.

    It affects only locks. ETAs, countdowns and time limits of Celery use the machine's clock.

    Args:
        server: the Redis in memory whose clock is controlled.
    """

    def __init__(self, server: MemoryServer) -> None:
        """Create the object. The clock continues to run."""
        self._server = server
        self._client: Any = in_memory(server.name)  # redis-py's types also allow coroutines

    def now(self) -> float:
        """Return the time of the locks in seconds since 1970."""
        return self._server.clock.microseconds() / 1_000_000

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        All events of this time happen, in their order, before this method returns: leases expire,
        locks are granted to the next waiters, waits time out. The leases of running tasks and of
        held ``Lock`` objects of this process are renewed, and its workers stay alive. Other leases
        (``singleton_locks.hold``, ``Lock(…, renew=False)``) expire.

        Args:
            seconds: seconds to move, up to a year.

        Raises:
            ConfigurationError: ``seconds`` is not a number in that range.
        """
        left = checked_seconds("seconds", seconds, 0.0, LONGEST_LEASE / 2)
        least, looks = left / STEPS, int(PATIENCE / _LOOK)
        while left > 0:
            with self._server.lock:
                step = min(left, max(least, self._next_event()))
                self._keep_alive(step)
                self._server.advance(step)
                self._sweep()
            left -= step
            looks = self._let_take_up(looks)

    def freeze(self) -> None:
        """Stop the clock. Only :meth:`advance` moves it, so no lease expires on a slow machine."""
        with self._server.lock:
            self._server.clock.stop()

    def unfreeze(self) -> None:
        """Start the clock again, from the time at which it stopped."""
        with self._server.lock:
            self._server.clock.go()

    @contextmanager
    def frozen(self) -> Iterator[LockTime]:
        """Stop the clock within a ``with`` block."""
        self.freeze()
        try:
            yield self
        finally:
            self.unfreeze()

    # -- one step; the server's lock blocks all other clients --------------------------------------

    def _next_event(self) -> float:
        """Return the seconds until the next end of a lease, or of a wait, that is not renewed."""
        now, renewed = self.now() * 1000, self._renewed()
        ends = [
            at
            for key in self._keys("*:holders")
            for token, at in self._client.zrange(key, 0, -1, withscores=True)
            if token not in renewed
        ]
        for key in self._keys("*:deadlines"):
            waiting = self._in_state("waiting", key)
            for token, at in self._client.zrange(key, 0, -1, withscores=True):
                if token not in waiting:
                    ends.append(at)
        ends += self._looks()
        return min((at - now for at in ends if at > now), default=math.inf) / 1000 + _AFTER

    def _looks(self) -> list[float]:
        """Return when locks whose rate, pause or limit changes by itself must be swept next."""
        found = []
        starts = {key.removesuffix(b":flow") for key in self._keys("*:flow")}
        for key in self._keys("*:meta"):
            if any(self._client.hmget(key, "paused_until", "ruled_until")):
                starts.add(key.removesuffix(b":meta"))
        for key in starts:
            name = self._client.hget(key + b":meta", "name")
            due = key.partition(b"}")[0] + b"}:due"
            found.append(self._client.zscore(due, name) if name else None)
        return [at for at in found if at is not None]

    def _keep_alive(self, step: float) -> None:
        """Renew leases, heartbeats and waits of clients, as their threads would have done."""
        for watchdog in self._watchdogs():
            self._renew(watchdog, step)
        for store in self._stores():
            self._beat(store, step)
        for key in self._keys("*:deadlines"):
            for token in self._in_state("waiting", key):
                if self._client.zscore(key, token) is not None:
                    self._client.zincrby(key, math.ceil(step * 1000), token)  # whole ms

    def _watchdogs(self) -> list[Watchdog]:
        """Return the watchdogs of this process that use this server."""
        return [
            watchdog
            for watchdog in watchdogs()
            if getattr(getattr(watchdog.store, "client", None), "server", None) is self._server
        ]

    @staticmethod
    def _renew(watchdog: Watchdog, step: float) -> None:
        """Renew the leases of a watchdog, which itself notices lost leases."""
        leases = watchdog.leases()
        answers = watchdog.store.extend(
            [(lease.name, lease.token, lease.seconds + step) for lease in leases]
        )
        for lease, held in zip(leases, answers, strict=True):
            if held and lease.held:
                watchdog.confirm(lease.token, watchdog.clock.monotonic() + lease.seconds + step)

    def _beat(self, store: RedisStore, step: float) -> None:
        """Repeat the last heartbeat of each worker."""
        fleet = store.keyspace.fleet
        prefix = f"{fleet}:worker:".encode()
        for key in self._keys(f"{prefix.decode()}*"):
            about = json.loads(self._client.get(key) or b"{}")
            if about:
                worker = key[len(prefix) :].decode()
                members = self._client.smembers(f"{fleet}:tasks:{worker}")
                tasks = [task.decode() for task in members if not task.startswith(b"#")]
                store.worker_heartbeat(
                    worker,
                    about["realm"],
                    about["queues"],
                    ALIVE + step,
                    int(self._client.get(f"{fleet}:free:{worker}") or 0),
                    tasks=tasks if members else None,
                    stopped=about.get("stopped"),
                )

    def _sweep(self) -> None:
        """Sweep all locks that are due, as the agents of workers do."""
        now = self.now() * 1000
        for store in self._stores():
            for key in self._keys(f"{store.keyspace.prefix}:*:due"):
                for name in self._client.zrangebyscore(key, "-inf", now):
                    store.sweep_and_grant(name.decode())

    # -- between two steps ------------------------------------------------------------------------

    def _let_take_up(self, looks: int) -> int:
        """Wait until each new holder has claimed its grant, or its watchdog renews it.

        Args:
            looks: largest number of checks.

        Returns:
            The number of checks that are left.
        """
        while looks > 0:
            with self._server.lock:
                if not self._untaken():
                    break
            Event().wait(_LOOK)
            looks -= 1
        return looks

    def _untaken(self) -> set[bytes]:
        """Return the tokens of grants that are not claimed yet."""
        granted: set[bytes] = set()
        for key in self._keys("*:holders"):
            granted |= self._in_state("granted", key)
        return granted - self._renewed()

    def _renewed(self) -> set[bytes]:
        """Return the tokens whose leases a watchdog renews."""
        return {
            lease.token.encode() for watchdog in self._watchdogs() for lease in watchdog.leases()
        }

    def _in_state(self, state: str, key: bytes) -> set[bytes]:
        """Return the tokens in a state. ``key`` is any key of their lock."""
        records = self._client.hgetall(key.rpartition(b":")[0] + b":record")
        return {
            token for token, record in records.items() if json.loads(record).get("state") == state
        }

    def _stores(self) -> list[RedisStore]:
        """Return a store for each key prefix in use."""
        found = {match[1].decode() for key in self._keys("*") if (match := _PREFIX.match(key))}
        return [RedisStore(self._client, Keyspace(prefix)) for prefix in sorted(found)]

    def _keys(self, pattern: str) -> list[bytes]:
        return list(self._client.scan_iter(pattern, count=1000))

"""The time of locks in memory, as tests move it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from celery_singleton_lock.config.argument_checks import checked_seconds
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.model import ALIVE
from celery_singleton_lock.store.connect import in_memory
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.message_operations import LONGEST_LEASE
from celery_singleton_lock.lock.renewals import Watchdog, living

if TYPE_CHECKING:
    from celery_singleton_lock.store.memory import MemoryServer

STEPS: Final = 1000
"""Most steps into which a leap is divided."""

PATIENCE: Final = 5.0
"""Most real seconds for which a leap waits that workers take up what they are granted."""

_PREFIX: Final = re.compile(rb"(.+?):(?:\{b\d\d\}|fleet):")
_LOOK: Final = 0.005
_AFTER: Final = 0.002
"""Seconds behind the end of a lease at which it certainly has ended."""


class LockTime:
    """The time by which leases end and waits are over. Real time goes on beside it.

    It is the time of the locks alone: ETAs, countdowns and time limits are Celery's, and go by the
    machine.

    Args:
        server: whose time.
    """

    def __init__(self, server: MemoryServer) -> None:
        """Change nothing yet."""
        self._server = server
        self._client: Any = in_memory(server.name)  # redis-py types answers for coroutines too

    def now(self) -> float:
        """Return the time of the locks, in seconds since 1970."""
        return self._server.clock.microseconds() / 1_000_000

    def advance(self, seconds: float) -> None:
        """Let time pass, as if all had waited.

        Who works in this process keeps what it has: the leases of running tasks and of held
        ``Lock`` objects are renewed, and workers stay alive. What nobody renews
        (``singleton_locks.hold``, ``Lock(…, renew=False)``) ends in its time. What is to happen on
        the way happens in its order, before this returns: a lease ends, and who is next is granted,
        before the next one's wait is over.

        Args:
            seconds: how many, up to a year.

        Raises:
            ConfigurationError: that is no time to pass.
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
        """Let it stand still, but for :meth:`advance`: however slow the machine, no lease ends."""
        with self._server.lock:
            self._server.clock.stop()

    def unfreeze(self) -> None:
        """Let it go on, from where it stands."""
        with self._server.lock:
            self._server.clock.go()

    @contextmanager
    def frozen(self) -> Iterator[LockTime]:
        """Let it stand still within a ``with`` block."""
        self.freeze()
        try:
            yield self
        finally:
            self.unfreeze()

    # -- one step, during which no other client is answered ----------------------------------------

    def _next_event(self) -> float:
        """Return the seconds until the next lease ends, or wait is over, that nobody prolongs."""
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
        return min((at - now for at in ends if at > now), default=math.inf) / 1000 + _AFTER

    def _keep_alive(self, step: float) -> None:
        """Give all who live what they would have asked for meanwhile."""
        for dog in self._dogs():
            self._renew(dog, step)
        for store in self._stores():
            self._beat(store, step)
        for key in self._keys("*:deadlines"):
            for token in self._in_state("waiting", key):
                if self._client.zscore(key, token) is not None:
                    self._client.zincrby(key, step * 1000, token)

    def _dogs(self) -> list[Watchdog]:
        """Return the watchdogs of those who use this server."""
        return [
            dog
            for dog in living()
            if getattr(getattr(dog.store, "client", None), "server", None) is self._server
        ]

    @staticmethod
    def _renew(dog: Watchdog, step: float) -> None:
        """Renew what a watchdog renews; what is lost it will find out by itself."""
        leases = dog.leases()
        answers = dog.store.extend(
            [(lease.name, lease.token, lease.seconds + step) for lease in leases]
        )
        for lease, held in zip(leases, answers, strict=True):
            if held and lease.held:
                dog.confirm(lease.token, dog.clock.monotonic() + lease.seconds + step)

    def _beat(self, store: RedisStore, step: float) -> None:
        prefix = f"{store.keyspace.fleet}:worker:".encode()
        for key in self._keys(f"{prefix.decode()}*"):
            about = json.loads(self._client.get(key) or b"{}")
            if about:
                worker = key[len(prefix) :].decode()
                store.beat(worker, about["realm"], about["queues"], ALIVE + step)

    def _sweep(self) -> None:
        """Look at all locks that want it, as the agents of workers do."""
        now = self.now() * 1000
        for store in self._stores():
            for key in self._keys(f"{store.keyspace.prefix}:*:due"):
                for name in self._client.zrangebyscore(key, "-inf", now):
                    store.kick(name.decode())

    # -- between two steps ------------------------------------------------------------------------

    def _let_take_up(self, looks: int) -> int:
        """Wait until who was granted a lock has begun to use it, or renews it until it can.

        Args:
            looks: most looks.

        Returns:
            How many are left.
        """
        while looks > 0:
            with self._server.lock:
                if not self._untaken():
                    break
            Event().wait(_LOOK)
            looks -= 1
        return looks

    def _untaken(self) -> set[bytes]:
        """Return the tokens of grants that nobody has taken up yet."""
        granted: set[bytes] = set()
        for key in self._keys("*:holders"):
            granted |= self._in_state("granted", key)
        return granted - self._renewed()

    def _renewed(self) -> set[bytes]:
        """Return the tokens of which somebody renews the leases."""
        return {lease.token.encode() for dog in self._dogs() for lease in dog.leases()}

    def _in_state(self, state: str, key: bytes) -> set[bytes]:
        """Return the tokens of a lock, of which a key is given, that are in a state."""
        records = self._client.hgetall(key.rpartition(b":")[0] + b":record")
        return {
            token for token, record in records.items() if json.loads(record).get("state") == state
        }

    def _stores(self) -> list[RedisStore]:
        """Return a store for each prefix that is in use."""
        found = {match[1].decode() for key in self._keys("*") if (match := _PREFIX.match(key))}
        return [RedisStore(self._client, Keyspace(prefix)) for prefix in sorted(found)]

    def _keys(self, pattern: str) -> list[bytes]:
        return list(self._client.scan_iter(pattern, count=1000))

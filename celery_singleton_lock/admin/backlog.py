"""Counts all parked messages, and the queues that workers have therefore stopped consuming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

from celery_singleton_lock.core.lock_view import Parked
from celery_singleton_lock.message_text import number_of
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.operator.base import AdminStore, Glance, Waiting
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.requests import Command

SLACK: Final = 100
"""Number of messages by which the counters may differ, since locks are read one by one."""

TOLERANCE: Final = 0.1
"""Share by which the counters may differ."""

READ: Final = 10_000
"""Most waiters whose sizes are read to check the sum of bytes."""

OVERHEAD: Final = 900
"""Approximate bytes that a parked message needs in Redis besides its body; see docs/redis.md."""


class Stopped(NamedTuple):
    """A queue that workers have stopped consuming, because too much of it is parked.

    Args:
        queue: its name.
        workers: number of workers that have stopped consuming it.
        of: number of workers that take its parked messages.
        since: wall time of the first stop.
    """

    queue: str
    workers: int
    of: int
    since: float

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.since, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        who = number_of(self.workers, "worker")
        who = f"{who} of {self.of}" if self.workers < self.of else f"all {self.of} workers"
        return f"the queue {self.queue!r} (by {who if self.of > 1 else 'its worker'}, since {when})"


def stopped_queues(store: AdminStore) -> list[Stopped]:
    """Return the queues that live workers have stopped consuming.

    Args:
        store: the store of the locks.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    every = list(store.workers().values())
    since: dict[tuple[str, str], list[float]] = {}
    for about in every:
        for queue, at in about.get("stopped", {}).items():
            since.setdefault((about["realm"], queue), []).append(float(at))
    return [
        Stopped(queue, len(times), _consumers(every, realm, queue), min(times))
        for (realm, queue), times in sorted(since.items())
    ]


def _consumers(every: list[Mapping[str, Any]], realm: str, queue: str) -> int:
    return sum(about["realm"] == realm and queue in about["queues"] for about in every)


def parked_in_all(store: RedisAdminStore) -> Parked:
    """Return the number and the bytes of all parked messages, of all brokers and queues.

    Args:
        store: the store of the locks.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    realms: set[str] = set()
    for fleet in store.keyspace.fleets:
        found = store.do(Command(("SMEMBERS", f"{fleet}:parked")))
        realms.update(replies.text(route).partition(":")[0] for route in found)
    each = [parked for realm in sorted(realms) for parked in store.parked(realm).values()]
    return Parked(
        sum(parked.waiting for parked in each),
        max((parked.oldest for parked in each), default=0.0),
        sum(parked.size for parked in each),
    )


def wrong_counters(store: RedisAdminStore, locks: Iterable[Glance]) -> str:
    """Return how the counters of parked messages differ from the locks; empty if they do not.

    They are wrong after keys of locks were deleted by hand. Their bytes are wrong while an older
    version parks on this Redis too.

    Args:
        store: the store of the locks.
        locks: all locks.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    every = list(locks)
    names = {lock.name: lock.waiting + lock.adrift for lock in every}
    full = [lock.name for lock in every if lock.bodies > names[lock.name]]
    besides = [each.size for name in full[:READ] for each in _out_of_queue(store, name)]
    parked, waiting = parked_in_all(store), sum(names.values()) + len(besides)
    if parked.waiting > waiting * (1 + TOLERANCE) + SLACK:
        return f"{number_of(parked.waiting, 'message')} are counted, and {waiting:,} wait"
    if waiting > READ:
        return ""
    size = sum(_stored(store, name) for name, number in names.items() if number) + sum(besides)
    if abs(parked.size - size) <= size * TOLERANCE + SLACK * OVERHEAD:
        return ""
    return f"{parked.size:,} bytes are counted, and {size:,} are stored"


def _stored(store: RedisAdminStore, name: str) -> int:
    """Return the bytes of all messages that wait for a lock."""
    return sum(each.size for part in ("queue", "adrift") for each in _waiters(store, name, part))


def _out_of_queue(store: RedisAdminStore, name: str) -> Iterator[Waiting]:
    """Yield the messages that are counted as parked, and are not in the queue."""
    for each in _waiters(store, name, "overdue"):
        if each.state == "settling" or (each.state == "following" and each.worker):
            yield each


def _waiters(store: RedisAdminStore, name: str, part: str) -> Iterator[Waiting]:
    end, more = "", True
    while more:
        page = store.list_waiters(name, part, end, most=1000)
        yield from page.waiting
        end, more = page.end, bool(page.end)

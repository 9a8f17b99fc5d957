"""Is this Redis fit for locks, and is what lies in it consistent? Unknown is never green."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from enum import Enum
from itertools import islice
from typing import Any, Final, NamedTuple

import redis
from redis.exceptions import RedisError

from celery_singleton_lock.core.clock import seconds_until
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.core.model import SCHEMA
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.message_operations import Command
from celery_singleton_lock.message_text import number_of, printable

OLDEST: Final = (6, 2)
"""Redis that has what the scripts use."""

NEGLECTED: Final = 15.0
"""Seconds after which a lock that wants a look should have had one."""

SKEW: Final = 5.0
"""Seconds by which the clocks may differ; locks use the server's alone."""

FULL: Final = 0.8
"""Share of maxmemory from which on it is told."""

STUCK: Final = 10.0
"""Seconds after its last round from which on a worker's thread hangs, or is dead."""

NAMED: Final = 5
"""Most examples that a check names."""


class Health(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    UNKNOWN = "unknown"
    FAIL = "fail"


class Check(NamedTuple):
    """One finding.

    Args:
        name: what was looked at.
        health: how it is.
        told: what was found, and what to change.
    """

    name: str
    health: Health
    told: str


def examine(store: RedisAdminStore, *, deep: bool = True) -> Iterator[Check]:
    """Yield the findings; without a connection, that one alone.

    Args:
        store: where.
        deep: also look through all locks for what contradicts itself.
    """
    try:
        offset = _server_offset(store)
    except BackendError as error:
        yield Check("connection", Health.FAIL, str(error))
        return
    yield Check("connection", Health.OK, "answers")
    yield _tried("scripts", lambda: _scripts(store))
    servers = store.servers()
    infos = [_info(server) for server in servers]
    for number, info in enumerate(infos):
        for name, look in _OF_INFO.items():
            checked = _unknown(name, "INFO") if info is None else look(info)
            yield checked if len(servers) == 1 else _of_server(servers[number], checked)
    yield _tried("persistence", lambda: _persistence(store, infos[0]))
    yield _clock(offset)
    for name, check in _OF_STORE.items():
        yield _tried(name, lambda check=check: check(store))  # type: ignore[misc]  # no type for it
    if deep:
        yield _tried("drift", lambda: _drift(store))


def _tried(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except BackendError as error:
        return Check(name, Health.FAIL, str(error))
    except RedisError as error:
        return Check(name, Health.UNKNOWN, f"not told: {type(error).__name__}")


def _unknown(name: str, command: str) -> Check:
    told = f"this user may not run {command}: allow it, or ask who runs this Redis"
    return Check(name, Health.UNKNOWN, told)


def _server_offset(store: RedisAdminStore) -> float:
    """Return for how many seconds the server's clock is ahead of ours."""
    return seconds_until(datetime.fromtimestamp(store.time(), timezone.utc))


def _of_server(client: redis.Redis, checked: Check) -> Check:
    """Say of which of several servers this is told."""
    place = client.connection_pool.connection_kwargs
    told = f"{place.get('host')}:{place.get('port')}: {checked.told}"
    return checked._replace(told=told)


def _info(client: redis.Redis) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = client.info()
    except RedisError:
        return None
    return found


def _scripts(store: RedisAdminStore) -> Check:
    store.probe()
    for server in store.servers():
        server.scan(0, count=1)
    return Check("scripts", Health.OK, "may be run, and all keys be looked through")


def _version(info: dict[str, Any]) -> Check:
    told = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in told.split(".")[:2] if part.isdigit())
    if not numbers:
        return Check("version", Health.UNKNOWN, "the server does not tell it")
    if numbers < OLDEST:
        return Check("version", Health.FAIL, f"{told}: use Redis 6.2 or later, or Valkey")
    return Check("version", Health.OK, told)


def _eviction(info: dict[str, Any]) -> Check:
    policy = info.get("maxmemory_policy")
    if policy is None:
        return Check("eviction", Health.UNKNOWN, "the server does not tell its maxmemory-policy")
    if policy != "noeviction":
        told = f"{policy}: parked tasks and locks can vanish; set maxmemory-policy noeviction"
        return Check("eviction", Health.FAIL, told)
    return Check("eviction", Health.OK, "noeviction")


def _memory(info: dict[str, Any]) -> Check:
    used, most = info.get("used_memory"), info.get("maxmemory")
    if used is None or most is None:
        return Check("memory", Health.UNKNOWN, "the server does not tell it")
    told = f"{int(used) / 2**20:,.0f} MiB used"
    if not int(most):
        return Check("memory", Health.OK, f"{told}, no maxmemory")
    share = int(used) / int(most)
    told = f"{told}, {share:.0%} of maxmemory"
    if share < FULL:
        return Check("memory", Health.OK, told)
    return Check("memory", Health.WARN, f"{told}: when it is full, tasks stay with the broker")


def _replicas(info: dict[str, Any]) -> Check:
    if info.get("role") == "slave":
        told = "this is a replica, and locks need the master: correct the address"
        return Check("replicas", Health.FAIL, told)
    count = info.get("connected_slaves")
    if count is None:
        return Check("replicas", Health.UNKNOWN, "the server does not tell them")
    return Check("replicas", Health.OK, f"{count} connected")


_OF_INFO: Final[dict[str, Callable[[dict[str, Any]], Check]]] = {
    "version": _version,
    "eviction": _eviction,
    "memory": _memory,
    "replicas": _replicas,
}


def _persistence(store: RedisAdminStore, info: dict[str, Any] | None) -> Check:
    kind = store.describe()["persistence"]
    if kind == "unknown" or info is None:
        return _unknown("persistence", "INFO or CONFIG GET save")
    status = "aof_last_write_status" if kind == "append-only file" else "rdb_last_bgsave_status"
    written = info.get(status)
    if written not in {"ok", None}:
        return Check("persistence", Health.FAIL, f"{kind}: the last write failed; see its log")
    if kind == "append-only file":
        return Check("persistence", Health.OK, kind)
    told = {
        "snapshots": "snapshots: a crash loses what was parked since the last; set appendonly yes",
        "none": "none: a restart loses all that is parked; set appendonly yes",
    }
    return Check("persistence", Health.WARN, told[kind])


def _clock(offset: float) -> Check:
    if abs(offset) <= SKEW:
        return Check("clock", Health.OK, f"differs by {abs(offset):.1f} s from this machine's")
    told = (
        f"differs by {abs(offset):.0f} s from this machine's: locks use the server's alone, but "
        "see which of both is wrong"
    )
    return Check("clock", Health.WARN, told)


def _schema(store: RedisAdminStore) -> Check:
    try:
        found: Any = store.do(Command(("GET", store.keyspace.schema)))
    except BackendError as error:
        # What is not told says nothing of the schema: unknown, and not wrong.
        raise error.__cause__ or error from error
    if found is None:
        return Check("schema", Health.OK, "no worker has been here yet")
    if replies.text(found) != SCHEMA:
        told = f"{replies.text(found)}, and this version works with {SCHEMA}: use the other version"
        return Check("schema", Health.FAIL, told)
    return Check("schema", Health.OK, SCHEMA)


def _workers(store: RedisAdminStore) -> Check:
    live = store.workers()
    queues = sorted({queue for about in live.values() for queue in about["queues"]})
    if live:
        return Check("workers", Health.OK, f"{len(live)} live, for {', '.join(queues)}")
    told = "none is live that parks tasks: what is parked waits until one starts"
    return Check("workers", Health.WARN, told)


def _sweeping(store: RedisAdminStore) -> Check:
    late = store.neglected(NEGLECTED, NAMED)
    if not late:
        return Check("sweeping", Health.OK, "no lock waits for a look")
    told = f"no worker has looked for {NEGLECTED:.0f} s at {', '.join(map(repr, late))}"
    return Check("sweeping", Health.FAIL, f"{told}: start one, or run sweep from cron")


def _lost(store: RedisAdminStore) -> Check:
    count, some = store.losses(NAMED)
    if not count:
        return Check("lost", Health.OK, "no parked task is known to be lost")
    told = (
        f"{count:,} parked tasks are gone since this Redis lost data, such as "
        f"{', '.join(map(printable, some))}: locks why ID tells of each; send them again, then "
        f"delete the key {store.keyspace.lost}"
    )
    return Check("lost", Health.FAIL, told)


_OF_STORE: Final[dict[str, Callable[[RedisAdminStore], Check]]] = {
    "schema": _schema,
    "workers": _workers,
    "sweeping": _sweeping,
    "lost": _lost,
}


def threads_check(reports: Mapping[str, Mapping[str, Any]]) -> Check:
    """Return whether the background threads of all workers make their rounds.

    Args:
        reports: of each worker that has answered, by its name; as ``inspect locks`` shows it.
    """
    rounds = [
        (worker, thread, seconds)
        for worker, report in sorted(reports.items())
        for thread, seconds in (report.get("threads") or {}).items()
    ]
    if not rounds:
        told = "no worker has answered: those of a busy solo pool do not"
        return Check("threads", Health.UNKNOWN, told)
    stuck = [each for each in rounds if (each[2] or 0.0) > STUCK]
    if not stuck:
        told = f"all {len(rounds)} threads of {number_of(len(reports), 'worker')} make their rounds"
        return Check("threads", Health.OK, told)
    named = "; ".join(
        f"{thread} of {worker}: last round {seconds:.0f} s ago"
        for worker, thread, seconds in stuck[:NAMED]
    )
    return Check("threads", Health.FAIL, f"{named}: see the log of that worker, or restart it")


def _drift(store: RedisAdminStore) -> Check:
    """Compare each lock's views of itself."""
    locks, wrong = 0, list[str]()
    for lock in store.glances(holders=0):
        locks += 1
        if lock.broken:
            wrong.append(f"{lock.name!r} holds another program's data")
        elif not lock.is_idle:
            found = islice(store.drift(lock.name), NAMED)
            wrong += [f"{lock.name!r}: {token}: {what}" for token, what in found]
        if len(wrong) >= NAMED:
            break
    if wrong:
        told = "; ".join(wrong[:NAMED])
        return Check("drift", Health.FAIL, f"{told}. Kick the lock (sweep), or drop that token")
    return Check("drift", Health.OK, f"{locks:,} locks agree with their records")

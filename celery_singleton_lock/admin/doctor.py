"""Check whether a Redis is fit for locks, and whether its data is consistent.

A check that cannot get its facts ends as UNKNOWN, never as OK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from enum import Enum
from itertools import islice
from typing import Any, Final, NamedTuple

import redis
from redis.exceptions import RedisError

from celery_singleton_lock.core.clock import seconds_until
from celery_singleton_lock.core.lock_mode import relaxed_by
from celery_singleton_lock.core.model import SCHEMA
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.message_text import number_of, printable
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.requests import Command

OLDEST: Final = (6, 2)
"""Oldest version of Redis that has the commands used by the scripts."""

NEGLECTED: Final = 15.0
"""Seconds by which a sweep may be overdue before the check fails."""

SKEW: Final = 5.0
"""Seconds by which the two clocks may differ. Locks use only the server's clock."""

FULL: Final = 0.8
"""Share of maxmemory above which the check warns."""

STUCK: Final = 10.0
"""Seconds after its last round from which a worker's thread counts as stuck."""

NAMED: Final = 5
"""Largest number of examples that a check names."""


class Health(str, Enum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    UNKNOWN = "unknown"
    FAIL = "fail"


class Check(NamedTuple):
    """One check with its result.

    Args:
        name: name of the check.
        health: the result.
        told: what was found, and what to change.
    """

    name: str
    health: Health
    told: str


def examine(store: RedisAdminStore, *, deep: bool = True) -> Iterator[Check]:
    """Run the checks, one after the other. If the connection fails, no other check runs.

    Args:
        store: the store of the locks.
        deep: also search all locks for contradictions.

    Yields:
        The result of each check.
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
            checked = look(info) if isinstance(info, dict) else _without_info(name, info)
            yield checked if len(servers) == 1 else _of_server(servers[number], checked)
    first = infos[0] if isinstance(infos[0], dict) else None
    yield _tried("persistence", lambda: _persistence(store, first))
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
        return Check(name, Health.UNKNOWN, f"not known: {type(error).__name__}")


def _unknown(name: str, command: str) -> Check:
    told = f"the Redis user may not run {command}: allow it, or ask the administrator of this Redis"
    return Check(name, Health.UNKNOWN, told)


def _server_offset(store: RedisAdminStore) -> float:
    """Return the seconds by which the server's clock is ahead of this machine's."""
    return seconds_until(datetime.fromtimestamp(store.time(), timezone.utc))


def _of_server(client: redis.Redis, checked: Check) -> Check:
    """Prefix the text with the server's address."""
    place = client.connection_pool.connection_kwargs
    told = f"{place.get('host')}:{place.get('port')}: {checked.told}"
    return checked._replace(told=told)


def _info(client: redis.Redis) -> dict[str, Any] | BackendError:
    try:
        found: dict[str, Any] = client.info()
    except RedisError as error:
        return explain(error)
    return found


def _without_info(name: str, error: BackendError) -> Check:
    """Tell a master of a Cluster that does not answer from one that refuses the command."""
    if isinstance(error, BackendUnreachable):
        return Check(name, Health.FAIL, str(error))
    return _unknown(name, "INFO")


def _scripts(store: RedisAdminStore) -> Check:
    store.probe()
    for server in store.servers():
        server.scan(0, count=1)
    return Check("scripts", Health.OK, "EVALSHA and SCAN are allowed")


def _version(info: dict[str, Any]) -> Check:
    told = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in told.split(".")[:2] if part.isdigit())
    if not numbers:
        return Check("version", Health.UNKNOWN, "INFO has no redis_version")
    if numbers < OLDEST:
        return Check(
            "version", Health.FAIL, f"{told} is too old: use Redis 6.2 or later, or Valkey"
        )
    return Check("version", Health.OK, told)


def _eviction(info: dict[str, Any]) -> Check:
    policy = info.get("maxmemory_policy")
    if policy is None:
        return Check("eviction", Health.UNKNOWN, "INFO has no maxmemory_policy")
    if policy != "noeviction":
        told = f"{policy}: Redis may delete locks and parked tasks; set maxmemory-policy noeviction"
        return Check("eviction", Health.FAIL, told)
    return Check("eviction", Health.OK, "noeviction")


def _memory(info: dict[str, Any]) -> Check:
    used, most = info.get("used_memory"), info.get("maxmemory")
    if used is None or most is None:
        return Check("memory", Health.UNKNOWN, "INFO has no used_memory and maxmemory")
    told = f"{int(used) / 2**20:,.0f} MiB used"
    if not int(most):
        return Check("memory", Health.OK, f"{told}, no maxmemory")
    share = int(used) / int(most)
    told = f"{told}, {share:.0%} of maxmemory"
    if share < FULL:
        return Check("memory", Health.OK, told)
    told = f"{told}: when it is full, no task is parked, and blocked tasks stay in the broker"
    return Check("memory", Health.WARN, told)


def _replicas(info: dict[str, Any]) -> Check:
    if info.get("role") == "slave":
        told = "this server is a replica, and locks need the master: use the master's address"
        return Check("replicas", Health.FAIL, told)
    count = info.get("connected_slaves")
    if count is None:
        return Check("replicas", Health.UNKNOWN, "INFO has no connected_slaves")
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
        "snapshots": "snapshots: a crash loses tasks parked since the last one; set appendonly yes",
        "none": "none: a restart loses all parked tasks; set appendonly yes",
    }
    return Check("persistence", Health.WARN, told[kind])


def _clock(offset: float) -> Check:
    if abs(offset) <= SKEW:
        return Check("clock", Health.OK, f"differs by {abs(offset):.1f} s from this machine's")
    told = (
        f"differs by {abs(offset):.0f} s from this machine's. Locks use only the server's clock. "
        "Check which of the two is wrong"
    )
    return Check("clock", Health.WARN, told)


def _schema(store: RedisAdminStore) -> Check:
    try:
        found: Any = store.do(Command(("GET", store.keyspace.schema)))
    except BackendError as error:
        # The user may not read the key. The schema may be right, so the check is UNKNOWN.
        raise error.__cause__ or error from error
    if found is None:
        if store.workers():  # each writes the key at its start, and after a loss
            told = (
                f"workers are live, and {store.keyspace.schema} is gone: this Redis has lost data"
            )
            return Check("schema", Health.WARN, told)
        return Check("schema", Health.OK, "no worker has started since this Redis was empty")
    if replies.text(found) != SCHEMA:
        told = (
            f"the data has schema {replies.text(found)}, and this version needs {SCHEMA}: use the "
            "version of celery-singleton-lock that wrote the data"
        )
        return Check("schema", Health.FAIL, told)
    return Check("schema", Health.OK, SCHEMA)


def _workers(store: RedisAdminStore) -> Check:
    live = store.workers()
    queues = sorted({queue for about in live.values() for queue in about["queues"]})
    if live:
        return Check("workers", Health.OK, f"{len(live)} live, for {', '.join(queues)}")
    told = "no live worker uses this Redis: parked tasks wait until one starts"
    return Check("workers", Health.WARN, told)


def _modes(store: RedisAdminStore) -> Check:
    relaxed = relaxed_by(store.switches())
    if relaxed:
        told = (
            f"switched to run without locks, so tasks may overlap: {relaxed}. locks audit says "
            "who did it; locks mode declared (for one task with --task) ends it"
        )
        return Check("modes", Health.WARN, told)
    return Check("modes", Health.OK, "no switch makes tasks run without their locks")


def _sweeping(store: RedisAdminStore) -> Check:
    late = store.unswept_locks(NEGLECTED, NAMED)
    if not late:
        return Check("sweeping", Health.OK, "no sweep is overdue")
    told = f"no worker has swept {', '.join(map(repr, late))} for {NEGLECTED:.0f} s"
    return Check("sweeping", Health.FAIL, f"{told}: start a worker, or run sweep from cron")


def _lost(store: RedisAdminStore) -> Check:
    count, some = store.losses(NAMED)
    if not count:
        return Check("lost", Health.OK, "no parked task is known to be lost")
    told = (
        f"{count:,} parked tasks are lost because this Redis lost data, such as "
        f"{', '.join(map(printable, some))}. Run locks why ID for details. Send them again, then "
        f"delete the key {store.keyspace.lost}"
    )
    return Check("lost", Health.FAIL, told)


_OF_STORE: Final[dict[str, Callable[[RedisAdminStore], Check]]] = {
    "schema": _schema,
    "workers": _workers,
    "modes": _modes,
    "sweeping": _sweeping,
    "lost": _lost,
}


def threads_check(reports: Mapping[str, Mapping[str, Any]]) -> Check:
    """Check that the background threads of all workers are running.

    Args:
        reports: worker name -> report of the worker, as ``inspect locks`` shows it.
    """
    rounds = [
        (worker, thread, seconds)
        for worker, report in sorted(reports.items())
        for thread, seconds in (report.get("threads") or {}).items()
    ]
    if not rounds:
        told = "no worker answered; a worker with a busy solo pool does not answer"
        return Check("threads", Health.UNKNOWN, told)
    stuck = [each for each in rounds if (each[2] or 0.0) > STUCK]
    if not stuck:
        told = f"all {len(rounds)} threads of {number_of(len(reports), 'worker')} are running"
        return Check("threads", Health.OK, told)
    named = "; ".join(
        f"{thread} of {worker}: last round {seconds:.0f} s ago"
        for worker, thread, seconds in stuck[:NAMED]
    )
    return Check("threads", Health.FAIL, f"{named}: see the log of that worker, or restart it")


def _drift(store: RedisAdminStore) -> Check:
    """Search all locks for contradictions between their keys."""
    locks, wrong, remedy = 0, list[str](), ""
    for lock in store.summarise_locks(holders=0):
        locks += 1
        if lock.broken:
            wrong.append(
                f"{lock.name!r}: its key has another program's data (delete that key, or set "
                "singleton_lock_prefix to a prefix that no other program uses)"
            )
        elif not lock.is_idle:
            found = islice(store.find_contradictions(lock.name), NAMED)
            told = [f"{lock.name!r}: {token}: {what}" for token, what in found]
            wrong += told
            remedy = ". Run sweep, or drop that token" if told else remedy
        if len(wrong) >= NAMED:
            break
    if wrong:
        return Check("drift", Health.FAIL, "; ".join(wrong[:NAMED]) + remedy)
    return Check("drift", Health.OK, f"{locks:,} locks are consistent")

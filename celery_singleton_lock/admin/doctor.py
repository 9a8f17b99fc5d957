"""Check whether a Redis is fit for locks, and whether its data is consistent.

A check that cannot get its facts ends as UNKNOWN, never as OK.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from enum import Enum
from itertools import islice
from typing import Any, Final, NamedTuple

import redis
from redis.exceptions import RedisError

from celery_singleton_lock.admin.backlog import (
    OVERHEAD,
    parked_in_all,
    stopped_queues,
    wrong_counters,
)
from celery_singleton_lock.admin.flow_checks import (
    closed_locks,
    grants_without_slot,
    paused_locks,
    too_costly_tasks,
)
from celery_singleton_lock.admin.why import takers_of
from celery_singleton_lock.admin.why_sentences import (
    drain_command,
    plain_takers,
    seconds,
    worker_name,
)
from celery_singleton_lock.core.clock import seconds_until
from celery_singleton_lock.core.lock_mode import relaxed_by
from celery_singleton_lock.core.model import SCHEMAS
from celery_singleton_lock.core.record_state import TO_END, RecordState
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.message_text import number_of, printable
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.operator.base import Glance, Waiting
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.requests import Command

OLDEST: Final = (6, 2)
"""Oldest version of Redis that has the commands used by the scripts."""

FIRST_PAUSE: Final = 2.0
"""Seconds after which an attempt to send a parked task to the broker is repeated at first."""

NEGLECTED: Final = 15.0
"""Seconds by which a sweep may be overdue before the check fails."""

SKEW: Final = 5.0
"""Seconds by which the two clocks may differ. Locks use only the server's clock."""

FULL: Final = 0.8
"""Share of maxmemory in use above which the check ``memory`` warns."""

MUCH: Final = 0.25
"""Share of maxmemory for parked messages above which the check ``backlog`` warns."""

STUCK: Final = 10.0
"""Seconds after which a thread counts as stuck since its last round, and a grant without a slot."""

SAMPLED: Final = 1000
"""Largest number of locks of which parked tasks are read."""

KINDS: Final = 100
"""Number of pairs of queue and task after which the search ends."""

FOREIGN: Final = 3000
"""Number of keys of each server that are searched for those of other programs."""

NAMED: Final = 5
"""Largest number of examples that a check names."""


class Health(str, Enum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """Advice before production. The exit status is as for OK."""
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


class Consumer(NamedTuple):
    """The queues and tasks of a worker, as it has answered.

    Args:
        queues: the queues that it consumes.
        tasks: the tasks that it has; None if it has not answered that.
    """

    queues: frozenset[str]
    tasks: frozenset[str] | None


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
    yield _tried("database", lambda: _database(store))
    yield _clock(offset)
    for name, check in _OF_STORE.items():
        yield _tried(name, lambda check=check: check(store))  # type: ignore[misc]  # no type for it
    if deep:
        yield _tried("paused", lambda: _paused(store))
        yield _tried("closed", lambda: _closed(store))
        yield _tried("costs", lambda: _costs(store))
        yield _tried("grants", lambda: _grants(store))
        yield _tried("parked", lambda: _parked(store))
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
    """Distinguish a master of a Cluster that does not answer from one that refuses the command."""
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


def _database(store: RedisAdminStore) -> Check:
    """Search for keys of other programs: they share memory, eviction and FLUSHDB with the locks."""
    prefix = f"{store.keyspace.prefix}:"
    looked = foreign = 0
    for server in store.servers():
        found = [replies.text(key) for key in islice(server.scan_iter(count=1000), FOREIGN)]
        looked += len(found)
        foreign += sum(not key.startswith(prefix) for key in found)
    if not foreign:
        told = f"has no keys of other programs, and {number_of(looked, 'key')} of locks"
        return Check("database", Health.OK, told)
    told = (
        f"{foreign:,} of {number_of(looked, 'key')} are of other programs, such as the broker: "
        "their memory, an eviction policy for them and FLUSHDB concern the locks too. Give the "
        "locks a database of their own, or a server (singleton_lock_backend)"
    )
    return Check("database", Health.NOTE, told)


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
        if store.workers():  # each worker writes the key at its start, and after a loss of data
            told = (
                f"workers are live, and {store.keyspace.schema} is gone: this Redis has lost data"
            )
            return Check("schema", Health.WARN, told)
        told = (
            "this Redis has no data of a worker: none has used it, or it has just lost its data, "
            "and live workers write it again within seconds"
        )
        return Check("schema", Health.OK, told)
    if replies.text(found) not in SCHEMAS:
        told = (
            f"the data has schema {replies.text(found)}, and this version needs "
            f"{' or '.join(SCHEMAS)}: use the version of celery-singleton-lock that wrote the data"
        )
        return Check("schema", Health.FAIL, told)
    return Check("schema", Health.OK, replies.text(found))


def _workers(store: RedisAdminStore) -> Check:
    live = store.workers()
    queues = sorted({queue for about in live.values() for queue in about["queues"]})
    if live:
        return Check("workers", Health.OK, f"{len(live)} live, for {', '.join(queues)}")
    told = (
        "no live worker uses this Redis: parked tasks wait until one starts. After a rollback to "
        "workers without locks, send them back with locks drain"
    )
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
        f"{', '.join(map(printable, some))}. Run locks why ID for details. The Redis command "
        f"HGETALL {store.keyspace.lost} lists all of them. Send them again, then delete this key"
    )
    return Check("lost", Health.FAIL, told)


def _quarantine(store: RedisAdminStore) -> Check:
    """Say whether a server grants nothing, as it was replaced or restarted. That ends by itself."""
    fleets = store.keyspace.fleets
    ends = [store.do(Command(("HGET", f"{fleet}:server", "till"))) or 0 for fleet in fleets]
    left = replies.seconds(max(map(int, ends))) - store.time()
    if left <= 0:
        return Check("quarantine", Health.OK, "no server of the locks is in quarantine")
    which = "no lock is granted" if len(fleets) == 1 else "locks of some masters are not granted"
    told = (
        f"{which} for another {seconds(left)}, since Redis was replaced or restarted "
        "(singleton_lock_quarantine): the longest lease that any client has asked for"
    )
    return Check("quarantine", Health.NOTE, told)


def _backlog(store: RedisAdminStore) -> Check:
    """Compare the parked messages with the memory, and name the queues that they stop."""
    parked, stopped = parked_in_all(store), stopped_queues(store)
    told = f"{number_of(parked.waiting, 'message')} parked, {parked.size / 2**20:,.1f} MiB"
    if stopped:
        told = (
            f"{told}. Workers have stopped consuming {', '.join(map(str, stopped[:NAMED]))}: "
            "singleton_lock_max_parked or singleton_lock_max_parked_bytes is reached. Parked tasks "
            "run as their locks become free. If these locks are paused (locks list shows that), no "
            "task of the queue runs until you resume them"
        )
        return Check("backlog", Health.WARN, told)
    infos = [_info(server) for server in store.servers()]
    most = sum(int(info.get("maxmemory") or 0) for info in infos if isinstance(info, dict))
    needs = parked.size + parked.waiting * OVERHEAD
    if not most or needs < most * MUCH:
        return Check("backlog", Health.OK, told)
    told = (
        f"{told}, about {needs / most:.0%} of maxmemory: set singleton_lock_max_parked_bytes, so "
        "that workers leave the rest in the broker"
    )
    return Check("backlog", Health.WARN, told)


_OF_STORE: Final[dict[str, Callable[[RedisAdminStore], Check]]] = {
    "schema": _schema,
    "workers": _workers,
    "modes": _modes,
    "sweeping": _sweeping,
    "lost": _lost,
    "quarantine": _quarantine,
    "backlog": _backlog,
}


def with_reports(found: Check, reports: Mapping[str, Mapping[str, Any]]) -> Check:
    """Return a check; correct it if workers with locks answer and Redis has no heartbeat of any.

    Args:
        found: a check of :func:`examine`.
        reports: as of :func:`threads_check`.
    """
    answered = sum("threads" in report for report in reports.values())
    if found.name != "workers" or found.health is not Health.WARN or not answered:
        return found
    told = (
        f"{number_of(answered, 'worker')} with locks answered at the broker, and this Redis knows "
        "none. If it has just failed over or lost data, their next heartbeats come within "
        "seconds: run doctor again. Else they consume no queue (cancel_consumer), use another "
        "Redis (singleton_lock_backend), or do not reach it: see their logs"
    )
    return Check("workers", Health.WARN, told)


def threads_check(reports: Mapping[str, Mapping[str, Any]], live: Collection[str] = ()) -> Check:
    """Check that the background threads of all workers are running.

    Args:
        reports: worker name -> report of the worker, as ``inspect locks`` shows it.
        live: ids of the workers of this broker that have a heartbeat in Redis. The check names
            those that do not answer.
    """
    rounds = [
        (worker, thread, seconds)
        for worker, report in sorted(reports.items())
        for thread, seconds in (report.get("threads") or {}).items()
    ]
    if not rounds:
        told = "no worker answered; a worker with a busy solo pool does not answer"
        return Check("threads", Health.UNKNOWN, told)
    answered = len({worker for worker, _, _ in rounds})
    stuck = [each for each in rounds if (each[2] or 0.0) > STUCK]
    silent = sorted({worker_name(each) for each in live} - reports.keys())
    if not stuck:
        told = f"all {len(rounds)} threads of {number_of(answered, 'worker')} are running"
        if not silent:
            return Check("threads", Health.OK, told)
        told = (
            f"{told}. No answer from {_some(silent)}, of which Redis has a heartbeat: a worker "
            "with a busy solo pool does not answer; else see its log"
        )
        return Check("threads", Health.UNKNOWN, printable(told))
    named = "; ".join(
        f"{thread} of {worker}: last round {seconds:.0f} s ago"
        for worker, thread, seconds in stuck[:NAMED]
    )
    return Check("threads", Health.FAIL, f"{named}: see the log of that worker, or restart it")


def broker_check(address: str, error: Exception | None) -> Check:
    """Check that the broker answers.

    Args:
        address: its URL, without credentials.
        error: the error when connecting to it; None if it answers.
    """
    if error is None:
        return Check("broker", Health.OK, f"{address} answers")
    told = (
        f"{address} does not answer ({type(error).__name__}). No new task arrives. Granted tasks "
        "may not start, and go from worker to worker, until it answers again"
    )
    return Check("broker", Health.FAIL, printable(told))


def consumers_check(
    store: RedisAdminStore,
    realm: str,
    tasks: Mapping[str, Collection[str]],
    consumers: Mapping[str, Consumer],
) -> Check:
    """Check that each worker that may get a locked task takes its lock in this Redis.

    Args:
        store: the store of the locks.
        realm: hash of the app's broker.
        tasks: queue -> the locked tasks of the app that are sent there.
        consumers: what each worker consumes, and which tasks it has, as the workers answer. A
            worker without a task cannot run it.
    """
    known = {worker_name(worker) for worker in store.workers()}
    unknown, lax = list[str](), list[str]()
    for worker, consumer in sorted(consumers.items()):
        has = consumer.tasks or frozenset()
        runs = {q: has & set(tasks.get(q, ())) for q in sorted(consumer.queues)}
        shared = [queue for queue, names in runs.items() if names]
        if shared and worker not in known:
            unknown.append(f"{worker} (queue {', '.join(shared[:NAMED])})")
    for queue, names in sorted(tasks.items()):
        for name in sorted(names):
            found = map(worker_name, _without_lock(store, realm, queue, name))
            lax += [f"{w} ({name})" for w in found if name in _tasks_of(consumers, w)]
    if not unknown and not lax:
        return _no_consumer_overlaps(consumers)
    told = ""
    if unknown:
        told = (
            f"{_some(unknown)}: no heartbeat in this Redis. Such a worker has no locks, or uses "
            "another Redis or singleton_lock_prefix, or does not reach it. "
        )
    if lax:
        told += f"{_some(lax)}: the task is not a LockedTask there. "
    return Check("consumers", Health.WARN, printable(f"{told}Locked tasks may overlap there"))


def _no_consumer_overlaps(consumers: Mapping[str, Consumer]) -> Check:
    silent = sorted(worker for worker, consumer in consumers.items() if consumer.tasks is None)
    if silent:
        told = f"{_some(silent)}: no answer to inspect registered. Run doctor again"
        return Check("consumers", Health.UNKNOWN, printable(told))
    told = "each worker that consumes the queue of a locked task takes its lock"
    return Check("consumers", Health.OK, told)


def _without_lock(store: RedisAdminStore, realm: str, queue: str, task: str) -> list[str]:
    """Return the live workers that consume a queue and do not lock a task."""
    return [worker for worker, locks in store.consumers(realm, queue, task).items() if not locks]


def _tasks_of(consumers: Mapping[str, Consumer], worker: str) -> frozenset[str]:
    return (consumers[worker].tasks if worker in consumers else None) or frozenset()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _paused(store: RedisAdminStore) -> Check:
    """Name the locks that an operator has paused. If tasks wait for them, nothing is wrong."""
    total, waiting, some = paused_locks(store, NAMED)
    if not total:
        return Check("paused", Health.OK, "no lock is paused")
    told = f"{number_of(total, 'lock')} paused, with {waiting} waiting: {'; '.join(some)}"
    health = Health.NOTE if waiting else Health.OK
    return Check("paused", health, printable(f"{told}. locks resume NAME resumes one"))


def _closed(store: RedisAdminStore) -> Check:
    """Name the locks that tasks and clients have closed for a time. They open by themselves."""
    total, some = closed_locks(store, NAMED)
    if not total:
        return Check("closed", Health.OK, "no lock is closed for a time")
    told = f"{number_of(total, 'lock')} closed for a time: {'; '.join(some)}"
    return Check("closed", Health.OK, printable(f"{told}. locks reopen NAME opens one earlier"))


def _costs(store: RedisAdminStore) -> Check:
    """Search for parked tasks that will fail, since a rate was lowered below their cost."""
    total, some = too_costly_tasks(store, NAMED, locks=SAMPLED)
    if not total:
        return Check("costs", Health.OK, "no parked task costs more than the rate of its lock")
    verb = "costs" if total == 1 else "cost"
    told = f"{number_of(total, 'parked task')} {verb} more than the rate of the lock: "
    remedy = (
        ". Each fails with LockCostError when it is next. Raise the rate (locks rate NAME RATE), "
        "or end the one that an operator has set (locks rate NAME --clear)"
    )
    return Check("costs", Health.WARN, printable(told + "; ".join(some) + remedy))


def _grants(store: RedisAdminStore) -> Check:
    """Search for granted tasks that those who wait for the same lock may keep from a slot."""
    total, some = grants_without_slot(store, NAMED, after=STUCK, locks=SAMPLED)
    if not total:
        return Check("grants", Health.OK, "no caller may keep a granted task from its slot")
    verb = "waits" if total == 1 else "wait"
    told = f"{number_of(total, 'granted task')} {verb} for a pool slot: "
    remedy = (
        ". Those behind it wait in code or in a slot. If they occupy all slots of that worker, "
        "nothing starts there: restart it, or add a slot (celery control pool_grow 1 -d WORKER)"
    )
    return Check("grants", Health.WARN, printable(told + "; ".join(some) + remedy))


def _parked(store: RedisAdminStore) -> Check:
    """Search for parked tasks that are next, or must end, and that no live worker takes."""
    total, looked, kinds = 0, 0, dict[tuple[str, str, str], Waiting]()
    for lock in store.summarise_locks(holders=0):
        adrift = 0 if lock.paused else lock.adrift
        if not (adrift or lock.aside) or lock.broken:
            continue
        total, looked = total + adrift, looked + 1
        if looked <= SAMPLED and len(kinds) < KINDS:
            page = store.list_waiters(lock.name, "adrift").waiting if adrift else ()
            ends = _beside_queue(store, lock.name) if lock.aside else []
            total += len(ends)
            late = filter(_is_neglected, (*page, *ends))
            kinds.update(((e.realm, e.queue, e.task), e) for e in late)
    told = islice(filter(None, (_without_taker(store, each) for each in kinds.values())), NAMED)
    examples = "; ".join(told)
    if not examples:
        return Check("parked", Health.OK, "no parked task waits for a worker that takes it")
    verb = "waits" if total == 1 else "wait"
    told_all = f"{number_of(total, 'parked task')} {verb} for a worker: {examples}"
    return Check("parked", Health.WARN, told_all)


def _is_neglected(each: Waiting) -> bool:
    """Each attempt to send it to the broker resets ``since``. One that fails doubles the pause."""
    return each.since >= NEGLECTED or each.publish_pause > FIRST_PAUSE


def _beside_queue(store: RedisAdminStore, name: str) -> list[Waiting]:
    """Return tasks that no live worker with locks would take.

    A worker has to end them, or is sending them back to a broker that may accept nothing.
    """
    page = store.list_waiters(name, "overdue").waiting
    return [
        each
        for each in page
        if each.state in TO_END | {RecordState.LEAVING} and not takers_of(store, each).lock
    ]


def _without_taker(store: RedisAdminStore, each: Waiting) -> str:
    """Return as a clause why no live worker takes a parked task; empty if one takes it."""
    takers = takers_of(store, each)
    if takers.lock:
        return ""
    if takers.plain:
        told = f"{plain_takers(each, takers.plain)}: deploy the version that does"
    else:
        told = f"no live worker with locks consumes the queue {each.queue!r}: start one"
    if each.state in TO_END:
        return printable(f"{told}, to end {each.task!r}, which is {each.state}")
    back = f"send {each.task!r} back to run without a lock ({drain_command(each)})"
    return printable(f"{told}, or {back}; a worker without the task would discard it")


def _drift(store: RedisAdminStore) -> Check:
    """Search all locks for contradictions between their keys."""
    locks, wrong, remedy, waited = 0, list[str](), "", list[Glance]()
    for lock in store.summarise_locks(holders=0):
        locks += 1
        if lock.waiting or lock.adrift or lock.bodies:
            waited.append(lock)
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
    if differ := wrong_counters(store, waited):
        advice = (
            f"the counters of parked messages are wrong: {differ}. Delete the keys "
            f"{store.keyspace.fleet}:parked*: messages that are parked afterwards are counted right"
        )
        return Check("drift", Health.WARN, advice)
    return Check("drift", Health.OK, f"{locks:,} locks are consistent")

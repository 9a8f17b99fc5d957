"""The operations of :class:`WorkerStore` on Redis (no I/O)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

from celery_singleton_lock.core.model import Claim, Identity, Owner, Reply
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.redis_keys import BUCKETS
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.requests import Command, Steps
from celery_singleton_lock.store.script_arguments import limit_of, milliseconds
from celery_singleton_lock.store.script_runner import ScriptRunner
from celery_singleton_lock.store.scripts import Argument, Call

DEFER: Final = 0.5
"""Seconds for which a due lock that one sweeper has taken is not returned to other sweepers.

This is long enough for a sweep. If the sweeper dies, the lock is swept this much later.
"""

FEW: Final = 8
"""Most locks with waiters that are returned per bucket."""


class Heartbeat(NamedTuple):
    """A heartbeat of a worker.

    Args:
        worker: its id.
        realm: hash of the broker.
        queues: what it consumes.
        ttl: seconds for which it counts as alive.
        free: number of free slots of its pool; -3: no slot is free, and three tasks wait for one.
        tasks: names of the tasks that it locks.
        digest: hash of those names, which are sent only if the server does not know the hash; empty
            if the worker locks all tasks.
        stopped: queues that it does not consume at present, although it takes their parked messages
            -> wall time since when.
    """

    worker: str
    realm: str
    queues: tuple[str, ...]
    ttl: float
    free: int = 0
    tasks: tuple[str, ...] = ()
    digest: str = ""
    stopped: Mapping[str, float] | None = None

    @classmethod
    def of(  # noqa: PLR0917  # as :meth:`WorkerOperations.worker_heartbeat` has them
        cls,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int,
        tasks: Iterable[str] | None,
        stopped: Mapping[str, float] | None = None,
    ) -> Heartbeat:
        """Return a heartbeat with the digest of its tasks."""
        names = tuple(sorted(tasks or ()))
        digest = "" if tasks is None else sha256("\n".join(names).encode()).hexdigest()[:16]
        return cls(worker, realm, tuple(sorted(queues)), ttl, free, names, digest, stopped)


class WorkerOperations(ScriptRunner):
    """Operations for the housekeeping of workers; arguments as of :class:`ScriptRunner`."""

    # -- heartbeats -------------------------------------------------------------------------------

    def worker_heartbeat(
        self,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int = 0,
        *,
        tasks: Collection[str] | None = None,
        stopped: Mapping[str, float] | None = None,
        light: bool = False,
    ) -> Steps[Mapping[str, str]]:
        """Record that a worker is alive; see :meth:`WorkerStore.worker_heartbeat`."""
        heartbeat = Heartbeat.of(worker, realm, queues, ttl, free, tasks, stopped)
        call = self.heartbeat_call(self.keyspace.fleet, heartbeat, light=light)
        known, *modes = yield from self.run(call)
        if not int(known):
            yield from self.run(self.heartbeat_call(self.keyspace.fleet, heartbeat, whole=True))
        return replies.pairs(modes)

    def heartbeat_call(
        self, fleet: str, heartbeat: Heartbeat, *, whole: bool = False, light: bool = False
    ) -> Call:
        """Return the call of the script ``worker_heartbeat``.

        Args:
            fleet: first part of the keys.
            heartbeat: what to record.
            whole: send the names of the tasks, not only their digest.
            light: only move its deadlines.
        """
        tasks = json.dumps(heartbeat.tasks) if whole else ""
        facts: dict[str, Any] = {"realm": heartbeat.realm, "queues": heartbeat.queues}
        if heartbeat.stopped:
            facts["stopped"] = dict(heartbeat.stopped)
        about = json.dumps(facts)
        arguments: list[Argument] = [heartbeat.worker, heartbeat.realm]
        arguments += [milliseconds(heartbeat.ttl), about, heartbeat.free]
        arguments += [heartbeat.digest, tasks, int(light), *heartbeat.queues]
        return Call(self.scripts["worker_heartbeat"], self.keyspace.of_fleet(fleet), arguments)

    def list_running(
        self,
        worker: str,
        new: Collection[tuple[str, str, str]],
        gone: Collection[tuple[str, str, str]],
        seconds: float,
    ) -> Steps[None]:
        """Change the list of running tasks; see :meth:`WorkerStore.list_running`."""
        now, every, own = (yield from self.time()), self.keyspace.running, self.keyspace.running_of
        key, kept_ms = own(worker), milliseconds(seconds)
        commands = [Command(("ZREMRANGEBYSCORE", every, "-inf", milliseconds(now)))]
        if gone:
            commands.append(Command(("ZREM", key, *map("\n".join, gone))))
        if new:
            scored = [word for each in new for word in (0, "\n".join(each))]
            commands += [
                Command(("ZADD", key, *scored)),
                Command(("PEXPIRE", key, kept_ms)),
                Command(("ZADD", every, milliseconds(now + seconds), worker)),
                Command(("PEXPIRE", every, kept_ms)),
            ]
        yield from self.send_each(commands)

    def fleet_size(self, realm: str, queues: Iterable[str]) -> Steps[int]:
        """Return the number of workers; see :meth:`WorkerStore.fleet_size`."""
        routes = [f"{self.keyspace.fleets[0]}:route:{realm}:{queue}" for queue in queues]
        found = yield from self.send_each(Command(("ZCARD", route)) for route in routes)
        return max(map(int, found), default=0)

    def inbox_size(self, worker: str) -> Steps[int]:
        """Return the number of grants in an inbox; see :meth:`WorkerStore.inbox_size`."""
        inboxes = [self.keyspace.inbox(worker, n) for n in range(len(self.keyspace.fleets))]
        found = yield from self.send_each(Command(("LLEN", inbox)) for inbox in inboxes)
        return sum(map(int, found))

    def leave(self, worker: str, realm: str, queues: Iterable[str]) -> Steps[None]:
        """Record that a worker accepts no more grants."""
        yield from self.worker_heartbeat(worker, realm, queues, 0)

    def switch(self, task: str, mode: str | None) -> Steps[None]:
        """Switch the mode of a task, or of all; see :meth:`WorkerStore.switch`."""
        if mode is None:
            yield Command(("HDEL", self.keyspace.mode, task))
        else:
            yield Command(("HSET", self.keyspace.mode, task, mode))

    # -- due locks --------------------------------------------------------------------------------

    def take_due_locks(self, limit: int = 100) -> Steps[Sequence[str]]:
        """Return locks that are due for a sweep; see :meth:`WorkerStore.take_due_locks`."""
        keys = [self.keyspace.due(bucket) for bucket in range(BUCKETS)]
        answer = yield from self.run(self.due_call(keys, limit))
        return [replies.text(name) for name in answer]

    def due_call(self, keys: Sequence[str], most: int) -> Call:
        """Return the call of the script ``take_due_locks``."""
        script = self.scripts["take_due_locks"]
        return Call(script, keys, script.pack({"most": most, "defer_ms": milliseconds(DEFER)}))

    def unswept_locks(self, seconds: float, limit: int = 20) -> Steps[Sequence[str]]:
        """Return locks that no worker sweeps; see :meth:`WorkerStore.unswept_locks`."""
        until = milliseconds((yield from self.time()) - seconds)
        found = yield from self.send_each(
            Command(("ZRANGEBYSCORE", self.keyspace.due(bucket), "-inf", until, "LIMIT", 0, limit))
            for bucket in range(BUCKETS)
        )
        return [replies.text(name) for names in found for name in names][:limit]

    def waited_for(self) -> Steps[Sequence[str]]:
        """Return locks that have waiters; see :meth:`WorkerStore.waited_for`."""
        found = yield from self.send_each(
            Command(("ZRANDMEMBER", self.keyspace.due(bucket), FEW)) for bucket in range(BUCKETS)
        )
        return [replies.text(name) for names in found for name in names]

    # -- observing --------------------------------------------------------------------------------

    def record_observation(
        self, owner: Owner, claim: Claim, *, waits: bool, took: float | None = None
    ) -> Steps[Reply | None]:
        """Record a run without its lock; see :meth:`WorkerStore.record_observation`."""
        call = self.lock_call(
            "record_observation",
            claim.name,
            token=owner.token,
            attempt=owner.attempt,
            task=owner.task,
            worker=owner.worker,
            limit_arg=limit_of(claim.limit),
            waits=int(waits),
            took_ms="" if took is None else milliseconds(took),
            rates_arg=claim.flow,
        )
        found = replies.text((yield from self.run(call)))
        return replies.observed_block(found) if found else None

    # -- the servers ------------------------------------------------------------------------------

    def identify(self) -> Steps[Identity]:
        """Return which servers these are; see :meth:`WorkerStore.identify`."""
        calls = [self.identify_call(fleet) for fleet in self.keyspace.fleets]
        return replies.identity((yield from self.run_many(calls)))

    def identify_call(self, fleet: str) -> Call:
        """Return the call of the script ``identify``."""
        script = self.scripts["identify"]
        return Call(script, self.keyspace.of_fleet(fleet), script.pack({"fresh": new_token()}))

    def describe(self) -> Steps[Mapping[str, str]]:
        """Return facts about the server; ``unknown`` for those that it does not report."""
        facts = dict.fromkeys(("version", "eviction", "persistence", "replicas"), "unknown")
        try:
            info = yield Command(("INFO",))
        except BackendRefused:
            return facts
        facts["version"] = str(info.get("redis_version", "unknown"))
        facts["eviction"] = str(info.get("maxmemory_policy", "unknown"))
        facts["replicas"] = str(info.get("connected_slaves", "unknown"))
        facts["persistence"] = yield from self._persistence(info)
        return facts

    def _persistence(self, info: Mapping[str, Any]) -> Steps[str]:
        if "aof_enabled" not in info:
            return "unknown"
        if int(info["aof_enabled"]):
            return "append-only file"
        try:
            saves = yield Command(("CONFIG GET", "save"))
        except BackendRefused:
            return "unknown"
        return "snapshots" if saves.get("save") else "none"

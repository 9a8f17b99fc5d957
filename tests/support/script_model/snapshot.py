"""The data in Redis at one instant, checked while it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock.core.redis_keys import BUCKETS, Keyspace
from celery_singleton_lock.store.replies import entries_in_index

ENDS_KEY = "ends-of-the-tests"
"""Where test builds of the scripts note when a key would expire, on their own clock."""

_READ = """
local out = {redis.call('HGETALL', KEYS[1])}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. ':*')) do
  local kind, value = redis.call('TYPE', key).ok
  if kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'hash' then value = redis.call('HGETALL', key)
  elseif kind == 'set' then value = redis.call('SMEMBERS', key)
  elseif kind == 'list' then value = redis.call('LRANGE', key, 0, -1)
  else value = redis.call('GET', key) end
  out[#out + 1] = {key, value}
end
return cjson.encode(out)
"""
"""One text: a client takes ten times as long to read a list of lists."""


@dataclass(slots=True)
class LockState:
    """The keys of one lock."""

    holders: dict[str, int] = field(default_factory=dict)
    queue: dict[str, int] = field(default_factory=dict)
    record: dict[str, dict[str, Any]] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)
    deadlines: dict[str, int] = field(default_factory=dict)
    adrift: dict[str, str] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    wakes: dict[str, int] = field(default_factory=dict)
    due: int | None = None
    index: dict[str, set[str]] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    flow: dict[str, Any] = field(default_factory=dict)  # part behind `flow` -> content
    ends: dict[str, int] = field(default_factory=dict)
    """When a key expires, by its part."""

    @property
    def overdue(self) -> set[str]:
        """Tokens that only have a deadline."""
        return self.deadlines.keys() - self.queue.keys() - self.adrift.keys()

    @property
    def delayed(self) -> set[str]:
        """Tokens that came back too often, and let others pass."""
        return {token for token, rec in self.record.items() if rec.get("delayed")}

    @property
    def standing(self) -> set[str]:
        """Tokens that hold or wait."""
        return set(self.holders) | set(self.queue) | set(self.adrift) | self.overdue

    def valid(self, now: int) -> dict[str, int]:
        """Holders whose lease has not ended."""
        return {token: till for token, till in self.holders.items() if till > now}


@dataclass(slots=True)
class Snapshot:
    """Everything below the prefix."""

    locks: dict[str, LockState]
    routes: dict[str, dict[str, int]] = field(default_factory=dict)
    tasks: dict[str, set[str]] = field(default_factory=dict)
    inboxes: dict[str, list[bytes]] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)
    parked: dict[str, dict[str, int]] = field(default_factory=dict)
    parked_routes: set[str] = field(default_factory=set)
    parked_bytes: dict[str, int] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)

    def live(self, lock: str, token: str, now: int) -> bool:
        """Whether a waiter is there to be granted: its client lives, or a worker consumes it."""
        state = self.locks[lock]
        rec = state.record.get(token, {})
        deadline = state.deadlines.get(token)
        if deadline is not None and deadline <= now:
            return False
        if not rec.get("parked"):
            return deadline is not None
        return bool(self.takers(rec, now))

    def takers(self, rec: dict[str, Any], now: int) -> set[str]:
        """The live workers that consume a message's queue, and lock its task or tell no tasks."""
        route = self.routes.get(f"{rec.get('realm')}:{rec.get('queue')}", {})
        return {
            worker
            for worker, till in route.items()
            if till > now and rec.get("task") in self.tasks.get(worker, {rec.get("task")})
        }


def _scores(flat: list[str]) -> dict[str, int]:
    return {flat[i]: int(float(flat[i + 1])) for i in range(0, len(flat), 2)}


def _floats(flat: list[str]) -> dict[str, float]:
    return {flat[i]: float(flat[i + 1]) for i in range(0, len(flat), 2)}


def _fields(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


class Reader:
    """Reads snapshots of some locks."""

    def __init__(self, client: Any, keyspace: Keyspace, names: list[str]) -> None:
        self.client = client
        self.keyspace = keyspace
        self.names = names
        self._script = client.register_script(_READ)
        self._place: dict[str, tuple[str, str]] = {}
        for name in names:
            keys = keyspace.lock(name)
            for part in (
                "holders",
                "queue",
                "record",
                "meta",
                "bodies",
                "deadlines",
                "adrift",
                "done",
            ):
                self._place[getattr(keys, part)] = (name, part)
        self._flows = {keyspace.lock(name).flow: name for name in names}
        self._attempts = {keyspace.attempts(name) for name in names}
        self._wakes = {keyspace.wake(name, ""): name for name in names}
        self._due = {keyspace.due(b) for b in range(BUCKETS)}
        self._index = {keyspace.index(b) for b in range(BUCKETS)}

    def read(self) -> Snapshot:
        """Return what lies there now."""
        snap = Snapshot({name: LockState() for name in self.names})
        ends, *found = json.loads(self._script(keys=[ENDS_KEY], args=[self.keyspace.prefix]))
        snap.ends = {key: int(end) for key, end in _fields(ends or []).items()}
        for key, value in found:
            snap.raw[key] = value
            self._sort(snap, key, value)
        for name, state in snap.locks.items():
            if state.record:  # cjson keeps no order of fields; two deliveries may both have a copy
                snap.raw[self.keyspace.lock(name).record] = {
                    token: {key: rec[key] for key in rec.keys() - {"copied"}}
                    for token, rec in state.record.items()
                }
        return snap

    def _sort(  # noqa: C901, PLR0912  # a table of what keys there are
        self, snap: Snapshot, key: str, value: Any
    ) -> None:
        fleet = self.keyspace.fleet
        if key in self._place:
            name, part = self._place[key]
            self._part(snap.locks[name], part, value)
            snap.locks[name].parts.add(part)
            if key in snap.ends:
                snap.locks[name].ends[part] = snap.ends[key]
        elif self._is_flow(snap, key, value):
            pass
        elif key in self._due:
            for name, score in _scores(value).items():
                if name in snap.locks:
                    snap.locks[name].due = score
                else:
                    snap.strays.append(f"{key}[{name}]")
        elif key in self._index:
            for attempt, entry in _fields(value).items():
                for name, token in entries_in_index(entry):
                    snap.locks[name].index.setdefault(attempt, set()).add(token)
        elif key.startswith(f"{fleet}:route:"):
            snap.routes[key.removeprefix(f"{fleet}:route:")] = _scores(value)
        elif key.startswith(f"{fleet}:tasks:"):
            snap.tasks[key.removeprefix(f"{fleet}:tasks:")] = set(value)
        elif key.startswith(f"{fleet}:inbox:"):
            entries = [entry.encode() for entry in value]
            snap.inboxes[key.removeprefix(f"{fleet}:inbox:")] = entries
        elif key.startswith(f"{fleet}:parked:"):
            snap.parked[key.removeprefix(f"{fleet}:parked:")] = _scores(value)
        elif key == f"{fleet}:parked":
            snap.parked_routes = set(value)
        elif key == f"{fleet}:parked_bytes":
            snap.parked_bytes = {route: int(size) for route, size in _fields(value).items()}
        elif key.startswith(f"{fleet}:free:"):
            snap.free[key.removeprefix(f"{fleet}:free:")] = int(value)
        elif key in self._attempts:
            del snap.raw[key]  # a cache, which a search may write
        elif key.startswith(f"{fleet}:worker:") or key in {
            f"{fleet}:{part}" for part in ("routes", "audit")
        }:
            pass
        else:
            for start, name in self._wakes.items():
                if key.startswith(start):
                    snap.locks[name].wakes[key.removeprefix(start)] = len(value)
                    return
            snap.strays.append(key)

    def _is_flow(self, snap: Snapshot, key: str, value: Any) -> bool:
        for start, name in self._flows.items():
            if key == start or key.startswith(f"{start}:"):
                part = key.removeprefix(start).removeprefix(":")
                fields = part in {"", "heads"}
                state = snap.locks[name]
                state.flow[part] = _fields(value) if fields else _floats(value)
                if key in snap.ends:
                    state.ends[f"flow:{part}"] = snap.ends[key]
                return True
        return False

    @staticmethod
    def _part(state: LockState, part: str, value: Any) -> None:
        if part in {"holders", "queue", "deadlines", "done"}:
            setattr(state, part, _scores(value))
        elif part == "record":
            state.record = {token: json.loads(raw) for token, raw in _fields(value).items()}
        elif part == "meta":
            state.meta = _fields(value)
        elif part == "bodies":
            state.bodies = {base: body.encode() for base, body in _fields(value).items()}
        elif part == "adrift":
            for member in _scores(value):
                route, _, token = member.rsplit("\n", 2)
                state.adrift[token] = route

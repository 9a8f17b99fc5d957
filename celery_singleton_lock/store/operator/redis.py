"""The operations for operators on a Redis or Valkey server; see :class:`AdminStore`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from typing import Any, Final

import redis

from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.core.model import ALIVE, DONE_FOR, REMEMBERED, Reply
from celery_singleton_lock.core.owner_token import base_of, new_token
from celery_singleton_lock.core.rate import Rate, listed
from celery_singleton_lock.core.redis_keys import BUCKETS, unique_key_of
from celery_singleton_lock.core.unique import EntryState, FirstCall, SentCall
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.message_text import encodable
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.cluster_routing import ELSEWHERE
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.message_operations import FIRST_ATTEMPT
from celery_singleton_lock.store.operator.base import (
    Glance,
    Operator,
    Page,
    Standing,
    Waiting,
)
from celery_singleton_lock.store.operator.listing import (
    COUNTED,
    GLANCED,
    SCANNED,
    escaped,
    fits,
    glance_calls,
    match_of,
)
from celery_singleton_lock.store.operator.replies import (
    LONGEST_WHY,
    audit_entry,
    audited,
    first_calls,
    glances_of,
    waiting_of,
)
from celery_singleton_lock.store.redis.pipelining import (
    PipelinedConnection,
    packed_call,
    packed_command,
)
from celery_singleton_lock.store.redis.sync import RedisStore, explained
from celery_singleton_lock.store.requests import Batch, Command
from celery_singleton_lock.store.script_arguments import limit_of, milliseconds_of
from celery_singleton_lock.store.scripts import Argument, Call, load_admin_scripts

CALLS_READ: Final = 100
"""Holders, waiters and messages out of the queue whose unique calls are read."""

AT_ONCE: Final = 500
"""Most workers that one command reads."""


class RedisAdminStore(RedisStore):
    """Locks on one Redis server, for operators. Arguments as of :class:`RedisStore`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.operations.scripts.update(load_admin_scripts(quarantine=self.operations.quarantine))

    # -- reading ----------------------------------------------------------------------------------

    def summarise_locks(self, pattern: str = "", *, holders: int = 1) -> Iterator[Glance]:
        """Yield all locks; see :meth:`AdminStore.summarise_locks`."""
        for server in self._all_servers():
            connection = PipelinedConnection(server)
            try:
                for call, answer in self._looks(connection, pattern, holders):
                    for found in self._read(call, answer):
                        if not pattern or fits(found.name, pattern):
                            yield found
            finally:
                connection.close()

    def key_count(self) -> int:
        """Return the number of keys; see :meth:`AdminStore.key_count`."""
        with explained(self.reconnect):
            return sum(int(server.dbsize()) for server in self._all_servers())

    def count_waiters(self, order: str = "waiting") -> list[tuple[str, int, float]]:
        """Return the locks that have waiters; see :meth:`AdminStore.count_waiters`."""
        script = self.operations.scripts["count_waiters"]
        left, first = [self.keyspace.due(bucket) for bucket in range(BUCKETS)], 0
        found: list[tuple[str, int, float]] = []
        while left:
            own = script.pack({"first": first, "most": COUNTED, "order": order})
            calls = [Call(script, [due], own) for due in left]
            answers = carry_out(self.operations.run_many(calls), self.do)
            first += COUNTED
            asked, left = left, []
            for due, call, answer in zip(asked, calls, answers, strict=True):
                total, *told = json.loads(replies.text(self._known(call, answer)))
                if total > first:
                    left.append(due)
                found += zip(told[::3], told[1::3], told[2::3], strict=True)
        long = [name for name, waiting, _ in found if waiting < 0]
        if long:
            found = [each for each in found if each[1] >= 0] + self._count_by_name(long, order)
        scale = 1 if order == "held" else 1000
        return found if order in {"waiting", "name"} else [(n, w, x / scale) for n, w, x in found]

    def _count_by_name(self, names: Sequence[str], order: str) -> list[tuple[str, int, float]]:
        """Count locks with long names, whose keys the script cannot compute."""
        return [
            (lock.name, lock.waiting + lock.adrift, _number_of(lock, order))
            for lock in self.summarise_named(names)
            if not lock.is_idle
        ]

    def summarise_named(self, names: Sequence[str], *, holders: int = 1) -> Sequence[Glance]:
        """Return some of the locks; see :meth:`AdminStore.summarise_named`."""
        metas = [self.keyspace.lock(name).meta for name in names]
        calls = glance_calls(self.operations, metas, holders)
        answers = carry_out(self.operations.run_many(calls), self.do)
        found = {
            lock.name: lock
            for call, answer in zip(calls, answers, strict=True)
            for lock in self._read(call, answer)
        }
        return [found[name] for name in names if name in found]

    def _looks(
        self, connection: PipelinedConnection, pattern: str, holders: int
    ) -> Iterator[tuple[Call, Any]]:
        """Yield short scripts, each for some of the locks that SCAN finds, and their answers.

        While the caller uses these answers, the server runs the next scripts.
        """
        answered: Iterable[tuple[Call, Any]] = ()
        calls: list[Call] = []
        seen: set[bytes | str] = set()  # SCAN may return a key twice
        cursor: str | None = "0"
        while calls or cursor is not None:
            scan = [] if cursor is None else [self._scanning(cursor)]
            with explained(self.reconnect):
                connection.ask([*map(packed_call, calls), *scan])
            yield from answered
            with explained(self.reconnect):
                answers = connection.answers()
            cursor, found = _scanned(answers.pop()) if scan else (None, [])
            answered = zip(calls, answers, strict=True)
            wanted = [
                key
                for key in dict.fromkeys(found)
                if key not in seen and (not pattern or self._may_fit(key, pattern))
            ]
            seen.update(wanted)
            calls = glance_calls(self.operations, wanted, holders)
        yield from answered

    def _scanning(self, cursor: str) -> bytes:
        """Return the SCAN command for the ``meta`` keys of locks."""
        match = match_of(self.keyspace.prefix)
        return packed_command(["SCAN", cursor, "MATCH", match, "COUNT", SCANNED])

    def _all_servers(self) -> Sequence[redis.Redis]:
        """Return the servers that together have all keys."""
        carry_out(self.operations.refuse_cluster_node(), self.do)
        return self.servers()

    def _read(self, call: Call, answer: Any) -> Iterable[Glance]:
        """Return the locks in an answer; if a record is not JSON, find it lock by lock."""
        told = self._known(call, answer)
        try:
            return glances_of(told)
        except (ValueError, TypeError, AttributeError):
            if len(call.keys) == 1:
                return [Glance(replies.text(call.keys[0]), broken=True)]
        singly = [call._replace(keys=[meta]) for meta in call.keys]
        return (found for each in singly for found in self._read(each, self._run(each)))

    def _known(self, call: Call, answer: Any) -> Any:
        """Return the answer to one of many calls.

        Raises:
            BackendError: the answer is an error.
        """
        told = self._answer_to(call, answer)
        if isinstance(told, BackendError):
            raise told
        return told

    def _may_fit(self, key: bytes | str, pattern: str) -> bool:
        """Return whether the lock of a key may match; the key of a long name has a digest only."""
        shown = replies.text(key)[len(self.keyspace.bucket(0)) + 1 : -len(":meta")]
        return shown.startswith("sha256-") or fits(shown, pattern)

    def list_waiters(self, name: str, part: str, after: str = "", most: int = 100) -> Page:
        """Return a page of the waiters of a lock; see :meth:`AdminStore.list_waiters`."""
        call = self._lock_call("list_waiters", name, part=part, after=after, most=most)
        now, end, found = self._run(call)
        now_ms = float(now)
        waiting = tuple(
            waiting_of(name, now_ms, token, record, int(size), until=float(until))
            for token, record, size, until in zip(*[iter(found)] * 4, strict=True)
        )
        return Page(waiting, replies.text(end))

    def locate_token(self, name: str, token: str) -> Standing:
        """Return whether a token holds or waits; see :meth:`AdminStore.locate_token`."""
        call = self._lock_call("locate_token", name, token=token)
        now, record, rank, left, size, ended, until = self._run(call)
        found = (
            waiting_of(name, float(now), token, record, int(size), until=float(until))
            if record
            else None
        )
        return Standing(found, int(rank), replies.seconds(left), bool(int(ended)))

    def find_call(self, name: str, key: str) -> SentCall | None:
        """Return the call that counts as sent; see :meth:`AdminStore.find_call`."""
        found = self._run(self._lock_call("find_call", name, unique_key=key))
        if not found:
            return None
        state, task_id, left = found
        expires_in = None if int(left) < 0 else replies.seconds(left)
        return SentCall(EntryState(replies.text(state)), replies.text(task_id), expires_in)

    def call_keys(self, name: str) -> Iterator[str]:
        """Yield the keys of the unique calls of a lock; see :meth:`AdminStore.call_keys`."""
        start = self.keyspace.unique(name)
        for server in self._all_servers():
            with explained(self.reconnect):
                found = list(server.scan_iter(f"{escaped(start)}*call", SCANNED))
            keys = (unique_key_of(replies.text(each)[len(start) :]) for each in found)
            yield from (key for key in keys if key is not None)

    def list_calls(self, name: str, keys: Iterable[str] = ()) -> Sequence[FirstCall]:
        """Return the calls that count as sent; see :meth:`AdminStore.list_calls`."""
        ours: list[Argument] = [name, CALLS_READ, *keys]
        call = Call(self.operations.scripts["list_calls"], tuple(self.keyspace.lock(name)), ours)
        return first_calls(name, self._run(call))

    def locate_running(self, start: str, most: int = 100) -> Sequence[tuple[str, str, str]]:
        """Return tasks that workers have; see :meth:`AdminStore.locate_running`."""
        now = int(self.time() * 1000)
        known = self.do(Command(("ZRANGEBYSCORE", self.keyspace.running, f"({now}", "+inf")))
        lists = [self.keyspace.running_of(replies.text(worker)) for worker in known]
        first, last = f"[{start}".encode(), f"[{start}".encode() + b"\xff"
        asked = [Command(("ZRANGEBYLEX", key, first, last, "LIMIT", 0, most)) for key in lists]
        found = self.do(Batch(asked)) if asked else []
        told = [replies.text(each).split("\n") for page in found for each in _checked(page)]
        return [(task_id, "\n".join(name), token) for task_id, *name, token in told]

    def task_ids(self, start: str) -> Iterator[str]:
        """Yield ids of tasks that wait; see :meth:`AdminStore.task_ids`."""
        match = f"*{escaped(start)}*"
        cursors = dict.fromkeys(map(self.keyspace.index, range(BUCKETS)), 0)
        while cursors:
            asked = [
                Command(("HSCAN", index, cursor, "MATCH", match, "COUNT", SCANNED))
                for index, cursor in cursors.items()
            ]
            answers = dict(zip(cursors, map(_checked, self.do(Batch(asked))), strict=True))
            cursors = {index: int(cursor) for index, (cursor, _) in answers.items() if int(cursor)}
            for _, found in answers.values():
                names = map(replies.text, found)
                yield from (
                    task_id for task_id in map(_task_id, names) if task_id.startswith(start)
                )

    def messages(self, name: str, tokens: Sequence[str]) -> Sequence[bytes | None]:
        """Return the stored messages of these tokens."""
        if not tokens:
            return []
        bases = [base_of(token) for token in tokens]
        return list(self.do(Command(("HMGET", self.keyspace.lock(name).bodies, *bases))))

    def find_contradictions(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield contradictions in a lock's data; see :meth:`AdminStore.find_contradictions`."""
        after = ""
        while True:
            call = self._lock_call("find_contradictions", name, after=after, most=GLANCED)
            end, found = self._run(call)
            told = [replies.text(each) for each in found]
            yield from zip(told[::2], told[1::2], strict=True)
            after = replies.text(end)
            if not after:
                return

    def silences(self, workers: Iterable[str]) -> Mapping[str, float]:
        """Return how long ago each worker's last heartbeat was; see :meth:`AdminStore.silences`."""
        names = list(workers)
        start = f"{self.keyspace.fleets[0]}:worker:"  # heartbeats are in all buckets
        left = self.do(Batch([Command(("PTTL", f"{start}{name}")) for name in names]))
        kept = ALIVE * REMEMBERED
        return {
            name: float("inf") if int(ms) < 0 else max(0.0, kept - replies.seconds(ms))
            for name, ms in zip(names, left, strict=True)
        }

    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the live workers; see :meth:`AdminStore.workers`."""
        fleet = self.keyspace.fleets[0]  # heartbeats are in all buckets
        now = int(self.time() * 1000)
        routes = self.do(Command(("ZRANGEBYSCORE", f"{fleet}:routes", f"({now}", "+inf")))
        starts = [f"{fleet}:route:{replies.text(route)}" for route in routes]
        asked = [Command(("ZRANGEBYSCORE", key, f"({now}", "+inf")) for key in starts]
        found = self.do(Batch(asked)) if asked else []
        names = sorted({replies.text(name) for live in found for name in _checked(live)})
        told: list[Any] = []
        for start in range(0, len(names), AT_ONCE):
            keys = [f"{fleet}:worker:{name}" for name in names[start : start + AT_ONCE]]
            told += self.do(Command(("MGET", *keys)))
        return {n: json.loads(about) for n, about in zip(names, told, strict=True) if about}

    def locked_tasks(self) -> frozenset[str]:
        """Return the names of the tasks that live workers lock."""
        start = f"{self.keyspace.fleets[0]}:tasks:"
        asked = [Command(("SMEMBERS", f"{start}{worker}")) for worker in self.workers()]
        found = [replies.text(each) for told in self.do(Batch(asked)) for each in _checked(told)]
        return frozenset(each for each in found if not each.startswith("#"))

    def consumers(self, realm: str, queue: str, task: str) -> Mapping[str, bool]:
        """Return the workers of a queue; see :meth:`AdminStore.consumers`."""
        fleet, now = self.keyspace.fleets[0], int(self.time() * 1000)
        route = f"{fleet}:route:{realm}:{queue}"
        live = self.do(Command(("ZRANGEBYSCORE", route, f"({now}", "+inf")))
        workers = sorted(map(replies.text, live))
        keys = [f"{fleet}:tasks:{worker}" for worker in workers]
        asked = [(Command(("SISMEMBER", key, task)), Command(("EXISTS", key))) for key in keys]
        told = [int(_checked(each)) for each in self.do(Batch([c for pair in asked for c in pair]))]
        return {
            worker: bool(locks or not known)
            for worker, locks, known in zip(workers, told[::2], told[1::2], strict=True)
        }

    def drains(self) -> Mapping[str, float]:
        """Return when each route was last drained; see :meth:`AdminStore.drains`."""
        last: dict[str, float] = {}
        for command in [Command(("HGETALL", key)) for key in self.keyspace.drained]:
            for route, at in self.do(command).items():
                name = replies.text(route)
                last[name] = max(last.get(name, 0.0), replies.seconds(at))
        return last

    def audit(self, most: int = 100) -> Sequence[dict[str, Any]]:
        """Return the audit log, newest entry first; see :meth:`AdminStore.audit`."""
        asked = [Command(("LRANGE", f"{f}:audit", 0, most - 1)) for f in self.keyspace.fleets]
        entries = [audited(entry) for command in asked for entry in self.do(command)]
        return sorted(entries, key=lambda entry: -float(entry["at"]))[:most]

    # -- changing ---------------------------------------------------------------------------------

    def force_release(
        self,
        name: str,
        token: str,
        by: Operator,
        *,
        keep: bool = True,
        done_for: float = DONE_FOR,
        worker: str = "",
    ) -> Reply:
        """Take the lock from one holder; see :meth:`AdminStore.force_release`."""
        call = self._lock_call(
            "force_release",
            name,
            token=token,
            keep=int(keep),
            done_ms=milliseconds_of("done_for", done_for),
            worker=worker,
            claim_ms=self.operations.claim_ms,
            who=audit_entry(by.at(token), "release"),
        )
        return replies.reply(self._run(call))

    def drop_waiters(
        self,
        name: str,
        tokens: Sequence[str],
        by: Operator,
        *,
        done_for: float | None = DONE_FOR,
        whole: bool = False,
        seal: str = "",
    ) -> Sequence[Waiting]:
        """Remove waiters; see :meth:`AdminStore.drop_waiters`."""
        if not tokens:
            return []
        known = self._waiting(name, tokens, whole=whole)
        done_ms = "" if done_for is None else milliseconds_of("done_for", done_for)
        call, who = seal or new_token(), audit_entry(by, "drop")
        ours: list[Argument] = [name, done_ms, call, int(bool(seal)), self.operations.claim_ms, who]
        keys = tuple(self.keyspace.lock(name))
        dropped = self._run(Call(self.operations.scripts["drop_waiters"], keys, [*ours, *tokens]))
        return [known[token] for token in map(replies.text, dropped) if token in known]

    def _waiting(self, name: str, tokens: Sequence[str], *, whole: bool) -> dict[str, Waiting]:
        """Return the waiters among these tokens, with their messages if ``whole``."""
        records = self.do(Command(("HMGET", self.keyspace.lock(name).record, *tokens)))
        messages = self.messages(name, tokens) if whole else [None] * len(tokens)
        return {
            token: waiting_of(name, 0.0, token, record, len(message or b""), message or b"")
            for token, record, message in zip(tokens, records, messages, strict=True)
            if record is not None
        }

    def adopt_messages(
        self, name: str, tokens: Sequence[str], realm: str, by: Operator
    ) -> Sequence[str]:
        """Assign messages to another broker; see :meth:`AdminStore.adopt_messages`."""
        who, keys = audit_entry(by, "import"), tuple(self.keyspace.lock(name))
        ours: list[Argument] = [name, realm, self.operations.claim_ms, who]
        script = self.operations.scripts["adopt_messages"]
        return [replies.text(token) for token in self._run(Call(script, keys, [*ours, *tokens]))]

    def forget_drops(self, name: str, owners: Sequence[tuple[str, str]]) -> int:
        """Forget that waiters were dropped; see :meth:`AdminStore.forget_drops`."""
        keys, script = tuple(self.keyspace.lock(name)), self.operations.scripts["forget_drops"]
        return int(self._run(Call(script, keys, [name, *chain.from_iterable(owners)])))

    def take_out_messages(
        self, name: str, tokens: Sequence[str], seconds: float, seal: str
    ) -> Sequence[Waiting]:
        """Take messages out of the queue; see :meth:`AdminStore.take_out_messages`."""
        if not tokens:
            return []
        keys, hold_ms = tuple(self.keyspace.lock(name)), milliseconds_of("seconds", seconds)
        ours: list[Argument] = [name, seal, hold_ms, self.operations.claim_ms]
        found = self._run(
            Call(self.operations.scripts["take_out_messages"], keys, [*ours, *tokens])
        )
        return [
            waiting_of(name, 0.0, found[i], found[i + 1], len(found[i + 2]), found[i + 2])
            for i in range(0, len(found), 3)
        ]

    def promote(self, name: str, token: str, by: Operator) -> Reply:
        """Put a waiter at the head of the queue; see :meth:`AdminStore.promote`."""
        call = self._lock_call(
            "promote",
            name,
            token=token,
            claim_ms=self.operations.claim_ms,
            who=audit_entry(by, "promote"),
        )
        return replies.reply(self._run(call))

    def forget_call(self, name: str, key: str, by: Operator) -> bool:
        """Let a call be sent again; see :meth:`AdminStore.forget_call`."""
        who = audit_entry(by, "forget-call")
        return bool(self._run(self._lock_call("forget_call", name, unique_key=key, who=who)))

    def pause(self, name: str, by: Operator, *, seconds: float | None = None) -> bool:
        """Stop granting the lock; see :meth:`AdminStore.pause`."""
        now = self.time()
        when = (
            _minute(now) if seconds is None else f"{_minute(now)}, until {_minute(now + seconds)}"
        )
        who = f"{by.who}@{by.host}" if by.host else by.who or "somebody"
        told = f"{who}, {when}: {by.why}" if by.why else f"{who}, {when}"
        return self._pause(name, encodable(" ".join(told.split())), by, "pause", seconds)

    def resume(self, name: str, by: Operator) -> bool:
        """Grant the lock again; see :meth:`AdminStore.resume`."""
        return self._pause(name, "", by, "resume")

    def _pause(  # in the order of the script's arguments
        self, name: str, reason: str, by: Operator, action: str, seconds: float | None = None
    ) -> bool:
        call = self._lock_call(
            "pause",
            name,
            reason=reason[:LONGEST_WHY],
            for_ms=_milliseconds(seconds),
            claim_ms=self.operations.claim_ms,
            who=audit_entry(by, action),
        )
        return bool(self._run(call))

    def reopen(self, name: str, by: Operator) -> bool:
        """End a timed close; see :meth:`AdminStore.reopen`."""
        call = self._lock_call(
            "reopen",
            name,
            claim_ms=self.operations.claim_ms,
            who=audit_entry(by, "reopen"),
        )
        return bool(self._run(call))

    def write_audit_entry(
        self, name: str, by: Operator, *, token: str = "", steps: int = 1
    ) -> None:
        """Write into the audit log; see :meth:`AdminStore.write_audit_entry`."""
        who = audit_entry(by, by.action or "remark")
        self._run(self._lock_call("write_audit_entry", name, token=token, steps=steps, who=who))

    def set_limit(
        self, name: str, limit: int | None, by: Operator, *, seconds: float | None = None
    ) -> int:
        """Set the limit; see :meth:`AdminStore.set_limit`."""
        call = self._lock_call(
            "set_limit",
            name,
            limit_arg="" if limit is None else limit_of(limit),
            for_ms=_milliseconds(seconds),
            claim_ms=self.operations.claim_ms,
            who=audit_entry(by, "limit", "as declared" if limit is None else str(limit)),
        )
        return int(self._run(call))

    def set_rates(
        self, name: str, rates: Sequence[Rate], by: Operator, *, seconds: float | None = None
    ) -> bool:
        """Set the rates; see :meth:`AdminStore.set_rates`."""
        told = ", ".join(map(str, rates)) or "as declared"
        call = self._lock_call(
            "set_rates",
            name,
            rates_arg=json.dumps(listed(rates)) if rates else "",
            for_ms=_milliseconds(seconds),
            claim_ms=self.operations.claim_ms,
            who=audit_entry(by, "rate", told),
        )
        return bool(self._run(call))


def _minute(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _milliseconds(seconds: float | None) -> Argument:
    """Return for how long an operator's value is in force; empty: until it is ended."""
    return "" if seconds is None else milliseconds_of("seconds", seconds, least=0.001)


class ClusterAdminStore(RedisAdminStore, ClusterStore):
    """Locks on a Redis Cluster, for operators. Arguments as of :class:`ClusterStore`."""

    def _answer_to(self, call: Call, answer: Any) -> Any:
        """Return the answer to one of many calls; run it again if its slot has moved."""
        return (
            self._run(call) if isinstance(answer, ELSEWHERE) else super()._answer_to(call, answer)
        )


def _number_of(lock: Glance, order: str) -> float:
    """Return the last number of view/count_waiters.lua for a lock, in the units of that script."""
    if order == "held":
        return float(lock.held)
    if order == "lease":
        return 1000 * min((holder.expires_in for holder in lock.holders), default=0.0)
    return 1000 * lock.oldest if order == "oldest" else 0.0


def _checked(answer: Any) -> Any:
    """Return an answer to one command of a batch.

    Raises:
        BackendError: the answer is an error.
    """
    if isinstance(answer, Exception):
        raise explain(answer) from answer
    return answer


def _scanned(answer: Any) -> tuple[str | None, Sequence[bytes | str]]:
    """Return the next cursor of SCAN (None: it has ended), and keys."""
    if isinstance(answer, Exception):
        raise explain(answer)
    cursor, found = answer
    return (replies.text(cursor) if int(cursor) else None), found


def _task_id(name: str) -> str:
    """Return the task id of an entry of the index; empty for an attempt that is not the first."""
    if name.endswith(FIRST_ATTEMPT):
        return name.removesuffix(FIRST_ATTEMPT)
    return name[1:] if name.startswith("@") else ""

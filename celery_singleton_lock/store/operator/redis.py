"""The operations for operators on a Redis or Valkey server; see :class:`AdminStore`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import redis

from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.core.model import ALIVE, REMEMBERED, Reply
from celery_singleton_lock.core.owner_token import base_of, new_token
from celery_singleton_lock.core.redis_keys import BUCKETS
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.cluster_routing import ELSEWHERE
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.operator.base import Glance, Operator, Page, Standing, Waiting
from celery_singleton_lock.store.operator.listing import (
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

    def _scan(self, match: str) -> Iterator[Sequence[bytes | str]]:
        """Yield pages of keys of all servers that match, as SCAN returns them."""
        for server in self._all_servers():
            cursor: Any = None
            while cursor is None or int(cursor):
                with explained(self.reconnect):
                    cursor, found = server.scan(cursor or 0, match=match, count=SCANNED)
                yield found

    def _all_servers(self) -> Sequence[redis.Redis]:
        """Return the servers that together have all keys."""
        carry_out(self.operations.refuse_cluster_node(), self.do)
        return self.servers()

    def _read(self, call: Call, answer: Any) -> Iterable[Glance]:
        """Return the locks in an answer; if a record is not JSON, find it lock by lock."""
        told = self._settled(call, answer)
        if isinstance(told, BackendError):
            raise told
        try:
            return glances_of(told)
        except (ValueError, TypeError, AttributeError):
            if len(call.keys) == 1:
                return [Glance(replies.text(call.keys[0]), broken=True)]
        singly = [call._replace(keys=[meta]) for meta in call.keys]
        return (found for each in singly for found in self._read(each, self._run(each)))

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
            waiting_of(name, now_ms, found[i], found[i + 1], int(found[i + 2]))
            for i in range(0, len(found), 3)
        )
        return Page(waiting, replies.text(end))

    def locate_token(self, name: str, token: str) -> Standing:
        """Return whether a token holds or waits; see :meth:`AdminStore.locate_token`."""
        call = self._lock_call("locate_token", name, token=token)
        now, record, rank, left, size, ended = self._run(call)
        found = waiting_of(name, float(now), token, record, int(size)) if record else None
        return Standing(found, int(rank), replies.seconds(left), bool(int(ended)))

    def task_ids(self, start: str) -> Iterator[str]:
        """Yield ids of tasks that wait; see :meth:`AdminStore.task_ids`."""
        match = f"@{escaped(start)}*"
        cursors = dict.fromkeys(map(self.keyspace.index, range(BUCKETS)), 0)
        while cursors:
            asked = [
                Command(("HSCAN", index, cursor, "MATCH", match, "COUNT", SCANNED))
                for index, cursor in cursors.items()
            ]
            answers = dict(zip(cursors, map(_settled, self.do(Batch(asked))), strict=True))
            cursors = {index: int(cursor) for index, (cursor, _) in answers.items() if int(cursor)}
            for _, found in answers.values():
                yield from (replies.text(field)[1:] for field in found)

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
        start = f"{self.keyspace.fleets[0]}:worker:"  # heartbeats are in all buckets
        keys = [key for page in self._scan(f"{escaped(start)}*") for key in page]
        told = self.do(Batch([Command(("GET", key)) for key in keys]))
        names = [replies.text(key)[len(start) :] for key in keys]
        known = {n: json.loads(about) for n, about in zip(names, told, strict=True) if about}
        return {name: about for name, about in known.items() if self._is_alive(name, about)}

    def locked_tasks(self) -> frozenset[str]:
        """Return the names of the tasks that live workers lock."""
        start = f"{self.keyspace.fleets[0]}:tasks:"
        asked = [Command(("SMEMBERS", f"{start}{worker}")) for worker in self.workers()]
        found = [replies.text(each) for told in self.do(Batch(asked)) for each in _settled(told)]
        return frozenset(each for each in found if not each.startswith("#"))

    def _is_alive(self, worker: str, about: Mapping[str, Any]) -> bool:
        """Return whether a worker's last heartbeat is recent enough for grants."""
        now = self.time() * 1000
        start = f"{self.keyspace.fleets[0]}:route:{about['realm']}"
        routes = [f"{start}:{queue}" for queue in about["queues"]]
        ends = [self.do(Command(("ZSCORE", route, worker))) for route in routes[:1]]
        return any(float(end or 0) > now for end in ends)

    def audit(self, most: int = 100) -> Sequence[dict[str, Any]]:
        """Return the audit log, newest entry first; see :meth:`AdminStore.audit`."""
        asked = [Command(("LRANGE", f"{f}:audit", 0, most - 1)) for f in self.keyspace.fleets]
        found = [json.loads(entry) for command in asked for entry in self.do(command)]
        entries = [{**entry, "at": replies.seconds(entry["at"])} for entry in found]
        return sorted(entries, key=lambda entry: -float(entry["at"]))[:most]

    # -- changing ---------------------------------------------------------------------------------

    def force_release(
        self,
        name: str,
        token: str,
        by: Operator,
        *,
        keep: bool = True,
        done_for: float = 3600.0,
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
            who=audit_entry(by, "release"),
        )
        return replies.reply(self._run(call))

    def drop_waiters(
        self,
        name: str,
        tokens: Sequence[str],
        by: Operator,
        *,
        done_for: float | None = 3600.0,
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

    def pause(self, name: str, by: Operator) -> bool:
        """Stop granting the lock; see :meth:`AdminStore.pause`."""
        when = datetime.fromtimestamp(self.time(), timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        who = f"{by.who}@{by.host}" if by.host else by.who or "somebody"
        told = f"{who}, {when}: {by.why}" if by.why else f"{who}, {when}"
        return self._pause(name, " ".join(told.split()), by, "pause")

    def resume(self, name: str, by: Operator) -> bool:
        """Grant the lock again; see :meth:`AdminStore.resume`."""
        return self._pause(name, "", by, "resume")

    def _pause(self, name: str, reason: str, by: Operator, action: str) -> bool:
        call = self._lock_call(
            "pause",
            name,
            reason=reason[:LONGEST_WHY],
            claim_ms=self.operations.claim_ms,
            who=audit_entry(by, action),
        )
        return bool(self._run(call))

    def write_audit_entry(
        self, name: str, by: Operator, *, token: str = "", steps: int = 1
    ) -> None:
        """Write into the audit log; see :meth:`AdminStore.write_audit_entry`."""
        who = audit_entry(by, by.action or "remark")
        self._run(self._lock_call("write_audit_entry", name, token=token, steps=steps, who=who))

    def set_limit(self, name: str, limit: int | None, by: Operator) -> int:
        """Set the limit; see :meth:`AdminStore.set_limit`."""
        call = self._lock_call(
            "set_limit",
            name,
            limit_arg="" if limit is None else limit_of(limit),
            claim_ms=self.operations.claim_ms,
            who=audit_entry(by, "limit", "as declared" if limit is None else str(limit)),
        )
        return int(self._run(call))


class ClusterAdminStore(RedisAdminStore, ClusterStore):
    """Locks on a Redis Cluster, for operators. Arguments as of :class:`ClusterStore`."""

    def _settled(self, call: Call, answer: Any) -> Any:
        """Return the answer to one of many calls; run it again if its slot has moved."""
        return self._run(call) if isinstance(answer, ELSEWHERE) else super()._settled(call, answer)


def _settled(answer: Any) -> Any:
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

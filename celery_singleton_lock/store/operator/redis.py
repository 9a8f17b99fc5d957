"""The verbs of operators on a Redis or Valkey server; see :class:`AdminStore`."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, Final

import redis

from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.core.redis_keys import BUCKETS, Keyspace
from celery_singleton_lock.core.model import ALIVE, REMEMBERED, Reply, base_of, new_token
from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.operator.base import Glance, Operator, Page, Standing, Waiting
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.cluster_routing import ELSEWHERE
from celery_singleton_lock.store.redis.sync import RedisStore, explained
from celery_singleton_lock.store.scripts import Argument, Call, load_admin_scripts
from celery_singleton_lock.store.message_operations import Batch, Command, Verbs, limit_of, milliseconds_of
from celery_singleton_lock.store.redis.fast_path import Relay, packed_call, packed_command

SCANNED: Final = 1000
"""Keys that one SCAN looks at: 0.3 ms on a usual machine."""

GLANCED: Final = 50
"""Locks that one script looks at: likewise."""

LONGEST_WHY: Final = 500
"""Characters of a reason that are kept."""


class RedisAdminStore(RedisStore):
    """Locks on one Redis server, for who operates it. Arguments as of :class:`RedisStore`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Prepare; nothing is sent yet."""
        super().__init__(*args, **kwargs)
        self.verbs.scripts.update(load_admin_scripts(quarantine=self.verbs.quarantine))

    # -- looking ----------------------------------------------------------------------------------

    def glances(self, pattern: str = "", *, holders: int = 1) -> Iterator[Glance]:
        """Yield all locks that are there; see :meth:`AdminStore.glances`."""
        for server in self._whole():
            relay = Relay(server)
            try:
                for call, answer in self._looks(relay, pattern, holders):
                    for found in self._read(call, answer):
                        if not pattern or fits(found.name, pattern):
                            yield found
            finally:
                relay.close()

    def _looks(self, relay: Relay, pattern: str, holders: int) -> Iterator[tuple[Call, Any]]:
        """Yield short scripts, each for some of the locks that SCAN finds, and their answers.

        While the caller works on these, the server is at the next ones.
        """
        answered: Iterable[tuple[Call, Any]] = ()
        calls: list[Call] = []
        seen: set[bytes | str] = set()  # SCAN may answer a key twice
        cursor: str | None = "0"
        while calls or cursor is not None:
            scan = [] if cursor is None else [self._scanning(cursor)]
            with explained(self.reconnect):
                relay.ask([*map(packed_call, calls), *scan])
            yield from answered
            with explained(self.reconnect):
                answers = relay.answers()
            cursor, found = _scanned(answers.pop()) if scan else (None, [])
            answered = zip(calls, answers, strict=True)
            wanted = [
                key
                for key in dict.fromkeys(found)
                if key not in seen and (not pattern or self._may_fit(key, pattern))
            ]
            seen.update(wanted)
            calls = glance_calls(self.verbs, wanted, holders)
        yield from answered

    def _scanning(self, cursor: str) -> bytes:
        """Return the command that looks for keys that tell of a lock."""
        match = match_of(self.keyspace.prefix)
        return packed_command(["SCAN", cursor, "MATCH", match, "COUNT", SCANNED])

    def _scan(self, match: str) -> Iterator[Sequence[bytes | str]]:
        """Yield the keys of all servers that fit, as SCAN finds them."""
        for server in self._whole():
            cursor: Any = None
            while cursor is None or int(cursor):
                with explained(self.reconnect):
                    cursor, found = server.scan(cursor or 0, match=match, count=SCANNED)
                yield found

    def _whole(self) -> Sequence[redis.Redis]:
        """Return the servers that together have all keys."""
        carry_out(self.verbs.be_whole(), self.do)
        return self.servers()

    def _read(self, call: Call, answer: Any) -> Iterable[Glance]:
        """Return these locks; where a record is no JSON, each by itself, to tell whose it is."""
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
        """Return whether a key's lock may fit; of long names the key shows a digest."""
        shown = replies.text(key)[len(self.keyspace.bucket(0)) + 1 : -len(":meta")]
        return shown.startswith("sha256-") or fits(shown, pattern)

    def page(self, name: str, part: str, after: str = "", most: int = 100) -> Page:
        """Return some of who waits for a lock; see :meth:`AdminStore.page`."""
        call = self._lock_call("page", name, part=part, after=after, most=most)
        now, end, found = self._run(call)
        now_ms = float(now)
        waiting = tuple(
            waiting_of(name, now_ms, found[i], found[i + 1], int(found[i + 2]))
            for i in range(0, len(found), 3)
        )
        return Page(waiting, replies.text(end))

    def look(self, name: str, token: str) -> Standing:
        """Return where a token stands; see :meth:`AdminStore.look`."""
        call = self._lock_call("look", name, token=token)
        now, record, rank, left, size, ended = self._run(call)
        found = waiting_of(name, float(now), token, record, int(size)) if record else None
        return Standing(found, int(rank), replies.seconds(left), bool(int(ended)))

    def task_ids(self, start: str) -> Iterator[str]:
        """Yield the ids of tasks that begin so and wait; see :meth:`AdminStore.task_ids`."""
        match = f"@{_escaped(start)}*"
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
        """Return the messages that are kept of these tokens."""
        if not tokens:
            return []
        bases = [base_of(token) for token in tokens]
        return list(self.do(Command(("HMGET", self.keyspace.lock(name).bodies, *bases))))

    def drift(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield what contradicts itself in a lock's data; see :meth:`AdminStore.drift`."""
        after = ""
        while True:
            call = self._lock_call("drift", name, after=after, most=GLANCED)
            end, found = self._run(call)
            told = [replies.text(each) for each in found]
            yield from zip(told[::2], told[1::2], strict=True)
            after = replies.text(end)
            if not after:
                return

    def silences(self, workers: Iterable[str]) -> Mapping[str, float]:
        """Return how long ago each worker's last heartbeat was; see :meth:`AdminStore.silences`."""
        names = list(workers)
        start = f"{self.keyspace.fleets[0]}:worker:"  # it beats in all
        left = self.do(Batch([Command(("PTTL", f"{start}{name}")) for name in names]))
        kept = ALIVE * REMEMBERED
        return {
            name: float("inf") if int(ms) < 0 else max(0.0, kept - replies.seconds(ms))
            for name, ms in zip(names, left, strict=True)
        }

    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the live workers: id -> ``realm`` and ``queues``."""
        start = f"{self.keyspace.fleets[0]}:worker:"  # it beats in all
        keys = [key for page in self._scan(f"{_escaped(start)}*") for key in page]
        told = self.do(Batch([Command(("GET", key)) for key in keys]))
        names = [replies.text(key)[len(start) :] for key in keys]
        known = {n: json.loads(about) for n, about in zip(names, told, strict=True) if about}
        return {name: about for name, about in known.items() if self._beats(name, about)}

    def _beats(self, worker: str, about: Mapping[str, Any]) -> bool:
        """Return whether a worker's last sign of life is young enough for it to get grants."""
        now = self.time() * 1000
        start = f"{self.keyspace.fleets[0]}:route:{about['realm']}"
        routes = [f"{start}:{queue}" for queue in about["queues"]]
        beats = [self.do(Command(("ZSCORE", route, worker))) for route in routes[:1]]
        return any(float(beat or 0) > now for beat in beats)

    def audit(self, most: int = 100) -> Sequence[dict[str, Any]]:
        """Return what operators did, newest first; see :meth:`AdminStore.audit`."""
        asked = [Command(("LRANGE", f"{f}:audit", 0, most - 1)) for f in self.keyspace.fleets]
        found = [json.loads(entry) for command in asked for entry in self.do(command)]
        entries = [{**entry, "at": replies.seconds(entry["at"])} for entry in found]
        return sorted(entries, key=lambda entry: -float(entry["at"]))[:most]

    # -- stepping in ------------------------------------------------------------------------------

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
            claim_ms=self.verbs.claim_ms,
            who=_entry(by, "release"),
        )
        return replies.reply(self._run(call))

    def drop(
        self,
        name: str,
        tokens: Sequence[str],
        by: Operator,
        *,
        done_for: float | None = 3600.0,
        whole: bool = False,
        seal: str = "",
    ) -> Sequence[Waiting]:
        """Take waiters out of the line; see :meth:`AdminStore.drop`."""
        if not tokens:
            return []
        known = self._waiting(name, tokens, whole=whole)
        done_ms = "" if done_for is None else milliseconds_of("done_for", done_for)
        call, who = seal or new_token(), _entry(by, "drop")
        ours: list[Argument] = [name, done_ms, call, int(bool(seal)), self.verbs.claim_ms, who]
        keys = tuple(self.keyspace.lock(name))
        dropped = self._run(Call(self.verbs.scripts["drop"], keys, [*ours, *tokens]))
        return [known[token] for token in map(replies.text, dropped) if token in known]

    def _waiting(self, name: str, tokens: Sequence[str], *, whole: bool) -> dict[str, Waiting]:
        """Return those of these tokens that are there, by token; with their messages if asked."""
        records = self.do(Command(("HMGET", self.keyspace.lock(name).record, *tokens)))
        messages = self.messages(name, tokens) if whole else [None] * len(tokens)
        return {
            token: waiting_of(name, 0.0, token, record, len(message or b""), message or b"")
            for token, record, message in zip(tokens, records, messages, strict=True)
            if record is not None
        }

    def seal(
        self, name: str, tokens: Sequence[str], seconds: float, seal: str
    ) -> Sequence[Waiting]:
        """Take messages out of the line for a while; see :meth:`AdminStore.seal`."""
        if not tokens:
            return []
        keys, hold_ms = tuple(self.keyspace.lock(name)), milliseconds_of("seconds", seconds)
        ours: list[Argument] = [name, seal, hold_ms, self.verbs.claim_ms]
        found = self._run(Call(self.verbs.scripts["seal"], keys, [*ours, *tokens]))
        return [
            waiting_of(name, 0.0, found[i], found[i + 1], len(found[i + 2]), found[i + 2])
            for i in range(0, len(found), 3)
        ]

    def promote(self, name: str, token: str, by: Operator) -> Reply:
        """Put a waiter at the head of the line; see :meth:`AdminStore.promote`."""
        call = self._lock_call(
            "promote", name, token=token, claim_ms=self.verbs.claim_ms, who=_entry(by, "promote")
        )
        return replies.reply(self._run(call))

    def pause(self, name: str, by: Operator) -> bool:
        """Grant the lock to nobody; see :meth:`AdminStore.pause`."""
        when = datetime.fromtimestamp(self.time(), timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        place = f"{by.who}@{by.host}" if by.host else by.who or "somebody"
        told = f"{place}, {when}: {by.why}" if by.why else f"{place}, {when}"
        return self._pause(name, " ".join(told.split()), by, "pause")

    def resume(self, name: str, by: Operator) -> bool:
        """Grant as usual again; see :meth:`AdminStore.resume`."""
        return self._pause(name, "", by, "resume")

    def _pause(self, name: str, reason: str, by: Operator, action: str) -> bool:
        call = self._lock_call(
            "pause",
            name,
            reason=reason[:LONGEST_WHY],
            claim_ms=self.verbs.claim_ms,
            who=_entry(by, action),
        )
        return bool(self._run(call))

    def remark(self, name: str, by: Operator, *, token: str = "", steps: int = 1) -> None:
        """Put into the audit what was done to a lock elsewhere."""
        who = _entry(by, by.action or "remark")
        self._run(self._lock_call("remark", name, token=token, steps=steps, who=who))

    def set_limit(self, name: str, limit: int | None, by: Operator) -> int:
        """Set the limit; see :meth:`AdminStore.set_limit`."""
        call = self._lock_call(
            "set_limit",
            name,
            limit_arg="" if limit is None else limit_of(limit),
            claim_ms=self.verbs.claim_ms,
            who=_entry(by, "limit", "as declared" if limit is None else str(limit)),
        )
        return int(self._run(call))


class ClusterAdminStore(RedisAdminStore, ClusterStore):
    """Locks on a Redis Cluster, for who operates it. Arguments as of :class:`ClusterStore`."""

    def _settled(self, call: Call, answer: Any) -> Any:
        """Ask the other master where a slot has moved meanwhile."""
        return self._run(call) if isinstance(answer, ELSEWHERE) else super()._settled(call, answer)


def _settled(answer: Any) -> Any:
    """Return an answer to one command of a batch.

    Raises:
        BackendError: it is an error.
    """
    if isinstance(answer, Exception):
        raise explain(answer) from answer
    return answer


def _escaped(text: str) -> str:
    """Return a text as a pattern that only it fits."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


def match_of(prefix: str) -> str:
    """Return the pattern of the keys that tell of a lock."""
    return f"{_escaped(prefix)}:{{b[0-9][0-9]}}:*:meta"


def fits(name: str, pattern: str) -> bool:
    """Return whether a name holds a text; fits a pattern, if that has one of ``*?[``."""
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def glance_calls(verbs: Verbs, metas: Sequence[bytes | str], holders: int) -> list[Call]:
    """Return short scripts, each for some of these locks; on a Cluster, for locks of one slot.

    Args:
        verbs: with those of operators.
        metas: the keys that tell of the locks.
        holders: most that are told of each lock.
    """
    script, keyspace = verbs.scripts["glance"], verbs.keyspace
    return [
        Call(script, keys[start : start + GLANCED], [holders])
        for keys in (_by_bucket(keyspace, metas) if keyspace.spread else [metas])
        for start in range(0, len(keys), GLANCED)
    ]


def _by_bucket(keyspace: Keyspace, metas: Sequence[bytes | str]) -> Iterable[Sequence[bytes | str]]:
    buckets: dict[str, list[bytes | str]] = {}
    for key in metas:
        buckets.setdefault(replies.text(key)[: len(keyspace.bucket(0))], []).append(key)
    return buckets.values()


def _entry(by: Operator, action: str, to: str = "") -> str:
    """Return who does what, as the scripts put it into the audit."""
    told = {**asdict(by), "action": by.action or action, "to": to, "why": by.why[:LONGEST_WHY]}
    return json.dumps({key: value for key, value in told.items() if value})


def _scanned(answer: Any) -> tuple[str | None, Sequence[bytes | str]]:
    """Return where SCAN goes on (None: it has ended), and the keys that it has found."""
    if isinstance(answer, Exception):
        raise explain(answer)
    cursor, found = answer
    return (replies.text(cursor) if int(cursor) else None), found


def glances_of(raw: Any) -> list[Glance]:
    """Return locks in short, of what glance.lua answers.

    Raises:
        ValueError: a record is none.
    """
    return [
        Glance(each, broken=True) if isinstance(each, str) else _glance(*each)
        for each in json.loads(replies.text(raw))
    ]


def _glance(  # noqa: PLR0917  # as glance.lua lists it
    held: int,
    waiting: int,
    adrift: int,
    bodies: int,
    limit: int,
    paused: int,
    oldest: float,
    name: str,
    *holders: Any,
) -> Glance:
    shown = tuple(
        replies.holder_of(token, record, left / 1000)
        for token, left, record in zip(holders[::3], holders[1::3], holders[2::3], strict=True)
    )
    return Glance(name, held, waiting, adrift, bodies, limit, paused == 1, oldest / 1000, shown)


def waiting_of(  # noqa: PLR0917  # as a page lists it
    lock: str, now_ms: float, token: Any, record: Any, size: int, message: bytes = b""
) -> Waiting:
    """Return who waits, of its record; without ``now_ms`` its ages are 0."""
    rec = json.loads(record)
    place = int(rec.get("place") or 0)
    since = float(rec.get("since") or 0)
    return Waiting(
        lock=lock,
        token=replies.text(token),
        state=replies.state_of(rec),
        task=rec.get("task", ""),
        attempt=rec.get("attempt", ""),
        age=max(0.0, now_ms / 1000 - place / 1_000_000) if now_ms else 0.0,
        since=max(0.0, (now_ms - since) / 1000) if now_ms else 0.0,
        size=size,
        realm=rec.get("realm", ""),
        queue=rec.get("queue", ""),
        worker=rec.get("worker", ""),
        lease=replies.seconds(rec.get("lease") or 0),
        place=place,
        wait=replies.seconds(rec["wait"]) if rec.get("wait") else None,
        copied=bool(rec.get("copied")),
        returns=int(rec.get("returns") or 0),
        message=message,
    )

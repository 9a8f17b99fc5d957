"""The operations of :class:`MessageStore` on Redis (no I/O)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from celery_singleton_lock.core.lock_view import Parked
from celery_singleton_lock.core.model import Claim, Owner, Reply, Verdict
from celery_singleton_lock.core.owner_token import base_of, new_token, number_of
from celery_singleton_lock.core.parked_message import (
    Delivery,
    MessageToPark,
    ParkedMessage,
    SweepReply,
)
from celery_singleton_lock.core.redis_keys import BUCKETS
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.requests import Batch, Command, Confirm, Pop, Steps
from celery_singleton_lock.store.script_arguments import (
    arguments_of,
    milliseconds,
    milliseconds_of,
)
from celery_singleton_lock.store.script_runner import ScriptRunner
from celery_singleton_lock.store.scripts import Argument, Call

HOLD: Final = 60.0
"""Seconds after which a message that was taken out of the queue for publishing queues again."""

MOST_LOST: Final = 10_000
"""Most lost tasks that are recorded in Redis."""

LOST_FOR: Final = 7 * 86_400.0
"""Seconds for which they are recorded."""

VOUCHED: Final = 300.0
"""Seconds for which Redis remembers the messages that workers have vouched for."""


class MessageOperations(ScriptRunner):
    """Operations on parked messages; arguments as of :class:`ScriptRunner`."""

    # -- parking ----------------------------------------------------------------------------------

    def park(self, owner: Owner, claim: Claim, message: MessageToPark) -> Steps[Reply]:
        """Store a message and queue it; see :meth:`MessageStore.park`."""
        # Not a batch of one: callers use stores without replicas, and need the error to be raised.
        return replies.reply((yield from self.run(self.park_call(owner, claim, message))))

    def park_many(
        self, messages: Iterable[tuple[Owner, Claim, MessageToPark]]
    ) -> Steps[Sequence[Reply | BackendError]]:
        """Park several messages in one round trip; see :meth:`MessageStore.park_many`."""
        asked = list(messages)
        answers = yield from self.run_many([self.park_call(*each) for each in asked])
        found = [a if isinstance(a, BackendError) else replies.reply(a) for a in answers]
        return (yield from self._confirmed([claim.name for _, claim, _ in asked], found))

    def _confirmed(
        self, names: Sequence[str], found: Sequence[Reply | BackendError]
    ) -> Steps[Sequence[Reply | BackendError]]:
        """Return the answers; an error for messages that too few replicas have.

        Such a message is stored, but a failover could lose it. Because of the error it also stays
        with the broker, and is parked again later. Then the only effect is to ask the replicas
        again.
        """
        if not self.replicas.number or not any(_is_stored(answer) for answer in found):
            return found
        safe = yield from self.confirm(names)
        error = BackendUnreachable(self.too_few())
        return [
            error if _is_stored(answer) and not ok else answer
            for answer, ok in zip(found, safe, strict=True)
        ]

    def confirm(self, names: Sequence[str]) -> Steps[Sequence[bool]]:
        """Wait for replicas; see :meth:`ReplicaStore.confirm`."""
        keys = [self.keyspace.waited(name) for name in names]
        safe: Sequence[bool] = yield Confirm(keys, self.replicas)
        return safe

    def too_few(self) -> str:
        """Return the error text for locks that too few replicas confirm."""
        return (
            f"Fewer than {self.replicas.number} replicas of the locks' Redis have it after "
            f"{self.replicas.seconds:g} s (singleton_lock_replicas_wait)."
        )

    def park_call(self, owner: Owner, claim: Claim, message: MessageToPark) -> Call:
        """Return the call of the script ``park``."""
        flow = {"flow_options": claim.flow} if claim.flow else {}
        return self.lock_call(
            "park_with_flow" if claim.flow else "park",
            claim.name,
            **flow,
            **arguments_of(owner, claim, self.claim_ms),
            body=message.body,
            realm=message.realm,
            route=message.queue,
            wait_ms=""
            if message.deadline is None
            else milliseconds_of("deadline", message.deadline),
            on_full="replace" if claim.replace else "",
            returns=message.returns,
        )

    # -- delivery ---------------------------------------------------------------------------------

    def body(self, name: str, token: str) -> Steps[bytes | None]:
        """Return the parked message of ``token``."""
        raw = yield Command(("HGET", self.keyspace.lock(name).bodies, base_of(token)))
        return None if raw is None else bytes(raw)

    def bodies_of(self, parked: Sequence[tuple[str, str]]) -> Steps[list[bytes | None]]:
        """Return parked messages; see :meth:`MessageStore.bodies_of`."""
        found = yield from self.send_each(
            Command(("HGET", self.keyspace.lock(name).bodies, base_of(token)))
            for name, token in parked
        )
        return [None if raw is None else bytes(raw) for raw in found]

    def receive(self, worker: str, timeout: float) -> Steps[Delivery | None]:
        """Wait up to ``timeout`` seconds for a grant in the inbox of ``worker``."""
        raw = yield Pop(self.keyspace.inbox(worker), timeout, often=True)
        return None if raw is None else replies.delivery(raw)

    def deliver_revoked(
        self, name: str, token: str, *, realm: str, worker: str = ""
    ) -> Steps[Reply]:
        """Deliver the message of a revoked task; see :meth:`MessageStore.deliver_revoked`."""
        call = self.lock_call(
            "deliver_revoked", name, token=token, realm=realm, worker=worker, claim_ms=self.claim_ms
        )
        return replies.reply((yield from self.run(call)))

    def deliver_unlocked(
        self, names: Sequence[str], tasks: Sequence[str], most: int, *, worker: str, realm: str
    ) -> Steps[int]:
        """Grant messages of tasks that do not lock; see :meth:`MessageStore.deliver_unlocked`."""
        script = self.scripts["deliver_unlocked"]
        behind: list[Argument] = [worker, realm, most, self.claim_ms, *tasks]
        answers = yield from self.run_many(
            [Call(script, self.keyspace.sent(name), [name, *behind]) for name in names]
        )
        return sum(int(moved) for moved in answers if not isinstance(moved, BackendError))

    # -- messages that no worker consumes ---------------------------------------------------------

    def sweep_and_grant(
        self, name: str, *, worker: str = "", realm: str = "", patience: float = 0.0
    ) -> Steps[SweepReply]:
        """Sweep and grant; see :meth:`MessageStore.sweep_and_grant`."""
        # Not a batch of one: this raises if the server refuses the lock; a batch would skip the
        # lock.
        seal = new_token()
        answer = yield from self.run(self._sweep_call(name, worker, realm, seal, patience))
        return replies.swept(name, seal, answer)

    def sweep_and_grant_many(
        self, names: Sequence[str], *, worker: str = "", realm: str = "", patience: float = 0.0
    ) -> Steps[SweepReply]:
        """Sweep several locks; see :meth:`MessageStore.sweep_and_grant_many`."""
        seal = new_token()
        answers = yield from self.run_many(
            [self._sweep_call(name, worker, realm, seal, patience) for name in names]
        )
        found = SweepReply()
        for name, answer in zip(names, answers, strict=True):
            if not isinstance(answer, BackendError):
                found.add(replies.swept(name, seal, answer))
        return found

    def _sweep_call(self, name: str, worker: str, realm: str, seal: str, patience: float) -> Call:
        return self.lock_call(
            "sweep_and_grant",
            name,
            worker=worker,
            realm=realm,
            seal=seal if realm else "",
            patience_ms=milliseconds(patience),
            hold_ms=milliseconds(HOLD),
            claim_ms=self.claim_ms,
        )

    def record_publish_result(
        self, name: str, seal: str, tokens: Sequence[str], *, sent: bool, worker: str = ""
    ) -> Steps[int]:
        """Record what was published; see :meth:`MessageStore.record_publish_result`."""
        script = self.scripts["record_publish_result"]
        ours: list[Argument] = [name, worker, seal, int(sent), self.claim_ms, *tokens]
        return int((yield from self.run(Call(script, self.keyspace.sent(name), ours))))

    # -- finding and counting ---------------------------------------------------------------------

    def locate_tasks(self, task_ids: Sequence[str]) -> Steps[Sequence[tuple[str, str]]]:
        """Return the locks and tokens of tasks; see :meth:`MessageStore.locate_tasks`."""
        fields = [name for task_id in task_ids for name in names_in_index(task_id)]
        if not fields:
            return []
        answers = yield from self.send_each(
            Command(("HMGET", self.keyspace.index(bucket), *fields)) for bucket in range(BUCKETS)
        )
        entries = [entry for answer in answers for entry in answer if entry]
        found = [each for entry in entries for each in replies.entries_in_index(entry)]
        return list(dict.fromkeys(found))  # older versions write two entries for a first attempt

    def parked(
        self, realm: str, queues: Collection[str] | None = None
    ) -> Steps[Mapping[str, Parked]]:
        """Return what is parked for each queue of a broker; see :meth:`MessageStore.parked`."""
        lists = [f"{fleet}:parked" for fleet in self.keyspace.fleets]
        if queues is None:
            routes = yield from self._parked_routes(realm, lists)
        else:
            routes = [(key, queue) for key in lists for queue in queues]
        commands = []
        for start, queue in routes:
            route = f"{realm}:{queue}"
            first = ("ZRANGE", f"{start}:{route}", 0, 0, "WITHSCORES")
            commands.append(Command(("ZCARD", f"{start}:{route}")))
            commands.append(Command(first, {"withscores": True}))
            commands.append(Command(("HGET", f"{start}_bytes", route)))
        found = yield from self.send_each(commands)
        now = yield from self.time()
        sums: dict[str, Parked] = {}
        each = zip(routes, found[::3], found[1::3], found[2::3], strict=True)
        for (_, queue), count, first, size in each:
            oldest = max(0.0, now - first[0][1] / 1e6) if first else 0.0
            others = sums.get(queue, Parked(0, 0.0))
            sums[queue] = Parked(
                others.waiting + count,
                max(others.oldest, oldest),
                others.size + (max(0, int(size or 0)) if count else 0),
            )
        return sums

    def _parked_routes(self, realm: str, lists: Sequence[str]) -> Steps[list[tuple[str, str]]]:
        """Return the queues with parked messages, each with the key that lists it."""
        members = yield from self.send_each(Command(("SMEMBERS", key)) for key in lists)
        return [
            (key, route.removeprefix(f"{realm}:"))
            for key, found in zip(lists, members, strict=True)
            for route in map(replies.text, found)
            if route.startswith(f"{realm}:")
        ]

    # -- after a loss of data ---------------------------------------------------------------------

    def has_messages(self, messages: Sequence[ParkedMessage]) -> Steps[Sequence[bool]]:
        """Return which messages are stored; see :meth:`MessageStore.has_messages`."""
        return (yield from self._exist(self._body_of(each) for each in messages))

    def has_traces(self, messages: Sequence[ParkedMessage]) -> Steps[Sequence[bool]]:
        """Return which messages have a trace; see :meth:`MessageStore.has_traces`."""
        traces = (
            self._body_of,
            self._end_of,
            self._end_of_attempt,
            self._sent_of,
            self._vouched_of,
            self._first_of,
            self._later_of,
        )
        commands = [trace(each) for each in messages for trace in traces]
        answers = yield from self._answers(commands)
        found = [answers[i : i + len(traces)] for i in range(0, len(answers), len(traces))]
        traced = []
        for message, seen in zip(messages, found, strict=True):
            *others, first, later = seen
            known = any(map(_exists, others)) or _is_other(message, first)
            known = known or _is_other(message, later)
            traced.append(known or (yield from self._runs_elsewhere(message, (first, later))))
        return traced

    def _runs_elsewhere(self, message: ParkedMessage, raw: Sequence[Any]) -> Steps[bool]:
        """Return whether another worker runs the former delivery again, which Redis has granted."""
        entries = [each for one in raw if one for each in replies.entries_in_index(one)]
        records = yield from self._answers(
            Command(("HGET", self.keyspace.lock(lock).record, token)) for lock, token in entries
        )
        return any(
            isinstance(record, Exception) or replies.worker_in(record) != message.worker
            for record in records
            if record
        )

    def _body_of(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).bodies
        return Command(("HEXISTS", key, base_of(message.token)))

    def _end_of(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).done
        return Command(("ZSCORE", key, base_of(message.token)))

    def _end_of_attempt(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).done
        return Command(("ZSCORE", key, message.attempt))

    def _sent_of(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).done
        sent = "" if message.moved else f"sent:{base_of(message.token)}"  # it has come back since
        return Command(("ZSCORE", key, sent))

    def _first_of(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).index
        return Command(("HGET", key, names_in_index(message.task_id)[0]))

    def _later_of(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).index
        return Command(("HGET", key, names_in_index(message.task_id)[1]))

    def _vouched_of(self, message: ParkedMessage) -> Command:
        return Command(("SISMEMBER", self.keyspace.vouched, base_of(message.token)))

    def _exist(self, commands: Iterable[Command]) -> Steps[list[bool]]:
        """Return which keys or fields exist; one that the server refuses to read counts as found.

        Raises:
            BackendUnreachable: a server does not answer.
        """
        return [_exists(answer) for answer in (yield from self._answers(commands))]

    @staticmethod
    def _answers(commands: Iterable[Command]) -> Steps[list[Any]]:
        """Return the answers; an error for what the server refuses to read.

        Raises:
            BackendUnreachable: a server does not answer.
        """
        asked = list(commands)
        answers = (yield Batch(asked)) if asked else []
        for answer in answers:
            if isinstance(answer, Exception) and isinstance(explain(answer), BackendUnreachable):
                raise explain(answer) from answer
        return list(answers)

    def vouch(self, tokens: Sequence[str]) -> Steps[None]:
        """Record which messages are not lost; see :meth:`MessageStore.vouch`."""
        if tokens:
            key = self.keyspace.vouched
            add, expire = ("SADD", key, *tokens), ("PEXPIRE", key, milliseconds(VOUCHED))
            yield from self.send_each([Command(add), Command(expire)])

    def note_lost(self, notes: Mapping[str, str]) -> Steps[None]:
        """Record lost parked tasks; see :meth:`MessageStore.note_lost`."""
        key = self.keyspace.lost
        room = max(0, MOST_LOST - int((yield Command(("HLEN", key)))))
        pairs = [part for pair in list(notes.items())[:room] for part in pair]
        if pairs:
            set_, expire = ("HSET", key, *pairs), ("PEXPIRE", key, milliseconds(LOST_FOR))
            yield from self.send_each([Command(set_), Command(expire)])


def _exists(answer: Any) -> bool:
    return answer not in {None, 0}


def _is_other(message: ParkedMessage, raw: Any) -> bool:
    """Return whether an entry of the index has another record than that of a former delivery.

    Redis may have lost the end of that delivery, and with it the message that was parked then.
    """
    if not (message.former and isinstance(raw, (bytes, str))):
        return _exists(raw)
    return any(not _is_former(message, *entry) for entry in replies.entries_in_index(raw))


def _is_former(message: ParkedMessage, lock: str, token: str) -> bool:
    return any(
        lock == name and base_of(token) == base_of(former) and number_of(token) <= number_of(former)
        for name, former in message.former
    )


def names_in_index(task_id: str) -> tuple[str, str]:
    """Return the entries of the index for a task: of its first attempt, and of later ones."""
    return f"{task_id}{FIRST_ATTEMPT}", f"@{task_id}"


FIRST_ATTEMPT: Final = "/0/0"
"""End of the name of an attempt that is not a retry and was not replaced."""


def _is_stored(answer: Reply | BackendError) -> bool:
    """Return whether a message is stored, so that its worker may acknowledge it."""
    return isinstance(answer, Reply) and answer.verdict in {Verdict.WAITING, Verdict.TWIN}

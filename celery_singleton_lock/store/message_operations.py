"""The verbs of a store as plans: which scripts they run, and what the answers mean (no I/O).

:mod:`celery_singleton_lock.store.redis.sync` carries them out in a thread, and
:mod:`celery_singleton_lock.store.redis.aio` in a task.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from redis import exceptions as failures

from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
    ConfigurationError,
)
from celery_singleton_lock.core.redis_keys import BUCKETS, Keyspace
from celery_singleton_lock.core.model import (
    CLAIM_LEASE,
    SCHEMA,
    Claim,
    Delivery,
    Ending,
    Holder,
    Identity,
    LockView,
    Observations,
    Owner,
    Parcel,
    Parked,
    ParkedMessage,
    Reply,
    Reservation,
    Stray,
    Verdict,
    base_of,
    new_token,
)
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import explain, one_node
from celery_singleton_lock.store.scripts import Argument, Call, Script, load_scripts

T = TypeVar("T")

ACQUIRE: Final = (
    "name token attempt place_us copy lease_ms limit_arg max_waiting wait_ms worker claim_ms about"
)
RELEASE: Final = "name token ending mark keep_ms keep_for worker done_ms claim_ms"
"""What the two verbs around each task take, in order; see :func:`packed`."""

PROBE: Final = "celery-singleton-lock probe"
"""Name of the lock that nobody else wants, or how the names of several begin."""

DEFER: Final = 0.5
"""Seconds for which a lock that one sweeper took is not shown to another.

Long enough to look at it; a sweeper that stands still just then keeps the lock waiting for as long.
"""

FEW: Final = 8
"""Most locks that somebody waits for which are named per bucket."""

HOLD: Final = 60.0
"""Seconds after which a message queues again that was taken out of the line to be sent."""

LONGEST_BLOCK: Final = 30.0
"""Most seconds for which a call blocks; who wants longer asks again."""

SHORTEST_BLOCK: Final = 0.01
"""Seconds for which a call blocks at least: 0 would be for ever."""

MOST_LOST: Final = 10_000
"""Most lost tasks that are noted in Redis."""

LOST_FOR: Final = 7 * 86_400.0
"""Seconds for which they are noted."""

VOUCHED: Final = 300.0
"""Seconds for which workers vouch for what they have in hand."""

SLACK: Final = 2.0
"""Seconds by which the socket time-out of a blocking call exceeds its block."""

LONGEST_LEASE: Final = 366 * 86_400.0
"""Most seconds for a lease or a wait: beyond it a slip of units is likelier than a plan."""


def _milliseconds(duration: float) -> int:
    return round(duration * 1000)


@functools.lru_cache(maxsize=1024)
def milliseconds_of(what: str, duration: float, *, least: float = 0.0) -> int:
    """Return milliseconds, and refuse what the scripts could only fail on half-way."""
    given: object = duration  # may be anything, whatever the annotation says
    if not isinstance(given, (int, float)) or not least <= given <= LONGEST_LEASE:
        msg = f"{what} is {duration!r}: give seconds, from {least:g} to {LONGEST_LEASE:g}."
        raise ConfigurationError(msg)
    return _milliseconds(duration)


def lease_of(duration: float) -> int:
    """Return milliseconds of a lease, and refuse what is none."""
    return milliseconds_of("lease", duration, least=0.001)


def _place(number: float) -> int:
    return number if type(number) is int and number >= 0 else _number("place", number)


@functools.lru_cache(maxsize=1024)
def limit_of(number: float) -> int:
    """Return a limit, and refuse what is none."""
    return _number("limit", number, least=1)


def _number(what: str, number: float, *, least: int = 0) -> int:
    if not math.isfinite(number) or number % 1 or number < least:
        msg = f"{what} is {number!r}: give a whole number, {least} or more."
        raise ConfigurationError(msg)
    return int(number)


@functools.lru_cache(maxsize=1024)
def _usual_of_acquire(  # noqa: PLR0917  # by place, since a key made of names is dearer
    lease: float,
    limit: int,
    max_waiting: int | None,
    wait: float | None,
    task: str,
    worker: str,
    host: str,
    pid: int,
    claim_ms: int,
) -> tuple[Argument, ...]:
    """Return what is the same for all calls of a task in a process: from ``lease_ms`` on."""
    lease_ms = lease_of(lease)
    about = {"task": task, "worker": worker, "host": host, "pid": str(pid), "lease": str(lease_ms)}
    return (
        lease_ms,
        limit_of(limit),
        "" if max_waiting is None else _number("max_waiting", max_waiting),
        "" if wait is None else milliseconds_of("wait", wait),
        worker,
        claim_ms,
        json.dumps(about, separators=(",", ":")),
    )


@functools.lru_cache(maxsize=1024)
def _usual_of_release(worker: str, done_for: float, claim_ms: int) -> tuple[Argument, ...]:
    """Likewise, from ``worker`` on."""
    return worker, milliseconds_of("done_for", done_for), claim_ms


def _is_kept(answer: Reply | BackendError) -> bool:
    """Return whether a message was parked, so that the broker could forget it."""
    return isinstance(answer, Reply) and answer.verdict in {Verdict.WAITING, Verdict.TWIN}


class Command(NamedTuple):
    """Send this, and answer with the server's answer.

    Args:
        words: the command.
        options: how redis-py is to read the answer.
    """

    words: tuple[Any, ...]
    options: Mapping[str, Any] = {}


class Attempts:
    """Whether a request was sent more than once.

    Attributes:
        repeated: an earlier attempt got no answer; the server may have carried it out.
    """

    __slots__ = ("repeated",)

    def __init__(self) -> None:
        """Begin before the first."""
        self.repeated = False


class Counted(NamedTuple):
    """Send this, as often as the client's retry policy says, and note whether it was repeated.

    Args:
        command: what to send.
        attempts: where to note it.
    """

    command: Command
    attempts: Attempts


class Batch(NamedTuple):
    """Send these in one round trip. Answer for each with the server's answer, or its error.

    Args:
        commands: what to send.
        patience: seconds after which a master of a Cluster that has not answered counts as silent,
            so that the answers of the others are not late; None: as long as its sockets wait. One
            server alone delays nobody else.
    """

    commands: Sequence[Command]
    patience: float | None = None


class Ask(NamedTuple):
    """The call of a verb around each task: in parts, so that a store may go a shorter way.

    See :func:`packed`.

    Args:
        script: what to run.
        name: the lock's name.
        own: the arguments that differ from call to call.
        usual: those behind them, which are the same for all calls of a task in a process.
    """

    script: Script
    name: str
    own: tuple[Argument, ...]
    usual: tuple[Argument, ...]

    def call(self, keyspace: Keyspace) -> Call:
        """Return this as a call like any other."""
        return Call(self.script, keyspace.sent(self.name), [*self.own, *self.usual])


class Pop(NamedTuple):
    """Block until a list has an element, and answer with it; or with None.

    Args:
        key: of the list.
        seconds: for which to block at most.
    """

    key: str
    seconds: float


class Receive(NamedTuple):
    """On Cluster: wait until one of a worker's inboxes has an element; answer as :class:`Pop`.

    Args:
        worker: whose inboxes.
        seconds: for which to wait at most.
    """

    worker: str
    seconds: float


class Replicas(NamedTuple):
    """How many replicas must have what was parked.

    Args:
        number: how many; 0: none.
        seconds: for which that is waited for.
    """

    number: int = 0
    seconds: float = 0.0

    def confirming(self, key: str) -> list[Command]:
        """Return what asks a server.

        WAIT asks for what was written until the last write of its own connection (until the last
        command, before Redis 7.2), and the messages may have taken another one: so a write goes
        before it.

        Args:
            key: what is written; it lies on that server.
        """
        mark = Command(("SET", key, 1, "PX", 1000))
        return [mark, Command(("WAIT", self.number, _milliseconds(self.seconds)))]


class Confirm(NamedTuple):
    """Wait for the replicas of the servers that have these keys, and answer for each key.

    Args:
        keys: one that may be written, for each lock that was written to, on the same server.
        replicas: how many are wanted, and for how long.
    """

    keys: Sequence[str]
    replicas: Replicas


Wish: TypeAlias = Command | Counted | Batch | Pop | Receive | Confirm
"""What a verb wants done. An error is one of ours, or NoScriptError."""

Verb: TypeAlias = Plan[Wish, T]

NO_REPLICAS: Final = Replicas()


def by_digest(call: Call) -> Command:
    """Run a script that the server knows."""
    return Command(("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments))


def by_text(call: Call) -> Command:
    """Run a script, and have the server know it from now on."""
    return Command(("EVAL", call.script.text, len(call.keys), *call.keys, *call.arguments))


def released(answer: Any, attempts: Attempts) -> Reply:
    """Return the reply to a release."""
    reply = replies.reply(answer)
    return reply._replace(repeated=True) if attempts.repeated else reply


class Sign(NamedTuple):
    """A worker's sign of life.

    Args:
        worker: its id.
        realm: hash of the broker.
        queues: what it consumes.
        ttl: seconds for which it counts as live.
        free: slots of its pool that are free; below 0, so many tasks wait for one.
        tasks: names of the tasks that it locks.
        digest: of those names, which are told once; empty if the worker does not say.
    """

    worker: str
    realm: str
    queues: tuple[str, ...]
    ttl: float
    free: int = 0
    tasks: tuple[str, ...] = ()
    digest: str = ""

    @classmethod
    def of(  # noqa: PLR0917  # as :meth:`Verbs.beat` has them
        cls,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int,
        tasks: Iterable[str] | None,
    ) -> Sign:
        """Return it with its digest."""
        names = tuple(sorted(tasks or ()))
        digest = "" if tasks is None else sha256("\n".join(names).encode()).hexdigest()[:16]
        return cls(worker, realm, tuple(sorted(queues)), ttl, free, names, digest)


class Verbs:
    """The verbs of a store on Redis.

    Args:
        keyspace: where the keys are.
        scripts: what they run; test builds pass their own.
        claim_lease: seconds in which a waiter must claim its grant.
        quarantine: grant nothing for one longest lease after the server's run id has changed.
        replicas: how many must have a parked message before it counts as kept.
    """

    def __init__(
        self,
        keyspace: Keyspace | None = None,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
        *,
        quarantine: bool = False,
        replicas: Replicas = NO_REPLICAS,
    ) -> None:
        """Prepare."""
        self.keyspace = keyspace or Keyspace()
        self.quarantine, self.replicas = quarantine, replicas
        self.scripts = dict(scripts) if scripts else dict(load_scripts(quarantine=quarantine))
        self._acquire = self.scripts["acquire"].taking(ACQUIRE)
        self._release = self.scripts["release"].taking(RELEASE)
        self.claim_ms = lease_of(claim_lease)

    # -- verbs ------------------------------------------------------------------------------------

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Verb[Reply]:
        """Take the lock, or queue for it; see :meth:`Store.acquire`."""
        ask = self.to_acquire(owner, claim, wait)
        return replies.reply((yield from self.run(ask.call(self.keyspace))))

    def to_acquire(self, owner: Owner, claim: Claim, wait: float | None) -> Ask:
        """Return what takes the lock, or queues for it."""
        own = (claim.name, owner.token, owner.attempt, _place(claim.place), int(claim.copy))
        usual = _usual_of_acquire(
            *(claim.lease, claim.limit, claim.max_waiting, wait),
            *(owner.task, owner.worker, owner.host, owner.pid, self.claim_ms),
        )
        return Ask(self._acquire, claim.name, own, usual)

    def park(self, owner: Owner, claim: Claim, parcel: Parcel) -> Verb[Reply]:
        """Keep a message and queue it; see :meth:`Store.park`."""
        return replies.reply((yield from self.run(self.park_call(owner, claim, parcel))))

    def park_many(
        self, parcels: Iterable[tuple[Owner, Claim, Parcel]]
    ) -> Verb[Sequence[Reply | BackendError]]:
        """Park several messages in one round trip; each gets its own answer or error."""
        asked = list(parcels)
        answers = yield from self.run_many([self.park_call(*parcel) for parcel in asked])
        found = [a if isinstance(a, BackendError) else replies.reply(a) for a in answers]
        return (yield from self._confirmed([claim.name for _, claim, _ in asked], found))

    def _confirmed(
        self, names: Sequence[str], found: Sequence[Reply | BackendError]
    ) -> Verb[Sequence[Reply | BackendError]]:
        """Return the answers; for what too few replicas have, an error.

        It is kept, but a failover could lose it: so the broker keeps it, too, and it is parked
        again, which is asked for once more and changes nothing else.
        """
        if not self.replicas.number or not any(_is_kept(answer) for answer in found):
            return found
        safe = yield from self.confirm(names)
        told = BackendUnreachable(self.too_few())
        return [
            told if _is_kept(answer) and not ok else answer
            for answer, ok in zip(found, safe, strict=True)
        ]

    def confirm(self, names: Sequence[str]) -> Verb[Sequence[bool]]:
        """Return for which locks enough replicas have all that was written; waits for them."""
        keys = [self.keyspace.waited(name) for name in names]
        safe: Sequence[bool] = yield Confirm(keys, self.replicas)
        return safe

    def too_few(self) -> str:
        """Return what is said when too few replicas confirm."""
        return (
            f"Fewer than {self.replicas.number} replicas of the lock's Redis have it after "
            f"{self.replicas.seconds:g} s (singleton_lock_replicas_wait)."
        )

    def claim(
        self,
        owner: Owner,
        name: str,
        lease: float,
        *,
        settle: bool = False,
        kept_elsewhere: bool = False,
    ) -> Verb[Reply]:
        """Begin to use a grant; see :meth:`Store.claim`."""
        call = self.lock_call(
            "claim",
            name,
            token=owner.token,
            lease_ms=lease_of(lease),
            settle=2 if kept_elsewhere else int(settle),
            worker=owner.worker,
            host=owner.host,
            pid=owner.pid,
            claim_ms=self.claim_ms,
        )
        return replies.reply((yield from self.run(call)))

    def release(
        self,
        name: str,
        token: str,
        ending: Ending,
        *,
        worker: str = "",
        done_for: float = 3600.0,
        mark: bool = False,
        reserve: Reservation | None = None,
    ) -> Verb[Reply]:
        """Give the lock back; see :meth:`Store.release`."""
        ask = self.to_release(name, token, ending, worker, done_for, mark, reserve)
        attempts = Attempts()
        answer = yield from self.run_counted(ask.call(self.keyspace), attempts)
        return released(answer, attempts)

    def to_release(  # noqa: PLR0917  # by place, since names are dearer
        self,
        name: str,
        token: str,
        ending: Ending,
        worker: str,
        done_for: float,
        mark: bool,
        reserve: Reservation | None,
    ) -> Ask:
        """Return what gives the lock back."""
        kept = ("", "") if reserve is None else (lease_of(reserve.seconds), reserve.attempt)
        own = (name, token, ending.value, int(mark), *kept)
        usual = _usual_of_release(worker, done_for, self.claim_ms)
        return Ask(self._release, name, own, usual)

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Verb[Sequence[bool | None]]:
        """Renew many leases; see :meth:`Store.extend`."""
        asked = list(leases)
        if not asked:
            return []
        answers = yield from self.run(self._extend_call(asked))
        refused = [answer for answer in answers if not isinstance(answer, int)]
        if len(refused) == len(asked):
            raise explain(failures.ResponseError(replies.text(refused[0])))
        return [answer == 1 if isinstance(answer, int) else None for answer in answers]

    def _extend_call(self, asked: Iterable[tuple[str, str, float]]) -> Call:
        keys: list[bytes] = []
        arguments: list[Argument] = []
        for name, token, lease in asked:
            keys += self.keyspace.sent(name)
            arguments += [name, token, lease_of(lease)]
        return Call(self.scripts["extend"], keys, arguments)

    def kick(
        self, name: str, *, worker: str = "", realm: str = "", patience: float = 0.0
    ) -> Verb[Sequence[Stray]]:
        """Sweep and grant; see :meth:`Store.kick`."""
        seal = new_token()
        answer = yield from self.run(self._kick_call(name, worker, realm, seal, patience))
        return replies.strays(name, seal, answer)

    def kick_many(
        self, names: Sequence[str], *, worker: str = "", realm: str = "", patience: float = 0.0
    ) -> Verb[Sequence[Stray]]:
        """Sweep several locks in one round trip; a lock whose keys are refused is passed by."""
        seal = new_token()
        answers = yield from self.run_many(
            [self._kick_call(name, worker, realm, seal, patience) for name in names]
        )
        found: list[Stray] = []
        for name, answer in zip(names, answers, strict=True):
            if not isinstance(answer, BackendError):
                found += replies.strays(name, seal, answer)
        return found

    def left(
        self, name: str, seal: str, tokens: Sequence[str], *, sent: bool, worker: str = ""
    ) -> Verb[int]:
        """Forget messages that are with the broker; see :meth:`Store.left`."""
        script = self.scripts["left"]
        ours: list[Argument] = [name, worker, seal, int(sent), self.claim_ms, *tokens]
        return int((yield from self.run(Call(script, self.keyspace.sent(name), ours))))

    def take_due(self, limit: int = 100) -> Verb[Sequence[str]]:
        """Return locks that want a look; see :meth:`Store.take_due`."""
        keys = [self.keyspace.due(bucket) for bucket in range(BUCKETS)]
        answer = yield from self.run(self._due_call(keys, limit))
        return [replies.text(name) for name in answer]

    def _due_call(self, keys: Sequence[str], most: int) -> Call:
        script = self.scripts["take_due"]
        return Call(script, keys, script.pack({"most": most, "defer_ms": _milliseconds(DEFER)}))

    def neglected(self, seconds: float, limit: int = 20) -> Verb[Sequence[str]]:
        """Return locks that have wanted a look for so long; see :meth:`Store.neglected`."""
        until = _milliseconds((yield from self.time()) - seconds)
        found = yield from self._each(
            Command(("ZRANGEBYSCORE", self.keyspace.due(bucket), "-inf", until, "LIMIT", 0, limit))
            for bucket in range(BUCKETS)
        )
        return [replies.text(name) for names in found for name in names][:limit]

    def inspect(self, name: str, *, waiters: int = 10) -> Verb[LockView]:
        """Return the lock as it stands; see :meth:`Store.inspect`."""
        call = self.lock_call("inspect", name, waiters=waiters)
        return replies.view(name, (yield from self.run(call)))

    def reset(self, name: str) -> Verb[int]:
        """Take the lock from all its holders; see :meth:`Store.reset`."""
        return int((yield from self.run(self.lock_call("reset", name, claim_ms=self.claim_ms))))

    def revoke(self, name: str, token: str, *, realm: str, worker: str = "") -> Verb[Reply]:
        """Have a revoked message delivered with that verdict; see :meth:`Store.revoke`."""
        call = self.lock_call(
            "revoke", name, token=token, realm=realm, worker=worker, claim_ms=self.claim_ms
        )
        return replies.reply((yield from self.run(call)))

    # -- parked messages --------------------------------------------------------------------------

    def find(self, task_ids: Sequence[str]) -> Verb[Sequence[tuple[str, str]]]:
        """Return the lock and token of those of these tasks that wait; one round trip."""
        fields = [f"@{task_id}" for task_id in task_ids]
        if not fields:
            return []
        answers = yield from self._each(
            Command(("HMGET", self.keyspace.index(bucket), *fields)) for bucket in range(BUCKETS)
        )
        entries = [entry for answer in answers for entry in answer if entry]
        return [found for entry in entries for found in replies.entries_in_index(entry)]

    def body(self, name: str, token: str) -> Verb[bytes | None]:
        """Return the parked message of ``token``."""
        raw = yield Command(("HGET", self.keyspace.lock(name).bodies, base_of(token)))
        return None if raw is None else bytes(raw)

    def parked(self, realm: str) -> Verb[Mapping[str, Parked]]:
        """Return how many messages of a broker are parked; see :meth:`Store.parked`."""
        lists = [f"{fleet}:parked" for fleet in self.keyspace.fleets]
        members = yield from self._each(Command(("SMEMBERS", key)) for key in lists)
        routes = [
            (key, route.removeprefix(f"{realm}:"))
            for key, found in zip(lists, members, strict=True)
            for route in map(replies.text, found)
            if route.startswith(f"{realm}:")
        ]
        commands = []
        for start, queue in routes:
            key = f"{start}:{realm}:{queue}"
            commands.append(Command(("ZCARD", key)))
            commands.append(Command(("ZRANGE", key, 0, 0, "WITHSCORES"), {"withscores": True}))
        found = yield from self._each(commands)
        now = yield from self.time()
        sums: dict[str, Parked] = {}
        for (_, queue), count, first in zip(routes, found[::2], found[1::2], strict=True):
            oldest = max(0.0, now - first[0][1] / 1e6) if first else 0.0
            others = sums.get(queue, Parked(0, 0.0))
            sums[queue] = Parked(others.waiting + count, max(others.oldest, oldest))
        return sums

    # -- modes ------------------------------------------------------------------------------------

    def switches(self) -> Verb[Mapping[str, str]]:
        """Return which tasks' modes are switched; see :meth:`Store.switches`."""
        found = yield Command(("HGETALL", self.keyspace.mode))
        return {replies.text(task): replies.text(mode) for task, mode in found.items()}

    def switch(self, task: str, mode: str | None) -> Verb[None]:
        """Switch the mode of a task, or of all; see :meth:`Store.switch`."""
        if mode is None:
            yield Command(("HDEL", self.keyspace.mode, task))
        else:
            yield Command(("HSET", self.keyspace.mode, task, mode))

    def waited_for(self) -> Verb[Sequence[str]]:
        """Return locks that somebody waits for; see :meth:`Store.waited_for`."""
        found = yield from self._each(
            Command(("ZRANDMEMBER", self.keyspace.due(bucket), FEW)) for bucket in range(BUCKETS)
        )
        return [replies.text(name) for names in found for name in names]

    def let_run(
        self, names: Sequence[str], tasks: Sequence[str], most: int, *, worker: str, realm: str
    ) -> Verb[int]:
        """Give parked messages of these tasks their turn; see :meth:`Store.let_run`."""
        script = self.scripts["let_run"]
        behind: list[Argument] = [worker, realm, most, self.claim_ms, *tasks]
        answers = yield from self.run_many(
            [Call(script, self.keyspace.sent(name), [name, *behind]) for name in names]
        )
        return sum(int(moved) for moved in answers if not isinstance(moved, BackendError))

    def observe(
        self, owner: Owner, claim: Claim, *, waits: bool, took: float | None = None
    ) -> Verb[Holder | None]:
        """Write down a run without its lock; see :meth:`Store.observe`."""
        call = self.lock_call(
            "observe",
            claim.name,
            token=owner.token,
            attempt=owner.attempt,
            task=owner.task,
            worker=owner.worker,
            limit_arg=limit_of(claim.limit),
            waits=int(waits),
            took_ms="" if took is None else _milliseconds(took),
        )
        found = replies.text((yield from self.run(call)))
        return replies.holder("", found) if found else None

    def observed(self) -> Verb[Observations]:
        """Return the report of what was observed; see :meth:`Store.observed`."""
        found = yield from self._each(
            Command(("HGETALL", self.keyspace.observed(bucket, part)))
            for bucket in range(BUCKETS)
            for part in ("tasks", "locks")
        )
        return Observations(replies.observed(found[::2]), replies.observed(found[1::2]))

    def forget_observed(self) -> Verb[None]:
        """Begin the report anew; see :meth:`Store.forget_observed`."""
        yield from self._each(
            Command(("DEL", self.keyspace.observed(bucket, part)))
            for bucket in range(BUCKETS)
            for part in ("tasks", "locks", "ranks")
        )

    # -- workers and waits ------------------------------------------------------------------------

    def beat(
        self,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int = 0,
        *,
        tasks: Collection[str] | None = None,
    ) -> Verb[Mapping[str, str]]:
        """Tell that a worker lives, for ``ttl`` seconds more; return the switches."""
        sign = Sign.of(worker, realm, queues, ttl, free, tasks)
        known, *modes = yield from self.run(self._beat_call(self.keyspace.fleet, sign))
        if not int(known):
            yield from self.run(self._beat_call(self.keyspace.fleet, sign, whole=True))
        return replies.pairs(modes)

    def _beat_call(self, fleet: str, sign: Sign, *, whole: bool = False) -> Call:
        tasks = json.dumps(sign.tasks) if whole else ""
        about = json.dumps({"realm": sign.realm, "queues": sign.queues})
        arguments: list[Argument] = [sign.worker, sign.realm, _milliseconds(sign.ttl), about]
        arguments += [sign.free, sign.digest, tasks, *sign.queues]
        return Call(self.scripts["beat"], [fleet], arguments)

    def leave(self, worker: str, realm: str, queues: Iterable[str]) -> Verb[None]:
        """Tell that a worker takes no more grants."""
        yield from self.beat(worker, realm, queues, 0)

    # -- lost data --------------------------------------------------------------------------------

    def identify(self) -> Verb[Identity]:
        """Return which servers these are; see :meth:`Store.identify`."""
        calls = [self._identify_call(fleet) for fleet in self.keyspace.fleets]
        answers = yield from self.run_many(calls)
        for answer in answers:
            if isinstance(answer, BackendError):
                raise answer
        markers, runs = zip(*answers, strict=True)
        return Identity(
            tuple(map(replies.text, markers)), frozenset(map(replies.text, runs)) - {""}
        )

    def _identify_call(self, fleet: str) -> Call:
        script = self.scripts["identify"]
        return Call(script, [fleet], script.pack({"fresh": new_token()}))

    def kept(self, messages: Sequence[ParkedMessage]) -> Verb[Sequence[bool]]:
        """Return which messages are kept; see :meth:`Store.kept`."""
        return (yield from self._found(self._body_of(each) for each in messages))

    def traced(self, messages: Sequence[ParkedMessage]) -> Verb[Sequence[bool]]:
        """Return of which messages anything is known; see :meth:`Store.traced`."""
        places = (self._body_of, self._end_of, self._index_of, self._vouched_of)
        found = yield from self._found(place(each) for each in messages for place in places)
        return [any(found[i : i + len(places)]) for i in range(0, len(found), len(places))]

    def _body_of(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).bodies
        return Command(("HEXISTS", key, base_of(message.token)))

    def _end_of(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).done
        return Command(("ZSCORE", key, base_of(message.token)))

    def _index_of(self, message: ParkedMessage) -> Command:
        key = self.keyspace.lock(message.lock).index
        return Command(("HEXISTS", key, f"@{message.task_id}"))

    def _vouched_of(self, message: ParkedMessage) -> Command:
        return Command(("SISMEMBER", self.keyspace.vouched, base_of(message.token)))

    @staticmethod
    def _found(commands: Iterable[Command]) -> Verb[list[bool]]:
        """Return what is there; what a server refuses to tell counts as there.

        Raises:
            BackendUnreachable: a server does not answer.
        """
        asked = list(commands)
        answers = (yield Batch(asked)) if asked else []
        for answer in answers:
            if isinstance(answer, Exception) and isinstance(explain(answer), BackendUnreachable):
                raise explain(answer) from answer
        return [answer not in {None, 0} for answer in answers]

    def vouch(self, tokens: Sequence[str]) -> Verb[None]:
        """Tell which messages are not lost; see :meth:`Store.vouch`."""
        if tokens:
            key = self.keyspace.vouched
            add, expire = ("SADD", key, *tokens), ("PEXPIRE", key, _milliseconds(VOUCHED))
            yield from self._each([Command(add), Command(expire)])

    def note_lost(self, notes: Mapping[str, str]) -> Verb[None]:
        """Note parked tasks that were lost; see :meth:`Store.note_lost`."""
        key = self.keyspace.lost
        room = max(0, MOST_LOST - int((yield Command(("HLEN", key)))))
        pairs = [part for pair in list(notes.items())[:room] for part in pair]
        if pairs:
            set_, expire = ("HSET", key, *pairs), ("PEXPIRE", key, _milliseconds(LOST_FOR))
            yield from self._each([Command(set_), Command(expire)])

    def lost(self, task_id: str) -> Verb[Mapping[str, Any] | None]:
        """Return what is noted of a parked task that was lost; see :meth:`AdminStore.lost`."""
        found = yield Command(("HGET", self.keyspace.lost, task_id))
        return None if found is None else json.loads(found)

    def losses(self, most: int) -> Verb[tuple[int, Sequence[str]]]:
        """Return how many parked tasks were lost, and some; see :meth:`AdminStore.losses`."""
        key = self.keyspace.lost
        count, some = yield from self._each(
            [Command(("HLEN", key)), Command(("HRANDFIELD", key, most))]
        )
        return int(count), sorted(map(replies.text, some or ()))

    # -- grants and waits -------------------------------------------------------------------------

    def receive(self, worker: str, timeout: float) -> Verb[Delivery | None]:
        """Wait up to ``timeout`` seconds for a grant."""
        raw = yield Pop(self.keyspace.inbox(worker), timeout)
        return None if raw is None else replies.delivery(raw)

    def wait(self, name: str, token: str, timeout: float) -> Verb[bool]:
        """Block until the wake list of ``token`` has an element, or ``timeout`` seconds passed."""
        return (yield Pop(self.keyspace.wake(name, token), timeout)) is not None

    # -- the server -------------------------------------------------------------------------------

    def time(self) -> Verb[float]:
        """Return the server's clock, in seconds."""
        whole, micro = yield Command(("TIME",))
        return float(whole) + float(micro) / 1_000_000

    def probe(self) -> Verb[None]:
        """Take and give back a lock nobody else wants: this server can do all that locks need."""
        owner, name = Owner(new_token()), PROBE
        yield from self.acquire(owner, Claim(name, lease=1.0, limit=2**31 - 1))
        yield from self.release(name, owner.token, Ending.FINAL)

    def schema(self) -> Verb[str]:
        """Return the version of the data model that lives here; ours, if none did."""
        yield Command(("SET", self.keyspace.schema, SCHEMA, "NX"))
        return replies.text((yield Command(("GET", self.keyspace.schema))))

    def describe(self) -> Verb[Mapping[str, str]]:
        """Return what this server guarantees; ``unknown`` where it does not say."""
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

    def _persistence(self, info: Mapping[str, Any]) -> Verb[str]:
        if "aof_enabled" not in info:
            return "unknown"
        if int(info["aof_enabled"]):
            return "append-only file"
        try:
            saves = yield Command(("CONFIG GET", "save"))
        except BackendRefused:
            return "unknown"
        return "snapshots" if saves.get("save") else "none"

    def be_whole(self) -> Verb[None]:
        """Refuse to look for locks by SCAN at one node of a Cluster: it would show a few, or none.

        Verbs for a lock need not ask: such a node refuses them. Where INFO is not allowed, nobody
        knows, and nothing is refused.

        Raises:
            BackendRefused: it is one.
        """
        try:
            info = yield Command(("INFO", "cluster"))
        except BackendRefused:
            return
        if int(info.get("cluster_enabled", 0)):
            raise one_node()

    # -- calls ------------------------------------------------------------------------------------

    def lock_call(self, verb: str, name: str, **arguments: Argument) -> Call:
        """Return the call of a script for one lock."""
        script = self.scripts[verb]
        return Call(script, self.keyspace.sent(name), script.pack({"name": name, **arguments}))

    def _asked(self, owner: Owner, claim: Claim) -> dict[str, Argument]:
        most = "" if claim.max_waiting is None else _number("max_waiting", claim.max_waiting)
        return {
            "token": owner.token,
            "lease_ms": lease_of(claim.lease),
            "limit_arg": limit_of(claim.limit),
            "place_us": _place(claim.place),
            "max_waiting": most,
            "copy": int(claim.copy),
            "attempt": owner.attempt,
            "task": owner.task,
            "worker": owner.worker,
            "host": owner.host,
            "pid": owner.pid,
            "claim_ms": self.claim_ms,
        }

    def park_call(self, owner: Owner, claim: Claim, parcel: Parcel) -> Call:
        """Return the call that keeps a message and queues it."""
        return self.lock_call(
            "park",
            claim.name,
            **self._asked(owner, claim),
            body=parcel.body,
            realm=parcel.realm,
            route=parcel.queue,
            wait_ms="" if parcel.deadline is None else milliseconds_of("deadline", parcel.deadline),
            on_full="replace" if claim.replace else "",
            returns=parcel.returns,
        )

    def _kick_call(self, name: str, worker: str, realm: str, seal: str, patience: float) -> Call:
        return self.lock_call(
            "kick",
            name,
            worker=worker,
            realm=realm,
            seal=seal if realm else "",
            patience_ms=_milliseconds(patience),
            hold_ms=_milliseconds(HOLD),
            claim_ms=self.claim_ms,
        )

    def run(self, call: Call) -> Verb[Any]:
        """Run a script by its digest; send its text only where the server does not know it."""
        try:
            return (yield by_digest(call))
        except failures.NoScriptError:
            return (yield by_text(call))

    def run_counted(self, call: Call, attempts: Attempts) -> Verb[Any]:
        """Run a script likewise, and note in ``attempts`` whether a request was repeated."""
        try:
            return (yield Counted(by_digest(call), attempts))
        except failures.NoScriptError:
            return (yield Counted(by_text(call), attempts))

    def run_many(self, calls: Sequence[Call], *, patience: float | None = None) -> Verb[list[Any]]:
        """Run scripts in one round trip; an answer is a reply, or the error of that call alone.

        Those that the server did not know run again, in their order and one by one: the first
        takes the text along, which the others then need not. SCRIPT LOAD would want a permission
        of its own. For ``patience`` see :class:`Batch`.
        """
        if not calls:
            return []
        answers = yield Batch([by_digest(call) for call in calls], patience)
        settled = []
        for call, answer in zip(calls, answers, strict=True):
            settled.append((yield from self.settled(call, answer)))
        return settled

    def settled(self, call: Call, answer: Any) -> Verb[Any]:
        """Return the answer to one of many calls, or its error."""
        if not isinstance(answer, failures.NoScriptError):
            return explain(answer) if isinstance(answer, Exception) else answer
        try:
            return (yield from self.run(call))
        except BackendError as error:
            return error

    @staticmethod
    def _each(commands: Iterable[Command]) -> Verb[list[Any]]:
        """Send commands in one round trip; the first error is that of all."""
        answers = yield Batch(list(commands))
        for answer in answers:
            if isinstance(answer, Exception):
                raise explain(answer) from answer
        return list(answers)

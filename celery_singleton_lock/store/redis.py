"""The store on a Redis or Valkey server: each verb is one Lua script."""

from __future__ import annotations

import functools
import json
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
    ConfigurationError,
)
from celery_singleton_lock.keys import BUCKETS, Keyspace, encoded
from celery_singleton_lock.model import (
    CLAIM_LEASE,
    SCHEMA,
    Claim,
    Delivery,
    Ending,
    Holder,
    LockView,
    Observations,
    Owner,
    Parcel,
    Parked,
    Reply,
    Reservation,
    Stray,
    base_of,
    new_token,
)
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.scripts import Argument, Call, Script, load_scripts
from celery_singleton_lock.store.wire import Wire, demoted, packed

ACQUIRE: Final = (
    "name token attempt place_us copy lease_ms limit_arg max_waiting wait_ms worker claim_ms about"
)
RELEASE: Final = "name token ending mark keep_ms keep_for worker done_ms claim_ms"
"""What the two verbs around each task take, in order; see :func:`packed`."""

DEFER: Final = 0.5
"""Seconds for which a lock that one sweeper took is not shown to another.

Long enough to look at it; a sweeper that stands still just then keeps the lock waiting for as long.
"""

FEW: Final = 8
"""Most locks that somebody waits for which are named per bucket."""

BLOCKS: Final = (1.0, 3.0, 10.0, 30.0)
"""Lengths of blocking calls, in seconds, that have a client each; who wants longer asks again."""

SLACK: Final = 2.0
"""Seconds by which the socket time-out of a blocking call exceeds its block."""

_UNREACHABLE: Final = (
    failures.ConnectionError,
    failures.TimeoutError,
    failures.BusyLoadingError,
    failures.ReadOnlyError,
    failures.ClusterDownError,
    failures.TryAgainError,
    OSError,
)
_TEMPORARY: Final = re.compile(r"\b(READONLY|UNBLOCKED|NOREPLICAS|MASTERDOWN|BUSY)\b")
"""Refusals that pass by themselves: a failover, too few replicas, another client's long script."""
_REFUSED: Final = {
    "NOPERM": "the ACL user may not run this; allow it: +@read +@write +eval +evalsha +time on the "
    "keys below the prefix (and +info +config|get, to be told what this server guarantees)",
    "WRONGTYPE": "a key below the lock's prefix holds another type, so another program uses the "
    "same names; set singleton_lock_prefix to a prefix of its own",
    "OOM": "the server has reached maxmemory; nothing was kept",
    "NOAUTH": "the server wants a password; put it into the URL",
    "WRONGPASS": "wrong user name or password",
}
_CODE: Final = re.compile(rf"\b({'|'.join(_REFUSED)})\b")
_DENIED_INSIDE: Final = "executing the script can't"
"""How Redis says, without a code, that a user may run a script and not what is in it."""
_CODE_OF: Final = (
    # redis-py takes the code off the sentence of errors for which it has a class.
    (failures.NoPermissionError, "NOPERM"),
    (failures.OutOfMemoryError, "OOM"),
    (failures.AuthenticationError, "WRONGPASS"),
)
_NO_MASTER: Final = (
    "No Sentinel that answers names a master. If that lasts, check the addresses, master_name and "
    "the password of the Sentinels (sentinel_kwargs)."
)
_NO_SCRIPTS: Final = "this server does not allow scripts (EVALSHA, EVAL), which every lock needs"

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


def _lease(duration: float) -> int:
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
    lease_ms = _lease(lease)
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


def explain(error: Exception) -> BackendError:
    """Return our error for one of redis-py's; never quotes an address or a password."""
    sentence = str(error)
    found = _CODE.search(sentence)
    code = found[1] if found else next((c for kind, c in _CODE_OF if isinstance(error, kind)), "")
    if _DENIED_INSIDE in sentence:
        code = "NOPERM"
    if code:
        return BackendRefused(f"The lock's Redis refused ({code}): {_REFUSED[code]}.")
    if "unknown command" in sentence.lower():
        return BackendRefused(f"The lock's Redis refused: {_NO_SCRIPTS}.")
    if isinstance(error, MasterNotFoundError):
        return BackendUnreachable(_NO_MASTER)
    temporary = _TEMPORARY.search(sentence)
    if temporary and not isinstance(error, _UNREACHABLE):
        return BackendUnreachable(f"The lock's Redis cannot serve now ({temporary[1]}).")
    if isinstance(error, _UNREACHABLE):
        return BackendUnreachable(f"The lock's Redis did not answer ({type(error).__name__}).")
    return BackendRefused(f"The lock's Redis refused: {sentence}")


@contextmanager
def explained(reconnect: Callable[[], None]) -> Iterator[None]:
    """Turn redis-py's errors into ours; have a demoted master's connections closed."""
    try:
        yield
    except (failures.RedisError, OSError) as error:
        if demoted(error):
            reconnect()
        raise explain(error) from error


class RedisStore:
    """Locks on one Redis server.

    Args:
        client: redis-py client, used for all verbs; replies may be decoded or not.
        keyspace: where the keys are.
        scripts: the verbs; test builds pass their own.
        claim_lease: seconds in which a waiter must claim its grant.
        direct: run single scripts past redis-py's client, see :class:`Wire`.

    Raises (all verbs):
        BackendUnreachable: no answer. The verb may or may not have run; asking again with the same
            token is safe.
        BackendRefused: the server answered with a refusal.
    """

    def __init__(
        self,
        client: redis.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
        direct: bool = False,
    ) -> None:
        """Prepare; nothing is sent yet."""
        self.client = client
        self._wire = Wire(client) if direct else None
        self.keyspace = keyspace or Keyspace()
        self._scripts = dict(scripts) if scripts else load_scripts()
        self._acquire = self._scripts["acquire"].taking(ACQUIRE)
        self._release = self._scripts["release"].taking(RELEASE)
        self._claim_ms = _lease(claim_lease)
        self._blocking: dict[float, redis.Redis] = {}
        weakref.finalize(self, _close_all, self._blocking, self._wire)

    # -- verbs ------------------------------------------------------------------------------------

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Reply:
        """Take the lock, or queue for it; see :meth:`Store.acquire`."""
        own = (claim.name, owner.token, owner.attempt, _place(claim.place), int(claim.copy))
        usual = _usual_of_acquire(
            *(claim.lease, claim.limit, claim.max_waiting, wait),
            *(owner.task, owner.worker, owner.host, owner.pid, self._claim_ms),
        )
        return replies.reply(self._ask(self._acquire, claim.name, own, usual))

    def park(self, owner: Owner, claim: Claim, parcel: Parcel) -> Reply:
        """Keep a message and queue it; see :meth:`Store.park`."""
        return replies.reply(self._run(self._park_call(owner, claim, parcel)))

    def park_many(
        self, parcels: Iterable[tuple[Owner, Claim, Parcel]]
    ) -> Sequence[Reply | BackendError]:
        """Park several messages in one round trip; each gets its own answer or error."""
        answers = self._run_many([self._park_call(*parcel) for parcel in parcels])
        return [a if isinstance(a, BackendError) else replies.reply(a) for a in answers]

    def claim(self, owner: Owner, name: str, lease: float, *, settle: bool = False) -> Reply:
        """Begin to use a grant; see :meth:`Store.claim`."""
        call = self._lock_call(
            "claim",
            name,
            token=owner.token,
            lease_ms=_lease(lease),
            settle=int(settle),
            worker=owner.worker,
            host=owner.host,
            pid=owner.pid,
            claim_ms=self._claim_ms,
        )
        return replies.reply(self._run(call))

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
    ) -> Reply:
        """Give the lock back; see :meth:`Store.release`."""
        kept = ("", "") if reserve is None else (_lease(reserve.seconds), reserve.attempt)
        own = (name, token, ending.value, int(mark), *kept)
        usual = _usual_of_release(worker, done_for, self._claim_ms)
        return replies.reply(self._ask(self._release, name, own, usual))

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Sequence[bool | None]:
        """Renew many leases; see :meth:`Store.extend`."""
        asked = list(leases)
        if not asked:
            return []
        prefix = self.keyspace.prefix
        keys = [key for name, _, _ in asked for key in encoded(prefix, name)]
        arguments: list[Argument] = []
        for name, token, lease in asked:
            arguments += [name, token, _lease(lease)]
        answers = self._run(Call(self._scripts["extend"], keys, arguments))
        refused = [answer for answer in answers if not isinstance(answer, int)]
        if len(refused) == len(asked):
            raise explain(failures.ResponseError(replies.text(refused[0])))
        return [answer == 1 if isinstance(answer, int) else None for answer in answers]

    def kick(self, name: str, *, worker: str = "", realm: str = "") -> Sequence[Stray]:
        """Sweep and grant; see :meth:`Store.kick`."""
        raw = self._run(self._kick_call(name, worker, realm))
        return replies.strays(name, raw)

    def kick_many(
        self, names: Sequence[str], *, worker: str = "", realm: str = ""
    ) -> Sequence[Stray]:
        """Sweep several locks in one round trip; a lock whose keys are refused is passed by."""
        answers = self._run_many([self._kick_call(name, worker, realm) for name in names])
        found: list[Stray] = []
        for name, answer in zip(names, answers, strict=True):
            if not isinstance(answer, BackendError):
                found += replies.strays(name, answer)
        return found

    def take_due(self, limit: int = 100) -> Sequence[str]:
        """Return locks that want a look; see :meth:`Store.take_due`."""
        script = self._scripts["take_due"]
        keys = [self.keyspace.due(bucket) for bucket in range(BUCKETS)]
        arguments = script.pack({"most": limit, "defer_ms": _milliseconds(DEFER)})
        return [replies.text(name) for name in self._run(Call(script, keys, arguments))]

    def neglected(self, seconds: float, limit: int = 20) -> Sequence[str]:
        """Return locks that have wanted a look for so long; see :meth:`Store.neglected`."""
        until = _milliseconds(self.time() - seconds)
        with explained(self.reconnect):
            pipe = self.client.pipeline(transaction=False)
            for bucket in range(BUCKETS):
                pipe.zrangebyscore(self.keyspace.due(bucket), "-inf", until, 0, limit)
            found = pipe.execute()
        return [replies.text(name) for names in found for name in names][:limit]

    def inspect(self, name: str, *, waiters: int = 10) -> LockView:
        """Return the lock as it stands; see :meth:`Store.inspect`."""
        return replies.view(name, self._run(self._lock_call("inspect", name, waiters=waiters)))

    def reset(self, name: str) -> int:
        """Take the lock from all its holders; see :meth:`Store.reset`."""
        return int(self._run(self._lock_call("reset", name, claim_ms=self._claim_ms)))

    def revoke(self, name: str, token: str, *, realm: str, worker: str = "") -> Reply:
        """Have a revoked message delivered with that verdict; see :meth:`Store.revoke`."""
        call = self._lock_call(
            "revoke", name, token=token, realm=realm, worker=worker, claim_ms=self._claim_ms
        )
        return replies.reply(self._run(call))

    # -- parked messages, workers, waits ----------------------------------------------------------

    def find(self, task_ids: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Return the lock and token of those of these tasks that wait; one round trip."""
        fields = [f"@{task_id}" for task_id in task_ids]
        if not fields:
            return []
        with explained(self.reconnect):
            pipe = self.client.pipeline(transaction=False)
            for bucket in range(BUCKETS):
                pipe.hmget(self.keyspace.index(bucket), fields)
            answers = pipe.execute()
        entries = [replies.text(entry) for answer in answers for entry in answer if entry]
        return [(name, token) for name, _, token in (e.rpartition("\n") for e in entries)]

    def body(self, name: str, token: str) -> bytes | None:
        """Return the parked message of ``token``."""
        with explained(self.reconnect):
            raw: Any = self.client.hget(self.keyspace.lock(name).bodies, base_of(token))
        return None if raw is None else bytes(raw)

    def beat(self, worker: str, realm: str, queues: Iterable[str], ttl: float) -> Mapping[str, str]:
        """Tell that a worker lives, for ``ttl`` seconds more; return the switches."""
        names = sorted(queues)
        about = json.dumps({"realm": realm, "queues": names})
        arguments: list[Argument] = [worker, realm, _milliseconds(ttl), about, *names]
        found = self._run(Call(self._scripts["beat"], [self.keyspace.fleet], arguments))
        return replies.pairs(found)

    def leave(self, worker: str, realm: str, queues: Iterable[str]) -> None:
        """Tell that a worker takes no more grants."""
        self.beat(worker, realm, queues, 0)

    def parked(self, realm: str) -> Mapping[str, Parked]:
        """Return how many messages of a broker are parked; see :meth:`Store.parked`."""
        with explained(self.reconnect):
            members: Any = self.client.smembers(self.keyspace.parked)
            routes = [
                route for route in map(replies.text, members) if route.startswith(f"{realm}:")
            ]
            pipe = self.client.pipeline(transaction=False)
            for route in routes:
                pipe.zcard(f"{self.keyspace.parked}:{route}")
                pipe.zrange(f"{self.keyspace.parked}:{route}", 0, 0, withscores=True)
            found, now = pipe.execute(), self.time()
        return {
            route.removeprefix(f"{realm}:"): Parked(
                count, max(0.0, now - first[0][1] / 1e6) if first else 0.0
            )
            for route, count, first in zip(routes, found[::2], found[1::2], strict=True)
        }

    # -- modes ------------------------------------------------------------------------------------

    def switches(self) -> Mapping[str, str]:
        """Return which tasks' modes are switched; see :meth:`Store.switches`."""
        with explained(self.reconnect):
            found: Any = self.client.hgetall(self.keyspace.mode)
        return {replies.text(task): replies.text(mode) for task, mode in found.items()}

    def switch(self, task: str, mode: str | None) -> None:
        """Switch the mode of a task, or of all; see :meth:`Store.switch`."""
        with explained(self.reconnect):
            if mode is None:
                self.client.hdel(self.keyspace.mode, task)
            else:
                self.client.hset(self.keyspace.mode, task, mode)

    def waited_for(self) -> Sequence[str]:
        """Return locks that somebody waits for; see :meth:`Store.waited_for`."""
        with explained(self.reconnect):
            pipe = self.client.pipeline(transaction=False)
            for bucket in range(BUCKETS):
                pipe.zrandmember(self.keyspace.due(bucket), FEW)
            found = pipe.execute()
        return [replies.text(name) for names in found for name in names]

    def let_run(
        self, names: Sequence[str], tasks: Sequence[str], most: int, *, worker: str, realm: str
    ) -> int:
        """Give parked messages of these tasks their turn; see :meth:`Store.let_run`."""
        script, prefix = self._scripts["let_run"], self.keyspace.prefix
        behind: list[Argument] = [worker, realm, most, self._claim_ms, *tasks]
        answers = self._run_many(
            [Call(script, encoded(prefix, name), [name, *behind]) for name in names]
        )
        return sum(int(moved) for moved in answers if not isinstance(moved, BackendError))

    def observe(
        self, owner: Owner, claim: Claim, *, waits: bool, took: float | None = None
    ) -> Holder | None:
        """Write down a run without its lock; see :meth:`Store.observe`."""
        call = self._lock_call(
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
        found = replies.text(self._run(call))
        return replies.holder("", found) if found else None

    def observed(self) -> Observations:
        """Return the report of what was observed; see :meth:`Store.observed`."""
        with explained(self.reconnect):
            pipe = self.client.pipeline(transaction=False)
            for bucket in range(BUCKETS):
                pipe.hgetall(self.keyspace.observed(bucket, "tasks"))
                pipe.hgetall(self.keyspace.observed(bucket, "locks"))
            found = pipe.execute()
        return Observations(replies.observed(found[::2]), replies.observed(found[1::2]))

    def forget_observed(self) -> None:
        """Begin the report anew; see :meth:`Store.forget_observed`."""
        with explained(self.reconnect):
            pipe = self.client.pipeline(transaction=False)
            for bucket in range(BUCKETS):
                for part in ("tasks", "locks", "ranks"):
                    pipe.delete(self.keyspace.observed(bucket, part))
            pipe.execute()

    # -- workers and waits ------------------------------------------------------------------------

    def receive(self, worker: str, timeout: float) -> Delivery | None:
        """Wait up to ``timeout`` seconds for a grant."""
        raw = self._pop(self.keyspace.inbox(worker), timeout)
        return None if raw is None else replies.delivery(raw)

    def wait(self, name: str, token: str, timeout: float) -> bool:
        """Block until the wake list of ``token`` has an element, or ``timeout`` seconds passed."""
        return self._pop(self.keyspace.wake(name, token), timeout) is not None

    def time(self) -> float:
        """Return the server's clock, in seconds."""
        with explained(self.reconnect):
            whole, micro = self.client.time()
        return float(whole) + float(micro) / 1_000_000

    def probe(self) -> None:
        """Take and give back a lock nobody else wants: this server can do all that locks need."""
        owner, name = Owner(new_token()), "celery-singleton-lock probe"
        self.acquire(owner, Claim(name, lease=1.0, limit=2**31 - 1))
        self.release(name, owner.token, Ending.FINAL)

    def schema(self) -> str:
        """Return the version of the data model that lives here; ours, if none did."""
        with explained(self.reconnect):
            self.client.set(self.keyspace.schema, SCHEMA, nx=True)
            return replies.text(self.client.get(self.keyspace.schema))

    def describe(self) -> Mapping[str, str]:
        """Return what this server guarantees; ``unknown`` where it does not say."""
        facts = {"version": "unknown", "eviction": "unknown", "persistence": "unknown"}
        facts["replicas"] = "unknown"
        try:
            with explained(self.reconnect):
                info: Any = self.client.info()
        except BackendRefused:
            return facts
        facts["version"] = str(info.get("redis_version", "unknown"))
        facts["eviction"] = str(info.get("maxmemory_policy", "unknown"))
        facts["replicas"] = str(info.get("connected_slaves", "unknown"))
        facts["persistence"] = self._persistence(info)
        return facts

    def _persistence(self, info: Mapping[str, Any]) -> str:
        if "aof_enabled" not in info:
            return "unknown"
        if int(info["aof_enabled"]):
            return "append-only file"
        try:
            with explained(self.reconnect):
                saves: Any = self.client.config_get("save")
        except BackendRefused:
            return "unknown"
        return "snapshots" if saves.get("save") else "none"

    # -- calls ------------------------------------------------------------------------------------

    def _lock_call(self, verb: str, name: str, **arguments: Argument) -> Call:
        script = self._scripts[verb]
        keys = encoded(self.keyspace.prefix, name)
        return Call(script, keys, script.pack({"name": name, **arguments}))

    def _asked(self, owner: Owner, claim: Claim) -> dict[str, Argument]:
        most = "" if claim.max_waiting is None else _number("max_waiting", claim.max_waiting)
        return {
            "token": owner.token,
            "lease_ms": _lease(claim.lease),
            "limit_arg": limit_of(claim.limit),
            "place_us": _place(claim.place),
            "max_waiting": most,
            "copy": int(claim.copy),
            "attempt": owner.attempt,
            "task": owner.task,
            "worker": owner.worker,
            "host": owner.host,
            "pid": owner.pid,
            "claim_ms": self._claim_ms,
        }

    def _park_call(self, owner: Owner, claim: Claim, parcel: Parcel) -> Call:
        return self._lock_call(
            "park",
            claim.name,
            **self._asked(owner, claim),
            body=parcel.body,
            realm=parcel.realm,
            route=parcel.queue,
            wait_ms="" if parcel.deadline is None else milliseconds_of("deadline", parcel.deadline),
            on_full="replace" if claim.replace else "",
        )

    def _kick_call(self, name: str, worker: str, realm: str) -> Call:
        return self._lock_call("kick", name, worker=worker, realm=realm, claim_ms=self._claim_ms)

    def _ask(
        self, script: Script, name: str, own: tuple[Argument, ...], usual: tuple[Argument, ...]
    ) -> Any:
        """Run a lock's script the short way, if that is open; see :func:`packed`."""
        if self._wire is not None:
            try:
                return self._wire.ask(packed(script, self.keyspace.prefix, name, own, usual))
            except failures.NoScriptError:
                pass  # as below, with its text
            except (failures.RedisError, OSError) as error:
                raise explain(error) from error
        return self._run(Call(script, encoded(self.keyspace.prefix, name), [*own, *usual]))

    def _run(self, call: Call) -> Any:
        """Run a script by its digest; send its text only where the server does not know it."""
        with explained(self.reconnect):
            try:
                return self.client.evalsha(
                    call.script.sha, len(call.keys), *call.keys, *call.arguments
                )
            except failures.NoScriptError:
                return self.client.eval(
                    call.script.text, len(call.keys), *call.keys, *call.arguments
                )

    def _run_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip; an answer is a reply, or the error of that call alone.

        Those that the server did not know run again, in their order and one by one: the first
        takes the text along, which the others then need not. SCRIPT LOAD would want a permission
        of its own.
        """
        if not calls:
            return []
        with explained(self.reconnect):
            pipe = self.client.pipeline(transaction=False)
            for call in calls:
                pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.arguments)
            answers = pipe.execute(raise_on_error=False)
        return [self._settled(call, answer) for call, answer in zip(calls, answers, strict=True)]

    def _settled(self, call: Call, answer: Any) -> Any:
        if isinstance(answer, failures.NoScriptError):
            return self._caught(lambda: self._run(call))
        if isinstance(answer, Exception) and demoted(answer):
            self.reconnect()
        return explain(answer) if isinstance(answer, Exception) else answer

    @staticmethod
    def _caught(run: Callable[[], Any]) -> Any:
        try:
            return run()
        except BackendError as error:
            return error

    # -- blocking ---------------------------------------------------------------------------------

    def _pop(self, key: str, timeout: float) -> bytes | str | None:
        """BLPOP on connections of their own, whose socket time-out lies above the block.

        redis-py 8's defaults (a 5 s socket time-out and ten retries) turned ``blpop(key, 7)`` into
        an error after 58.9 s; a retried BLPOP would also swallow an element.
        """
        block = min(max(timeout, 0.01), BLOCKS[-1])
        with explained(self.reconnect):
            found: Any = self._blocking_client(block).blpop([key], timeout=block)
        return None if found is None else found[1]

    def _blocking_client(self, block: float) -> redis.Redis:
        """Return the client for blocks of about this length, so that a stalled server is noticed.

        Threads that come together may each make one; the dictionary keeps the first, and the others
        have not connected yet.
        """
        longest = next(most for most in BLOCKS if block <= most)
        found = self._blocking.get(longest)
        return found or self._blocking.setdefault(longest, blocking_twin(self.client, longest))

    def reconnect(self) -> None:
        """Close what is idle, so that the next call asks anew where the server is."""
        for client in (self.client, *self._blocking.values()):
            client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close the connections that this store opened; the caller's client stays open.

        Those of a store that nobody uses any more are closed likewise.
        """
        _close_all(self._blocking, self._wire)


def _close_all(blocking: dict[float, redis.Redis], wire: Wire | None) -> None:
    while blocking:
        # redis-py leaves a pool open that it was given
        blocking.popitem()[1].connection_pool.disconnect()
    if wire:
        wire.close()


def blocking_twin(client: redis.Redis, longest: float) -> redis.Redis:
    """Return a client to the same server for calls that block: no retries, a socket time-out above.

    Args:
        client: the client to copy.
        longest: most seconds for which a call blocks.
    """
    pool = client.connection_pool
    options = dict(pool.connection_kwargs)
    options.update(socket_timeout=longest + SLACK, retry=Retry(NoBackoff(), 0), retry_on_error=[])
    options.pop("retry_on_timeout", None)
    twin = redis.ConnectionPool(connection_class=pool.connection_class, **options)
    return redis.Redis(connection_pool=twin)

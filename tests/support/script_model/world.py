"""Clients, workers and messages around one store, and what each of them assumes.

The scripts are the real ones on a real Redis; only their clock is replaced by one that reads a key,
so time passes when :meth:`World.advance` says so. Keys expire by the same clock (the world deletes
what would have expired). After every step all invariants are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock.core.model import (
    Claim,
    Ending,
    Owner,
    Reply,
    Reservation,
    Verdict,
)
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.core.parked_message import Delivery, MessageToPark, UntakenMessage
from celery_singleton_lock.core.rate import Rate, packed
from celery_singleton_lock.core.redis_keys import Keyspace, bucket_of
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.requests import Pop, Steps
from celery_singleton_lock.store.scripts import Script, load_admin_scripts, load_scripts
from support.script_model.flow import COSTED, FAIR, PACED, RULED, Flow, flow_of, head_start_of
from support.script_model.snapshot import ENDS_KEY, LockState, Reader, Snapshot

CLOCK_KEY = "clock-of-the-tests"
CLOCK = f"""
local server = redis
local function server_time() return server.call('GET', '{CLOCK_KEY}') end
local function by_this_clock(call)
  return function(command, key, ...)
    if command == 'PEXPIRE' then
      if server.call('EXISTS', key) == 0 then return 0 end
      local at = math.floor(server_time() / 1000) + (...)
      server.call('HSET', '{ENDS_KEY}', key, string.format('%.0f', at))
      return 1
    elseif command == 'PTTL' then
      local at = server.call('HGET', '{ENDS_KEY}', key)
      if server.call('EXISTS', key) == 0 then return -2 end
      return at and tonumber(at) - math.floor(server_time() / 1000) or -1
    elseif command == 'PERSIST' then
      return server.call('HDEL', '{ENDS_KEY}', key)
    end
    return call(command, key, ...)
  end
end
local redis = {{call = by_this_clock(server.call), pcall = by_this_clock(server.pcall)}}
"""
JANE = Operator("jane")
START_US = 1_763_712_000_000_000
CLAIM_LEASE = 5.0

# Two locks in one bucket, where one name begins with the other: they share `due` and `index`.
ONE = "one"
TWO = next(f"one{i}" for i in range(10_000) if bucket_of(f"one{i}") == bucket_of(ONE))
MIXED = "mixed"
LIMITS = {ONE: 1, TWO: 2, MIXED: 2, PACED: 2, FAIR: 3}
REALMS = ("R", "S")
QUEUES = ("q", "r")
WORKERS = {"w1": ("R", ("q", "r")), "w2": ("R", ("q",)), "w3": ("S", ("q",))}
DECLARED = {
    "w2": ("app.task",)
}  # the tasks that a worker locks; others tell nothing, as older ones


@dataclass(frozen=True)
class Asker:
    """A token, and what it was asked for with."""

    owner: Owner
    claim: Claim
    to_park: MessageToPark

    @property
    def token(self) -> str:
        return self.owner.token

    @property
    def base(self) -> str:
        return base_of(self.owner.token)


@dataclass(frozen=True)
class Step:
    """One call of a verb: what was asked, what was answered, and the keys before and after.

    A call that a full Redis refused has no answer.
    """

    verb: str
    lock: str
    before: Snapshot
    after: Snapshot
    token: str = ""
    reply: Any = None
    asker: Asker | None = None
    ending: Ending | None = None
    asked: tuple[Any, ...] = ()
    refused: bool = False


@dataclass
class Ledger:
    """What is known of one lock independently of its keys."""

    beliefs: dict[str, int] = field(default_factory=dict)  # token -> ms until when its client holds
    places: dict[str, int] = field(default_factory=dict)  # base -> place in line
    leases: dict[str, int] = field(default_factory=dict)  # base -> longest lease asked for, ms
    kept: dict[str, str] = field(default_factory=dict)  # base -> attempt, of bodies to be kept
    settled: dict[str, int] = field(default_factory=dict)  # attempt or base -> ms until remembered
    ended: dict[str, int] = field(default_factory=dict)  # attempt -> ms of the end, if remembered
    granted: set[str] = field(default_factory=set)  # tokens of parked messages
    # Keys that expire leave entries in the bucket's index and due, for others to tidy up.
    expired: set[tuple[str, str]] = field(default_factory=set)
    expired_due: int | None = None
    accepted: set[str] = field(default_factory=set)  # bases that were acknowledged at their start
    reserved: dict[str, int] = field(default_factory=dict)  # attempt -> ms until when it is kept
    held_after: dict[str, int] = field(default_factory=dict)  # token -> ms until when it is kept
    passing: set[str] = field(default_factory=set)  # attempts that this step lets pass the line
    replaced: set[str] = field(default_factory=set)  # bases that made room, and may not run
    revoked: set[str] = field(default_factory=set)  # bases whose tasks were revoked, likewise
    taken: dict[str, int] = field(default_factory=dict)  # granted token that a revoke took -> ms
    rejected: set[str] = field(default_factory=set)  # bases that their tasks rejected, likewise
    waits: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # token -> till, of how long, ms
    refused: dict[str, int] = field(default_factory=dict)  # base -> ms of the last failed publish
    declared: int = 0  # the lowest limit of those who hold or wait
    ruled: int | None = None  # an operator's, which goes before it
    paused: bool = False
    last_fence: int = 0
    flow: Flow = field(default_factory=Flow)

    def time_is(self, now: int) -> None:
        """End what an operator has set until now."""
        if self.paused and self.flow.paused_until is not None and self.flow.paused_until <= now:
            self.paused = False
        if self.ruled and self.flow.ruled_until is not None and self.flow.ruled_until <= now:
            self.ruled = None
        if self.flow.rates_until is not None and self.flow.rates_until <= now:
            self.flow.rates_ruled = False

    @property
    def limit(self) -> int:
        """The limit in force."""
        return self.ruled or self.declared


class Clockwork(RedisAdminStore):
    """A store whose own clock is the scripts' one."""

    def __init__(self, client: Any, keyspace: Keyspace, scripts: Mapping[str, Script]) -> None:
        super().__init__(client, keyspace, scripts=scripts, claim_lease=CLAIM_LEASE)
        self.operations.scripts.update(scripts)  # those of operators, too

    def tell_time_by(self, world: World) -> None:
        self.operations.time = lambda: told(world.now_us / 1_000_000)

    def _pop(self, pop: Pop) -> bytes | str | None:
        """Read one grant: the model sees those that are in Redis, and none that were read."""
        return self._pop_often(pop)


def told(answer: float) -> Steps[float]:
    """Return a plan that asks nothing."""
    yield from ()
    return answer


class World:
    """Runs one history."""

    def __init__(
        self,
        client: Any,
        check: Callable[[World, Step], None],
        scripts: Mapping[str, Script] | None = None,
        watch: Callable[[World, Step], None] | None = None,
    ) -> None:
        self.client = client
        self.check = check
        self.watch = watch
        self.keyspace = Keyspace()
        real = {**load_scripts(CLOCK), **load_admin_scripts(CLOCK)}
        self.store = Clockwork(client, self.keyspace, scripts or real)
        self.store.tell_time_by(self)
        self.reader = Reader(client, self.keyspace, list(LIMITS))
        self.now_us = START_US
        self.numbers = 0
        self.steps = 0
        self.history: list[str] = []  # calls, for people
        self.played: list[tuple[str, dict[str, Any]]] = []  # moves, to be played again
        self.askers: list[Asker] = []
        self.deliveries: list[Delivery] = []
        self.strays: list[UntakenMessage] = []  # out of the line, on their way to the broker
        self.published: set[tuple[str, str]] = set()  # seal and token of those that it has
        self.acknowledged: set[tuple[str, str]] = set()  # and of those that a worker has, as a twin
        self.patients: list[Any] = []  # clients that wait, see clients.py
        self.first_of: dict[str, Asker] = {}
        self.ledgers = {name: Ledger() for name in LIMITS}
        self.full = False
        self._allow(0)  # a former history may have ended on a full server
        client.flushall()
        self._set_clock()
        self.snap = self.reader.read()

    # -- memory -----------------------------------------------------------------------------------

    def fill(self, full: bool) -> None:
        """Have the server refuse whatever takes memory, or not any more."""
        self.history.append("the server is full" if full else "the server has room")
        self.full = full
        self._allow(1 if full else 0)

    def _allow(self, most: int) -> None:
        """Set maxmemory: 0 is without bound, and one byte is always too little."""
        self.client.config_set("maxmemory", most)

    # -- time -------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """Milliseconds on the scripts' clock."""
        return self.now_us // 1000

    def _set_clock(self) -> None:
        if self.full:
            self._allow(0)
        self.client.set(CLOCK_KEY, self.now_us)
        if self.full:
            self._allow(1)

    def advance(self, seconds: float) -> None:
        """Let time pass; keys whose time has come expire."""
        self.history.append(f"advance({seconds})")
        self.now_us += round(seconds * 1_000_000)
        self._set_clock()
        for ledger in self.ledgers.values():
            ledger.time_is(self.now)
        gone = [key for key, end in self.snap.ends.items() if end <= self.now]
        if gone:
            self.client.delete(*gone)
            self.client.hdel(ENDS_KEY, *gone)
            self._note_expired()
            self.snap = self._look()

    def _note_expired(self) -> None:
        for name, ledger in self.ledgers.items():
            state, record = self.snap.locks[name], self.keyspace.lock(name).record
            ledger.flow.expired_lines |= {
                part.removeprefix("flow:line:")
                for part, end in state.ends.items()
                if part.startswith("flow:line:") and end <= self.now
            }
            if state.ends.get("record", self.now + 1) <= self.now and record in self.snap.ends:
                ledger.expired |= {(n, t) for n, tokens in state.index.items() for t in tokens}
                ledger.expired_due = state.due

    def _look(self) -> Snapshot:
        """Read the keys; one that is gone has no end any more."""
        snap = self.reader.read()
        gone = [key for key in snap.ends if key not in snap.raw]
        if gone:
            self.client.hdel(ENDS_KEY, *gone)
            for key in gone:
                del snap.ends[key]
        return snap

    # -- steps ------------------------------------------------------------------------------------

    def _step(self, verb: str, lock: str, call: Callable[[], Any], **facts: Any) -> Any:
        before = self.snap
        self.history.append(f"{verb} {lock} {facts.get('token', '')} {facts.get('note', '')}")
        facts.pop("note", None)
        reply, refused = self._answer(call)
        self.snap = self._look()
        self.steps += 1
        step = Step(verb, lock, before, self.snap, reply=reply, refused=refused, **facts)
        self.check(self, step)
        if self.watch is not None:
            self.watch(self, step)
        return reply

    @staticmethod
    def _answer(call: Callable[[], Any]) -> tuple[Any, bool]:
        try:
            return call(), False
        except BackendRefused as error:
            if "maxmemory" not in str(error):
                raise
            return None, True

    def _twice(
        self, verb: str, lock: str, call: Callable[[], Any], lost: bool, **facts: Any
    ) -> Any:
        """Run a verb; if its reply is lost, run it again, which must change nothing.

        FULL kept nothing and promised nothing: asked again it may well find room.
        """
        reply = self._step(verb, lock, call, **facts)
        if lost and getattr(reply, "verdict", None) is not Verdict.FULL:
            self._step("again " + verb, lock, call, **facts)
        return None if lost else reply

    def new_asker(
        self,
        lock: str,
        *,
        lease: float = 10.0,
        attempt: str | None = None,
        place: int = 0,
        limit: int = 0,
        max_waiting: int | None = None,
        copy: int = 0,
        base: str = "",
        worker: str = "",
        realm: str = "R",
        queue: str = "q",
        deadline: float | None = None,
        task: str = "app.task",
        replace: bool = False,
        head_start: int = 0,
        plain: bool = False,
    ) -> Asker:
        """Make a client (no attempt) or a message; `place` is relative to now, 0 none.

        Without `plain`, callers of the locks of flow control have flow options. `head_start` is in
        microseconds.

        `base` is that of a message. This is its second delivery, which the broker does not mark.
        """
        self.numbers += 1
        number = self.numbers
        token = f"{base}.{1000 + number}" if base else f"t{number}.0"
        made = 0 if plain else int(base_of(token).removeprefix("t"))
        asker = Asker(
            Owner(
                token,
                attempt if attempt is not None else f"a{number}/0/0",
                task,
                worker,
                "host",
                1,
            ),
            Claim(
                lock,
                lease,
                limit or LIMITS[lock],
                place and self.now_us + place,
                max_waiting,
                copy,
                replace,
                packed((), head_start) or flow_of(lock, made),
            ),
            MessageToPark(f"body of {base_of(token)}".encode(), realm, queue, deadline),
        )
        self.first_of.setdefault(asker.base, asker)
        self.askers.append(asker)
        del self.askers[:-40]
        return asker

    def moved(self, stray: UntakenMessage) -> Asker:
        """What comes from the broker of a message that was sent there."""
        first = self.first_of[base_of(stray.token)]
        number = int(first.base.removeprefix("t"))
        head_start = head_start_of(first.claim.name, number)  # it comes with its options again
        return self.new_asker(
            first.claim.name,
            lease=first.claim.lease,
            attempt=stray.attempt,
            place=min(stray.place + head_start - self.now_us, -1),
            limit=first.claim.limit,
            base=first.base,
            realm=first.to_park.realm,
            queue=first.to_park.queue,
            task=first.owner.task,
        )

    def unanswered(self, first: Asker, token: str, place: int) -> Asker:
        """Make what parks a message again whose delivery `token` was claimed without an answer."""
        again = Asker(
            first.owner._replace(token=token),
            first.claim._replace(
                copy=first.claim.copy or max(place, 1),
                unanswered=True,
                place=place,
                max_waiting=None,
                replace=False,
            ),
            first.to_park,
        )
        self.askers.append(again)
        return again

    def copy_of(self, stray: UntakenMessage) -> Asker:
        """What comes back of a copy that a worker of an older version has published."""
        first = self.first_of[base_of(stray.token)]
        copy = Asker(
            first.owner._replace(token=stray.token),
            first.claim._replace(copy=True),
            first.to_park,
        )
        self.askers.append(copy)
        return copy

    def acquire(
        self, asker: Asker, wait: float | None = None, *, lost: bool = False
    ) -> Reply | None:
        return self._twice(
            "acquire",
            asker.claim.name,
            lambda: self.store.acquire(asker.owner, asker.claim, wait=wait),
            lost,
            token=asker.token,
            asker=asker,
            asked=(wait,),
            note=f"wait={wait} {asker.claim}",
        )

    def park(self, asker: Asker, *, lost: bool = False) -> Reply | None:
        return self._twice(
            "park",
            asker.claim.name,
            lambda: self.store.park(asker.owner, asker.claim, asker.to_park),
            lost,
            token=asker.token,
            asker=asker,
            note=f"{asker.to_park} {asker.claim}",
        )

    def claim(
        self,
        lock: str,
        token: str,
        lease: float = 10.0,
        *,
        settle: bool = False,
        lost: bool = False,
    ) -> Reply | None:
        owner = Owner(token, worker="w1", host="host", pid=2)
        return self._twice(
            "claim",
            lock,
            lambda: self.store.claim(owner, lock, lease, acks_early=settle),
            lost,
            token=token,
            asked=(lease, settle),
            note=f"settle={settle}",
        )

    def release(
        self,
        lock: str,
        token: str,
        ending: Ending = Ending.FINAL,
        *,
        worker: str = "",
        done_for: float = 60.0,
        mark: bool = False,
        reserve: Reservation | None = None,
        lost: bool = False,
    ) -> Reply | None:
        return self._twice(
            "release",
            lock,
            lambda: self.store.release(
                lock, token, ending, worker=worker, done_for=done_for, mark=mark, reserve=reserve
            ),
            lost,
            token=token,
            ending=ending,
            asked=(done_for, mark, reserve),
            note=f"{ending} mark={mark} {reserve or ''}",
        )

    def extend(
        self, lock: str, tokens: Iterable[str], lease: float = 10.0, *, lost: bool = False
    ) -> Any:
        asked = tuple(tokens)
        return self._twice(
            "extend",
            lock,
            lambda: self.store.extend([(lock, token, lease) for token in asked]),
            lost,
            asked=(lease, *asked),
            note=str(asked),
        )

    def kick(
        self, lock: str, worker: str = "w1", *, patience: float = 0.0, lost: bool = False
    ) -> Any:
        realm = WORKERS[worker][0]
        found = self._twice(
            "kick",
            lock,
            lambda: self.store.sweep_and_grant(lock, worker=worker, realm=realm, patience=patience),
            lost,
            asked=(worker, realm, patience),
            note=worker,
        )
        self.strays += found or ()
        del self.strays[:-20]
        return found

    def left(self, stray: UntakenMessage, *, sent: bool, lost: bool = False) -> Any:
        """What became of a message that was on its way to the broker."""
        return self._twice(
            "left",
            stray.name,
            lambda: self.store.record_publish_result(
                stray.name, stray.seal, [stray.token], sent=sent
            ),
            lost,
            token=stray.token,
            asked=(stray.seal, sent),
            note=f"{sent=}",
        )

    def revoke(
        self, lock: str, token: str, worker: str = "w1", *, realm: str = "", lost: bool = False
    ) -> Reply | None:
        """What an agent does that hears of a revoke; of its own realm unless another is named."""
        own = realm or WORKERS[worker][0]
        return self._twice(
            "revoke",
            lock,
            lambda: self.store.deliver_revoked(lock, token, realm=own, worker=worker),
            lost,
            token=token,
            asked=(own,),
            note=f"{worker} {own}",
        )

    def pause(self, lock: str, seconds: float | None = None, *, lost: bool = False) -> Any:
        """What an operator does, so that nobody is granted the lock."""
        call = lambda: self.store.pause(lock, JANE, seconds=seconds)  # noqa: E731
        again = lost and seconds is None  # with a time, each call is audited
        return self._twice("pause", lock, call, again, asked=(seconds,), note=f"{seconds}")

    def resume(self, lock: str, *, lost: bool = False) -> Any:
        """What an operator does, so that the lock is granted again."""
        return self._twice("resume", lock, lambda: self.store.resume(lock, JANE), lost)

    def set_limit(self, lock: str, limit: int | None, seconds: float | None = None) -> Any:
        """What an operator does, whatever the tasks declare; None: those count again."""
        call = lambda: self.store.set_limit(lock, limit, JANE, seconds=seconds)  # noqa: E731
        asked = (limit, seconds)
        return self._step("set_limit", lock, call, asked=asked, note=f"{limit} {seconds}")

    def set_rates(self, lock: str, ruled: bool, seconds: float | None = None) -> Any:
        """What an operator does with rates; not `ruled`: what tasks declare counts again."""
        rates = RULED if ruled else ()
        call = lambda: self.store.set_rates(lock, rates, JANE, seconds=seconds)  # noqa: E731
        asked = (ruled, seconds)
        return self._step("set_rates", lock, call, asked=asked, note=f"{rates} {seconds}")

    def close_for(self, lock: str, seconds: float, *, lost: bool = False) -> Any:
        """What a task does that meets a 429."""
        call = lambda: self.store.close_for(lock, seconds, "429")  # noqa: E731
        return self._twice("close_for", lock, call, lost, asked=(seconds,), note=f"{seconds}")

    def reopen(self, lock: str) -> Any:
        """What an operator does with a lock that is closed."""
        return self._step("reopen", lock, lambda: self.store.reopen(lock, JANE))

    def charge(self, lock: str, token: str, amount: int, *, lost: bool = False) -> Any:
        """What a task does that knows what its start has used."""
        self.numbers += 1
        rate, charge_id = Rate(COSTED, cost=1).key, f"c{self.numbers}"
        return self._twice(
            "charge",
            lock,
            lambda: self.store.charge(lock, token, charge_id, amount, [rate]),
            lost,
            token=token,
            asked=(rate, amount),
            note=f"{amount}",
        )

    def reset(self, lock: str) -> Any:
        return self._step("reset", lock, lambda: self.store.reset(lock))

    def sweep(self, worker: str = "w1", *, lost: bool = False) -> list[str]:
        """What an agent does about once a second."""
        names = self._twice("take_due", "", self.store.take_due_locks, lost)
        for name in names or ():
            self.kick(name, worker, patience=3.0)
        return list(names or ())

    def neglected(self, seconds: float) -> list[str]:
        """What a worker asks that tells of locks nobody sweeps."""
        call = lambda: self.store.unswept_locks(seconds)  # noqa: E731
        return list(self._step("neglected", "", call, asked=(seconds,), note=str(seconds)))

    def hears(self, lock: str, token: str) -> bool:
        """Whether a waiting client finds its wake-up (without blocking); it takes it."""
        if not self.snap.locks[lock].wakes.get(token):
            return False
        call = lambda: self.store.wait(lock, token, 0.01)  # noqa: E731
        return bool(self._step("wait", lock, call, token=token))

    def beat(self, worker: str, free: int = 0) -> None:
        realm, queues = WORKERS[worker]
        self._step(
            "beat",
            "",
            lambda: self.store.worker_heartbeat(
                worker, realm, queues, 3.0, free, tasks=DECLARED.get(worker)
            ),
            note=f"{worker} free={free}",
        )

    def leave(self, worker: str) -> None:
        realm, queues = WORKERS[worker]
        self._step("leave", "", lambda: self.store.leave(worker, realm, queues), note=worker)

    def receive(self, worker: str) -> Delivery | None:
        """Take one grant from an inbox, if there is one (without blocking)."""
        if not self.snap.inboxes.get(worker):
            return None
        got = self._step("receive", "", lambda: self.store.receive(worker, 0.01), note=worker)
        if got:
            self.deliveries.append(got)
            del self.deliveries[:-20]
        return got

    def lose_all_data(self) -> None:
        """FLUSHALL: what clients believe is void, what was parked is gone; fences go on."""
        self.history.append("flushall")
        self.strays.clear()
        self.published.clear()
        self.client.flushall()
        self.now_us += 1000  # no server loses its data and starts again within a microsecond
        self._set_clock()
        for ledger in self.ledgers.values():
            ledger.beliefs.clear()
            ledger.kept.clear()
            ledger.settled.clear()
            ledger.granted.clear()
            ledger.reserved.clear()
            ledger.held_after.clear()
            ledger.replaced.clear()
            ledger.revoked.clear()
            ledger.taken.clear()
            ledger.rejected.clear()
            ledger.waits.clear()
            ledger.refused.clear()
            ledger.declared, ledger.ruled, ledger.paused = 0, None, False
            ledger.flow = Flow()
        self.snap = self._look()

    def state(self, lock: str) -> LockState:
        return self.snap.locks[lock]


__all__ = ["CLOCK", "LIMITS", "MIXED", "ONE", "TWO", "Asker", "Ledger", "Step", "Verdict", "World"]

"""Clients and messages of one lock with groups, and a model of start-time fair queueing beside it.

The scripts are the real ones, on a real Redis whose clock the tests set. The model is told what
joined and left, and decides who must be granted, in which order.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reply, Reservation, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.scripts import (
    FLOW_VERBS,
    VERBS,
    Script,
    assemble,
    file_of,
    load_admin_scripts,
    load_scripts,
    read,
    with_flow,
)
from support.script_model.mutants import Mutant

CLOCK = "local function server_time() return redis.call('GET', 'clock') end"
NAME = "a"
KEYS = Keyspace().lock(NAME)
FLOW = KEYS.flow
CLAIM_LEASE = 2.0
WORKER, REALM, ROUTE = "w1", "R", "q"
US = 1_000_000
WAITING = {"waiting", "parked"}


class Broken(AssertionError):  # an invariant
    """A group has more than its share or its limit, or a waiter has lost its line."""


class Waiter(NamedTuple):
    """A waiter, as its record has it."""

    token: str
    group: str
    score: float
    limit: float
    weight: float


class Model:
    """Start-time fair queueing, in the shortest form.

    A group that waits is next at the higher of the lock's virtual time and the end of its last
    start.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.ends: dict[str, float] = {}

    def start_of(self, group: str) -> float:
        return max(self.time, self.ends.get(group, 0.0))

    def start(self, group: str, weight: float, others: set[str]) -> None:
        """A task of the group starts; ``others`` wait, and are below their limits."""
        own = self.start_of(group)
        self.time = max(self.time, min([own, *(self.start_of(other) for other in others)]))
        self.ends[group] = own + 1 / weight


class Snapshot(NamedTuple):
    """What Redis has."""

    waiters: dict[str, Waiter]
    holders: dict[str, dict[str, Any]]
    ends: dict[str, float]


class World:
    """One lock, its clients and its messages.

    Args:
        client: of the Redis.
        limit: permits.
        groups: that callers declare; None is a caller without one.
        scripts: with a wrong line.
    """

    def __init__(
        self,
        client: Any,
        limit: int = 3,
        groups: tuple[Group | None, ...] = (None,),
        scripts: Mapping[str, Script] | None = None,
    ) -> None:
        self.client, self.limit, self.groups = client, limit, groups
        self.store = RedisAdminStore(
            client, scripts={**(scripts or load_scripts(CLOCK))}, claim_lease=CLAIM_LEASE
        )
        admin = load_admin_scripts(CLOCK)
        self.store.operations.scripts.update(admin)
        self.store.operations.scripts.update(scripts or {})
        self.model = Model()
        self.counts = False
        self.now_us = 1_000 * US
        self.log: list[str] = []  # the group of each start
        self.retried = 0
        self.retries: list[str] = []  # attempts whose permits were kept
        self.before = Snapshot({}, {}, {})
        client.flushdb()
        self.advance(0)
        self.heartbeat()

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * US)
        self.client.set("clock", self.now_us)

    def heartbeat(self, seconds: float = 30.0) -> None:
        self.store.worker_heartbeat(WORKER, REALM, [ROUTE], seconds, 9)

    # -- moves ------------------------------------------------------------------------------------

    def _claim(self, group: Group | None, lease: float = 30.0) -> Claim:
        flow = packed((), group=group)
        return Claim(NAME, lease, self.limit, flow=flow)

    def acquire(
        self,
        group: Group | None = None,
        *,
        wait: float | None = None,
        attempt: str = "",
        who: Owner | None = None,
        lease: float = 30.0,
    ) -> Reply:
        who = who or Owner(new_token(), attempt)
        reply = self.store.acquire(who, self._claim(group, lease), wait=wait)
        self.check(own=who.token, group=group, lone=reply.verdict is Verdict.GRANTED)
        return reply

    def park(
        self, group: Group | None = None, *, attempt: str = "", place: int = 0, copy: int = 0
    ) -> str:
        token = new_token()
        owner = Owner(token, attempt or token, "t", WORKER)
        claim = self._claim(group)._replace(place=place, copy=copy)
        self.store.park(owner, claim, MessageToPark(b"body", REALM, ROUTE, None))
        self.check(group=group, kept=attempt)
        return token

    def claim(self, token: str) -> Reply:
        reply = self.store.claim(Owner(token), NAME, 30.0)
        self.check()
        return reply

    def release(self, token: str, ending: Ending = Ending.FINAL, keep_for: str = "") -> None:
        reserve = Reservation(keep_for, 30.0) if keep_for or ending is Ending.HOLD else None
        self.store.release(NAME, token, ending, worker=WORKER, reserve=reserve)
        self.check(kept=keep_for)

    def kick(self) -> None:
        self.store.sweep_and_grant(NAME, worker=WORKER)
        self.check()

    def retry(self, token: str) -> None:
        self.retried += 1
        self.retries.append(f"id{self.retried}/1/0")
        self.release(token, Ending.KEEP, self.retries[-1])

    def come_back(self, group: Group | None) -> None:
        if self.retries:
            self.park(group, attempt=self.retries.pop())

    def ask_twice(self, group: Group | None) -> None:
        who = Owner(new_token())
        for _ in range(2):
            self.acquire(group, wait=30.0, who=who)

    def worker_dies(self) -> None:
        self.heartbeat(0.0)
        self.kick()
        self.kick()
        self.heartbeat()
        self.kick()

    def promote(self, token: str) -> None:
        self.store.promote(NAME, token, Operator("me", "here"))
        self.check()

    # -- what must hold ---------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        records = {
            token.decode(): json.loads(raw)
            for token, raw in self.client.hgetall(KEYS.record).items()
        }
        waiters = {}
        for token, score in self.client.zrange(KEYS.queue, 0, -1, withscores=True):
            name = token.decode()
            record = records.get(name)
            if record is None:
                self.broken(f"{name} waits without a record")
            waiters[name] = self._waiter(name, score, record)
        ends = dict(self.client.zrange(KEYS.holders, 0, -1, withscores=True))
        held = {token.decode(): records.get(token.decode(), {}) for token in ends}
        return Snapshot(waiters, held, {token.decode(): end for token, end in ends.items()})

    @staticmethod
    def _waiter(token: str, score: float, record: Mapping[str, Any]) -> Waiter:
        return Waiter(
            token,
            record.get("group", ""),
            score,
            record.get("group_limit", math.inf),
            record.get("group_weight", 1.0),
        )

    def check(
        self, own: str = "", group: Group | None = None, *, lone: bool = False, kept: str = ""
    ) -> None:
        before, now = self.before, self.snapshot()
        self.before = now
        self.counts = self.counts or group is not None
        if not self.counts:
            return
        if not self.client.hexists(FLOW, "vt"):
            self.broken("the lock has forgotten its groups")
        self._starts(before, now, own if lone else "", kept)
        self._limits(now)
        self._lines(now)
        self._places(now)

    def _starts(self, before: Snapshot, now: Snapshot, lone: str, kept: str) -> None:
        """Each new holder was the next one by the model."""
        old = {token: record.get("fence") for token, record in before.holders.items()}
        starts = [
            token
            for token, record in sorted(now.holders.items(), key=lambda one: int(one[1]["fence"]))
            if record["fence"] != old.get(token) and record["state"] in {"granted", "running"}
        ]
        waiting = dict(now.waiters)
        for token in starts:
            record = now.holders[token]
            waiting[token] = self._waiter(token, float(record["place"]), record)
        running = self._running({t: r for t, r in now.holders.items() if t not in starts})
        for token in starts:
            waiter = waiting.pop(token)
            others = self._eligible(waiting, running)
            passes = str(now.holders[token].get("attempt", "")) == kept != ""
            if not passes and (token != lone or others):
                self._was_next(waiter, waiting, running, others)
            self.model.start(waiter.group, waiter.weight, {w.group for w in others})
            running.setdefault(waiter.group, set()).add(token)
            self.log.append(waiter.group)

    def _was_next(
        self,
        waiter: Waiter,
        waiting: Mapping[str, Waiter],
        running: Mapping[str, set[str]],
        others: list[Waiter],
    ) -> None:
        if len(running.get(waiter.group, ())) >= waiter.limit:
            self.broken(f"{waiter.group} starts above its limit")
        mine = (self.model.start_of(waiter.group), waiter.score)
        for other in others:
            theirs = (self.model.start_of(other.group), other.score)
            if theirs < mine and other.group != waiter.group:
                self.broken(f"{waiter} at {mine} passes {other} at {theirs}")
        if any(o.group == waiter.group and o.score < waiter.score for o in waiting.values()):
            self.broken(f"{waiter} passes another one of its group")

    @staticmethod
    def _eligible(waiting: Mapping[str, Waiter], running: Mapping[str, set[str]]) -> list[Waiter]:
        """The first waiter of each group that is below its limit."""
        heads: dict[str, Waiter] = {}
        for waiter in waiting.values():
            head = heads.get(waiter.group)
            if head is None or (waiter.score, waiter.token) < (head.score, head.token):
                heads[waiter.group] = waiter
        return [w for w in heads.values() if len(running.get(w.group, ())) < w.limit]

    @staticmethod
    def _running(holders: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
        running: dict[str, set[str]] = {}
        for token, record in holders.items():
            running.setdefault(record.get("group", ""), set()).add(token)
        return running

    def _limits(self, now: Snapshot) -> None:
        """I4: nobody waits who may start, unless somebody looks at once."""
        running = self._running(now.holders)
        free = len(now.holders) < self.limit
        due = self.client.zscore(KEYS.due, NAME)
        if free and self._eligible(now.waiters, running) and (due or math.inf) > self.now_us / 1000:
            self.broken(f"a permit is free, and {self._eligible(now.waiters, running)} wait")
        if now.waiters and due is None:
            self.broken("nobody looks at who waits")
        ends = list(now.ends.values())
        if now.waiters and ends and due > max(min(ends), self.now_us / 1000):
            self.broken("nobody looks when the first lease ends")
        for group, tokens in running.items():
            counted = {t.decode() for t in self.client.zrange(f"{FLOW}:running:{group}", 0, -1)}
            if group and not tokens <= counted:
                self.broken(f"{group} has {tokens} running, and {counted} count")
            if counted - set(now.holders) and not self.stale:
                self.broken(f"of {group}, {counted} count, which have ended")

    stale = False
    """Whether holders were ended behind the back of the groups, as by an older version."""

    def _lines(self, now: Snapshot) -> None:
        """I7: each waiter is in the line of its group, and no other token is in a line."""
        lines: dict[str, dict[str, float]] = {}
        for key in self.client.scan_iter(f"{glob(FLOW)}:line:*"):
            group = key.decode().split(":line:", 1)[1]
            lines[group] = {
                t.decode(): s for t, s in self.client.zrange(key, 0, -1, withscores=True)
            }
            self._line_stays(key, stored=any(self._is_parked(t) for t in lines[group]))
        expected: dict[str, dict[str, float]] = {}
        for waiter in now.waiters.values():
            expected.setdefault(waiter.group, {})[waiter.token] = waiter.score
        if lines != expected:
            self.broken(f"the lines are {lines}; waiting are {expected}")
        stored = bool(self.client.exists(KEYS.bodies))
        for part in ("", ":groups", ":heads", ":full", ":idle"):
            self._stays(f"{FLOW}{part}", stored=stored)

    def _is_parked(self, token: str) -> bool:
        return bool(json.loads(self.client.hget(KEYS.record, token) or "{}").get("parked"))

    def _line_stays(self, key: Any, *, stored: bool) -> None:
        """A line that has had a message may stay as long as the lock has one."""
        left = self.client.pttl(key)
        if (stored and left >= 0) or 0 <= left < 50_000:
            self.broken(f"{key} expires in {left} ms")
        if left == -1 and not self.client.exists(KEYS.bodies):
            self.broken(f"{key} stays for ever")

    def _stays(self, key: Any, *, stored: bool) -> None:
        left = self.client.pttl(key)
        if stored and left >= 0:
            self.broken(f"{key} expires beside a message")
        if not stored and left == -1:
            self.broken(f"{key} stays for ever")
        if 0 <= left < 50_000:
            self.broken(f"{key} expires in {left} ms")

    def _scores(self, part: str) -> dict[str, float]:
        found = self.client.zrange(f"{FLOW}:{part}", 0, -1, withscores=True)
        return {member.decode(): score for member, score in found}

    def _places(self, now: Snapshot) -> None:
        running = self._running(now.holders)
        eligible = {w.group: w for w in self._eligible(now.waiters, running)}
        full = {w.group for w in now.waiters.values()} - set(eligible)
        members = self._scores("groups")
        heads = {g.decode(): m.decode() for g, m in self.client.hgetall(f"{FLOW}:heads").items()}
        expected = {g: f"{w.score:016.0f}:{g}" for g, w in eligible.items()}
        if heads != expected or set(members) != set(heads.values()):
            self.broken(f"next may be {expected}; known are {heads}, {members}")
        starts = {m[17:]: s for m, s in members.items()}
        at_limit = self._scores("full")
        if set(at_limit) != full:
            self.broken(f"at their limits are {full}; known are {set(at_limit)}")
        idle = self._scores("idle")
        if set(idle) & (set(eligible) | full):
            self.broken("a group that waits is idle")
        time = float(self.client.hget(FLOW, "vt"))
        if time != self.model.time:
            self.broken(f"the virtual time is {time}, and not {self.model.time}")
        for group in {*starts, *at_limit, *idle, *self.model.ends}:
            known = {**idle, **at_limit, **starts}.get(group, time)
            if max(known, time) != self.model.start_of(group):
                self.broken(f"{group} is next at {known}, and not {self.model.start_of(group)}")
        if any(end <= time for end in idle.values()):
            self.broken("a group is remembered that has nothing to remember")

    def broken(self, what: str) -> None:
        raise Broken(what)


def glob(text: str) -> str:
    return "".join(f"[{sign}]" if sign in "*?[]" else sign for sign in text)


A, B, C, D = Group("a", 1), Group("b", 2, 2.0), Group("c", None, 0.5), Group("d")
GROUPS = (A, B, C, D, None)


def walk(world: World, seed: int, steps: int = 80) -> None:
    """Tasks of several groups come, wait, claim, are retried, return, die and go."""
    chance = random.Random(seed)

    def holder() -> str:
        return chance.choice([*world.before.holders] or ["nobody.0"])

    def waiter() -> str:
        return chance.choice([*world.before.waiters] or ["nobody.0"])

    def group() -> Group | None:
        return chance.choice(world.groups)

    moves: list[tuple[int, Callable[[], Any]]] = [
        (3, lambda: world.acquire(group())),
        (4, lambda: world.acquire(group(), wait=chance.choice([3.0, 30.0]))),
        (1, lambda: world.ask_twice(group())),
        (6, lambda: world.park(group(), place=chance.choice([0, 0, world.now_us - 2 * US]))),
        (6, lambda: world.claim(holder())),
        (6, lambda: world.release(holder())),
        (2, lambda: world.release(holder(), Ending.AGAIN)),
        (1, lambda: world.release(holder(), Ending.RETURN)),
        (1, lambda: world.release(holder(), Ending.HOLD)),
        (1, lambda: world.retry(holder())),
        (1, lambda: world.come_back(group())),
        (2, lambda: world.release(waiter())),
        (1, lambda: world.promote(waiter())),
        (3, world.kick),
        (1, world.worker_dies),
        (4, lambda: world.advance(chance.choice([0.01, 0.3, 1.0, 2.5]))),
        (1, lambda: world.advance(31.0)),
        (1, lambda: world.advance(-chance.choice([0.01, 1.0, 40.0]))),
    ]
    weights, calls = zip(*moves, strict=True)
    for _ in range(steps):
        chance.choices(calls, weights)[0]()
        world.heartbeat()


# --- histories ------------------------------------------------------------------------------------


def weights(world: World) -> None:
    """Three groups with a backlog: their starts are as their weights, within one."""
    world.limit, shares = 1, {"a": 1.0, "b": 2.0, "d": 4.0}
    for name, weight in shares.items():
        for _ in range(24):
            world.park(Group(name, None, weight))
    for number in range(35):
        world.release(*world.before.holders)
        for name, weight in shares.items():
            share = (number + 2) * weight / sum(shares.values())
            if abs(world.log.count(name) - share) > 2:
                world.broken(f"{name} had {world.log.count(name)} starts, and its share is {share}")


def small_beside_large(world: World) -> None:
    """A group that comes late starts at once beside one with a backlog, and gains no credit."""
    world.limit = 1
    for _ in range(20):
        world.park(D)
    for _ in range(10):
        world.release(*world.before.holders)
    for _ in range(3):
        world.park(A)
    for _ in range(7):
        world.release(*world.before.holders)
    if "".join(world.log) != "d" * 11 + "adadadd":
        world.broken(f"the starts were {world.log}")


def first_declaration(world: World) -> None:
    """Who waits when the lock gets groups is in the group of those that have none."""
    world.limit = 1
    for _ in range(3):
        world.park(None)
        world.acquire(None, wait=30.0)
    for _ in range(3):
        world.park(A)
    for _ in range(9):
        for token in world.before.holders:
            world.claim(token)
        world.release(*world.before.holders)
    if world.before.waiters:
        world.broken("somebody waits for ever")


def clients_only(world: World) -> None:
    """The groups of clients that wait are kept, and not for ever."""
    world.limit = 1
    world.acquire(A)
    for _ in range(2):
        world.acquire(D, wait=300.0)
    if world.client.pttl(f"{FLOW}:line:d") < 350_000:
        world.broken("a line is forgotten before its clients give up")
    left = [world.client.pttl(f"{FLOW}{part}") for part in ("", ":groups", ":heads")]
    if min(left) < 350_000:
        world.broken(f"the groups are forgotten before their clients give up: {left}")


def last_message(world: World) -> None:
    """When the last message leaves, the lines of the clients expire, in all groups."""
    world.limit = 1
    world.acquire(A)
    parked = []
    for group in (D, None, A, B):
        world.acquire(group, wait=300.0)
        parked.append(world.park(group))
    for token in parked:
        world.release(token)
    if world.client.exists(KEYS.bodies):
        world.broken("a message is left")
    for group in ("d", "", "a", "b"):
        left = world.client.pttl(f"{FLOW}:line:{group}")
        if left < 350_000:
            world.broken(f"the line of {group} expires in {left} ms")


def two_leases(world: World) -> None:
    """Holders of a group count as long as the longest lease."""
    world.acquire(B, lease=900.0)
    world.acquire(B, lease=30.0)
    if world.client.pttl(f"{FLOW}:running:b") < 950_000:
        world.broken("a shorter lease shortens the longer one")


def retry_first(world: World) -> None:
    """A retry in its own permit starts before who is next, and moves the virtual time to nobody."""
    world.limit = 1
    world.acquire(D)
    world.park(C)
    world.retry(*world.before.holders)
    world.come_back(D)
    if world.log != ["d", "d"]:
        world.broken(f"the starts were {world.log}")


def long_run(world: World) -> None:
    """A holder counts for the limit of its group as long as its lease is renewed."""
    world.acquire(A, lease=300.0)
    token = next(iter(world.before.holders))
    running = f"{FLOW}:running:a"
    if world.client.pttl(running) < 350_000:
        world.broken("a holder counts for a minute")
    world.store.extend([(NAME, token, 900.0)])
    if min(world.client.pttl(running), world.client.pttl(FLOW)) < 950_000:
        world.broken("a renewed holder does not count as long as it holds the lock")
    world.client.pexpire(running, 100_000)
    world.park(D)
    world.park(A)
    world.claim(token)
    world.check()
    if world.client.pttl(running) < 80_000:
        world.broken("a repeated call shortens how long a holder counts")


def late_claim(world: World) -> None:
    """A granted message counts for its group as long as its full lease."""
    world.limit = 1
    world.park(A)
    token = next(iter(world.before.holders))
    world.store.claim(Owner(token), NAME, 900.0)
    world.check()
    if world.client.pttl(f"{FLOW}:running:a") < 950_000:
        world.broken("a claimed grant counts for a minute only")


def older_version(world: World) -> None:
    """A holder that an older version ended, and a waiter that it queued, are found by a sweep."""
    world.limit, world.stale = 3, True
    world.acquire(A)
    world.park(A)
    token = next(t for t, r in world.before.holders.items() if r["state"] == "running")
    _forget(world, token)
    world.kick()
    if world.before.waiters:
        world.broken("a group waits for a holder that has ended")
    if world.client.zscore(f"{FLOW}:running:a", token) is not None:
        world.broken("a sweep keeps a holder that has ended")
    world.stale = False
    world.limit = 1
    world.park(B)
    waiter = next(iter(world.before.waiters))
    for key in world.client.scan_iter(f"{glob(FLOW)}:*"):
        if b":line:" in key or key.endswith((b":groups", b":heads")):
            world.client.delete(key)
    world.kick()
    if waiter not in world.before.waiters:
        world.broken("a waiter is lost")


def ended_by_an_older_version(world: World) -> None:
    """A holder that an older version ended does not keep the next caller from the lock."""
    world.stale = True
    world.acquire(A)
    _forget(world, *world.before.holders)
    if world.acquire(A).verdict is not Verdict.GRANTED:
        world.broken("a holder that has ended counts for the limit of its group")


def line_of_no_group(world: World) -> None:
    """A sweep puts a group with a line in its place again."""
    world.limit = 1
    world.acquire(A)
    world.park(B)
    world.client.delete(f"{FLOW}:groups", f"{FLOW}:heads")
    world.kick()


def left_behind(world: World) -> None:
    """As stale_line, of a token whose record is left."""
    world.limit = 1
    for _ in range(3):
        world.park(A)
    first = next(iter(world.before.waiters))
    world.client.zrem(KEYS.queue, first)
    world.before = world.snapshot()
    world.release(*world.before.holders)
    if first in world.before.holders or not world.before.holders:
        world.broken("who has left the queue is granted, or keeps others from it")


def _forget(world: World, token: str) -> None:
    """End a holder behind the back of its group."""
    world.client.zrem(KEYS.holders, token)
    world.client.hdel(KEYS.record, token)
    world.before = world.snapshot()


def stale_line(world: World) -> None:
    """A token in a line that is not in the queue is not granted."""
    world.limit = 1
    for _ in range(3):
        world.park(A)
    first = next(iter(world.before.waiters))
    world.client.zrem(KEYS.queue, first)
    world.client.hdel(KEYS.record, first)
    world.before = world.snapshot()
    world.release(*world.before.holders)
    if first in world.before.holders or not world.before.holders:
        world.broken("who has left the queue is granted, or keeps others from it")


def kept_permit(world: World) -> None:
    """A permit that is kept for a retry, or for nobody, counts for the group."""
    for ending in (Ending.KEEP, Ending.HOLD):
        world.acquire(A)
        world.park(A)
        token = next(t for t, r in world.before.holders.items() if r["state"] == "running")
        if ending is Ending.KEEP:
            world.retry(token)
        else:
            world.release(token, ending)
        if len(world.before.holders) != 1:
            world.broken("another task of the group starts beside a kept permit")
        world.release(*world.before.holders)
        world.release(*world.before.holders)
    world.acquire(A)
    world.retry(*world.before.holders)
    world.come_back(A)
    if not world.before.holders:
        world.broken("the retry waits for its own permit")


def told(world: World) -> None:
    """Who waits for the limit of its group is told so."""
    world.acquire(A, lease=20.0)
    for reply in (world.acquire(A), world.acquire(A, wait=30.0)):
        if reply.waits_for is not WaitsFor.GROUP:
            world.broken(f"it was told that it waits for {reply.waits_for}")
    if world.client.zscore(KEYS.due, NAME) <= world.now_us / 1000:
        world.broken("somebody looks at once for a group at its limit")
    view = world.store.inspect(NAME)
    if view.waits_for is not WaitsFor.GROUP or not 19 < view.next_look <= 20:
        world.broken(f"the lock is said to wait for {view.waits_for}, {view.next_look}")
    world.park(D)
    full = Claim(NAME, 30.0, world.limit, max_waiting=0, flow=packed((), group=A))
    to_park = MessageToPark(b"body", REALM, ROUTE, None)
    reply = world.store.park(Owner(new_token(), "x", "t", WORKER), full, to_park)
    if reply.verdict is not Verdict.FULL or reply.waits_for is not WaitsFor.GROUP:
        world.broken(f"it was told {reply.verdict}, {reply.waits_for}")


def many_idle(world: World) -> None:
    """Groups that the virtual time has reached are forgotten, and of many others the first ones."""
    world.acquire(A)
    idle = {f"x{number:05}": 1.0 + number for number in range(10_010)}
    world.client.zadd(f"{FLOW}:idle", idle)
    claim = Claim(NAME, 30.0, world.limit, flow=packed((), group=D))
    world.store.acquire(Owner(new_token()), claim)
    left = world.client.zcard(f"{FLOW}:idle")
    if left != 10_000:
        world.broken(f"{left} groups are remembered")
    if world.client.zscore(f"{FLOW}:idle", "x10009") is None:
        world.broken("the wrong ones are forgotten")


HISTORIES = (
    weights,
    small_beside_large,
    first_declaration,
    clients_only,
    last_message,
    two_leases,
    retry_first,
    long_run,
    late_claim,
    ended_by_an_older_version,
    line_of_no_group,
    older_version,
    left_behind,
    stale_line,
    kept_permit,
    told,
    many_idle,
)

LIBRARY = "shared"
MUTANTS = (
    Mutant("a group has no limit", LIBRARY, "return most and call('ZCARD', running) >= most and",
           "return false and"),
    Mutant("a group has one too many", LIBRARY, "#call('ZINTER', 2, running, holders) >= most",
           "#call('ZINTER', 2, running, holders) > most"),
    Mutant("a holder that has ended counts", LIBRARY,
           " and #call('ZINTER', 2, running, holders) >= most", ""),
    Mutant("a group saves up credit", LIBRARY, "    return math.max(at, tonumber(own or at))\n",
           "    return tonumber(own or 0)\n"),
    Mutant("a group at its limit forgets its starts", LIBRARY,
           "call('ZSCORE', full, group) or call('ZSCORE', idle, group)",
           "call('ZSCORE', idle, group)"),
    Mutant("a group without a waiter forgets its starts", LIBRARY,
           " or call('ZSCORE', idle, group)\n", "\n"),
    Mutant("a group with a waiter forgets its starts", LIBRARY,
           "member and call('ZSCORE', groups, member) or", ""),
    Mutant("a group is next at two times", LIBRARY, "      call('ZREM', groups, member)\n", ""),
    Mutant("a head stays", LIBRARY, "      call('HDEL', heads, group)\n", ""),
    Mutant("a group stays at its limit", LIBRARY, "    call('ZREM', full, group)\n", ""),
    Mutant("a group that waits is idle", LIBRARY, "    call('ZREM', idle, group)\n", ""),
    Mutant("what is not ahead is remembered", LIBRARY, "if start > at then call('ZADD', idle",
           "if true then call('ZADD', idle",
           (("    call('ZREMRANGEBYSCORE', idle, '-inf', exact(at))\n", ""),)),
    Mutant("the limit of the first waiter does not count", LIBRARY,
           "elseif is_full(record_of(head[1])) then", "elseif false then"),
    Mutant("groups are sorted by name", LIBRARY,
           "member = string.format('%016.0f', tonumber(head[2])) .. ':' .. group",
           "member = string.rep('0', 16) .. ':' .. group"),
    Mutant("the head of a group is not known", LIBRARY,
           "      call('HSET', heads, group, member)\n", ""),
    Mutant("a line expires beside a message", LIBRARY, "      call('PERSIST', line)\n",
           "      local _ = line\n"),
    Mutant("a line of clients stays", LIBRARY,
           "      call('PEXPIRE', line, digits(math.max(left, tonumber(rec.deadline or now) - now"
           " + GRACE_MS)))\n", "      local _ = left\n"),
    Mutant("a line stays when the last message leaves", LIBRARY,
           "if call('PTTL', line_of(group)) == -1 then call('PEXPIRE', line_of(group),"
           " digits(live)) end", "local _ = group"),
    Mutant("a line of a group at its limit stays when the last message leaves", LIBRARY,
           "for _, group in ipairs(call('ZRANGE', full, 0, -1)) do waiting[#waiting + 1] = group"
           " end", "local _ = waiting"),
    Mutant("a line lives for a minute", LIBRARY,
           "digits(math.max(left, tonumber(rec.deadline or now) - now + GRACE_MS))",
           "digits(GRACE_MS)"),
    Mutant("who comes first is not next", LIBRARY,
           "    if call('ZRANK', line, token) == 0 then "
           "place_group(group, next_start(group)) end\n",
           "    if call('ZCARD', line) == 1 then place_group(group, next_start(group)) end\n"),
    Mutant("who has left stays in the line", LIBRARY,
           "    call('ZREM', line_of(group), token)\n    if start then", "    if start then"),
    Mutant("a group without a waiter stays", LIBRARY,
           "    if start then place_group(group, start) end\n", ""),
    Mutant("a holder does not count", LIBRARY,
           "    call('ZADD', running_of(group), now, token)\n", ""),
    Mutant("a holder counts for a minute", LIBRARY, "digits(math.max(left, lease + GRACE_MS)))\n"
           "    local start, first", "digits(math.max(left, GRACE_MS)))\n"
           "    local start, first"),
    Mutant("a shorter lease shortens the longer one", LIBRARY,
           "digits(math.max(left, lease + GRACE_MS)))\n    local start, first",
           "digits(lease + GRACE_MS))\n    local start, first"),
    Mutant("the virtual time stands still", LIBRARY,
           "      at = math.max(at, math.min(start, tonumber(first or start)))\n", ""),
    Mutant("the virtual time passes who waits", LIBRARY,
           "at = math.max(at, math.min(start, tonumber(first or start)))",
           "at = math.max(at, start)"),
    Mutant("the virtual time is not kept", LIBRARY,
           "      call('HSET', flow, 'vt', exact(at))\n      start", "      start"),
    Mutant("a weight has no effect", LIBRARY, "start = start + 1 / (rec.group_weight or 1)",
           "start = start + 1"),
    Mutant("a weight has the opposite effect", LIBRARY,
           "start = start + 1 / (rec.group_weight or 1)",
           "start = start + (rec.group_weight or 1)"),
    Mutant("a start does not count", LIBRARY,
           "    place_group(group, start)\n    call('ZREMRANGEBYSCORE'",
           "    place_group(group, next_start(group))\n    call('ZREMRANGEBYSCORE'"),
    Mutant("a reservation is a start", LIBRARY,
           "fair.hold(token, rec, state == 'granted' or state == 'running', lease)",
           "fair.hold(token, rec, true, lease)"),
    Mutant("no group is forgotten", LIBRARY,
           "    call('ZREMRANGEBYSCORE', idle, '-inf', exact(at))\n", ""),
    Mutant("groups are remembered without end", LIBRARY,
           "    call('ZREMRANGEBYRANK', idle, 0, -MOST_IDLE - 1)\n", ""),
    Mutant("an ended holder counts on", LIBRARY,
           "    call('ZREM', running_of(group), token)\n", ""),
    Mutant("an end does not free its group", LIBRARY,
           "    if call('ZSCORE', full, group) then "
           "place_group(group, next_start(group)) end\n", ""),
    Mutant("who has left the queue is granted", LIBRARY,
           "if token and call('ZSCORE', queue, token) then", "if token then"),
    Mutant("who has left the queue is in the way", LIBRARY,
           "      if token then call('ZREM', line_of(group), token) end\n",
           "      if token then return nil end\n"),
    Mutant("waiters of an older version stay without a line", LIBRARY,
           "      join(token, rec, call('ZSCORE', queue, token))\n", ""),
    Mutant("a waiter in a line of no group stays there", LIBRARY,
           "if placed and call('ZSCORE', line_of(group), token) then break end",
           "if call('ZSCORE', line_of(group), token) then break end"),
    Mutant("ends by an older version stay", LIBRARY,
           "for _, group in ipairs(call('ZRANGE', full, skip, skip + BATCH - 1)) do",
           "for _, group in ipairs({}) do"),
    Mutant("no sweep repairs", LIBRARY, "  if fair and sweeping then fair.repair() end\n", ""),
    Mutant("waiters from before the first group are left out", LIBRARY,
           "if alone or call('ZUNIONSTORE', line_of(''), 1, queue) == 0 then return end",
           "if true then return end"),
    Mutant("waiters from before the first group are not next", LIBRARY,
           "    place_group('', at)\n", ""),
    Mutant("the groups expire beside a message", LIBRARY,
           "        call('PERSIST', key)\n", "        call('PTTL', key)\n"),
    Mutant("the groups stay for ever", LIBRARY, "        call('PEXPIRE', key, digits(live))\n",
           "        call('PTTL', key)\n"),
    Mutant("the groups live for a minute", LIBRARY, "local live = till - now + GRACE_MS",
           "local live = GRACE_MS"),
    Mutant("a renewal does not renew its group", "lock/extend_leases.lua",
           "    if rec and fair then fair.renew(rec, lease_ms) end\n", ""),
    Mutant("a renewal does not see the group", "lock/extend_leases.lua",
           "redis.call('EXISTS', queue, bodies, deadlines, adrift, flow) == 0",
           "redis.call('EXISTS', queue, bodies, deadlines, adrift) == 0"),
    Mutant("a claim does not renew its group", LIBRARY,
           "  if fair then fair.renew(rec, tonumber(rec.lease)) end\n", ""),
    Mutant("who joins the queue has no line", LIBRARY,
           "  if fair then fair.join(token, rec, score_of(rec)) end\n", ""),
    Mutant("who leaves the queue stays in its line", LIBRARY,
           "  if fair then fair.leave(token, rec) end\n", ""),
    Mutant("the first of the queue is next", LIBRARY,
           "  if fair then return fair.choose() end\n", ""),
    Mutant("an end is not told to the group", LIBRARY,
           "  if fair then fair.end_hold(token, rec) end\n", ""),
    Mutant("a hold is not told to the group", LIBRARY,
           "  if fair then fair.hold(token, rec, state == 'granted' or state == 'running', lease)"
           " end\n", ""),
    Mutant("the lock is due at once for a group at its limit", LIBRARY,
           "local reason, till = queue_waits_for()\n    if not reason then till = now end",
           "local reason, till = waits_for()\n    if not reason then till = now end"),
    Mutant("groups are not kept", LIBRARY, "  if fair then keep_groups() end\n", ""),
    Mutant("a kept permit has no group", LIBRARY,
           "  if fair then fair.assign(reserved, rec) end\n", ""),
    Mutant("a kept permit counts beside its attempt", LIBRARY,
           "  leave_holders(token, fair and load(token))\n",
           "  redis.call('ZREM', holders, token)\n"),
    Mutant("a lock that stays held has no group", "lock/release_and_grant_next.lua",
           "  if fair then fair.assign(held, rec) end\n", ""),
    Mutant("a caller has no group", "lock/acquire.lua",
           "  if fair and fair.mine then fair.assign(rec, fair.mine) end\n", ""),
    Mutant("a message has no group", "lock/park.lua",
           "  if fair and fair.mine and not where then fair.assign(rec, fair.mine) end\n", ""),
    Mutant("a message for a full queue has no group", "lock/park.lua",
           "  if fair and fair.mine then fair.assign(about, fair.mine) end\n", ""),
    Mutant("a lone caller passes the limit of its group", "lock/acquire.lua",
           "if not waits_for(nil, rec) and not (fair and fair.is_full(rec)) then",
           "if not waits_for(nil, rec) then"),
    Mutant("a waiter does not know that it waits for its group", LIBRARY,
           "    if not reason and fair and fair.is_full(rec or load(token) or {}) then reason ="
           " 'group' end\n", ""),
    Mutant("a view does not know of a group", "view/inspect.lua",
           "if not reason and fair and fair.all_full()", "if false and fair.all_full()"),
    Mutant("a lock does not see its groups", LIBRARY,
           "  fair = rates and rates.vt and open_groups(rates.vt) or nil\n", ""),
)  # fmt: skip


def scripts_of(mutant: Mutant) -> dict[str, Script]:
    """All verbs, one line of them wrong."""
    texts = {LIBRARY: read("shared"), **{file_of(v): read(file_of(v)) for v in VERBS}}
    texts[mutant.file] = mutant.patch(texts[mutant.file])
    bodies = {verb: texts[file_of(verb)] for verb in VERBS}
    bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
    return {v: _assembled(v, CLOCK, texts[LIBRARY], body) for v, body in bodies.items()}


_assembled = functools.cache(assemble)

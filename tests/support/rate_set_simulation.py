"""Clients that acquire several locks with rates, one after another; some die or give up meanwhile.

The scripts are the real ones, on a real Redis whose clock the tests set. A log of the starts that
does not depend on the keys shows whether a period has more of them than its rate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock.config.limits import NO_LIMIT
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import Rate, packed
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import Script, load_scripts
from support.rate_simulation import CLOCK, LIBRARY, US, Broken
from support.script_model.mutants import Mutant

LEASE = 30.0
CLAIM_LEASE = 2.0
NAMES = ("a", "b", "c", "d")
LONGEST = 400.0
"""Seconds after which each client of a walk must have had its locks."""


@dataclass
class Task:
    """A client that needs several locks.

    Args:
        names: of its locks, in order.
        owners: its token at each of them.
        at: number of locks that it holds.
    """

    names: tuple[str, ...]
    owners: tuple[Owner, ...]
    at: int = 0
    runs: bool = False
    dead: bool = False
    renewed: dict[str, float] = field(default_factory=dict)

    def later(self, name: str) -> bool:
        return name != self.names[-1]


class Sets:
    """Some locks, and clients that need several of them.

    Args:
        client: of the Redis.
        rates: name -> the rates of that lock.
        limits: name -> its permits.
        scripts: with a wrong line.
    """

    def __init__(
        self,
        client: Any,
        rates: dict[str, tuple[Rate, ...]],
        limits: dict[str, int],
        scripts: dict[str, Script] | None = None,
    ) -> None:
        self.client, self.rates, self.limits = client, rates, limits
        self.store = RedisStore(
            client, scripts=scripts or load_scripts(CLOCK), claim_lease=CLAIM_LEASE
        )
        self.now_us = 1_000 * US
        self.tasks: list[Task] = []
        self.ended = 0
        self.starts: dict[str, list[int]] = {name: [] for name in rates}
        client.flushdb()
        self.advance(0)

    def advance(self, seconds: float) -> None:
        """Move the clock, in steps in which clients that live renew their leases."""
        while seconds > 0:
            step = min(seconds, 5.0)
            seconds -= step
            self.now_us += round(step * US)
            self.client.set("clock", self.now_us)
            self.renew()
        self.client.set("clock", self.now_us)

    def renew(self) -> None:
        for task in self.tasks:
            held = [] if task.dead else list(zip(task.names, task.owners, strict=True))[: task.at]
            answers = self.store.extend([(name, who.token, LEASE) for name, who in held])
            for (name, _), answer in zip(held, answers, strict=True):
                if not answer:
                    self.broken(f"a lock {name} that was renewed is lost")
                task.renewed[name] = self.now_us / US + LEASE

    # -- clients ----------------------------------------------------------------------------------

    def arrive(self, *names: str) -> Task:
        task = Task(names, tuple(Owner(new_token()) for _ in names))
        self.tasks.append(task)
        return task

    def claim_of(self, task: Task, name: str) -> Claim:
        flow = packed(self.rates.get(name, ()))
        later = bool(flow) and task.later(name)
        return Claim(name, LEASE, self.limits[name], flow=flow, later=later)

    def step(self, task: Task) -> None:
        """Ask for the next lock; with the last one, start."""
        if task.runs:
            return self.end(task)
        claim = self.claim_of(task, task.names[task.at])
        reply = self.store.acquire(task.owners[task.at], claim, wait=60.0)
        if reply.verdict is Verdict.GRANTED:
            self.got(task)
        elif reply.verdict is not Verdict.WAITING:
            self.broken(f"a waiter of {claim.name} was told {reply.verdict}")
        return self.check()

    def claim(self, task: Task) -> None:
        """Claim the next lock, as a client that was woken does."""
        if task.runs:
            return
        claim = self.claim_of(task, task.names[task.at])
        owner = task.owners[task.at]
        reply = self.store.claim(owner, claim.name, LEASE, later=claim.later)
        if reply.verdict is Verdict.GRANTED:
            self.got(task)
        self.check()

    def got(self, task: Task) -> None:
        name = task.names[task.at]
        task.renewed[name] = self.now_us / US + LEASE
        task.at += 1
        self.check()
        if task.at == len(task.names):
            self.start(task)

    def start(self, task: Task) -> None:
        """All locks are held: let the rates count the start."""
        last = task.names[-1]
        if last in self.rates:
            self.starts[last].append(self.now_us)
        for name, owner in zip(task.names[:-1], task.owners, strict=False):
            if name in self.rates:
                if self.store.claim(owner, name, LEASE).verdict is not Verdict.GRANTED:
                    self.broken(f"a held lock {name} cannot be claimed")
                self.starts[name].append(self.now_us)
        task.runs = True

    def end(self, task: Task) -> None:
        """Release all locks, or leave the queue."""
        for name, owner in reversed(list(zip(task.names, task.owners, strict=True))[: task.at + 1]):
            self.store.release(name, owner.token, Ending.FINAL)
        self.tasks.remove(task)
        self.ended += task.runs
        self.check()

    def die(self, task: Task) -> None:
        task.dead = True

    def kick(self) -> None:
        for name in NAMES:
            self.store.sweep_and_grant(name)
        self.check()

    # -- what must hold ---------------------------------------------------------------------------

    def unclaimed(self, name: str) -> int:
        """Number of clients that hold a lock and have not started, by what they know."""
        return sum(
            name in task.names[: task.at]
            and not task.runs
            and task.renewed[name] * US > self.now_us
            for task in self.tasks
        )

    def check(self) -> None:
        for name, rates in self.rates.items():
            for rate in rates:
                since = self.now_us - rate.period * US
                begun = sum(at > since for at in self.starts[name])
                if begun + self.unclaimed(name) > rate.number + rate.burst:
                    self.broken(
                        f"{begun} starts and {self.unclaimed(name)} that may start in {rate}"
                    )
        for name in NAMES:
            held = [t for t, till in self._holders(name) if till * 1000 > self.now_us]
            if len(held) > self.limits[name]:
                self.broken(f"{len(held)} hold {name}")

    def all_end(self) -> None:
        """Each client that lives gets its locks in time: none is lost, and none waits for ever."""
        until = self.now_us + LONGEST * US
        while alive := [task for task in self.tasks if not task.dead]:
            if self.now_us > until:
                self.broken(f"{len(alive)} clients wait for ever")
            for task in alive:
                if task in self.tasks:
                    self.step(task)
            self.advance(1.0)

    def _holders(self, name: str) -> list[tuple[bytes, float]]:
        key = Keyspace().lock(name).holders
        found: list[tuple[bytes, float]] = self.client.zrange(key, 0, -1, withscores=True)
        return found

    def log_of(self, name: str) -> str:
        return f"{Keyspace().lock(name).flow}:log"

    def broken(self, what: str) -> None:
        raise Broken(what)


def walk(client: Any, seed: int, scripts: dict[str, Script] | None = None, steps: int = 60) -> int:
    """Clients come, wait, die, give up and end in a random order. Returns how many ran."""
    chance = random.Random(seed)
    choices = (Rate("1/2s"), Rate("2/3s"), Rate("3/10s"), Rate("4/4s", kind="smooth", burst=2))
    rates = {name: (chance.choice(choices),) for name in chance.sample(NAMES, 3)}
    limits = {name: chance.choice([1, 2, 3, NO_LIMIT]) for name in NAMES}
    sets = Sets(client, rates, limits, scripts)
    for _ in range(steps):
        alive = [task for task in sets.tasks if not task.dead]
        one = chance.choice(alive) if alive else None
        match chance.randrange(12):
            case 0 | 1 | 2:
                sets.arrive(*sorted(chance.sample(NAMES, chance.randrange(1, 4))))
            case 3:
                sets.advance(chance.choice([0.1, 1.0, 2.5, 11.0]))
            case 4:
                sets.kick()
            case 5 if one:
                chance.choice([sets.die, sets.end])(one)
            case 6 if one:
                sets.claim(one)
            case _ if one:
                sets.step(one)
    sets.all_end()
    return sets.ended


# --- histories ------------------------------------------------------------------------------------


def waits_for_the_next_lock(client: Any, scripts: Any) -> None:
    """Who holds a lock with a rate, and waits for the next one, starts only when it has both."""
    sets = Sets(client, {"a": (Rate("1/5s"),)}, {"a": 9, "b": 1, "c": 1, "d": 1}, scripts)
    other = sets.arrive("b")
    sets.step(other)
    first, second = sets.arrive("a", "b"), sets.arrive("a", "c")
    for task in (first, first, second):
        sets.step(task)
    sets.advance(60)
    sets.step(second)
    sets.end(other)
    sets.step(first)
    if not first.runs:
        sets.broken("who is next does not start")
    sets.step(second)
    sets.advance(5)
    sets.step(second)
    sets.step(second)
    if not second.runs:
        sets.broken("a start counts for longer than its period")


def gives_up(client: Any, scripts: Any) -> None:
    """Who gives up while it waits for the next lock gives its start back at once."""
    limits = {"a": NO_LIMIT, "b": 1, "c": 1, "d": 1}
    sets = Sets(client, {"a": (Rate("1000/h"),)}, limits, scripts)
    other = sets.arrive("b")
    sets.step(other)
    many = [sets.arrive("a", "b") for _ in range(150)]
    for task in many:
        sets.step(task)
    for task in many[::10]:
        token = task.owners[0].token
        sets.end(task)
        if client.zscore(sets.log_of("a"), token) is not None:
            sets.broken("a start is lost with a client that gives up")


def dies(client: Any, scripts: Any) -> None:
    """Who dies while it waits for the next lock gives its start back when its lease ends."""
    limits = {"a": NO_LIMIT, "b": 1, "c": 1, "d": 1}
    sets = Sets(client, {"a": (Rate("1/h"),)}, limits, scripts)
    other = sets.arrive("b")
    sets.step(other)
    first, second = sets.arrive("a", "b"), sets.arrive("a", "c")
    sets.step(first)
    sets.step(second)
    sets.die(first)
    sets.advance(LEASE + 1)
    sets.step(second)
    sets.step(second)
    if not second.runs:
        sets.broken("a start is lost with a client that has died")


def ended_by_an_older_script(client: Any, scripts: Any) -> None:
    """A start that an older script has not given back is given back in the next sweeps."""
    limits = {"a": NO_LIMIT, "b": 1, "c": 1, "d": 1}
    sets = Sets(client, {"a": (Rate("1000/h"),)}, limits, scripts)
    other = sets.arrive("b")
    sets.step(other)
    many = [sets.arrive("a", "b") for _ in range(150)]
    for task in many:
        sets.step(task)
    tokens = sorted(task.owners[0].token for task in many)
    for token in (tokens[0], tokens[-1]):
        client.zrem(Keyspace().lock("a").holders, token)
    for _ in range(60):
        sets.now_us += 1
        sets.advance(0)
        sets.store.sweep_and_grant("a")
    if {client.zscore(sets.log_of("a"), token) for token in (tokens[0], tokens[-1])} != {None}:
        sets.broken("a start is lost, since others are before it")


def outlasts_the_rate(client: Any, scripts: Any) -> None:
    """While somebody holds a lock and waits for the next one, its rate is not forgotten."""
    sets = Sets(client, {"a": (Rate("1/s"),)}, {"a": 9, "b": 1, "c": 1, "d": 1}, scripts)
    other = sets.arrive("b")
    sets.step(other)
    first = sets.arrive("a", "b")
    sets.step(first)
    flow, log = Keyspace().lock("a").flow, sets.log_of("a")
    for _ in range(2):
        sets.store.extend([("a", first.owners[0].token, 600.0)])
        if min(client.pttl(flow), client.pttl(log)) < 600_000:
            sets.broken("a rate is forgotten before the lease of who has not started")
        client.pexpire(flow, 1000)
        client.pexpire(log, 1000)


def woken(client: Any, scripts: Any) -> None:
    """Who was granted a lock while it waited, and claims it, has not started yet."""
    sets = Sets(client, {"a": (Rate("1/2s"),)}, {"a": 1, "b": 1, "c": 1, "d": 1}, scripts)
    first, second, other = sets.arrive("a"), sets.arrive("a", "b"), sets.arrive("b")
    for task in (first, other, second):
        sets.step(task)
    sets.advance(2)
    sets.end(first)
    sets.claim(second)
    token = second.owners[0].token
    if client.zscore(Keyspace().lock("a").holders, token) < sets.now_us / 1000 + 20_000:
        sets.broken("its lease is that of a grant")
    sets.advance(10)
    third = sets.arrive("a", "c")
    sets.step(third)
    sets.end(other)
    sets.step(second)
    if client.zscore(sets.log_of("a"), token) != sets.now_us:
        sets.broken("its start counts at another time")


def asks_again(client: Any, scripts: Any) -> None:
    """Who did not hear that it holds a lock, and asks again, has not started yet."""
    sets = Sets(client, {"a": (Rate("1/2s"),)}, {"a": 1, "b": 1, "c": 1, "d": 1}, scripts)
    task = sets.arrive("a", "b")
    for _ in range(2):
        sets.store.acquire(task.owners[0], sets.claim_of(task, "a"), wait=60.0)
    if client.zscore(sets.log_of("a"), task.owners[0].token) < 9e15:
        sets.broken("a repeated request counts as a start")


HISTORIES = (
    waits_for_the_next_lock,
    gives_up,
    dies,
    ended_by_an_older_script,
    outlasts_the_rate,
    woken,
    asks_again,
)

EXTEND = "lock/extend_leases.lua"
MUTANTS = (
    Mutant("a claimed lock of several is a start", LIBRARY,
           "rec.state ~= 'running' and not starts_later then", "rec.state ~= 'running' then"),
    Mutant("a claimed lock of several runs", LIBRARY,
           "  if not starts_later then set_state(rec, 'running') end\n",
           "  set_state(rec, 'running')\n"),
    Mutant("a lock of several is a start", LIBRARY,
           "  if rates and starts_later then rates.note_grant(token, rec) end\n"
           "  if rates and not starts_later then rates.note_start(token, rec) end\n",
           "  if rates then rates.note_start(token, rec) end\n"),
    Mutant("a lock of several runs", LIBRARY,
           "starts_later and 'granted' or 'running', lease)", "'running', lease)"),
    Mutant("a lock of several does not count", LIBRARY,
           "  if rates and starts_later then rates.note_grant(token, rec) end\n", ""),
    Mutant("who gives up keeps its start", LIBRARY,
           "  if rates then rates.drop(token, rec) end\n", ""),
    Mutant("who gives up after its start takes it back", LIBRARY,
           "if not since or tonumber(since) < UNCLAIMED then", "if not since then"),
    Mutant("only the first ended grants are found", LIBRARY,
           "local from = now_us % math.max(1, unclaimed() - BATCH + 1)", "local from = 0"),
    Mutant("a rate is forgotten before a long lease", LIBRARY,
           "/ 1000), left_ms or 0)", "/ 1000), 0)"),
    Mutant("a log is forgotten before a long lease", LIBRARY,
           "if stored or left then live(log, left) end", "if stored then live(log) end"),
    Mutant("a rate is not kept for who has not started", LIBRARY,
           "if left or redis.call('PTTL', flow) == -1 then",
           "if redis.call('PTTL', flow) == -1 then"),
    Mutant("a renewal does not keep the rate", EXTEND, "deadlines, adrift, flow) == 0",
           "deadlines, adrift) == 0"),
    Mutant("a claim of several locks is the last one", "lock/claim.lua",
           "starts_later = delete_message == '3'\n", ""),
    Mutant("who waits is not told that it was granted", "lock/acquire.lua",
           "if rec.state == 'running' or rec.state == 'granted' then",
           "if rec.state == 'running' then"),
)  # fmt: skip

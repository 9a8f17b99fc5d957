"""Clients of a lock whose server is replaced by one without its last writes.

The scripts are the real ones with ``singleton_lock_quarantine``, on a real Redis whose clock the
tests set. A copy of its keys is the replica. After a promotion only that copy is left.
"""

from __future__ import annotations

import random

from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import (
    VERBS,
    Script,
    assemble,
    file_of,
    load_scripts,
    read,
    read_shared,
)
from support.script_model.mutants import Mutant

CLOCK = "local function server_time() return redis.call('GET', 'clock') end"
NAME = "a"
KEYS = Keyspace().lock(NAME)
SERVER = f"{KEYS.fleet}:server"
LEASES = (2.0, 5.0, 8.0)
LONGEST = max(LEASES)


class Broken(AssertionError):  # an invariant
    """Two hold the lock at once, or nobody can have it for longer than was said."""


class World:
    """One lock, its clients, and the servers that succeed one another."""

    def __init__(self, client, scripts=None) -> None:
        self.client, self.time = client, 1000.0
        self.store = RedisStore(
            client, scripts=scripts or load_scripts(CLOCK, quarantine=True), claim_lease=2.0
        )
        self.beliefs: dict[str, float] = {}
        self.waiters: list[Owner] = []
        client.flushdb()
        self.advance(0)
        self.replica: dict[bytes, tuple[bytes, int]] = {}

    def advance(self, seconds: float) -> None:
        self.time = round(self.time + seconds, 3)
        self.client.set("clock", round(self.time * 1e6))

    # -- servers ----------------------------------------------------------------------------------

    def serve(self, longest: float = LONGEST) -> None:
        """Let the server have served for a while, and have met a lease of that length."""
        run = self.client.info("server")["run_id"]
        noted = {"run": run, "since": 0, "till": 0, "longest": round(longest * 1000)}
        self.client.hset(SERVER, mapping=noted)

    def replicate(self) -> None:
        """From now on, what is written is lost when this server is."""
        kept = set(self.client.keys()) - {b"clock"}
        self.replica = {key: (self.client.dump(key), self.client.pttl(key)) for key in kept}

    def fail_over(self) -> None:
        """Another server takes its place, with what was replicated."""
        self.client.flushdb()
        for key, (kept, left) in self.replica.items():
            self.client.restore(key, max(0, left), kept)
        if self.client.exists(SERVER):
            self.client.hset(SERVER, "run", "another")
        self.advance(0.001)

    # -- clients ----------------------------------------------------------------------------------

    def acquire(self, lease: float, *, attempt: str = "", wait: float | None = None) -> Verdict:
        who = Owner(new_token(), attempt)
        reply = self.store.acquire(who, Claim(NAME, lease), wait=wait)
        if reply.verdict is Verdict.GRANTED:
            self.believe(who.token, lease)
        if reply.verdict is Verdict.WAITING:
            self.waiters.append(who)
        self.check()
        return reply.verdict

    def hold(self, lease: float, attempt: str = "") -> str:
        """Take a free lock."""
        if self.acquire(lease, attempt=attempt) is not Verdict.GRANTED:
            msg = "a free lock is refused"
            raise Broken(msg)
        return next(iter(self.beliefs))

    def claim(self, number: int, lease: float) -> None:
        who = self.waiters[number % len(self.waiters)]
        reply = self.store.claim(who, NAME, lease)
        if reply.verdict is Verdict.GRANTED:
            self.believe(who.token, lease)
        if reply.verdict is not Verdict.WAITING:
            self.waiters.remove(who)
        self.check()

    def extend(self, token: str, lease: float) -> None:
        if self.store.extend([(NAME, token, lease)]) == [True]:
            self.believe(token, lease)
        else:
            del self.beliefs[token]
        self.check()

    def release(self, token: str, keep_for: str = "") -> None:
        reserve = Reservation(keep_for, LONGEST) if keep_for else None
        ending = Ending.KEEP if keep_for else Ending.FINAL
        self.store.release(NAME, token, ending, reserve=reserve)
        del self.beliefs[token]
        self.check()

    def believe(self, token: str, lease: float) -> None:
        self.beliefs[token] = max(self.beliefs.get(token, 0.0), self.time + lease)

    # -- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """One believes, at most; and who waits is looked at when the quarantine opens."""
        self.beliefs = {t: till for t, till in self.beliefs.items() if till > self.time}
        if len(self.beliefs) > 1:
            msg = f"{len(self.beliefs)} hold the lock at once"
            raise Broken(msg)
        opens = float(self.client.hget(SERVER, "till") or 0) / 1000
        looks = self.client.zscore(KEYS.due, NAME)
        if opens > self.time and self.client.zcard(KEYS.queue) and (looks or 1e18) / 1000 > opens:
            msg = "nobody looks at the line when the quarantine opens"
            raise Broken(msg)

    def settle(self) -> None:
        """One longest lease after a script has met the server, a lock can be had."""
        self.store.sweep_and_grant(NAME)
        self.advance(LONGEST + 0.001)
        nobodys = self.store.acquire(Owner(new_token()), Claim("b", 1.0))
        if nobodys.verdict is not Verdict.GRANTED:
            msg = "the quarantine does not open"
            raise Broken(msg)


def walk(world: World, seed: int, steps: int = 50) -> None:
    """Clients come and go; two servers are lost, each a moment after it was replicated."""
    chance = random.Random(seed)
    world.serve()
    for step in range(steps):
        if step in {12, 32}:
            world.replicate()
        if step in {17, 38}:
            world.fail_over()
        a_move(world, chance)
    world.settle()


def a_move(world: World, chance: random.Random) -> None:
    holder, lease = next(iter(world.beliefs), ""), chance.choice(LEASES)
    moves = [
        lambda: world.acquire(lease),
        lambda: world.acquire(lease, wait=chance.choice([4.0, 30.0])),
        lambda: world.claim(chance.randrange(9), lease) if world.waiters else None,
        lambda: world.extend(holder, lease) if holder else None,
        lambda: world.release(holder) if holder else None,
        lambda: world.store.sweep_and_grant(NAME),
        lambda: world.advance(chance.choice([0.1, 1.0, 2.5])),
    ]
    chance.choices(moves, [4, 3, 5, 2, 3, 2, 3])[0]()


# --- histories ------------------------------------------------------------------------------------


def lost_reservation(world: World) -> None:
    """A permit is kept for an attempt, which takes it: that is lost, and its copy comes."""
    world.serve()
    world.release(world.hold(LONGEST, "id/0/0"), keep_for="id/1/0")
    world.replicate()
    world.hold(LONGEST, "id/1/0")
    world.fail_over()
    world.acquire(LONGEST, attempt="id/1/0")


def lost_hand_over(world: World) -> None:
    """Who was first in line has the lock; the server that comes after grants to the second."""
    world.serve()
    holder = world.hold(2.0)
    for _ in range(2):
        world.acquire(LONGEST, wait=30.0)
    world.replicate()
    second = world.waiters[1]
    world.release(holder)
    world.claim(0, LONGEST)
    world.fail_over()
    for _ in range(2):
        world.advance(2.1)
        world.store.sweep_and_grant(NAME)
    world.waiters = [second]
    world.claim(0, LONGEST)


def lost_hand_over_beside_a_retry(world: World) -> None:
    """Who was first in line has the lock; the new server hears that its task is retried instead."""
    world.serve()
    holder = world.hold(LONGEST)
    world.acquire(LONGEST, wait=30.0)
    world.acquire(LONGEST, wait=30.0, attempt="id/1/0")
    world.replicate()
    retry = world.waiters[1]
    world.release(holder)
    world.claim(0, LONGEST)
    world.fail_over()
    world.beliefs[holder] = 0.0
    world.release(holder, keep_for="id/1/0")
    world.waiters = [retry]
    world.claim(0, LONGEST)


def longer_lease(world: World) -> None:
    """The lease that is lost was the first of its length; who asks next asks for as long."""
    world.serve(longest=2.0)
    world.replicate()
    world.hold(LONGEST)
    world.fail_over()
    for _ in range(3):
        world.acquire(LONGEST)
        world.advance(2.1)
    world.settle()


def long_lease(world: World) -> None:
    """It was not the first of its length: who asks for less waits for it."""
    world.serve(longest=2.0)
    world.release(world.hold(LONGEST))
    world.replicate()
    world.hold(LONGEST)
    world.fail_over()
    for _ in range(3):
        world.acquire(2.0)
        world.advance(2.1)


def empty_server(world: World) -> None:
    """It knows of no lease, so it waits for the default."""
    world.serve()
    world.hold(LONGEST)
    world.fail_over()
    world.acquire(LONGEST)
    world.advance(LONGEST)
    if world.acquire(LONGEST) is Verdict.GRANTED:
        msg = "it has not waited for the default"
        raise Broken(msg)


HISTORIES = (
    lost_reservation,
    lost_hand_over,
    lost_hand_over_beside_a_retry,
    longer_lease,
    long_lease,
    empty_server,
)

SHARED = "shared with quarantine"
MUTANTS = (
    Mutant("a promotion is not seen", SHARED, "noted[1] ~= run", "not noted[1]"),
    Mutant("an empty server grants", SHARED, "(noted[4] and quarantine.longest or UNKNOWN_MS)",
           "quarantine.longest"),
    Mutant("the quarantine ends at once", SHARED,
           "now + (noted[4] and quarantine.longest or UNKNOWN_MS)",
           "now"),
    Mutant("the quarantine stays closed", SHARED, "found.till > now and found.till", "found.till"),
    Mutant("each script meets the server", SHARED, "redis.pcall('HSET', key, 'run', run,",
           "redis.pcall('HSET', key, 'run', '',"),
    Mutant("no lease is noted", SHARED, "redis.call('HSET', found.key, 'longest', digits(lease),",
           "redis.call('HSET', found.key,"),
    Mutant("a longer lease changes nothing", SHARED,
           "found.till = math.max(found.till, found.since + lease)", "local _ = lease"),
    Mutant("a longer lease begins now", SHARED,
           "found.till = math.max(found.till, found.since + lease)",
           "found.till = now + 2 * lease"),
    Mutant("the usual case passes", "lock/acquire.lua", "copy == '0' and not quarantined_until()",
           "copy == '0'"),
    Mutant("whoever is next starts", SHARED, "if opens then return 'redis', opens end",
           "if false then return end"),
    Mutant("permits are free", "lock/acquire.lua", "if not waits_for(nil, rec) and not (fair",
           "if redis.call('ZCARD', holders) < limit and not (fair"),
    Mutant("the line is granted", SHARED, "while next_may_start(own) do",
           "while redis.call('ZCARD', holders) < limit do",
           (("elseif waiter_waits_for(rec, own) == 'worker' then",
             "elseif rec.parked and not worker_for(rec, own) then"),)),
    Mutant("reservations pass", SHARED,
           "local reason = waits_for(redis.call('ZCARD', holders) - 1, rec)",
           "local reason = redis.call('ZCARD', holders) > limit and 'holder' or nil"),
    Mutant("a retry that waits passes", SHARED, "local reason = waiter_waits_for(waits, own)",
           "local reason"),
    Mutant("nobody looks when it opens", SHARED, "look = math.min(look, till or look)",
           "if reason ~= 'redis' then look = math.min(look, till or look) end"),
    Mutant("leases that are asked for are not noted", "lock/acquire.lua",
           "note_lease(lease_ms)\n", ""),
)  # fmt: skip


def scripts_of(mutant: Mutant) -> dict[str, Script]:
    """All verbs with the quarantine, one line of them wrong."""
    texts = {SHARED: read_shared(quarantine=True), **{file_of(v): read(file_of(v)) for v in VERBS}}
    texts[mutant.file] = mutant.patch(texts[mutant.file])
    return {verb: assemble(verb, CLOCK, texts[SHARED], texts[file_of(verb)]) for verb in VERBS}

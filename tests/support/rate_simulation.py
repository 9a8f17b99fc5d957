"""Clients of one lock with rates, and a log of its starts that does not depend on the keys.

The scripts are the real ones, on a real Redis whose clock the tests set, also backwards.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reply, Reservation, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import SMOOTH, Rate, packed
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import (
    FLOW_VERBS,
    VERBS,
    Script,
    assemble,
    file_of,
    load_scripts,
    read,
    with_flow,
)
from support.script_model.mutants import Mutant

CLOCK = "local function server_time() return redis.call('GET', 'clock') end"
NAME = "a"
KEYS = Keyspace().lock(NAME)
CLAIM_LEASE = 2.0
WORKER, REALM, ROUTE = "w1", "R", "q"
US = 1_000_000


class Broken(AssertionError):  # an invariant
    """More have started than the rate allows, or nobody starts although it allows one."""


class World:
    """One lock and its clients.

    Args:
        client: of the Redis.
        rates: that its callers declare.
        limit: permits.
        scripts: with a wrong line.
    """

    def __init__(
        self,
        client: Any,
        rates: tuple[Rate, ...],
        limit: int = 3,
        scripts: dict[str, Script] | None = None,
    ) -> None:
        self.client, self.rates, self.limit = client, rates, limit
        self.store = RedisStore(
            client, scripts=scripts or load_scripts(CLOCK), claim_lease=CLAIM_LEASE
        )
        self.now_us = 1_000 * US
        self.counts = False  # a lock counts starts from the first declaration on
        self.starts: list[int] = []
        self.running: dict[str, int] = {}  # token -> when its client started
        self.waiting: list[Owner] = []  # clients, in the order of their arrival
        self._granted, self._granted_at, self._counted = 0, 0, False
        client.flushdb()
        self.advance(0)

    def advance(self, seconds: float) -> None:
        """Move the clock; a negative number sets it back."""
        self.now_us += round(seconds * US)
        self.client.set("clock", self.now_us)

    @property
    def highest(self) -> int:
        """The time that counts: now, or the last start or grant if the clock was set back."""
        return max([self.now_us, self._granted_at, *self.starts[-1:]])

    # -- clients ----------------------------------------------------------------------------------

    def acquire(
        self,
        *,
        wait: float | None = None,
        lease: float = 30.0,
        declares: bool = True,
        attempt: str = "",
        again: Owner | None = None,
    ) -> Reply:
        self.counts = self.counts or declares
        who = again or Owner(new_token(), attempt)
        claim = Claim(NAME, lease, self.limit, flow=packed(self.rates) if declares else "")
        reply = self.store.acquire(who, claim, wait=wait)
        if reply.verdict is Verdict.GRANTED:
            self.starts_now(who.token)
            self.waiting = [other for other in self.waiting if other != who]
        elif reply.verdict is Verdict.WAITING and who not in self.waiting:
            self.waiting.append(who)
        self.check(reply)
        return reply

    def declared(self, rate: Rate) -> Reply:
        """Acquire as a caller with another rate, and check nothing."""
        claim = Claim(NAME, 30.0, self.limit, flow=packed((rate,)))
        return self.store.acquire(Owner(new_token()), claim)

    def claim(self, number: int) -> Reply | None:
        if not self.waiting:
            return None
        who = self.waiting[number % len(self.waiting)]
        reply = self.store.claim(who, NAME, 30.0)
        if reply.verdict is Verdict.GRANTED:
            self.starts_now(who.token)
        if reply.verdict is not Verdict.WAITING:
            self.waiting.remove(who)
        self.check(reply)
        if reply.verdict is Verdict.GRANTED and self._next_waits_for_its_rate():
            if reply.waits_for is not WaitsFor.RATE:
                self.broken("who claims does not learn when the next one may start")
            self._told(reply.next_look)
        return reply

    def release(self, ending: Ending = Ending.FINAL, token: str = "", keep_for: str = "") -> None:
        token = token or next(iter(self.running), "nobody.0")
        reserve = Reservation(keep_for, 30.0) if keep_for else None
        reply = self.store.release(NAME, token, ending, reserve=reserve)
        self.running.pop(token, None)
        self.check()
        if reply.verdict is Verdict.RELEASED and self._next_waits_for_its_rate():
            if reply.waits_for is not WaitsFor.RATE:
                self.broken("who released does not learn when the next one may start")
            self._told(reply.next_look)

    def leaves(self, number: int) -> None:
        """A waiting client, which may have been granted meanwhile, goes away."""
        if self.waiting:
            who = self.waiting.pop(number % len(self.waiting))
            self.release(token=who.token)

    def park(self) -> str:
        """A message of a task is parked; one with or without a rate."""
        token = new_token()
        flow = packed(self.rates) if self.counts else ""
        owner, to_park = (
            Owner(token, token, "t", WORKER),
            MessageToPark(b"body", REALM, ROUTE, None),
        )
        self.store.worker_heartbeat(WORKER, REALM, [ROUTE], 30.0, 9)
        self.store.park(owner, Claim(NAME, 30.0, self.limit, flow=flow), to_park)
        self.check()
        return token

    def kick(self) -> None:
        granted = self.grants()
        swept = self.store.sweep_and_grant(NAME, worker=WORKER)
        self.check()
        told = self.grants() > granted and self._next_waits_for_its_rate()
        if told != (NAME in swept.next_starts):
            self.broken(f"who sweeps is told {swept.next_starts}")
        if told:
            self._told(swept.next_starts[NAME])

    def grants(self) -> int:
        return int(self.client.hget(KEYS.meta, "grants") or 0)

    def _next_waits_for_its_rate(self) -> bool:
        held = [t for t, till in self._holders() if till * 1000 > self.now_us]
        waits = self.client.exists(KEYS.queue) and len(held) < self.limit
        return bool(waits) and self.highest < self.opens_at() < math.inf

    def _told(self, next_look: float) -> None:
        opens, told = self.opens_at(), self.now_us + next_look * US
        if not opens - 1 <= told <= opens + 1001:
            self.broken(f"the rate opens at {opens}, and {told} was told")

    def starts_now(self, token: str) -> None:
        if token not in self.running:
            if self.counts:
                self.starts.append(self.highest)
                self._counts_at_that_time(token)
            self.running[token] = self.highest

    # -- what must hold ---------------------------------------------------------------------------

    def _counts_at_that_time(self, token: str) -> None:
        if any(rate.kind != SMOOTH for rate in self.rates):
            counted = self.client.zscore(f"{KEYS.flow}:log", token)
            if counted != self.highest:
                self.broken(f"a start at {self.highest} counts at {counted}")

    def unclaimed(self) -> int:
        """Number of grants that nobody has claimed, and whose lease has not ended."""
        count = 0
        for token, till in self.client.zrange(KEYS.holders, 0, -1, withscores=True):
            record = json.loads(self.client.hget(KEYS.record, token))
            count += record["state"] == "granted" and till * 1000 > self.now_us
        return count

    def opens_at(self) -> float:
        """Return when the next one may start by all rates; inf: not before a claim or an end."""
        return max((self._opens(rate) for rate in self.rates), default=0.0)

    def _opens(self, rate: Rate) -> float:
        period = rate.period * US
        if not self.counts:
            return 0
        if rate.kind == SMOOTH:
            gap = math.ceil(period / rate.number)
            on_time = 0
            for start in self.starts:
                on_time = max(start, on_time) + gap
            on_time = max(self.highest, on_time) + self.unclaimed() * gap
            return on_time - (rate.burst - 1) * gap
        counted = [s for s in self.starts if s > self.highest - period]
        free = rate.number - self.unclaimed()
        if free <= 0:
            return math.inf
        return 0 if len(counted) < free else counted[len(counted) - free] + period

    def check(self, reply: Reply | None = None) -> None:
        granted = self.grants()
        counts_earlier = self.counts and not self._counted and self.unclaimed() > 0
        if (self.counts and granted > self._granted) or counts_earlier:
            self._granted_at = self.highest
        self._granted, self._counted = granted, self.counts
        self._no_window_has_too_many()
        held = [t for t, till in self._holders() if till * 1000 > self.now_us]
        opens = self.opens_at()
        queued = self.client.zrange(KEYS.queue, 0, -1)
        due = self.client.zscore(KEYS.due, NAME)
        if queued and len(held) < self.limit:
            if due is None:
                self.broken("nobody looks at who waits")
            if opens <= self.highest and due * 1000 > self.now_us:
                self.broken("the rate allows a start, and the first waiter waits")
            if opens < math.inf and due * 1000 > max(opens, self.now_us) + 1000:
                self.broken(f"the rate opens at {opens}, and the next look is at {due * 1000}")
        if reply and reply.verdict is Verdict.BLOCKED and len(held) < self.limit:
            self._blocked_by_its_rate(reply, opens, queued)
        self._what_counts_is_kept()

    def _what_counts_is_kept(self) -> None:
        if self.rates and self.starts and self.starts[-1] == self.highest:
            least = min(rate.period for rate in self.rates) * 1000
            if not self.client.exists(KEYS.bodies) and self.client.pttl(KEYS.flow) < least:
                self.broken("what was counted is forgotten before its period has passed")
        if self.client.exists(KEYS.flow):
            stays = self.client.pttl(KEYS.flow) == -1
            if stays != bool(self.client.exists(KEYS.bodies)):
                self.broken("a rate stays for ever, or may expire beside a message")

    def _blocked_by_its_rate(self, reply: Reply, opens: float, queued: list[bytes]) -> None:
        if opens > self.highest and reply.waits_for is not WaitsFor.RATE:
            self.broken(f"it waits for {reply.waits_for}, and not for the rate")
        if opens <= self.highest and not queued:
            self.broken("the lock is free, and its rate allows a start: it was refused")
        if self.highest < opens < math.inf:
            self._told(reply.next_look)

    def _holders(self) -> list[tuple[bytes, float]]:
        found: list[tuple[bytes, float]] = self.client.zrange(KEYS.holders, 0, -1, withscores=True)
        return found

    def _no_window_has_too_many(self) -> None:
        for rate in self.rates:
            most = rate.number + rate.burst
            period = rate.period * US
            for i, start in enumerate(self.starts):
                inside = sum(1 for other in self.starts[: i + 1] if other > start - period)
                if inside > most:
                    self.broken(f"{inside} started in one period of {rate}")
            if rate.kind == SMOOTH:
                self._is_smooth(rate)

    def _is_smooth(self, rate: Rate) -> None:
        gap = math.ceil(rate.period * US / rate.number)
        for i in range(len(self.starts) - rate.burst):
            ahead = self.starts[i] + gap - self.starts[i + rate.burst]
            if ahead > 0:
                self.broken(f"{rate.burst + 1} starts came within one interval of {rate}")

    def broken(self, what: str) -> None:
        raise Broken(what)


def walk(world: World, seed: int, steps: int = 60) -> None:
    """Clients come, wait, claim, die and go; the clock may be set back."""
    chance = random.Random(seed)
    for _ in range(steps):
        number = chance.randrange(9)
        moves = [
            lambda: world.acquire(declares=chance.random() < 0.8),
            lambda: world.acquire(wait=chance.choice([3.0, 30.0])),
            lambda n=number: world.claim(n),
            world.release,
            lambda n=number: world.leaves(n),
            world.kick,
            world.park,
            lambda: world.advance(chance.choice([0.01, 0.3, 1.0, 1.0, 2.5])),
            lambda: world.advance(chance.choice([-0.5, -4.0])),
        ]
        chance.choices(moves, [4, 3, 6, 5, 1, 3, 1, 6, 1])[0]()


RATES = (
    (Rate("3/5s"),),
    (Rate("1/s"),),
    (Rate("4/2s", kind="smooth", burst=2),),
    (Rate("2/s"), Rate("5/10s"), Rate("30/m", kind="smooth", burst=5)),
)


# --- histories ------------------------------------------------------------------------------------


def late_claims(world: World) -> None:
    """Grants of one period are claimed in the next: they count in the period of their claims."""
    world.rates = (Rate("2/s"),)
    for _ in range(3):
        world.acquire()
    for _ in range(6):
        world.acquire(wait=60.0)
    world.advance(1.001)
    world.release()
    world.release()
    world.advance(0.9)
    world.claim(0)
    world.claim(0)
    world.advance(0.2)
    for _ in range(3):
        world.release()
        world.kick()
    for _ in range(3):
        world.claim(0)


def lapsed_grant(world: World) -> None:
    """A grant that nobody claims gives its start back."""
    world.rates = (Rate("1/m"),)
    world.limit = 1
    world.acquire(lease=300.0)
    world.acquire(wait=300.0)
    world.acquire(wait=300.0)
    world.waiting.pop(0)  # it has died
    world.advance(60)
    world.release()
    world.advance(CLAIM_LEASE + 0.1)
    world.kick()
    if world.claim(0).verdict is not Verdict.GRANTED:
        world.broken("a start is lost with a grant that nobody claimed")


def grant_given_back(world: World) -> None:
    """A client that was granted, and goes away before it claims, gives its start back."""
    world.rates = (Rate("1/m"),)
    world.limit = 1
    world.acquire(lease=300.0)
    world.acquire(wait=300.0)
    world.acquire(wait=300.0)
    world.advance(60)
    world.release()
    world.leaves(0)
    if world.claim(0).verdict is not Verdict.GRANTED:
        world.broken("a start is lost with a client that went away")


def clock_set_back(world: World) -> None:
    """A start after the clock was set back counts as long as the last one before."""
    world.rates = (Rate("2/5s"),)
    for seconds in (5.5, -5.4, 5.1):
        world.acquire()
        world.release()
        world.advance(seconds)
    world.acquire()


def clock_set_back_before_a_claim(world: World) -> None:
    """A claim after the clock was set back counts at the time of its grant."""
    world.rates = (Rate("1/s"),)
    world.acquire()
    world.acquire(wait=30.0)
    world.advance(1.5)
    world.kick()
    world.advance(-1.0)
    world.claim(0)


def spread_starts(world: World) -> None:
    """A start counts for the whole period."""
    world.rates = (Rate("2/4s"),)
    world.acquire()
    world.advance(3)
    world.acquire()
    world.acquire()


def repeated_claim(world: World) -> None:
    """A claim without an answer is repeated: that is one start."""
    world.rates = (Rate("1/2s"),)
    world.limit = 1
    world.acquire()
    who = Owner(new_token())
    world.acquire(wait=60.0, again=who)
    world.advance(2)
    world.release()
    world.claim(0)
    world.advance(1.9)
    for _ in range(2):
        world.store.claim(who, NAME, 30.0)
    world.advance(0.2)
    world.release(token=who.token)
    if world.acquire().verdict is not Verdict.GRANTED:
        world.broken("a repeated claim counts as another start")


def lower_rate(world: World) -> None:
    """Of two callers with different rates the lower rate is in force, until the lock is idle."""
    world.rates = (Rate("1/5s"),)
    world.acquire()
    if world.declared(Rate("9/5s")).verdict is not Verdict.BLOCKED:
        world.broken("the higher rate is in force")
    world.release()
    world.rates = (Rate("9/5s"),)
    world.acquire()


def two_rates(world: World) -> None:
    """Callers with rates of different periods: both are in force."""
    world.rates = (Rate("1/5s"),)
    world.acquire()
    if world.declared(Rate("9/10s")).verdict is not Verdict.BLOCKED:
        world.broken("the rate of the other caller is forgotten")


def retry_above_the_rate(world: World) -> None:
    """A retry whose permit was kept starts when the rate allows it, before all others."""
    world.rates = (Rate("1/5s"),)
    world.limit = 1
    world.acquire(attempt="id/0/0")
    world.acquire(wait=60.0)
    world.release(Ending.KEEP, keep_for="id/1/0")
    if world.acquire(attempt="id/1/0").waits_for is not WaitsFor.RATE:
        world.broken("the retry waits for its own reservation")
    retry = world.acquire(wait=60.0, attempt="id/1/0")
    if retry.verdict is not Verdict.WAITING or retry.rank != 1:
        world.broken(f"the retry was told {retry.verdict}, rank {retry.rank}")


def a_day(world: World) -> None:
    """A rate of a day counts starts of this morning, though the lock was idle since."""
    world.rates = (Rate("1/d"),)
    world.acquire()
    world.release()
    left = world.client.pttl(KEYS.flow), world.client.pttl(f"{KEYS.flow}:log")
    if min(left) < 86_400_000 or max(left) > 86_500_000:
        world.broken(f"what was counted lives for {left} ms")
    if world.acquire(declares=False).verdict is not Verdict.BLOCKED:
        world.broken("a caller without a rate passes that of the others")


def declared_again(world: World) -> None:
    """A rate is kept for a period and a minute after its last declaration."""
    world.rates = (Rate("5/h"),)
    world.acquire()
    world.client.pexpire(KEYS.flow, 1000)
    world.acquire()


def message_ends(world: World) -> None:
    """A rate that was kept for a message expires after it."""
    world.rates = (Rate("5/h"),)
    world.acquire()
    world.release(token=world.park())
    world.release()


def sweep_that_grants(world: World) -> None:
    """Of two messages one may start now, and the next one a moment later."""
    world.rates, world.limit = (Rate("2/10s"),), 9
    world.acquire()
    world.advance(5)
    world.acquire()
    for _ in range(2):
        world.park()
    world.advance(5.1)
    world.kick()


def long_log(world: World) -> None:
    """Starts that no rate counts any more are deleted."""
    world.rates = (Rate("50/s"),)
    world.limit = 1000
    for _ in range(3):
        for _ in range(50):
            world.acquire()
        world.advance(1)
    if world.client.zcard(f"{KEYS.flow}:log") > 101:
        world.broken("the log keeps what no rate counts")


def another_rate_between(world: World) -> None:
    """What the first caller's rate counts is kept for its period, and no longer."""
    rare, often = packed((Rate("2/m"),)), packed((Rate("9/s"),))

    def calls(flow: str) -> bool:
        who = Owner(new_token())
        reply = world.store.acquire(who, Claim(NAME, 30.0, world.limit, flow=flow))
        world.store.release(NAME, who.token, Ending.FINAL)
        return reply.verdict is Verdict.GRANTED

    if not (calls(rare) and calls(rare)):
        world.broken("a rate allows less than it says")
    for _ in range(3):
        world.advance(5)
        if not calls(often):
            world.broken("the idle lock has not taken the rate of its caller")
    if calls(rare):
        world.broken("the first rate has forgotten its starts")
    world.advance(121)
    calls(often)
    world.advance(121)
    calls(often)
    if json.loads(world.client.hget(KEYS.flow, "past")):
        world.broken("a rate that counts nothing any more is remembered")


HISTORIES = (
    another_rate_between,
    late_claims,
    lapsed_grant,
    grant_given_back,
    clock_set_back,
    clock_set_back_before_a_claim,
    spread_starts,
    repeated_claim,
    lower_rate,
    two_rates,
    retry_above_the_rate,
    a_day,
    declared_again,
    message_ends,
    sweep_that_grants,
    long_log,
)

LIBRARY = "shared"
MUTANTS = (
    Mutant("no rate is in force", LIBRARY, "if rates then return rates.waits(rec) end\n", ""),
    Mutant("the clock may be set back", LIBRARY,
           "local at = math.max(now_us, tonumber(kept.seen or 0))", "local at = now_us"),
    Mutant("the highest time is not kept", LIBRARY,
           "digits(at - longest_window()))\n    if old > 0 then "
           "redis.call('ZREMRANGEBYRANK', log, 0, "
           "math.min(old, 10 * BATCH) - 1) end\n    redis.call('HSET', flow, 'seen', digits(at))\n",
           "digits(at - longest_window()))\n    if old > 0 then "
           "redis.call('ZREMRANGEBYRANK', log, 0, "
           "math.min(old, 10 * BATCH) - 1) end\n"),
    Mutant("the time of a grant is not kept", LIBRARY,
           "    redis.call('HSET', flow, 'seen', digits(at)) -- its claim counts", "    --"),
    Mutant("one too many may start", LIBRARY, "if over <= 0 then",
           "if over <= 1 then"),
    Mutant("one too few may start", LIBRARY, "if over <= 0 then",
           "if over < 0 then", (("'LIMIT', over - 1, 1)", "'LIMIT', math.max(0, over - 1), 1)"),)),
    Mutant("the next look is that of the last start", LIBRARY,
           "'LIMIT', over - 1, 1)", "'LIMIT', taken - 1, 1)"),
    Mutant("the next look is a period from now", LIBRARY, "return tonumber(leaves) + rate[3]",
           "return tonumber(leaves) < UNCLAIMED and at + rate[3] or UNCLAIMED"),
    Mutant("unclaimed grants are starts that are over", LIBRARY,
           "    redis.call('ZADD', log, digits(UNCLAIMED), token)\n", ""),
    Mutant("a grant is a start", LIBRARY, "    redis.call('ZADD', log, digits(UNCLAIMED), token)\n",
           "    redis.call('ZADD', log, digits(at), token)\n"),
    Mutant("a claim is no start", LIBRARY,
           "if rates and rec.state ~= 'running' and not starts_later then"
           " rates.note_start(token, rec) end\n",
           ""),
    Mutant("a repeated claim is another start", LIBRARY,
           "if rates and rec.state ~= 'running' and not starts_later then", "if rates then"),
    Mutant("a direct grant is no start", LIBRARY,
           "  if rates and not starts_later then rates.note_start(token, rec) end\n", ""),
    Mutant("a grant does not count", LIBRARY,
           "  if rates then rates.note_grant(token, rec) end\n", ""),
    Mutant("an ended grant counts on", LIBRARY,
           "if ended(token) then redis.call('ZREM', log, token) end",
           "local _ = token",
           (("if not since or tonumber(since) < UNCLAIMED then return end",
             "if true then return end"),)),
    Mutant("a smooth rate has no interval", LIBRARY,
           "digits(on_time(rate) + cost * gap_of(rate))",
           "digits(on_time(rate))"),
    Mutant("a smooth rate saves up starts", LIBRARY, "return math.max(at, tonumber(kept['tat:'",
           "return math.max(0, tonumber(kept['tat:'"),
    Mutant("a smooth rate forgets grants", LIBRARY, "(taken - rate[4] + cost)", "(cost - rate[4])"),
    Mutant("a smooth rate has a larger burst", LIBRARY, "(taken - rate[4] + cost)",
           "(taken - rate[4])"),
    Mutant("a smooth rate has no burst", LIBRARY, "(taken - rate[4] + cost)", "taken"),
    Mutant("only the last rate counts", LIBRARY,
           "do till = math.max(till, opens_at(rate, rec)) end",
           "do till = opens_at(rate, rec) end"),
    Mutant("the higher rate is in force", LIBRARY, "= math.min(other[2], rate[2]),",
           "= math.max(other[2], rate[2]),"),
    Mutant("an idle lock keeps its rate", LIBRARY,
           "      if replace then replace_own(wanted.rates) end\n", ""),
    Mutant("other rates are forgotten", LIBRARY,
           "      if replace then replace_own(wanted.rates) end\n",
           "      replace_own(wanted.rates)\n"),
    Mutant("an idle lock forgets what other rates count", LIBRARY,
           "tonumber(each[2]) > at and #left < MOST_PAST", "false"),
    Mutant("an idle lock remembers rates for ever", LIBRARY,
           "tonumber(each[2]) > at and #left < MOST_PAST", "#left < MOST_PAST"),
    Mutant("what another rate counts is not logged", LIBRARY,
           "for _, each in ipairs(past) do known[#known + 1] = each[1] end", ""),
    Mutant("a retry passes the rate", LIBRARY, "  return not reason, place\n",
           "  return not later or reason == 'rate', place\n"),
    Mutant("a retry loses its place to the rate", LIBRARY,
           " or reason == 'redis' or reason == 'rate'", " or reason == 'redis'"),
    Mutant("a retry takes its own reservation for a holder", LIBRARY,
           "told_reason(kept_for_me and redis.call('ZCARD', holders) - 1)", "told_reason()"),
    Mutant("a day is forgotten after a minute", LIBRARY,
           "math.max(math.ceil(longest_window() / 1000), left_ms or 0)", "0"),
    Mutant("a rate is not kept for its callers", LIBRARY,
           "    live(flow)\n    live(log)\n    each_costed",
           "    live(log)\n    each_costed"),
    Mutant("a rate expires beside a message", LIBRARY,
           "if stored or ruling_ends() == math.huge then return redis.call('PERSIST', flow) end",
           "if stored then return end"),
    Mutant("a rate stays after its messages", LIBRARY,
           "if left or redis.call('PTTL', flow) == -1 then", "if left then"),
    Mutant("who releases does not learn of the next start", LIBRARY,
           "if (rates or paused) and redis.call('ZCARD', queue) > 0 then "
           "reason, till = told_reason() end", ""),
    Mutant("who claims does not learn of the next start", LIBRARY,
           "(lease_end(token) or now) - now, 0, look, why, '')",
           "(lease_end(token) or now) - now, 0, next_look_ms, '', '')"),
    Mutant("who sweeps does not learn of the next start", "lock/sweep_and_grant.lua",
           "if (why == 'rate' or why == 'pause') and till then", "if false then"),
    Mutant("who has granted nothing is told all the same", "lock/sweep_and_grant.lua",
           "if rates and grants > granted_before and", "if rates and"),
    Mutant("starts are kept for ever", LIBRARY,
           "    redis.call('ZADD', log, digits(at), token)\n    live(log)\n",
           "    redis.call('ZADD', log, digits(at), token)\n    redis.call('PERSIST', log)\n"),
    Mutant("the log is not tidied up", LIBRARY, "if old > 0 then", "if old < 0 then"),
    Mutant("the log is tidied up too early", LIBRARY, "digits(at - longest_window())",
           "digits(at - longest_window() / 2)"),
    Mutant("a caller without a rate does not see that of others", LIBRARY,
           "rates = left > 0 and redis.call('EXISTS', flow) == 1 and open_rates() or nil",
           "rates = nil"),
    Mutant("the usual case does not see a rate", "lock/acquire.lua", "adrift, done, flow)\n",
           "adrift, done)\n"),
)  # fmt: skip


def scripts_of(mutant: Mutant) -> dict[str, Script]:
    """All verbs, one line of them wrong."""
    texts = {LIBRARY: read(LIBRARY), **{file_of(v): read(file_of(v)) for v in VERBS}}
    texts[mutant.file] = mutant.patch(texts[mutant.file])
    bodies = {verb: texts[file_of(verb)] for verb in VERBS}
    bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
    return {verb: assemble(verb, CLOCK, texts[LIBRARY], body) for verb, body in bodies.items()}

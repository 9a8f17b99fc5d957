"""Clients of one lock whose rate counts costs, and an account of what they use.

The account is kept without the keys: a list of what each start and each charge has used. The
scripts are the real ones, on a real Redis whose clock the tests set, also backwards.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import Rate, packed
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import Script, load_scripts
from support.rate_simulation import CLAIM_LEASE, CLOCK, KEYS, LIBRARY, NAME, US, Broken
from support.script_model.mutants import Mutant

RATES = (Rate("20/5s", cost=1), Rate("20/5s", kind="smooth", burst=10, cost=1))
LEASE = 30.0


class Account:
    """One lock, its clients, and what they have used.

    Args:
        client: of the Redis.
        rate: that the callers declare, with costs of their own.
        limit: permits.
        scripts: with a wrong line.
    """

    def __init__(
        self, client: Any, rate: Rate, limit: int = 9, scripts: dict[str, Script] | None = None
    ) -> None:
        self.client, self.rate, self.limit = client, rate, limit
        self.store = RedisStore(
            client, scripts=scripts or load_scripts(CLOCK), claim_lease=CLAIM_LEASE
        )
        self.now_us, self.seen = 1_000 * US, 0
        self.used: list[list[int]] = []  # when, how much
        self.starts: dict[str, list[int]] = {}  # token -> its entry in `used`
        self.costs: dict[str, int] = {}
        self.waiting: list[Owner] = []
        self.charges = 0
        self._grants = 0
        client.flushdb()
        self.advance(0)

    def advance(self, seconds: float) -> None:
        """Move the clock; a negative number sets it back."""
        self.now_us += round(seconds * US)
        self.client.set("clock", self.now_us)

    @property
    def at(self) -> int:
        """The time that counts."""
        return max(self.now_us, self.seen)

    @property
    def gap(self) -> int:
        return math.ceil(self.rate.period * US / self.rate.number)

    # -- clients ----------------------------------------------------------------------------------

    def acquire(self, cost: int, wait: float | None = None, *, declares: bool = True) -> Owner:
        who = Owner(new_token())
        rates = (self.rate.costing(cost),) if declares else ()
        self.costs[who.token] = cost if declares else 1
        claim = Claim(NAME, LEASE, self.limit, flow=packed(rates))
        for _ in range(2):  # the first reply is lost
            reply = self.store.acquire(who, claim, wait=wait)
            if reply.verdict is Verdict.GRANTED:
                self.starts_now(who)
        if reply.verdict is Verdict.WAITING:
            self.waiting.append(who)
        self.check()
        return who

    def claim(self, number: int) -> None:
        if self.waiting:
            who = self.waiting[number % len(self.waiting)]
            for _ in range(2):
                reply = self.store.claim(who, NAME, LEASE)
                if reply.verdict is Verdict.GRANTED:
                    self.starts_now(who)
            if reply.verdict is not Verdict.WAITING:
                self.waiting.remove(who)
            self.check()

    def starts_now(self, who: Owner) -> None:
        if who.token not in self.starts:
            self.seen = self.at
            self.starts[who.token] = [self.at, self.costs[who.token]]
            self.used.append(self.starts[who.token])

    def release(self, number: int) -> None:
        running = [token for token, _ in self.holders() if token in self.starts]
        if running:
            self.store.release(NAME, running[number % len(running)], Ending.FINAL)
        self.check()

    def leaves(self, number: int) -> None:
        """A waiter, which may have been granted meanwhile, goes away."""
        if self.waiting:
            who = self.waiting.pop(number % len(self.waiting))
            self.store.release(NAME, who.token, Ending.FINAL)
            self.check()

    def charge(self, number: int, amount: int) -> None:
        """Charge for a running client, or for one whose lock is lost; the first reply is lost."""
        tokens = list(self.starts)
        if not tokens:
            return
        token, held = tokens[-1 - number % len(tokens)], dict(self.holders())
        self.charges += 1
        for _ in range(2):
            self.store.charge(NAME, token, f"charge {self.charges}", amount, [self.rate.key])
        self.seen = self.at
        if amount > 0:
            self.used.append([self.at, amount])
        elif token in held:
            self.starts[token][1] -= min(-amount, self.starts[token][1])
        self.check()

    # -- what must hold ---------------------------------------------------------------------------

    def holders(self) -> list[tuple[str, str]]:
        """Return the tokens with leases that have not ended, and their states."""
        found = self.client.zrange(KEYS.holders, 0, -1, withscores=True)
        return [
            (token.decode(), json.loads(self.client.hget(KEYS.record, token))["state"])
            for token, till in found
            if till * 1000 > self.now_us
        ]

    def counted(self) -> float:
        """Return what counts now, of starts and charges."""
        if not self.rate.burst:
            since = self.at - self.rate.period * US
            return sum(amount for when, amount in self.used if when > since)
        level, before = 0, 0
        for when, amount in self.used:  # replayed, with what each has really used
            level = max(0, level - (when - before)) + amount * self.gap
            before = when
        return max(0, level - (self.at - before)) / self.gap

    def check(self) -> None:
        self.store.sweep_and_grant(NAME)
        grants = int(self.client.hget(KEYS.meta, "grants") or 0)
        granted, self._grants = grants > self._grants, grants
        unclaimed = [token for token, state in self.holders() if state == "granted"]
        if granted:
            self.seen = self.at
        total = self.counted() + sum(self.costs[token] for token in unclaimed)
        (rate,) = self.store.inspect(NAME).rates
        if math.ceil(round(total, 4)) != rate.started:
            raise Broken(f"{total} count, and the lock says {rate.started}")
        if granted and total > self.rate.most + 1e-6:
            raise Broken(f"{total} count after a grant, of {self.rate.most}")
        self._nobody_waits_without_need(total)

    def _nobody_waits_without_need(self, total: float) -> None:
        head = self.client.zrange(KEYS.queue, 0, 0)
        if not head or len(self.holders()) >= self.limit:
            return
        if total + self.costs[head[0].decode()] <= self.rate.most - 1e-6:
            raise Broken("the first waiter may start, and waits")
        due = self.client.zscore(KEYS.due, NAME) * 1000
        if self.rate.burst and due > self.at + self.rate.period * 20 * US:
            raise Broken("nobody looks in time")
        if not self.rate.burst and due > self.at + self.rate.period * US + 1000:
            raise Broken("nobody looks in time")


def walk(account: Account, seed: int, steps: int = 50) -> None:
    """Clients come, wait, claim, are charged, die and go; the clock may be set back."""
    chance = random.Random(seed)
    cost = lambda: chance.choice([0, 1, 1, 3, 7, 10])  # noqa: E731
    account.acquire(1)
    for _ in range(steps):
        number = chance.randrange(9)
        moves = [
            lambda: account.acquire(cost(), declares=chance.random() < 0.9),
            lambda: account.acquire(cost(), wait=chance.choice([3.0, 60.0])),
            lambda n=number: account.claim(n),
            lambda n=number: account.release(n),
            lambda n=number: account.leaves(n),
            lambda n=number: account.charge(n, chance.choice([1, 4, 30])),
            lambda n=number: account.charge(n, chance.choice([-1, -3, -50])),
            lambda: account.advance(chance.choice([0.01, 0.25, 0.5, 1.0, 2.5, 5.0])),
            lambda: account.advance(chance.choice([-0.5, -4.0])),
        ]
        chance.choices(moves, [3, 4, 6, 3, 1, 2, 3, 7, 1])[0]()


def given_back_after_it_has_gone(account: Account) -> None:
    """A start whose level was 0 since then has nothing to give back."""
    first = account.acquire(10)
    account.advance(4)
    account.acquire(8)
    account.charge(list(reversed(list(account.starts))).index(first.token), -10)


def given_back_twice(account: Account) -> None:
    """Two starts give back, and the second finds the level that the first has left."""
    account.acquire(4)
    account.acquire(4)
    account.advance(0.5)
    account.acquire(1)
    account.charge(2, -4)
    account.charge(1, -4)


def given_back_keeps_its_time(account: Account) -> None:
    """What a start keeps leaves with the period of its start."""
    account.acquire(10)
    account.advance(3)
    account.charge(0, -5)
    account.advance(2.1)
    account.check()


def given_back_while_others_start(account: Account) -> None:
    """What a start gives back was never free meanwhile, so all of it is."""
    for _ in range(4):
        account.acquire(5)
        account.advance(1.25)
    for number in range(4):
        account.charge(number, -5)


def cheaper_one_behind(account: Account) -> None:
    """The first waits for its cost, and the second one behind it."""
    account.acquire(account.rate.most - 1)
    account.acquire(5, wait=60.0)
    account.acquire(1, wait=60.0)
    account.claim(1)


def lapsed_grant(account: Account) -> None:
    """A grant that nobody claims gives its cost back."""
    account.acquire(account.rate.most)
    account.acquire(5, wait=60.0)
    account.advance(5)
    account.acquire(1, wait=60.0)
    account.advance(CLAIM_LEASE + 0.1)
    account.check()


def long_usage(account: Account) -> None:
    """What no rate counts any more leaves the log and the sum."""
    for _ in range(5):
        for _ in range(9):
            account.acquire(1)
            account.release(0)
        account.advance(5)
    log = f"{KEYS.flow}:log:{account.rate.key}"
    account.acquire(1)
    if account.client.zcard(log) > 3 or not account.client.pttl(KEYS.flow) > 0:
        raise Broken("the log keeps what no rate counts")


HISTORIES = (
    given_back_after_it_has_gone,
    given_back_twice,
    given_back_keeps_its_time,
    given_back_while_others_start,
    cheaper_one_behind,
    lapsed_grant,
    long_usage,
)


def play(client: Any, scripts: dict[str, Script] | None = None, walks: int = 2) -> None:
    for rate in RATES:
        for history in HISTORIES:
            history(Account(client, rate, scripts=scripts))
        for seed in range(walks):
            walk(Account(client, rate, limit=2 + 3 * seed, scripts=scripts), seed)


MUTANTS = (
    Mutant("each start costs 1", LIBRARY,
           "return rate[5] and rec and rec.costs and tonumber(rec.costs[rate[1]]) or 1 end",
           "return 1 end"),
    Mutant("costs are not stored with a waiter", LIBRARY, "rec.costs = costs or rec.costs",
           "local _ = rec"),
    Mutant("the first waiter's cost does not count", LIBRARY, "local over = taken + cost - rate[2]",
           "local over = taken + 1 - rate[2]"),
    Mutant("a smooth rate ignores the cost of the next one", LIBRARY,
           "(taken - rate[4] + cost) * gap_of", "(taken - rate[4] + 1) * gap_of"),
    Mutant("the sum is not added up", LIBRARY, "    add_used(rate, cost)\n", ""),
    Mutant("the sum keeps what has left", LIBRARY, "then add_used(rate, -cost_in(entry)) end",
           "then return end"),
    Mutant("what has left counts on", LIBRARY,
           "for _, entry in ipairs(outdated(rate, -1)) do used = used - cost_in(entry) end", "",
           (("    each_costed(function(rate)\n      forget_outdated(rate)\n",
             "    each_costed(function(rate)\n"),)),
    Mutant("a grant costs nothing until it is claimed", LIBRARY,
           "      enter(rate, cost, token, UNCLAIMED)\n", ""),
    Mutant("a claimed grant counts twice", LIBRARY,
           "if rate[5] and not again then strike(rate, digits(cost) .. ' ' .. token) end", ""),
    Mutant("an ended grant counts on", LIBRARY,
           "if ended(string.match(entry, ' (.*)$')) then strike(rate, entry) end",
           "local _ = entry",
           (("strike(rate, digits(cost_of(rate, rec)) .. ' ' .. token) end)", "end)"),)),
    Mutant("a smooth start counts 1", LIBRARY, "digits(on_time(rate) + cost * gap_of(rate))",
           "digits(on_time(rate) + gap_of(rate))"),
    Mutant("a repeated charge counts twice", LIBRARY, "      if repeated then return end\n", ""),
    Mutant("a smooth charge does not count", LIBRARY,
           "if amount > 0 and rate[4] > 0 then return add_smooth(rate, amount) end",
           "if amount > 0 and rate[4] > 0 then return end"),
    Mutant("a charge does not count", LIBRARY,
           "if amount > 0 then return enter(rate, amount, '+' .. charge_id, at) end",
           "if amount > 0 then return end"),
    Mutant("more is given back than a start has cost", LIBRARY,
           "local less = math.min(cost, -amount)", "local less = -amount"),
    Mutant("a start gives back again and again", LIBRARY, "rec.given[rate[1]] = given + less", ""),
    Mutant("a smooth start gives back what later ones use", LIBRARY,
           "then back = math.min(back, low[2]) end", "then local _ = low end"),
    Mutant("a start gives back only what is left of its own", LIBRARY,
           "if tonumber(low[1]) > since then back", "if tonumber(low[1]) >= since then back"),
    Mutant("levels do not follow what is given back", LIBRARY,
           "if tonumber(low[1]) > since then low[2] = low[2] - back end", ""),
    Mutant("a sliding start keeps what it gives back", LIBRARY,
           "    enter(rate, cost - less, token, tonumber(score))\n",
           "    enter(rate, cost, token, tonumber(score))\n"),
    Mutant("what is given back begins a new period", LIBRARY,
           "enter(rate, cost - less, token, tonumber(score))",
           "enter(rate, cost - less, token, at)"),
)  # fmt: skip

"""Clients and an operator of one lock, and a model of its limit that does not read the keys.

The scripts are the real ones, on a real Redis whose clock the tests set, also backwards.
"""

from __future__ import annotations

import math
import random
from typing import Any

from celery_singleton_lock.config.computed_options import Computed
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reply, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import Rate, rates_of
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.scripts import (
    ADMIN_VERBS,
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
JANE = Operator("jane")
LEASE = 40.0
CLAIM_LEASE = 4.0
GRACE_MS = 60_000
US = 1_000_000
HOUR = 3600.0


class Broken(AssertionError):  # an invariant
    """A value of an operator is in force too long or too short, or nobody looks when it ends."""


class World:
    """One lock, its clients and its operator.

    Args:
        client: of the Redis.
        scripts: with a wrong line.
    """

    def __init__(self, client: Any, scripts: dict[str, Script] | None = None) -> None:
        self.client = client
        real = {**load_scripts(CLOCK), **load_admin_scripts(CLOCK)}
        self.store = RedisAdminStore(client, scripts=scripts or real, claim_lease=CLAIM_LEASE)
        self.store.operations.scripts.update(scripts or real)
        self.now_us = 1_000 * US
        self.pause_ends, self.limit_ends, self.rates_end = 0.0, 0.0, 0.0  # ms; inf: by a call
        self.ruled, self.static = 1, 1
        self.newest: tuple[int, int] | None = None  # limit, place
        self.running: dict[str, Owner] = {}
        self.waiting: list[Owner] = []
        client.flushdb()
        self.advance(0)

    @property
    def now(self) -> float:
        """Milliseconds, as the scripts count."""
        return float(self.now_us // 1000)

    def advance(self, seconds: float) -> None:
        """Move the clock. A value that has ended is forgotten with the next call that writes."""
        self.now_us += round(seconds * US)
        self.client.set("clock", self.now_us)

    # -- what is in force -------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self.pause_ends > self.now

    @property
    def declared(self) -> int:
        return self.static if self.newest is None else min(self.static, self.newest[0])

    @property
    def limit(self) -> int:
        return self.ruled if self.limit_ends > self.now else self.declared

    def held(self) -> int:
        return sum(1 for _, till in self.holders() if till > self.now)

    def holders(self) -> list[tuple[bytes, float]]:
        found: list[tuple[bytes, float]] = self.client.zrange(KEYS.holders, 0, -1, withscores=True)
        return found

    def _idle(self) -> bool:
        return not self.held() and not self.client.zcard(KEYS.queue)

    # -- clients ----------------------------------------------------------------------------------

    def acquire(
        self,
        number: int,
        *,
        computed: bool = False,
        age: float = 0.0,
        copy: bool = False,
        wait: float | None = None,
    ) -> Reply:
        """Ask for the lock, as a task that declares this limit, or whose arguments give it."""
        self.advance(0.001)  # no two arrive at the same time
        self._forget_ended()
        place = self.now_us - round(age * US)
        who = Owner(new_token(), f"{new_token()}/0/0")
        self._note_declared(number, place, computed=computed, copy=copy)
        claim = Claim(NAME, LEASE, number, place, copy=int(copy))
        if computed:
            options = Computed(number).applied(LockOptions())
            claim = claim._replace(limit=options.declared_limit, flow=options.flow)
        before = self.client.zcount(KEYS.queue, "-inf", place)
        free = not self.paused and self.held() + before < self.limit
        reply = self.store.acquire(who, claim, wait=wait)
        if free != (reply.verdict is Verdict.GRANTED) and wait is None:
            self.broken(f"limit {self.limit}, {self.held()} hold it: {reply}")
        if reply.verdict is Verdict.GRANTED:
            self.running[who.token] = who
        elif reply.verdict is Verdict.WAITING:
            self.waiting.append(who)
        if reply.verdict is Verdict.BLOCKED and self.paused:
            self._told(reply)
        self.check()
        return reply

    def _note_declared(self, number: int, place: int, *, computed: bool, copy: bool) -> None:
        swept = [till for _, till in self.holders() if till <= self.now]
        idle = self._idle() and not (swept and self.client.zcard(KEYS.queue))
        wanted = 2**31 - 1 if computed else number
        if idle or wanted < self.static:
            self.static = wanted
        if not computed:
            return
        known = self.newest
        newer = known is None or known[1] > self.now_us or (not copy and place >= known[1])
        if copy and known is not None:
            newer = False
        if newer:
            self.newest = (number, place)

    def _told(self, reply: Reply) -> None:
        if reply.waits_for is not WaitsFor.PAUSE:
            self.broken(f"it waits for {reply.waits_for}, and not for the pause")
        left = (self.pause_ends - self.now) / 1000
        if left < math.inf and not left - 0.01 <= reply.next_look <= left + 0.01:
            self.broken(f"the pause ends in {left}, and {reply.next_look} was told")

    def claim(self, number: int) -> None:
        self._forget_ended()
        if self.waiting:
            who = self.waiting[number % len(self.waiting)]
            verdict = self.store.claim(who, NAME, LEASE).verdict
            if verdict is Verdict.GRANTED:
                self.running[who.token] = who
            if verdict is not Verdict.WAITING:
                self.waiting.remove(who)
            self.check()

    def release(self) -> None:
        self._forget_ended()
        token = next(iter(self.running), "nobody.0")
        self.running.pop(token, None)
        self.store.release(NAME, token, Ending.FINAL)
        self.check(swept=False)

    def renew(self) -> None:
        asked = [(NAME, token, LEASE) for token in self.running]
        if asked:
            self.store.extend(asked)
            self.check(swept=False)

    def sweep(self) -> None:
        self._forget_ended()
        self.store.sweep_and_grant(NAME)
        self.check()

    # -- the operator -----------------------------------------------------------------------------

    def pause(self, seconds: float | None) -> None:
        self._forget_ended()
        self.store.pause(NAME, JANE, seconds=seconds)
        self.pause_ends = self._ends(seconds)
        self.check()

    def resume(self) -> None:
        self._forget_ended()
        self.store.resume(NAME, JANE)
        self.pause_ends = 0.0
        self.check()

    def set_limit(self, number: int | None, seconds: float | None) -> None:
        self._forget_ended()
        now = self.store.set_limit(NAME, number, JANE, seconds=seconds)
        self.ruled, self.limit_ends = number or 1, self._ends(seconds) if number else 0.0
        if now != self.limit:
            self.broken(f"the limit is {self.limit}, and {now} was told")
        self.check()

    def set_rate(self, seconds: float | None, *, clear: bool = False) -> None:
        """Set a rate that is never reached: only its life is checked."""
        self._forget_ended()
        rates = () if clear else rates_of(Rate("9999/s"))
        self.store.set_rates(NAME, rates, JANE, seconds=seconds)
        self.rates_end = 0.0 if clear else self._ends(seconds)
        self.check()

    def _ends(self, seconds: float | None) -> float:
        return math.inf if seconds is None else self.now + seconds * 1000

    def _forget_ended(self) -> None:
        """A call that writes sees what has ended: that does not come back with the clock."""
        if self.pause_ends <= self.now:
            self.pause_ends = 0.0
        if self.limit_ends <= self.now:
            self.limit_ends = 0.0
        if self.rates_end <= self.now:
            self.rates_end = 0.0

    # -- what must hold ---------------------------------------------------------------------------

    def check(self, *, swept: bool = True) -> None:
        held, queued = self.held(), self.client.zcard(KEYS.queue)
        due = self.client.zscore(KEYS.due, NAME)
        if swept and queued and not self.paused and held < self.limit and due > self.now:
            self.broken("a permit is free, and the first waiter waits")
        if queued:
            self._somebody_looks(due, held)
        view = self.store.inspect(NAME)
        if bool(view.paused) != self.paused:
            self.broken(f"paused until {self.pause_ends}, and {view.paused!r} is shown")
        if view.limit_set != (self.limit_ends > self.now):
            self.broken(f"the limit ends at {self.limit_ends}, and {view.limit_set} is shown")
        if view.rates_set != (self.rates_end > self.now):
            self.broken(f"the rate ends at {self.rates_end}, and {view.rates_set} is shown")
        if view.limit and view.limit != self.limit and held:
            self.broken(f"the limit is {self.limit}, and {view.limit} is shown")
        self._is_kept_and_not_for_ever()

    def _somebody_looks(self, due: float | None, held: int) -> None:
        """By the earliest time at which the answer can change, or when a lease ends."""
        earliest = math.inf
        if self.paused:
            earliest = self.pause_ends
        elif held >= self.limit and self.limit_ends > self.now and self.ruled < self.declared:
            earliest = self.limit_ends
        if earliest < math.inf and (due is None or due > earliest):
            self.broken(f"something ends at {earliest}, and the next look is at {due}")

    def _is_kept_and_not_for_ever(self) -> None:
        ends = max(self.pause_ends, self.limit_ends, self.rates_end)
        left = self.client.pttl(KEYS.meta)
        if ends == math.inf:
            if left != -1:
                self.broken(f"meta expires in {left} ms before what an operator has set")
        elif ends > self.now and 0 <= left < ends - self.now - 1000:
            self.broken(f"meta expires in {left} ms, and something ends at {ends}")
        elif left == -1 and not self.client.exists(KEYS.bodies):
            self.broken("meta lives for ever, after what an operator has set")
        self._flow_is_kept(self.client.pttl(KEYS.flow))

    def _flow_is_kept(self, flow: int) -> None:
        if self.rates_end > self.now and (flow == -2 or 0 <= flow < self.rates_end - self.now):
            self.broken(f"flow expires in {flow} ms before the rate of an operator")
        if flow == -1 and self.rates_end != math.inf:
            self.broken("flow lives for ever, after the rate of an operator")
        if self.newest and flow != -2:
            last = max((till for _, till in self.holders()), default=self.now)
            if 0 <= flow < last - self.now - 1000:
                self.broken(f"flow expires in {flow} ms before the last lease ends")

    def broken(self, what: str) -> None:
        raise Broken(what)


def walk(world: World, seed: int, steps: int = 60) -> None:
    """Clients come and go, an operator changes his mind, the clock may be set back."""
    chance = random.Random(seed)
    for _ in range(steps):
        number, seconds = chance.randrange(1, 5), chance.choice([None, 1.0, 5.0, 20.0])
        moves = [
            lambda n=number: world.acquire(n),
            lambda n=number: world.acquire(n, computed=True),
            lambda n=number: world.acquire(n, computed=True, age=chance.choice([2.0, 9.0])),
            lambda n=number: world.acquire(n, computed=True, copy=True),
            lambda n=number: world.acquire(n, computed=chance.random() < 0.5, wait=HOUR),
            lambda n=number: world.claim(n),
            world.release,
            world.renew,
            world.sweep,
            lambda s=seconds: world.pause(s),
            world.resume,
            lambda n=number, s=seconds: world.set_limit(n, s),
            lambda: world.set_limit(None, None),
            lambda s=seconds: world.set_rate(s),
            lambda: world.set_rate(None, clear=True),
            lambda: world.advance(chance.choice([0.3, 1.0, 2.5, 6.0])),
            lambda: world.advance(chance.choice([-0.5, -3.0])),
        ]
        chance.choices(moves, [3, 4, 2, 1, 4, 5, 4, 2, 4, 3, 2, 3, 1, 2, 1, 8, 1])[0]()


# --- histories ------------------------------------------------------------------------------------


def pause_with_a_waiter(world: World) -> None:
    world.acquire(1)
    world.acquire(1, wait=HOUR)
    world.pause(5.0)
    world.release()
    world.advance(5.0)
    world.sweep()
    world.claim(0)
    if not world.running:
        world.broken("the waiter of a pause that has ended does not start")


def lower_limit_with_a_waiter(world: World) -> None:
    world.acquire(2)
    world.set_limit(1, 5.0)
    world.acquire(2, wait=HOUR)
    world.advance(5.0)
    world.sweep()
    world.claim(0)
    if len(world.running) != 2:
        world.broken("the waiter behind a limit that has ended does not start")


def end_and_clock_back(world: World) -> None:
    world.pause(5.0)
    world.set_limit(3, 5.0)
    world.set_rate(5.0)
    world.advance(5.0)
    world.sweep()
    world.advance(-3.0)
    world.check()
    world.acquire(1)


def pause_again(world: World) -> None:
    world.pause(5.0)
    world.pause(None)
    world.advance(20.0)
    world.check()
    world.pause(1.0)
    world.advance(1.0)
    world.pause(None)
    world.check()


def limit_again(world: World) -> None:
    world.set_limit(3, 5.0)
    world.set_limit(2, None)
    world.advance(20.0)
    world.check()
    world.set_limit(None, None)


def renewals(world: World) -> None:
    for seconds in (None, 90.0):
        world.acquire(1)
        world.pause(seconds)
        world.renew()
        world.resume()
        world.set_limit(2, seconds)
        world.renew()
        world.set_limit(None, None)
        world.set_rate(seconds)
        world.renew()
        world.set_rate(None, clear=True)
        world.renew()
        world.release()


def raised_limit(world: World) -> None:
    world.acquire(1, computed=True)
    for _ in range(3):
        world.acquire(1, computed=True, wait=HOUR)
    world.acquire(3, computed=True, wait=HOUR)
    if world.held() != 3:
        world.broken(f"the limit was raised to 3, and {world.held()} hold the lock")


def older_values(world: World) -> None:
    world.acquire(3, computed=True)
    world.acquire(1, computed=True, age=5.0)
    world.acquire(1, computed=True, copy=True)
    world.advance(-60.0)
    world.acquire(2, computed=True)


def static_and_computed(world: World) -> None:
    world.acquire(4, computed=True)
    world.acquire(2)
    world.acquire(1, computed=True)
    world.acquire(9, computed=True)
    world.release()
    world.release()
    world.acquire(9, computed=True)


def long_run_of_a_computed_limit(world: World) -> None:
    world.acquire(2, computed=True)
    for _ in range(4):
        world.advance(30.0)
        world.client.pexpire(KEYS.flow, 10_000)
        world.renew()
    world.acquire(4, computed=True)
    world.acquire(4, computed=True)


HISTORIES = (
    pause_with_a_waiter,
    lower_limit_with_a_waiter,
    end_and_clock_back,
    pause_again,
    limit_again,
    renewals,
    raised_limit,
    older_values,
    static_and_computed,
    long_run_of_a_computed_limit,
)

LIBRARY = "shared"
PAUSE, LIMIT = "operator/pause.lua", "operator/set_limit.lua"
RATES, EXTEND = "operator/set_rates.lua", "lock/extend_leases.lua"
MUTANTS = (
    Mutant("a pause has no end", LIBRARY, "pause_ended and pause_ended <= now", "false"),
    Mutant("a limit has no end", LIBRARY, "limit_ended and limit_ended <= now", "false"),
    Mutant("the rates of an operator have no end", LIBRARY, "if set_ended then set = nil end", ""),
    Mutant(
        "a pause that has ended stays",
        LIBRARY,
        "if ruling.pause_ended then redis.call('HDEL', meta, 'paused', 'paused_until') end",
        "",
    ),
    Mutant(
        "a limit that has ended stays",
        LIBRARY,
        "if ruling.limit_ended then redis.call('HDEL', meta, 'ruled', 'ruled_until') end",
        "",
    ),
    Mutant("rates that have ended stay", LIBRARY, "if rates then rates.drop_ruling() end", ""),
    Mutant(
        "nobody hears when a pause ends",
        LIBRARY,
        "return 'pause', ruling.pause and math.max(ruling.pause, closed or 0) end",
        "return 'pause' end",
    ),
    Mutant(
        "nobody looks when a lower limit ends",
        LIBRARY,
        "if ruled and ruled < declared then",
        "if false then",
    ),
    Mutant(
        "meta does not know of a pause",
        LIBRARY,
        "local pause_till = paused and (ruling.pause or math.huge) or 0",
        "local pause_till = 0",
    ),
    Mutant(
        "meta does not know of a limit",
        LIBRARY,
        "local limit_till = ruled and (ruling.limit or math.huge) or 0",
        "local limit_till = 0",
    ),
    Mutant("meta does not know of rates", LIBRARY, "rates and rates.ruling_ends() or 0)", "0)"),
    Mutant(
        "meta lives for ever beside a pause",
        LIBRARY,
        "local pause_till = paused and (ruling.pause or math.huge) or 0",
        "local pause_till = paused and math.huge or 0",
    ),
    Mutant(
        "flow does not know of rates",
        LIBRARY,
        "local least = math.max(ruling_ends(), tonumber(last or 0))",
        "local least = math.max(0, tonumber(last or 0))",
    ),
    Mutant(
        "flow does not know of holders",
        LIBRARY,
        "local least = math.max(ruling_ends(), tonumber(last or 0))",
        "local least = math.max(ruling_ends(), 0)",
    ),
    Mutant(
        "flow expires before rates without an end",
        LIBRARY,
        "if stored or ruling_ends() == math.huge then return",
        "if ruling_ends() == math.huge then return end\n    if stored then return",
    ),
    Mutant(
        "an older message overrides",
        LIBRARY,
        "if last and (copy or place < last and last <= now_us) then",
        "if last and copy then",
    ),
    Mutant(
        "a copy overrides",
        LIBRARY,
        "if last and (copy or place < last and last <= now_us) then",
        "if last and place < last and last <= now_us then",
    ),
    Mutant(
        "a place in the future overrides",
        LIBRARY,
        "if last and (copy or place < last and last <= now_us) then",
        "if last and (copy or place < last) then",
    ),
    Mutant(
        "a computed limit is not bounded",
        LIBRARY,
        "return math.min(lowest, newest.limit[1])",
        "return newest.limit[1]",
    ),
    Mutant(
        "a computed limit has no effect",
        LIBRARY,
        "return math.min(lowest, newest.limit[1])",
        "return lowest",
    ),
    Mutant(
        "the lowest number is forgotten",
        LIBRARY,
        "    redis.call('HSET', flow, 'static', kept.static)\n",
        "",
    ),
    Mutant(
        "the lowest number stays on an idle lock",
        LIBRARY,
        "local lowest = (wanted < before or idle) and wanted or before",
        "local lowest = wanted < before and wanted or before",
    ),
    Mutant(
        "a later pause keeps the first end",
        PAUSE,
        "if changed then redis.call('HDEL', meta, 'paused_until') end",
        "",
    ),
    Mutant(
        "a pause for a time has no end",
        PAUSE,
        "if till then redis.call('HSET', meta, 'paused_until', digits(till)) end",
        "",
    ),
    Mutant(
        "a pause does not replace one that has an end",
        PAUSE,
        "(not paused or till or ruling.pause)",
        "(not paused or till)",
    ),
    Mutant(
        "a pause does not give one an end",
        PAUSE,
        "(not paused or till or ruling.pause)",
        "(not paused or ruling.pause)",
    ),
    Mutant("a pause is deleted with an ended one", PAUSE, "drop_ended_rulings()\n", ""),
    Mutant("a pause without an end expires", PAUSE, "  redis.call('PERSIST', meta)\n", ""),
    Mutant(
        "a later limit keeps the first end",
        LIMIT,
        "redis.call('HDEL', meta, 'ruled', 'ruled_until')\n",
        "if limit_arg == '' then redis.call('HDEL', meta, 'ruled', 'ruled_until') end\n",
    ),
    Mutant(
        "a limit for a time has no end",
        LIMIT,
        "  redis.call('HSET', meta, 'ruled_until', digits(ruling.limit))\n",
        "",
    ),
    Mutant("a limit without an end expires", LIMIT, "  redis.call('PERSIST', meta)\n", ""),
    Mutant(
        "a cleared limit stays", LIMIT, "redis.call('HDEL', meta, 'ruled', 'ruled_until')\n", ""
    ),
    Mutant("rates without an end expire with meta", RATES, "  redis.call('PERSIST', meta)\n", ""),
    Mutant(
        "rates for a time have no end", RATES, "rates.rule(wanted, till)", "rates.rule(wanted, nil)"
    ),
    Mutant(
        "a renewal lets the rates of an operator expire",
        EXTEND,
        "deadlines, adrift, flow) == 0",
        "deadlines, adrift) == 0",
    ),
    Mutant(
        "a renewal lets a limit expire",
        EXTEND,
        "local free = held and not set[1] and not set[2]",
        "local free = held and not set[1]",
    ),
)


def scripts_of(mutant: Mutant) -> dict[str, Script]:
    """All verbs, one line of them wrong."""
    verbs = {**VERBS, **ADMIN_VERBS}
    texts = {LIBRARY: read(LIBRARY), **{file_of(v): read(file_of(v)) for v in verbs}}
    texts[mutant.file] = mutant.patch(texts[mutant.file])
    bodies = {verb: texts[file_of(verb)] for verb in verbs}
    bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
    operators = f"{texts[LIBRARY]}\n\n{read('shared/operator.lua')}"
    return {
        verb: assemble(verb, CLOCK, operators if verb in ADMIN_VERBS else texts[LIBRARY], body)
        for verb, body in bodies.items()
    }

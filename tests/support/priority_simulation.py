"""Waiters of one lock with priorities, and a model of its queue that does not read the keys.

The scripts are the real ones, on a real Redis whose clock the tests set.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed
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
    read,
    with_flow,
)
from support.script_model.mutants import Mutant

CLOCK = "local function server_time() return redis.call('GET', 'clock') end"
NAME, WORKER, REALM = "a", "w", "R"
KEYS = Keyspace().lock(NAME)
BY = Operator("model")
US = 1_000_000
LEASE = 100_000.0  # longer than a walk
HEAD_STARTS = (0, 0, 0, 5 * US, 60 * US, 86_400 * US, -5 * US, -86_400 * US)


class Broken(AssertionError):  # the model and the scripts differ
    """A waiter stands elsewhere than in the model."""


@dataclass
class Waiter:
    """A waiter of the model.

    Attributes:
        token: its present owner token.
        arrived: time of its arrival.
        place: position in the queue.
        parked: whether its message is stored.
    """

    token: str
    arrived: int
    place: int
    parked: bool
    returns: int = 0

    @property
    def order(self) -> tuple[int, str]:
        return self.place, self.token


class World:
    """One lock with one permit, and its queue as it must be.

    Args:
        client: of the Redis.
        scripts: with a wrong line.
    """

    def __init__(self, client: Any, scripts: dict[str, Script] | None = None) -> None:
        self.client, self.now_us, self.numbers = client, 10**15, 0
        scripts = dict(scripts or scripts_of(None))
        self.store = RedisAdminStore(client, scripts=dict(scripts), claim_lease=LEASE)
        self.store.operations.scripts.update(scripts)  # those of operators too
        self.queue: list[Waiter] = []
        self.adrift: list[Waiter] = []
        self.holder: Waiter | None = None
        self.paused = False
        client.flushdb()
        self.advance(0)
        self.store.worker_heartbeat(WORKER, REALM, ["q"], 10**6, 10**6)

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * US)
        self.client.set("clock", self.now_us)

    # -- what happens ------------------------------------------------------------------------------

    def arrive(
        self, head_start: int = 0, ago: float = 0, *, parks: bool, waits: bool = True
    ) -> str:
        """A client or a message comes; `ago` seconds before now, 0 if its place is not known."""
        self.numbers += 1
        token = f"t{self.numbers:06}.0"
        owner = Owner(token, f"{token}/0/0", "task", WORKER if parks else "")
        place = round(self.now_us - ago * US) if ago else 0
        claim = Claim(NAME, LEASE, place=place, flow=packed((), head_start))
        arrived = self._arrival(place)
        me = Waiter(token, arrived, max(0, arrived - head_start), parks)
        if parks:
            self.store.park(owner, claim, MessageToPark(b"body", REALM, "q"))
        else:
            verdict = self.store.acquire(owner, claim, wait=LEASE if waits else None).verdict
            first = min([*self.queue, me], key=lambda each: each.order) is me
            may = not self.holder and not self.paused and first
            if (verdict is Verdict.GRANTED) != may:
                self.broken(f"{token} is {verdict.value}, and may start: {may}")
        if parks or waits or not (self.holder or self.paused or self.queue):
            self.queue.append(me)
        self.check()
        return token

    def _arrival(self, place: int) -> int:
        if place:
            return min(place, self.now_us)
        last = max(self.queue, key=lambda each: each.order, default=None)
        if last is None or last.place < self.now_us:
            return self.now_us
        return max(self.now_us, last.arrived + 1)

    def asks_again(self, number: int) -> None:
        """A client that waits asks again, as after a heartbeat; it names no place."""
        clients = [each for each in self.queue if not each.parked]
        if clients:
            me = clients[number % len(clients)]
            owner = Owner(me.token, f"{me.token}/0/0", "task")
            self.store.acquire(owner, Claim(NAME, LEASE), wait=LEASE)
            self.check()

    def end(self, ending: Ending = Ending.FINAL) -> None:
        """The holder ends, or its message returns."""
        me = self.holder
        if me is None:
            return
        again = ending is Ending.AGAIN and me.parked
        if again:
            self.store.claim(Owner(me.token), NAME, LEASE)
        self.store.release(NAME, me.token, ending)
        self.holder = None
        if again:
            me.returns += 1
            me.token = self._next(me.token)
            self._returned(me)
        self.check()

    def _returned(self, me: Waiter) -> None:
        """The first time it keeps its place; later it waits, and goes behind all."""
        if me.returns == 1:
            self.queue.append(me)
        else:
            self._grant()
            self.check_waiting()
            self.advance(120)
            self.store.sweep_and_grant(NAME, worker=WORKER, realm=REALM)
            self._go_to_the_end(me)

    def _go_to_the_end(self, me: Waiter) -> None:
        me.arrived = self._arrival(0)
        last = max((each.place for each in self.queue), default=0)
        me.place = max(me.arrived, last + 1)
        self.queue.append(me)

    def force(self) -> None:
        """An operator takes the lock from its holder, whose message goes behind all waiters."""
        me = self.holder
        if me is not None:
            self.store.force_release(NAME, me.token, BY, keep=True)
            self.holder = None
            if me.parked:
                me.token = self._next(me.token)
                self._go_to_the_end(me)
            self.check()

    def promote(self, number: int) -> None:
        if self.queue:
            me = self.queue[number % len(self.queue)]
            first = min(each.place for each in self.queue)
            self.store.promote(NAME, me.token, BY)
            me.place = min(me.place, first - 1)
            self.check()

    def pause(self, *, paused: bool) -> None:
        (self.store.pause if paused else self.store.resume)(NAME, BY)
        self.paused = paused
        self.check()

    def retry_in_a_pause(self) -> None:
        """A retried client finds its reserved permit, and the lock paused: it is the next."""
        me = self.holder
        if me is None or me.parked or self.paused:
            return
        kept = Reservation(f"{me.token}/1/0", LEASE)
        self.store.release(NAME, me.token, Ending.KEEP, reserve=kept)
        self.pause_only()
        token = f"r{me.token}"
        self.store.acquire(Owner(token, kept.attempt), Claim(NAME, LEASE), wait=LEASE)
        first = min((each.place for each in self.queue), default=10**18)
        self.holder = None
        arrived = self._arrival(0)
        self.queue.append(Waiter(token, arrived, min(me.place, first - 1), parked=False))
        self.check()

    def pause_only(self) -> None:
        self.store.pause(NAME, BY)
        self.paused = True

    def replace(self, head_start: int) -> None:
        """A message takes the room of the one that arrived first, whatever its priority."""
        parked = [each for each in self.queue if each.parked]
        if not (self.holder or self.paused) or not parked:
            return
        self.numbers += 1
        token = f"t{self.numbers:06}.0"
        claim = Claim(
            NAME, LEASE, max_waiting=len(self.queue), replace=True, flow=packed((), head_start)
        )
        to_park = MessageToPark(b"body", REALM, "q")
        self.store.park(Owner(token, f"{token}/0/0", "task", WORKER), claim, to_park)
        oldest = min(parked, key=lambda each: (each.arrived, each.order))
        self.queue.remove(oldest)
        arrived = self._arrival(0)
        self.queue.append(Waiter(token, arrived, max(0, arrived - head_start), parked=True))
        self.check()

    # -- what must be ------------------------------------------------------------------------------

    @staticmethod
    def _next(token: str) -> str:
        number = int(token.rpartition(".")[2])
        return f"{base_of(token)}.{number + 1}"

    def _grant(self) -> None:
        if self.holder is None and not self.paused and self.queue:
            self.holder = min(self.queue, key=lambda each: each.order)
            self.queue.remove(self.holder)

    def check(self) -> None:
        self._grant()
        self.check_waiting()

    def check_waiting(self) -> None:
        view = self.store.inspect(NAME, waiters=0)
        held, holder = [each.token for each in view.holders], self.holder
        if held != ([holder.token] if holder else []):
            self.broken(f"{held} hold the lock, and not {holder}")
        found, _ = self.store.list_waiters(NAME, "queue", most=10**6)
        places = [(each.token, each.place, each.arrived or each.place) for each in found]
        wanted = [
            (each.token, each.place, each.arrived)
            for each in sorted(self.queue, key=lambda each: each.order)
        ]
        if places != wanted:
            self.broken(f"the queue is {places}, and not {wanted}")
        self._check_ages(wanted)

    def _check_ages(self, wanted: list[tuple[str, int, int]]) -> None:
        (lock,) = self.store.summarise_named([NAME]) or [None]
        oldest = max(0.0, (self.now_us - wanted[0][2]) / US) if wanted else 0.0
        if lock is not None and abs(max(0.0, lock.oldest) - oldest) > 0.01:
            self.broken(f"its first waiter has waited {lock.oldest}, and not {oldest}")
        listed = dict(self.client.zrange(self._route, 0, -1, withscores=True))
        parked = {each.token.encode(): each.arrived for each in self.queue if each.parked}
        if listed != parked:
            self.broken(f"listed as parked are {listed}, and not {parked}")

    @property
    def _route(self) -> str:
        return f"{KEYS.fleet}:parked:{REALM}:q"

    def broken(self, what: str) -> None:
        raise Broken(what)


def walk(world: World, seed: int, steps: int = 60) -> None:
    """Play random moves."""
    dice = random.Random(seed)
    for _ in range(steps):
        number, head_start = dice.randrange(99), dice.choice(HEAD_STARTS)
        ago = dice.choice((0, 0, 0.5, 8, 100))
        moves = (
            lambda h=head_start, a=ago: world.arrive(h, a, parks=True),
            lambda h=head_start, a=ago: world.arrive(h, a, parks=False),
            lambda h=head_start, a=ago: world.arrive(h, a, parks=False, waits=False),
            world.end,
            lambda: world.end(Ending.AGAIN),
            lambda n=number: world.asks_again(n),
            world.force,
            lambda n=number: world.promote(n),
            lambda n=number: world.pause(paused=bool(n % 2)),
            world.retry_in_a_pause,
            lambda h=head_start: world.replace(h),
        )
        weights = (6, 4, 2, 5, 3, 2, 1, 1, 1, 1, 2)
        dice.choices(moves, weights)[0]()
        world.advance(dice.choice((0, 0.000_001, 0.3, 4, 30)))


LIBRARY = "shared"
ACQUIRE, PARK = "lock/acquire.lua", "lock/park.lua"
COUNTED = "view/summarise_locks.lua"
# fmt: off
MUTANTS = (
    Mutant("no head start counts", LIBRARY, "arrived - ahead", "arrived"),
    Mutant("a head start is a delay", LIBRARY, "arrived - ahead", "arrived + ahead"),
    Mutant("the arrival is lost", LIBRARY,
           "rec.place, rec.arrived = digits(math.max(0, arrived - ahead)), rec.place",
           "rec.place = digits(math.max(0, arrived - ahead))"),
    Mutant("a promoted waiter arrived earlier", LIBRARY,
           "rec.arrived, rec.place = rec.arrived or rec.place, place", "rec.place = place"),
    Mutant("each move is an arrival", LIBRARY,
           "rec.arrived, rec.place = rec.arrived or rec.place, place",
           "rec.arrived, rec.place = rec.place, place"),
    Mutant("a waiter that can wait delays later ones", LIBRARY,
           "(rec and arrival_of(rec) or last) + 1", "last + 1"),
    Mutant("after a clock that was set back, later ones pass", LIBRARY,
           "return math.max(now_us, (rec and arrival_of(rec) or last) + 1)", "return now_us"),
    Mutant("a waiter of the same microsecond is not after the last", LIBRARY,
           "local rec = last >= now_us and", "local rec = last > now_us and",
           (("(rec and arrival_of(rec) or last) + 1",
             "(rec and arrival_of(rec) or last - 1) + 1"),)),
    Mutant("who returns often keeps its head start", LIBRARY,
           "else move_behind_all(rec) end", "end"),
    Mutant("who goes behind all is before those that can wait", LIBRARY,
           "  if last >= arrived then move_to(rec, digits(last + 1)) end\n", ""),
    Mutant("who goes behind all is as old as before", LIBRARY,
           "rec.place, rec.arrived = digits(arrived), "
           "rec.preempt and (rec.arrived or rec.place) or",
           "rec.place = digits(arrived) or"),
    Mutant("a forced message is next again", "operator/force_release.lua",
           "    move_behind_all(rec) --", "    --"),
    Mutant("messages are listed by their place", LIBRARY, "rec.arrived or rec.place, token)",
           "rec.place, token)"),
    Mutant("the most urgent is replaced", LIBRARY, "if not prioritised then return",
           "if true then return"),
    Mutant("the newest is replaced", LIBRARY, "arrival_of(rec) < arrival_of(first)",
           "arrival_of(rec) > arrival_of(first)"),
    Mutant("nobody notes that there are priorities", LIBRARY,
           "  redis.call('HSET', meta, 'prioritised', '1') --", "  --"),
    Mutant("a retry is not the next in acquire", ACQUIRE,
           "if first then move_to(rec, first) end\n", ""),
    Mutant("asking again is a new arrival", ACQUIRE, "if not rec then\n", "if true then\n"),
    Mutant("a client without a place has one", ACQUIRE, "  place_at(rec, tonumber(place_us))\n",
           "  place_at(rec, now_us)\n"),
    Mutant("promote puts it behind the first", "operator/promote.lua", "digits(first - 1)",
           "digits(first + 1)"),
    Mutant("the first waiter is as old as its place", COUNTED,
           "string.match(raw, '\"arrived\":\"(%d+)\"') or first[2]", "first[2]"),
)
# fmt: on


def scripts_of(mutant: Mutant | None) -> dict[str, Script]:
    """All scripts; with a mutant, one line of them is wrong."""
    verbs = (*VERBS, *ADMIN_VERBS)
    texts = {LIBRARY: read(LIBRARY), **{file_of(v): read(file_of(v)) for v in verbs}}
    if mutant is not None:
        texts[mutant.file] = mutant.patch(texts[mutant.file])
    bodies = {verb: texts[file_of(verb)] for verb in verbs}
    bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
    shared = f"{texts[LIBRARY]}\n\n{read('shared/operator.lua')}"
    library = {verb: shared if verb in ADMIN_VERBS else texts[LIBRARY] for verb in bodies}
    return {verb: assemble(verb, CLOCK, library[verb], body) for verb, body in bodies.items()}

"""Messages of one lock that settle, and an account of which of them must run, and when.

The account is kept without the keys. The scripts are the real ones, on a real Redis whose clock
the tests set, also backwards.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.settle import Settle
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.replies import delivery
from celery_singleton_lock.store.scripts import Script, load_admin_scripts, load_scripts
from support.rate_simulation import CLOCK, KEYS, LIBRARY, NAME, REALM, ROUTE, US, WORKER, Broken
from support.script_model.mutants import Mutant

SETTLES = (
    Settle(5),
    Settle(5, 12),
    Settle(5, run_first=True),
    Settle(200, 500, run_first=True),
)
"""With a quiet period that is longer than an idle lock lives, too."""

TASKS = ("app.one", "app.two")
LEASE = 30.0
BY = Operator("test")


@dataclass
class Message:
    """One call, and where it must be.

    Args:
        token: owner token.
        task: name of the task.
        place: microseconds.
        copy: whether the broker has delivered it before.
        began: milliseconds at which the first message of its burst came.
        settled: milliseconds at which it queues.
    """

    token: str
    task: str
    place: int
    copy: bool = False
    began: int = 0
    settled: int = 0

    def is_older_than(self, other: Message) -> bool:
        """Return whether the worker that has this one received it before the other one."""
        return (self.copy and not other.copy) or self.place < other.place


class Bursts:
    """One lock, and the messages of two tasks.

    Args:
        client: of the Redis.
        settle: of both tasks.
        scripts: with a wrong line.
    """

    def __init__(
        self, client: Any, settle: Settle, scripts: dict[str, Script] | None = None
    ) -> None:
        self.client, self.settle = client, settle
        self.store = RedisAdminStore(client, scripts=scripts or load_scripts(CLOCK))
        self.store.operations.scripts.update(load_admin_scripts(CLOCK))
        self.fleet = self.store.keyspace.fleet
        self.now_us, self.sent = 1_000 * US, 0
        self.settling: dict[str, Message] = {}  # task -> the newest
        self.came: dict[str, int] = {}  # task -> when its last message came
        self.expected: list[tuple[str, str, str]] = []  # verdict, token, by
        self.running: list[str] = []
        self.unended: list[str] = []  # delivered to end, and the worker has not yet
        client.flushdb()
        self.advance(0)
        self.store.worker_heartbeat(WORKER, REALM, [ROUTE], 10_000_000.0, 1_000)

    @property
    def now(self) -> int:
        return self.now_us // 1000

    def advance(self, seconds: float) -> None:
        """Move the clock; a negative number sets it back."""
        self.now_us += round(seconds * US)
        self.client.set("clock", self.now_us)

    # -- what happens -----------------------------------------------------------------------------

    def send(
        self, task: str, *, copy: bool = False, late: float = 0.0, settles: bool = True
    ) -> str:
        """Store a message that a worker received ``late`` seconds ago; the first reply is lost."""
        self.sent += 1
        self._settle_due()
        message = Message(f"t{self.sent}.0", task, self.now_us - round(late * US), copy)
        flow = packed((), settle=self.settle if settles else None)
        claim = Claim(NAME, LEASE, 1_000, message.place, copy=int(copy), flow=flow)
        owner = Owner(message.token, f"t{self.sent}/0/0", task, WORKER)
        if settles:
            self._arrives(message)
        else:
            self.expected.append(("granted", message.token, ""))
        for _ in range(2):
            reply = self.store.park(owner, claim, MessageToPark(b"m", REALM, ROUTE))
            if reply.verdict is not Verdict.WAITING:
                msg = f"{message} is answered {reply}"
                raise Broken(msg)
        self.check()
        return message.token

    def _arrives(self, message: Message) -> None:
        older, last = self.settling.get(message.task), self.came.get(message.task)
        self.came[message.task] = self.now
        quiet = round(self.settle.quiet * 1000)
        if older is None and self.settle.run_first and (last is None or last + quiet <= self.now):
            self.expected.append(("granted", message.token, ""))
            return
        if older is not None and message.is_older_than(older):
            self.expected.append(("replaced", message.token, older.token))
            return
        message.began = self.now
        if older is not None:
            message.began = older.began
            self.expected.append(("replaced", older.token, message.token))
        message.settled = self.now + quiet
        if self.settle.most is not None:
            message.settled = min(message.settled, message.began + round(self.settle.most * 1000))
        self.settling[message.task] = message

    def _settle_due(self) -> None:
        due = [each for each in self.settling.values() if each.settled <= self.now]
        for each in due:
            del self.settling[each.task]
            self.expected.append(("granted", each.token, ""))

    def sweep(self) -> None:
        self._settle_due()
        swept = self.store.sweep_and_grant(NAME, worker=WORKER)
        wanted = min((each.settled - self.now for each in self.settling.values()), default=None)
        found = swept.next_starts.get(NAME)
        if (None if found is None else round(found * 1000)) != wanted:
            msg = f"the next message settles in {wanted} ms, and the sweep says {found} s"
            raise Broken(msg)
        self.check()

    def end(self, number: int) -> None:
        if self.running:
            self._settle_due()
            token = self.running.pop(number % len(self.running))
            self.store.release(NAME, token, Ending.FINAL, worker=WORKER)
            self.check()

    def revoke(self, task: str, *, ends: bool = True) -> None:
        self._settle_due()
        if task in self.settling:
            token = self.settling.pop(task).token
            self.expected.append(("revoked", token, ""))
            self.store.deliver_revoked(NAME, token, realm=REALM, worker=WORKER)
            if not ends:
                self.unended.append(token)
            self.check()

    def drop(self, task: str) -> None:
        self._settle_due()
        if task in self.settling:
            self.store.drop_waiters(NAME, [self.settling.pop(task).token], by=BY)
            self.check()

    # -- what must be true ------------------------------------------------------------------------

    def check(self) -> None:
        """Compare what the worker received and what is stored with the account."""
        found = [delivery(raw) for raw in self._inbox()]
        told = sorted((each.verdict, each.token, _token_of(each.by)) for each in found)
        if told != sorted(self.expected):
            msg = f"the worker received {told}, and should have received {sorted(self.expected)}"
            raise Broken(msg)
        self.expected = []
        wrong = [each for each in found if each.settled is not (each.verdict == "replaced")]
        if wrong:
            msg = f"{wrong}: only what was replaced had not settled"
            raise Broken(msg)
        for each in found:  # as a worker does
            if each.verdict == "granted":
                self.store.claim(Owner(each.token, worker=WORKER), NAME, 1_000_000.0)
                self.running.append(each.token)
            elif each.token not in self.unended:
                self.store.release(NAME, each.token, Ending.FINAL, worker=WORKER)
        self._check_stored()

    def _inbox(self) -> list[bytes]:
        inbox = f"{self.fleet}:inbox:{WORKER}"
        found = self.client.lrange(inbox, 0, -1)
        self.client.delete(inbox)
        return list(found)

    def _check_stored(self) -> None:
        records = {
            token.decode(): json.loads(raw)
            for token, raw in self.client.hgetall(KEYS.record).items()
        }
        deadlines = dict(self.client.zrange(KEYS.deadlines, 0, -1, withscores=True))
        stored = {
            token: (rec["task"], int(deadlines.get(token.encode(), -1)))
            for token, rec in records.items()
            if rec.get("delayed")
        }
        wanted = {each.token: (each.task, each.settled) for each in self.settling.values()}
        if stored != wanted:
            msg = f"these settle: {stored}; and should: {wanted}"
            raise Broken(msg)
        bodies = {base.decode() for base in self.client.hkeys(KEYS.bodies)}
        if bodies != {token.partition(".")[0] for token in (*wanted, *self.running, *self.unended)}:
            msg = f"these messages are stored: {bodies}"
            raise Broken(msg)
        due = self.client.zscore(KEYS.due, NAME)
        first = min((settled for _, settled in wanted.values()), default=None)
        if first is not None and (due is None or due > first):
            msg = f"nobody looks before {due}, and a message settles at {first}"
            raise Broken(msg)
        left = self.client.pttl(KEYS.flow)
        if self.settle.run_first and 0 <= left < self.settle.quiet * 1000 - (
            self.now - max(self.came.values(), default=self.now)
        ):
            msg = f"the last call is forgotten in {left} ms"
            raise Broken(msg)


def _token_of(attempt: str) -> str:
    return f"{attempt.partition('/')[0]}.0" if attempt else ""


# -- histories -------------------------------------------------------------------------------------


def walk(bursts: Bursts, seed: int, steps: int = 60) -> None:
    """Anything in any order."""
    choose = random.Random(seed)
    for _ in range(steps):
        choose.choice(STEPS)(bursts, choose, choose.choice(TASKS))
    finish(bursts)


def _pass_time(bursts: Bursts, choose: random.Random, _task: str) -> None:
    bursts.advance(choose.choice([0.5, 2, 4, 6, 90]))
    bursts.sweep()


def _send(bursts: Bursts, choose: random.Random, task: str) -> None:
    bursts.send(task, late=choose.choice([0, 0, 0, 0.5, 3]))


STEPS = (
    *(_send, _send, _send, _send, _pass_time, _pass_time),
    lambda bursts, _choose, task: bursts.send(task, copy=True),
    lambda bursts, _choose, task: bursts.send(task, settles=False),
    lambda bursts, choose, _task: bursts.end(choose.randrange(9)),
    lambda bursts, _choose, task: bursts.revoke(task),
    lambda bursts, _choose, task: bursts.drop(task),
    lambda bursts, _choose, _task: bursts.sweep(),
)


def finish(bursts: Bursts) -> None:
    """Let all settle and end: then nothing is left for ever."""
    bursts.advance(600)
    bursts.sweep()
    while bursts.running:
        bursts.end(0)
    lasting = [key for key in bursts.client.keys(f"*{{{NAME}}}*") if bursts.client.pttl(key) == -1]
    if lasting:
        msg = f"these keys stay for ever: {lasting}"
        raise Broken(msg)


def long_burst(bursts: Bursts) -> None:
    """A steady stream queues at its maximum, if it has one."""
    for _ in range(12):
        bursts.send(TASKS[0])
        bursts.advance(bursts.settle.quiet * 0.75)
        bursts.sweep()
    finish(bursts)


def clock_back(bursts: Bursts) -> None:
    """A message that came before the clock was set back settles when it has come again."""
    bursts.send(TASKS[0])
    bursts.advance(-3)
    bursts.sweep()
    bursts.send(TASKS[1])
    finish(bursts)


def apart(bursts: Bursts) -> None:
    """The end of one quiet period is not that of another task."""
    bursts.send(TASKS[0])
    bursts.send(TASKS[0])
    bursts.advance(2)
    bursts.send(TASKS[1])
    bursts.send(TASKS[1])
    for _ in range(4):
        bursts.advance(bursts.settle.quiet / 3)
        bursts.sweep()
    finish(bursts)


def revoked_and_not_ended(bursts: Bursts) -> None:
    """A message that comes meanwhile has nothing to replace."""
    bursts.send(TASKS[0])
    bursts.send(TASKS[0])
    bursts.revoke(TASKS[0], ends=False)
    bursts.send(TASKS[0])


HISTORIES = (long_burst, clock_back, apart, revoked_and_not_ended)


def play(client: Any, scripts: dict[str, Script] | None = None, walks: int = 2) -> None:
    for settle in SETTLES:
        for history in HISTORIES:
            history(Bursts(client, settle, scripts))
        for seed in range(walks):
            walk(Bursts(client, settle, scripts), seed)


MUTANTS = (
    Mutant("each message settles on its own", LIBRARY,
           "local other = rates.settling(source)", "local other = nil"),
    Mutant("all tasks settle together", LIBRARY, "store('settling:' .. source, token)",
           "store('settling:', token)",
           (("return kept['settling:' .. source] end,", "return kept['settling:'] end,"),)),
    Mutant("a message that queues is replaced", LIBRARY,
           "if not (older and older.settles and older.delayed) then older = nil end", ""),
    Mutant("a copy replaces a newer one", LIBRARY,
           "if older and (rec.copy and not older.copy or arrival_of(rec) < arrival_of(older)) then",
           "if older and arrival_of(rec) < arrival_of(older) then"),
    Mutant("what comes last is the newest", LIBRARY,
           "if older and (rec.copy and not older.copy or arrival_of(rec) < arrival_of(older)) then",
           "if older and rec.copy and not older.copy then"),
    Mutant("of two copies the first one is the newest", LIBRARY,
           "rec.copy and not older.copy or", "rec.copy or"),
    Mutant("the older one stays", LIBRARY,
           "if older then replace(other, older, rec.attempt, own) end", ""),
    Mutant("the maximum begins anew", LIBRARY,
           "older and older.settles_from or digits(now)", "digits(now)"),
    Mutant("the maximum does not count", LIBRARY,
           "if most_ms > 0 then till", "if most_ms > 0 and false then till"),
    Mutant("the first one waits", LIBRARY,
           "if not older and run_first == 1 and last + quiet_ms <= now then return false end", ""),
    Mutant("the first of a burst runs before its quiet period", LIBRARY,
           "run_first == 1 and last + quiet_ms <= now then", "run_first == 1 then"),
    Mutant("the last call is not remembered", LIBRARY, "store('came:' .. source, digits(now))", ""),
    Mutant("the last call is forgotten with the lock", LIBRARY,
           "store('quiet', digits(quiet_ms))", "local _ = quiet_ms"),
    Mutant("a replaced one is not told", LIBRARY,
           "  count('replaced')\n  deliver_to_end(token, own)\nend\n\n-- Debounce",
           "  count('replaced')\nend\n\n-- Debounce"),
    Mutant("a replaced one queues", LIBRARY,
           "rec.by, rec.delayed, rec.state = by, nil, 'parked'", "rec.by = by"),
    Mutant("a replaced one is not known to have settled", LIBRARY,
           "settles = rec.by and rec.settles,", ""),
    Mutant("a revoked one is said to have settled", LIBRARY,
           "settles = rec.by and rec.settles,", "settles = rec.settles,"),
    Mutant("it never queues", LIBRARY,
           "redis.call('ZADD', deadlines, digits(till), token)\n  rates",
           "redis.call('ZADD', deadlines, till + 9e12, token)\n  rates"),
    Mutant("a settled one settles on", LIBRARY,
           "rec.settles, rec.settles_from, rec.ahead = nil, nil, nil", "rec.delayed = '1'"),
    Mutant("a dropped one is waited for", LIBRARY,
           "local till = token and tonumber(redis.call('ZSCORE', deadlines, token) or nil)",
           "local till = token and now + 1"),
    Mutant("a sweep tells the last one", LIBRARY,
           "if till and not (first and first <= till) then first = till end",
           "if till then first = till end",
           (("for i = 1, #flat, 2 do\n      local token = string",
             "for i = #flat - 1, 1, -2 do\n      local token = string"),)),
    Mutant("a sweep tells no end", "lock/sweep_and_grant.lua",
           "local next_start = rates and rates.next_settled()", "local next_start"),
    Mutant("nothing settles", "lock/park.lua",
           "not (settles and let_settle(token, rec, worker)) then", "true then"),
)  # fmt: skip

"""Outcomes that a search must have seen, otherwise it has not searched: each is counted.

A search that never met a case has said nothing about it. So what the verbs can lead to is listed
here, and a run whose moves never led there fails (``python -m tests.property.run`` prints how often
each was seen).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.core.owner_token import base_of
from support.script_model.invariants.facts import ends_unanswered, grants, reservations, verb
from support.script_model.snapshot import LockState
from support.script_model.world import Ledger, Step, World


@dataclass
class Seen:
    """One step at one lock, after it was checked."""

    world: World
    step: Step

    @cached_property
    def verb(self) -> str:
        return verb(self.step)

    @cached_property
    def before(self) -> LockState:
        return self.step.before.locks[self.step.lock]

    @cached_property
    def after(self) -> LockState:
        return self.step.after.locks[self.step.lock]

    @cached_property
    def ledger(self) -> Ledger:
        return self.world.ledgers[self.step.lock]

    @cached_property
    def granted(self) -> list[str]:
        return grants(self.before, self.after)

    @cached_property
    def rec(self) -> dict[str, Any]:
        """The token's record before."""
        return self.before.record.get(self.step.token, {})

    @property
    def verdict(self) -> Verdict | None:
        return getattr(self.step.reply, "verdict", None)

    @cached_property
    def lapsed(self) -> set[str]:
        """Tokens whose leases had ended, and that this step removed."""
        ended = self.before.holders.keys() - self.before.valid(self.world.now).keys()
        return {token for token in ended if token not in self.after.holders}

    def became(self, *states: str) -> set[str]:
        """Tokens that this step brought into a state."""
        return {
            token
            for state in states
            for token in self._in(self.after, state) - self._in(self.before, state)
        }

    def told_again(self, state: str) -> bool:
        """Whether a message that must end was given to a worker once more."""
        both = self._in(self.before, state) & self._in(self.after, state)
        later = [t for t in both if self.after.deadlines[t] > self.before.deadlines[t]]
        return bool(later) and self.verb != "extend"

    def ended(self, state: str) -> bool:
        ends = self.verb == "release" and self.step.ending is Ending.FINAL
        return ends and self.rec.get("state") == state

    def adrift_of(self, *, own: bool) -> bool:
        """Whether messages of the caller's broker (or another's) are adrift after a kick."""
        realm = f"{self.step.asked[1]}:" if self.verb == "kick" else ""
        return bool(realm) and any(
            route.startswith(realm) == own for route in self.after.adrift.values()
        )

    @staticmethod
    def _in(state: LockState, said: str) -> set[str]:
        return {token for token, rec in state.record.items() if rec["state"] == said}


OUTCOMES: dict[str, Callable[[Seen], Any]] = {
    # permits that are kept over a retry
    "a permit is kept for a retry": lambda s: (
        s.step.ending is Ending.KEEP and reservations(s.after) - reservations(s.before)
    ),
    "a kept permit is taken by its attempt": lambda s: (
        s.step.asker
        and s.step.asker.owner.attempt in s.ledger.passing
        and s.step.token in s.granted
    ),
    "a kept permit refuses others": lambda s: (
        s.verdict is Verdict.BLOCKED and reservations(s.after) & s.after.valid(s.world.now).keys()
    ),
    "a kept permit lapses": lambda s: s.lapsed & reservations(s.before),
    "a kept permit is given back": lambda s: (
        s.verb == "release" and s.step.token in reservations(s.before) - reservations(s.after)
    ),
    "the next attempt was there first, and goes on at once": lambda s: (
        s.step.ending is Ending.KEEP
        and any(s.after.record[t]["attempt"] in s.ledger.passing for t in s.granted)
    ),
    "a kept permit's attempt comes, and nobody consumes its queue": lambda s: (
        s.verb == "park"
        and s.step.asker.owner.attempt in s.ledger.passing
        and s.step.token not in s.after.holders
    ),
    # twins
    "a copy is told that its attempt is here": lambda s: s.verdict is Verdict.TWIN,
    "a copy is kept as a twin": lambda s: (
        s.verb == "park"
        and s.verdict is Verdict.TWIN
        and s.step.asker.base in s.after.bodies.keys() - s.before.bodies.keys()
    ),
    "a copy of an ended attempt ends quietly": lambda s: s.verdict is Verdict.DONE,
    "a twin takes over": lambda s: (
        {base_of(rec["twin"]) for rec in s.before.record.values() if rec.get("twin")}
        & {base_of(token) for token in s.after.standing - s.before.standing}
    ),
    "a twin goes with its attempt": lambda s: (
        s.rec.get("twin") and s.before.bodies.keys() - s.after.bodies.keys()
    ),
    # claims that were not answered
    "a delivery ends whose claim was not answered": lambda s: (
        ends_unanswered(s.world, s.step, s.before) and s.rec.get("settled")
    ),
    "a message with an unanswered claim is there already": lambda s: (
        s.step.asker
        and s.step.asker.claim.unanswered
        and s.step.token not in s.before.standing
        and s.verdict is Verdict.WAITING
        and s.step.asker.base in s.before.bodies
    ),
    "a message with an unanswered claim comes when its delivery is gone": lambda s: (
        s.step.asker
        and s.step.asker.claim.unanswered
        and s.step.asker.base in s.after.bodies.keys() - s.before.bodies.keys()
        and s.step.token not in s.before.valid(s.world.now)
    ),
    # bounded queues
    "a queue is full": lambda s: s.verdict is Verdict.FULL,
    "a message makes room": lambda s: s.became("replaced"),
    "a replaced message is told again": lambda s: s.told_again("replaced"),
    "a replaced message is ended": lambda s: s.ended("replaced"),
    "a message adrift makes room": lambda s: s.became("replaced") & s.before.adrift.keys(),
    # waits that end
    "a message waits for too long": lambda s: s.became("overdue"),
    "an overdue message is told again": lambda s: s.told_again("overdue"),
    "an overdue message is ended": lambda s: s.ended("overdue"),
    "a message that went back waits on": lambda s: (
        {t for t in s.became("parked") if not t.endswith(".0")} & s.ledger.waits.keys()
    ),
    "a silent client loses its place": lambda s: any(
        token not in s.after.record and till <= s.world.now
        for token, till in s.before.deadlines.items()
        if token not in s.before.bodies
    ),
    "a client gives up": lambda s: (
        s.step.ending is Ending.CANCEL and s.verdict is Verdict.RELEASED and not s.rec.get("parked")
    ),
    "a cancel comes after the grant": lambda s: (
        s.step.ending is Ending.CANCEL and s.verdict is Verdict.GRANTED
    ),
    "a client is woken": lambda s: s.verb == "wait",
    "a woken client claims": lambda s: (
        s.verb == "claim"
        and s.verdict is Verdict.GRANTED
        and s.rec.get("state") == "granted"
        and not s.rec.get("parked")
    ),
    # realms, queues that nobody consumes
    "a grant is passed on": lambda s: (
        s.step.ending is Ending.OFFER and s.verdict is Verdict.RELEASED
    ),
    "a grant that is not passed on stays": lambda s: (
        s.step.ending is Ending.OFFER and s.verdict is Verdict.GRANTED
    ),
    "a message goes adrift": lambda s: s.became("adrift"),
    "a message is recalled": lambda s: s.before.adrift.keys() & s.after.queue.keys(),
    "a message adrift is granted": lambda s: s.before.adrift.keys() & set(s.granted),
    "a message leaves for the broker": lambda s: s.verb == "kick" and s.step.reply,
    "a message does not leave yet": lambda s: s.adrift_of(own=True) and not s.step.reply,
    "a message is with the broker, and forgotten": lambda s: (
        s.verb == "left" and s.step.asked[1] and s.step.reply
    ),
    "a message came back before it was forgotten": lambda s: (
        s.verb == "left"
        and s.step.asked[1]
        and s.rec.get("copied")
        and s.became("parked", "adrift")
    ),
    "a message that the broker refused waits on": lambda s: (
        s.verb == "left" and not s.step.asked[1] and s.became("parked", "adrift")
    ),
    "a message is not taken by a worker that consumes its queue": lambda s: any(
        not s.step.after.takers(rec, s.world.now)
        and any(
            till > s.world.now
            for till in s.step.after.routes.get(f"{rec['realm']}:{rec['queue']}", {}).values()
        )
        for rec in s.after.record.values()
        if rec["state"] == "adrift"
    ),
    "another broker's messages are left alone": lambda s: s.adrift_of(own=False),
    "a newcomer passes who is adrift": lambda s: (
        s.verb == "acquire" and s.step.token in s.granted and s.after.adrift
    ),
    "a copy comes back while its message waits": lambda s: (
        s.step.asker and s.step.asker.claim.copy and s.step.token in s.before.standing
    ),
    "a copy comes back under a former token": lambda s: (
        s.step.asker
        and s.step.asker.claim.copy
        and s.step.token not in s.before.record
        and s.step.asker.base in s.before.bodies
    ),
    # limits that change in flight
    "a lower limit is declared while more hold": lambda s: (
        s.verb in {"acquire", "park"} and len(s.after.valid(s.world.now)) > s.ledger.limit
    ),
    "an idle lock takes a higher limit": lambda s: (
        s.verb in {"acquire", "park"}
        and int(s.after.meta.get("limit", 0)) > int(s.before.meta.get("limit", 9))
    ),
    "several are granted at once": lambda s: len(s.granted) > 1,
    # operators
    "a paused lock refuses": lambda s: s.ledger.paused and s.verdict is Verdict.BLOCKED,
    "a lock that was paused is granted": lambda s: s.verb == "resume" and s.granted,
    "an operator's limit is granted": lambda s: s.verb == "set_limit" and s.granted,
    "an operator's limit is lower than the number of holders": lambda s: (
        s.verb == "set_limit" and len(s.after.valid(s.world.now)) > s.ledger.limit
    ),
    "a permit is kept on a paused lock": lambda s: (
        s.ledger.paused
        and s.step.ending is Ending.KEEP
        and reservations(s.after) - reservations(s.before)
    ),
    "no permit is left to keep on a paused lock": lambda s: (
        s.ledger.paused
        and s.step.ending is Ending.KEEP
        and len(s.before.valid(s.world.now)) > max(1, s.ledger.limit)
    ),
    "a kept permit's attempt comes to a paused lock": lambda s: (
        s.ledger.paused and s.step.asker and s.step.asker.owner.attempt in s.ledger.passing
    ),
    # revokes, leases, resets
    "a revoked message leaves the line": lambda s: s.became("revoked"),
    "a revoked message is told again": lambda s: s.told_again("revoked"),
    "a revoked message is ended": lambda s: s.ended("revoked"),
    "a rejected message is kept": lambda s: s.became("rejected"),
    "a rejected message is told again": lambda s: s.told_again("rejected"),
    "a rejected message is ended": lambda s: s.ended("rejected"),
    "a rejected message that is not kept is forgotten": lambda s: (
        s.step.ending is Ending.REJECT
        and s.verdict is Verdict.RELEASED
        and not s.after.record.get(s.step.token)
        and not s.became("rejected")
    ),
    "a message that keeps coming back is delayed": lambda s: s.after.delayed - s.before.delayed,
    "a delayed message queues again": lambda s: s.before.delayed & s.after.queue.keys(),
    "a delayed message is revoked": lambda s: s.became("revoked") & s.before.delayed,
    "two calls with one task id wait or hold": lambda s: any(
        len(tokens) > 1 for tokens in s.after.index.values()
    ),
    "a message goes back under its next token": lambda s: any(
        not token.endswith(".0") for token in s.after.standing - s.before.standing
    ),
    "a late end frees nothing": lambda s: (
        s.verdict is Verdict.ABSENT
        and s.verb == "release"
        and base_of(s.step.token) in s.before.bodies
    ),
    "a lock is reset": lambda s: s.verb == "reset" and s.step.reply,
}

WHILE_FULL: dict[str, Callable[[Seen], Any]] = {
    "full: acquire is refused": lambda s: s.step.refused and s.verb == "acquire",
    "full: park is refused": lambda s: s.step.refused and s.verb == "park",
    "full: a lapsed lease stays through a refused call": lambda s: (
        s.step.refused and len(s.after.holders) > len(s.after.valid(s.world.now))
    ),
    "full: a release hands over": lambda s: s.verb == "release" and s.granted,
    "full: a message goes back": lambda s: (
        s.step.ending is Ending.AGAIN
        and any(not token.endswith(".0") for token in s.after.standing - s.before.standing)
    ),
    "full: a permit is kept for a retry": lambda s: (
        s.step.ending is Ending.KEEP and reservations(s.after) - reservations(s.before)
    ),
    "a lock stays taken after a success": lambda s: (
        s.step.ending is Ending.HOLD and reservations(s.after) - reservations(s.before)
    ),
    "full: a lease is renewed": lambda s: s.verb == "extend" and any(s.step.reply),
    "full: a grant is claimed": lambda s: (
        s.verb == "claim" and s.verdict is Verdict.GRANTED and s.rec.get("state") == "granted"
    ),
    "full: a sweep grants": lambda s: s.verb == "kick" and s.granted,
    "full: a revoked message leaves the line": lambda s: s.became("revoked"),
    "full: a lock is reset": lambda s: s.verb == "reset" and s.step.reply,
}

OF_THE_FLEET: dict[str, Callable[[Step], Any]] = {
    "a lock that wants a look is taken": lambda step: verb(step) == "take_due" and step.reply,
    "a neglected lock is told": lambda step: verb(step) == "neglected" and step.reply,
    "a delivery is received": lambda step: verb(step) == "receive" and step.reply,
}

ALL: tuple[str, ...] = (*OUTCOMES, *WHILE_FULL, *OF_THE_FLEET, "full: a sweeper takes what is due")


def count(tally: Counter[str], world: World, step: Step) -> None:
    """Add what this step has shown."""
    tally.update(name for name, shows in OF_THE_FLEET.items() if shows(step))
    if world.full and verb(step) == "take_due" and step.reply:
        tally["full: a sweeper takes what is due"] += 1
    if not step.lock:
        return
    seen = Seen(world, step)
    if not step.refused:
        tally.update(name for name, shows in OUTCOMES.items() if shows(seen))
    if world.full:
        tally.update(name for name, shows in WHILE_FULL.items() if shows(seen))


def unseen(tally: Counter[str]) -> list[str]:
    return [name for name in ALL if not tally[name]]


def table(tally: Counter[str], steps: int) -> Iterable[str]:
    """Yield lines that say how often each outcome was seen."""
    for name in ALL:
        often = 1000 * tally[name] / max(1, steps)
        yield f"{tally[name]:>9,}  {often:>6.2f} in 1,000 steps  {name}"

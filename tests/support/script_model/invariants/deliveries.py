"""Invariants of deliveries to workers and brokers, and of answers."""

from __future__ import annotations

import json
from collections import Counter

from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.core.owner_token import base_of
from support.script_model.invariants.facts import (
    broken,
    comes_unanswered,
    grants,
    news,
    reservations,
    touched,
    verb,
)
from support.script_model.invariants.locks import is_closed
from support.script_model.invariants.tasks import consumed
from support.script_model.world import Step, World


def a_grant_reaches_who_was_granted(world: World, step: Step) -> None:
    """Once: in the inbox of a live worker that consumes its queue, or in its client's wake list."""
    if verb(step) == "receive":
        return
    told: Counter[str] = Counter()
    for worker, entry in news(step):
        head, _, body = entry.partition(b"\n")
        fields = json.loads(head)
        _delivery_is_right(world, step, worker, fields, body)
        told[fields["token"]] += 1
    for name, _, before, after in touched(world, step):
        for token in set(grants(before, after)) - reservations(after):
            _is_told(step, name, token, told[token])
        for token in after.overdue - before.overdue:
            if (
                after.record[token]["state"] != "leaving"
                and consumed(world, step, after, token) != told[token]
            ):
                broken("grant", f"{token} of {name} is over, and told {told[token]} times")


def _is_told(step: Step, name: str, token: str, times: int) -> None:
    """Who asked itself, and not for its message to be kept, has the answer."""
    state = step.after.locks[name]
    answered = token == step.token and verb(step) in {"acquire", "claim"}
    if state.record[token].get("parked"):
        if times != (0 if answered else 1):
            broken("grant", f"{token} was granted {name}, and told {times} times")
    elif not answered and not state.wakes.get(token):
        broken("grant", f"{token} was granted {name}, and not woken")


def _delivery_is_right(
    world: World, step: Step, worker: str, fields: dict[str, str], body: bytes
) -> None:
    token, state = fields["token"], step.after.locks[fields["lock"]]
    rec = state.record.get(token, {})
    route = f"{rec.get('realm')}:{rec.get('queue')}"
    if worker not in step.before.takers(rec, world.now):
        broken("realm", f"{token} of {route} was given to {worker}, which does not take that")
    as_it_stands = ("granted", rec.get("fence")) if token in state.holders else (rec["state"], "0")
    if (fields["verdict"], fields["fence"]) != as_it_stands:
        broken("grant", f"{token} is {as_it_stands}, and {worker} was told {fields}")
    if body != state.bodies.get(base_of(token)):
        broken("I8", f"{token} was given to {worker} with another body")


def a_grant_goes_to_a_worker_with_a_free_slot(world: World, step: Step) -> None:
    """If a live one has told of any; a slot that a release frees is its worker's own."""
    if verb(step) in {"receive", "beat", "leave"}:
        return
    given, takers = Counter(), set()
    for worker, entry in news(step):
        fields = json.loads(entry.partition(b"\n")[0])
        rec = step.after.locks[fields["lock"]].record[fields["token"]]
        takers.add(frozenset(step.before.takers(rec, world.now)))
        given[worker] += 1
    ended = step.before.locks[step.lock].record.get(step.token, {}) if step.lock else {}
    freed = verb(step) == "release" and ended.get("state") == "running"
    free = step.before.free
    for worker in () if step.ending is Ending.OFFER else free:  # who passes on has none
        left = step.after.free.get(worker)
        if left is None:  # its key has expired, in real time: the machine was busy
            continue
        if free[worker] - given[worker] not in {left, left - freed}:
            broken("slots", f"{worker} had {free[worker]} slots, got {given[worker]}, has {left}")
    if len(takers) != 1:
        return
    idle = [w for w in takers.pop() if free.get(w, 0) > given[w]]
    full = [w for w in given if given[w] > max(free.get(w, 0) + freed, 0)]
    if idle and full:
        broken("slots", f"{full} have no slot for what was granted, and {idle} have: {free}")


def a_grant_is_passed_on_only_before_it_begins(world: World, step: Step) -> None:
    if step.ending not in {Ending.OFFER, Ending.RETURN}:
        return
    before, after = step.before.locks[step.lock], step.after.locks[step.lock]
    if before.holders.get(step.token, 0) <= world.now:
        return
    stays = step.token in after.holders and step.reply.verdict is Verdict.GRANTED
    if before.record[step.token]["state"] != "granted" and not stays:
        broken("pass", f"{step.token} of {step.lock} has begun, and was passed on")
    if (
        step.ending is Ending.OFFER
        and not stays
        and not any(free > 0 for free in step.before.free.values())
    ):
        broken("pass", f"{step.token} of {step.lock} was passed on, and nobody has a free slot")


def messages_leave_for_their_own_broker(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    """Those that nobody takes, to the broker they came from, neither too soon nor late (T38)."""
    if verb(step) != "kick":
        return
    worker, realm, patience = step.asked
    for name, ledger, _, after in touched(world, step):
        for stray in step.reply:
            rec = after.record.get(stray.token, {})
            found = (rec.get("state"), rec.get("realm"), rec.get("queue"), rec.get("seal"))
            if found != ("leaving", realm, stray.queue, stray.seal):
                broken("realm", f"{stray} of {name} goes to {realm}; it is {found}")
            if step.before.takers(rec, world.now):
                broken("T38", f"{stray.token} of {name} leaves, and a worker takes it")
            was = step.before.locks[name].record.get(stray.token, {})
            if was.get("state") == "adrift" and int(was["since"]) + patience * 1000 > world.now:
                broken("T38", f"{stray.token} of {name} leaves too soon")
            if stray.body != after.bodies[base_of(stray.token)]:
                broken("I8", f"{stray.token} of {name} leaves with another body")
            if world.now < ledger.refused.get(base_of(stray.token), 0) + 2000:
                broken("T4", f"{stray.token} of {name} was refused, and leaves again")
        for token, route in after.adrift.items():
            rec = after.record[token]
            refused = base_of(token) in ledger.refused
            waits = int(rec["since"]) + patience * 1000 > world.now or is_closed(world, ledger)
            live = {w for w, till in step.before.routes.get(route, {}).items() if till > world.now}
            waits = waits or (live and worker not in live)  # these know whether they have its task
            if route.startswith(f"{realm}:") and not (waits or refused):
                broken("T38", f"nobody takes {token} of {name}, and it does not leave")


def neglected_tells_what_nobody_looks_at(world: World, step: Step) -> None:
    """All of it, and nothing changes by it."""
    if verb(step) != "neglected":
        return
    until = world.now - round(1000 * step.asked[0])
    wanting = {
        name for name, state in step.after.locks.items() if (state.due or until + 1) <= until
    }
    if set(step.reply) != wanting:
        broken("I12", f"{wanting} wanted a look until {until}, and {step.reply} was told")
    if step.before.raw != step.after.raw:
        broken("I12", "asking what is neglected changed it")


def answers_tell_what_the_keys_say(  # noqa: C901, PLR0912  # a list of facts
    world: World, step: Step
) -> None:
    """GRANTED means held, WAITING means in line, and everything else that the token is gone."""
    if verb(step) not in {"acquire", "park", "claim", "release"}:
        return
    for name, _, before, after in touched(world, step):
        verdict, token = step.reply.verdict, step.token
        holds = after.holders.get(token, 0) > world.now
        stands = token in after.standing
        is_ended = verb(step) == "release" and "ended_by" in before.record.get(token, {})
        if is_ended and verdict is Verdict.GRANTED:
            continue  # it is not returned, since a process ends its task now
        if verdict is Verdict.GRANTED and not holds:
            broken("I2", f"{token} was told that it holds {name}")
        if verdict is Verdict.GRANTED and step.reply.fencing_token != int(
            after.record[token]["fence"]
        ):
            broken("I2", f"{token} of {name} was told fence {step.reply.fencing_token}")
        # Who parks, and is granted by the same call, hears of it by inbox.
        kept = verb(step) == "park" and base_of(token) in {
            *after.bodies,
            *map(base_of, after.standing),
        }
        if verdict is Verdict.WAITING and (
            not (stands or kept) or (holds and verb(step) == "acquire")
        ):
            broken("I2", f"{token} was told that it waits for {name}")
        if verdict in {Verdict.BLOCKED, Verdict.FULL, Verdict.RELEASED, Verdict.ABSENT} and stands:
            if token in reservations(after):
                continue  # nobody is behind it who could claim it
            if verdict is Verdict.ABSENT and token not in before.standing:
                continue  # a token that this very sweep made, and nobody knew
            broken("I2", f"{token} was told {verdict}, and stands at {name}")
        cancels = step.ending is Ending.CANCEL and before.holders.get(token, 0) > world.now
        if cancels and verdict is not Verdict.GRANTED:
            broken("I2", f"{token} held {name}, cancelled, and was told {verdict}")
        claims = verb(step) == "claim" and verdict is Verdict.GRANTED
        if claims and after.holders[token] < world.now + step.asked[0] * 1000:
            broken("I2", f"{token} claimed {name} for {step.asked[0]} s, and got less")
        if (
            verdict is Verdict.ABSENT
            and verb(step) == "claim"
            and before.holders.get(token, 0) > world.now
            and token not in reservations(before)
        ):
            broken("I2", f"{token} held {name} and was told that it is absent")
        if verdict is Verdict.RELEASED and token not in before.standing:
            broken("I2", f"{token} did not stand at {name} and was told that it was released")
        stored = token
        if comes_unanswered(step, before, after):  # under another number
            stored = next(t for t in after.standing if base_of(t) == base_of(token))
        if step.reply.rank and step.reply.rank != 1 + sorted(
            after.queue, key=lambda t: (after.queue[t], t)
        ).index(stored):
            broken("I2", f"{token} was told rank {step.reply.rank}")

"""The ledgers: what is known independently of the keys."""

from __future__ import annotations

from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.core.owner_token import base_of
from support.script_model.flow import (
    cost_of,
    costs_of,
    known_rates,
    log_of,
    opens_at,
    unclaimed,
)
from support.script_model.invariants.facts import (
    arrival_of,
    broken,
    comes_unanswered,
    ends_unanswered,
    head_start_of,
    place_of,
    verb,
)
from support.script_model.invariants.locks import is_closed
from support.script_model.invariants.tasks import first_in_queue, its_like
from support.script_model.snapshot import LockState
from support.script_model.world import Ledger, Step, World

TAKEN_MS = 120_000
"""How long it is remembered that a revoke has taken a grant."""


def note(world: World, step: Step) -> None:
    """Bring the ledger of the step's lock up to date."""
    ledger = world.ledgers[step.lock]
    before, after = step.before.locks[step.lock], step.after.locks[step.lock]
    ledger.passing.clear()
    _note_flow(world, step, ledger, before, after)
    if verb(step) in _NOTES:
        _NOTES[verb(step)](world, step, ledger, before, after)
    ledger.replaced &= {base_of(token) for token in after.record}
    ledger.revoked &= {base_of(token) for token in after.record}
    ledger.rejected &= {base_of(token) for token in after.record}
    _note_delayed(world, ledger, before, after)
    # One that lapsed after its start and asks anew is a task like any other.
    ledger.accepted &= {base_of(t) for t, rec in after.record.items() if rec.get("parked")}
    # Successors of a delivery keep the place of the first; a twin takes the place of its attempt.
    for token, rec in after.record.items():
        base = base_of(token)
        kept = token.startswith(("keep:", "held:"))
        if kept and (token not in before.record or token == f"held:{step.token}"):
            ledger.places.pop(base, None)  # made anew, at the place of who keeps it
        ledger.leases[base] = max(ledger.leases.get(base, 0), int(rec["lease"]))
        if base not in ledger.places:
            placed = step.token == token and step.asker and not step.asker.claim.place
            soonest = world.now_us - head_start_of(step.asker.claim) if placed else 0
            ledger.places[base] = max(int(rec["place"]), soonest)


def _note_delayed(world: World, ledger: Ledger, before: LockState, after: LockState) -> None:
    """Who was delayed comes behind all who wait, in the order in which the delays end."""
    for token in before.delayed & after.record.keys() - after.delayed:
        place = int(after.record[token]["place"])
        stays = place == ledger.places.get(base_of(token))
        if stays and after.record[token].get("revoked"):
            continue
        others = [p for t, p in before.queue.items() if t != token]
        if place < world.now_us or place <= max(others, default=0):
            broken("returns", f"{token} was delayed, and comes before who waits")
        ledger.places[base_of(token)] = place


def _stands(world: World, step: Step, state: LockState) -> bool:
    """Whether the step's token held or waited, not counting what its own sweep removed."""
    token = step.token
    if token not in state.standing:
        return False
    if base_of(token) in state.bodies:
        return token not in state.holders or state.holders[token] > world.now
    return state.holders.get(token, state.deadlines.get(token, 0)) > world.now


def _note_asked(world: World, step: Step, ledger: Ledger, before: LockState) -> None:
    claim, base = step.asker.claim, step.asker.base
    ledger.leases[base] = max(round(claim.lease * 1000), ledger.leases.get(base, 0))
    arrives = not _stands(world, step, before) and step.reply.verdict in {
        Verdict.GRANTED,
        Verdict.WAITING,
        Verdict.BLOCKED,
        Verdict.FULL,
    }
    attempt = step.asker.owner.attempt
    arrives = arrives and base not in before.bodies
    if ledger.flow.held_back and step.reply.verdict is Verdict.BLOCKED:
        arrives = False  # its reservation stays until it queues
    if arrives and ledger.reserved.pop(attempt, 0) > world.now:
        ledger.passing.add(attempt)
    if _stands(world, step, before) or base in before.bodies:
        return
    stands = step.after.locks[step.lock].record
    stood = any(base_of(token) == base for token in before.record)  # not if its data were lost
    if stood and any(base_of(token) == base and token != step.token for token in stands):
        return  # it stands under a later number, at the place of that
    ledger.places.pop(base, None)
    if step.reply.verdict in {Verdict.DONE, Verdict.TWIN}:
        return
    if ledger.flow.held_back and attempt in ledger.passing:
        ledger.places[base] = step.after.locks[step.lock].queue.get(step.token, 0)
    elif claim.place and step.reply.verdict in {Verdict.GRANTED, Verdict.WAITING}:
        ledger.places[base] = place_of(world, claim)
    clients = [
        t for t in before.queue if t not in before.bodies and before.deadlines.get(t, 0) > world.now
    ]
    idle = not before.valid(world.now) and not clients and not before.bodies
    lowest = min(claim.limit, ledger.declared or claim.limit)
    ledger.declared = claim.limit if idle else lowest


def _note_copy(step: Step, after: LockState) -> None:
    """Whoever is told TWIN relies on the end of the other being remembered."""
    attempt = step.asker.owner.attempt
    known = [r for r in after.record.values() if r["attempt"] == attempt]
    if not any(r.get("parked") or r.get("twin") or r.get("copied") for r in known):
        broken("I8", f"{step.token} was told TWIN, and the end of {attempt} will not be remembered")


def _note_acquire(world, step, ledger, before, after) -> None:
    _note_asked(world, step, ledger, before)
    if step.reply.verdict is Verdict.TWIN:
        _note_copy(step, after)
    if step.reply.verdict is Verdict.GRANTED:
        ledger.beliefs[step.token] = world.now + round(step.reply.lease * 1000)
    (wait,) = step.asked
    waits = wait is not None and step.reply.verdict is Verdict.WAITING
    if waits and not after.record[step.token].get("parked"):
        _note_wait(world, ledger, step.token, wait)


def _note_wait(world, ledger, token, seconds) -> None:
    ledger.waits.pop(token, None)
    if seconds is not None:
        ledger.waits[token] = world.now + round(1000 * seconds), round(1000 * seconds)


def _note_park(world, step, ledger, before, after) -> None:  # noqa: C901  # a list of facts
    base, attempt = step.asker.base, step.asker.owner.attempt
    if ends_unanswered(world, step, before):
        ledger.beliefs.pop(step.token, None)
        ledger.accepted.discard(base)
    elif comes_unanswered(step, before, after):
        ledger.places[base] = place_of(world, step.asker.claim)
    _note_asked(world, step, ledger, before)
    _note_replaced(world, step, ledger, after)
    runs = {base_of(t) for t in before.valid(world.now)} & ledger.accepted
    if step.reply.verdict is Verdict.WAITING and base not in runs:
        if base not in before.bodies:
            _note_wait(world, ledger, step.token, step.asker.to_park.deadline)
        ledger.kept[base] = attempt
        if base not in after.bodies:
            broken("I8", f"{step.token} was told that it is kept")
    if step.reply.verdict is Verdict.TWIN:
        _note_copy(step, after)
        if base in after.bodies.keys() - before.bodies.keys() and _has_begun(after, attempt):
            broken("begun", f"{step.token} is kept, and {attempt} was acknowledged and has begun")
        if base in after.bodies:
            ledger.kept[base] = attempt
        elif attempt not in ledger.kept.values() and not _has_begun(after, attempt):
            broken("I8", f"{step.token} was told TWIN, and nothing of {attempt} is kept")


def _has_begun(state, attempt) -> bool:
    """Whether it was acknowledged at its start: then it does not begin a second time."""
    return any(rec["attempt"] == attempt and rec.get("settled") for rec in state.record.values())


def _note_left(world, step, ledger, before, after) -> None:
    """A message is forgotten once the broker has it, unless a worker has told it a twin."""
    seal, sent = step.asked
    rec, base = before.record.get(step.token, {}), base_of(step.token)
    leaves = rec.get("state") == "leaving" and rec.get("seal") == seal
    if not leaves:
        return
    if not sent:
        ledger.refused[base] = world.now
    message = (seal, step.token)
    if sent and message in world.published - world.acknowledged and not rec.get("copied"):
        _is_settled(ledger, base)
    if step.token in after.standing and not rec.get("copied") and sent:
        broken("left", f"{step.token} of {step.lock} is with the broker, and stays")


def _note_replaced(world, step, ledger, after) -> None:
    made_room = [
        token
        for token, rec in after.record.items()
        if rec["state"] == "replaced" and base_of(token) not in ledger.replaced
    ]
    others = its_like(after, step.asker)
    for token in made_room:
        ledger.replaced.add(base_of(token))
        arrived = arrival_of(after.record[token])
        older = [t for t in others if t != step.token and arrival_of(after.record[t]) < arrived]
        if after.record[token]["task"] != step.asker.owner.task or older:
            broken("replace", f"{token} made room at {step.lock}, and was not the oldest")
    if len(made_room) > 1 or (made_room and not step.asker.claim.replace):
        broken("replace", f"{made_room} made room at {step.lock} for one")


def _note_claim(world, step, ledger, before, after) -> None:
    lease, settle = step.asked
    base = base_of(step.token)
    if step.reply.verdict is Verdict.GRANTED:
        ledger.leases[base] = max(ledger.leases.get(base, 0), round(lease * 1000))
        ledger.beliefs[step.token] = world.now + round(step.reply.lease * 1000)
        if settle:
            _is_settled(ledger, base)
            if before.record.get(step.token, {}).get("twin"):
                _is_settled(ledger, base_of(before.record[step.token]["twin"]))
            if after.record[step.token].get("parked"):
                ledger.accepted.add(base)


def _is_settled(ledger: Ledger, base: str) -> None:
    ledger.kept.pop(base, None)
    ledger.granted = {token for token in ledger.granted if base_of(token) != base}


def _note_release(world, step, ledger, before, after) -> None:
    done_for, mark, reserve = step.asked
    token, base = step.token, base_of(step.token)
    held = before.holders.get(token, 0) > world.now
    if step.reply.verdict is not Verdict.GRANTED:
        ledger.beliefs.pop(token, None)
        ledger.reserved = {a: t for a, t in ledger.reserved.items() if f"keep:{a}" != token}
        ledger.held_after.pop(token, None)
    settles = step.ending in {Ending.FINAL, Ending.KEEP, Ending.HOLD, Ending.REJECT} or (
        step.ending is Ending.CANCEL and not held
    )
    if token not in before.standing or not settles:
        return
    rec = before.record[token]
    attempt, twin = rec["attempt"], rec.get("twin")
    if step.ending is Ending.REJECT:
        _note_rejected(ledger, before, base, base_of(twin or token))
        return
    _is_settled(ledger, base)
    if step.ending is Ending.KEEP and held:
        _note_reservation(world, ledger, before, after, token, reserve)
    if step.ending is Ending.HOLD and held:
        ledger.held_after[f"held:{token}"] = world.now + round(reserve.seconds * 1000)
    if twin:
        _is_settled(ledger, base_of(twin))
    if attempt and (mark or rec.get("parked") or twin or rec.get("copied")):
        _note_remembered(world, ledger, rec, base, done_for)


def _note_remembered(world, ledger, rec, base, done_for) -> None:
    """A rejected message may come back from its broker: its attempt is not remembered."""
    until = world.now + round(done_for * 1000)
    ledger.settled[base] = until
    if not rec.get("rejected") or rec.get("publish_at"):
        ledger.settled[rec["attempt"]] = until
        ledger.ended[rec["attempt"]] = world.now


def _note_rejected(ledger, before, *bases) -> None:
    found = [base for base in bases if base in before.bodies]
    ledger.rejected |= set(found[:1])
    if not found:
        _is_settled(ledger, bases[0])


def _note_reservation(  # a step, taken apart
    world, ledger, before, after, token, reserve
) -> None:
    others = {t: rec for t, rec in before.record.items() if t not in (token, reserve.token)}
    if any(rec["attempt"] == reserve.attempt for rec in others.values()):
        ledger.passing.add(reserve.attempt)  # it is here already, and gets its turn at once
        first = first_in_queue(after)
        if after.record.get(first, {}).get("attempt") == reserve.attempt:
            ledger.places[base_of(first)] = after.queue[first]  # or it is the next
    elif len(before.holders) - 1 < ledger.limit:
        until = world.now + round(reserve.seconds * 1000)
        ledger.reserved[reserve.attempt] = until


def _note_extend(world, step, ledger, before, after) -> None:
    lease, *tokens = step.asked
    for token, held in zip(tokens, step.reply, strict=True):
        base = base_of(token)
        if held:
            ledger.leases[base] = max(ledger.leases.get(base, 0), round(lease * 1000))
        reserved = token.removeprefix("keep:")
        if held and token in after.holders and reserved in ledger.reserved:
            ledger.reserved[reserved] = after.holders[token]
        if held and token in after.holders and token in ledger.beliefs:
            ledger.beliefs[token] = max(ledger.beliefs[token], world.now + round(lease * 1000))


def _note_revoke(world, step, ledger, before, after) -> None:
    if step.reply.verdict is not Verdict.RELEASED or step.token not in before.record:
        return
    ledger.revoked.add(base_of(step.token))
    if step.token in before.holders:
        ledger.taken[step.token] = world.now + TAKEN_MS


def _note_pause(world, step, ledger, before, after) -> None:
    ledger.paused = verb(step) == "pause"
    if ledger.paused:
        ledger.flow.paused_until = _until(world, *step.asked)


def _until(world, seconds) -> int | None:
    return None if seconds is None else world.now + round(1000 * seconds)


def _note_limit(world, step, ledger, before, after) -> None:
    ledger.ruled, seconds = step.asked
    ledger.flow.ruled_until = _until(world, seconds)


def _note_rates(world, step, ledger, before, after) -> None:
    ledger.flow.rates_ruled, seconds = step.asked
    ledger.flow.rates_until = _until(world, seconds)


def _note_close(world, step, ledger, before, after) -> None:
    (seconds,) = step.asked
    ledger.flow.closed = max(ledger.flow.closed, _until(world, seconds))


def _note_reopen(world, step, ledger, before, after) -> None:
    ledger.flow.closed = 0


def _note_charge(world, step, ledger, before, after) -> None:
    rate, amount = step.asked
    if step.reply.verdict is Verdict.CHARGED and not step.verb.startswith("again "):
        ledger.flow.starts.append((world.now_us, {rate: amount}, f"charge {world.numbers}"))


def _note_flow(
    world: World, step: Step, ledger: Ledger, before: LockState, after: LockState
) -> None:
    """Note what has started; before, whether a reservation must wait for the lock to open."""
    flow, now = ledger.flow, world.now
    if step.ending is Ending.LATER and step.asked[2]:
        flow.closed = max(flow.closed, now + round(1000 * step.asked[2].seconds))
    rates, known = known_rates(after, now)
    rec = after.record.get(step.token) or {"costs": costs_of(step.asker and step.asker.claim.flow)}
    granted = list(unclaimed(before, now))
    opens = opens_at(flow, rates, granted, rec, world.now_us)
    flow.held_back = is_closed(world, ledger) or opens > world.now_us
    for token, rec in after.record.items():
        was = before.record.get(token, {})
        same = was.get("fence") == rec.get("fence") and was.get("state") != "granted"
        if token in after.holders and rec["state"] == "granted":
            flow.granted_again.add(token)
        if token in after.holders and rec["state"] == "running":
            flow.granted_again.discard(token)
        if token in after.holders and rec["state"] == "running" and not same and known:
            costs = {log_of(rate): cost_of(rate, rec) for rate in known}
            flow.starts.append((world.now_us, costs, token))


def _note_reset(world, step, ledger, before, after) -> None:
    ledger.beliefs.clear()
    ledger.reserved.clear()
    ledger.held_after.clear()
    taken = {
        base_of(kept)
        for token in before.valid(world.now)
        for kept in (token, before.record[token].get("twin") or token)
    }
    others = [place for token, place in after.queue.items() if base_of(token) not in taken]
    for token, rec in after.record.items():
        if base_of(token) in taken:
            ledger.places.pop(base_of(token), None)
            if int(rec["place"]) < max([world.now_us, *others]):
                broken("reset", f"{token} of {step.lock} was taken, and is not the last in line")


_NOTES = {
    "acquire": _note_acquire,
    "park": _note_park,
    "claim": _note_claim,
    "release": _note_release,
    "extend": _note_extend,
    "reset": _note_reset,
    "pause": _note_pause,
    "resume": _note_pause,
    "set_rates": _note_rates,
    "close_for": _note_close,
    "reopen": _note_reopen,
    "charge": _note_charge,
    "set_limit": _note_limit,
    "revoke": _note_revoke,
    "left": _note_left,
}

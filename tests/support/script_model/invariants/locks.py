"""Invariants of a lock: I1 to I12."""

from __future__ import annotations

import math
from typing import Any

from celery_singleton_lock.core.owner_token import base_of
from support.script_model.flow import (
    group_is_full,
    known_rates,
    opens_at,
    unclaimed,
)
from support.script_model.invariants.facts import (
    ADRIFT,
    DEFER,
    HOLDING,
    OVER,
    QUEUED,
    arrival_of,
    broken,
    grants,
    may_grant,
    place_in_line,
    reservations,
    touched,
    verb,
)
from support.script_model.snapshot import LockState, Snapshot
from support.script_model.world import Ledger, Step, World


def i1_unexpired_holders_never_exceed_the_limit(world: World, step: Step) -> None:
    for name, ledger, before, after in touched(world, step):
        # A permit that stays taken after a success is no grant: it takes the place of its own.
        new = [token for token in grants(before, after) if not token.startswith("held:")]
        valid = after.valid(world.now)
        if new and len(valid) > ledger.limit:
            broken("I1", f"{len(valid)} hold {name}, whose limit is {ledger.limit}: {valid}")
        if len(valid) > max(ledger.limit, len(before.valid(world.now))):
            broken("I1", f"{len(valid)} hold {name}: more than before, and than {ledger.limit}")


def i2_what_a_client_believes_the_server_keeps(world: World, step: Step) -> None:
    for name, ledger in world.ledgers.items():
        holders = step.after.locks[name].holders
        for token, until in ledger.beliefs.items():
            if until > world.now and holders.get(token, 0) < until:
                broken(
                    "I2",
                    f"{token} believes to hold {name} until {until}, and the server keeps "
                    f"{holders.get(token)} (now {world.now})",
                )


def i3_fences_grow_in_grant_order(world: World, step: Step) -> None:
    for name, ledger, before, after in touched(world, step):
        for token in grants(before, after):
            fence = int(after.record.get(token, {}).get("fence", 0))
            if fence <= ledger.last_fence:
                broken("I3", f"{token} got fence {fence} of {name} after {ledger.last_fence}")
            ledger.last_fence = fence
        if after.holders and int(after.meta.get("fence", 0)) < max(
            (int(after.record.get(t, {}).get("fence", 0)) for t in after.holders), default=0
        ):
            broken("I3", f"{name} remembers a lower fence than its holders have")


def i4_full_or_no_live_waiter(world: World, step: Step) -> None:
    if not may_grant(step):
        return
    for name, ledger, _, after in touched(world, step):
        if len(after.valid(world.now)) >= ledger.limit or is_closed(world, ledger):
            continue
        if rate_opens(world, ledger, after) > world.now_us:
            continue
        for token in list(after.queue) + list(after.adrift):
            if group_is_full(after, after.record[token], world.now):
                continue
            if step.after.live(name, token, world.now):
                broken("I4", f"{token} waits for {name}, which is not full, after {step.verb}")


def is_closed(world: World, ledger: Ledger) -> bool:
    """Whether nobody may start: an operator has paused the lock, or it is closed for a time."""
    return ledger.paused or ledger.flow.closed > world.now


def rate_opens(world: World, ledger: Ledger, state: LockState) -> float:
    """Return when the most expensive waiter may start by the rates; the others may wait for it."""
    rates, _ = known_rates(state, world.now)
    granted = list(unclaimed(state, world.now))
    waiting = [state.record[token] for token in (*state.queue, *state.adrift)]
    return max(
        (opens_at(ledger.flow, rates, granted, rec, world.now_us) for rec in waiting),
        default=world.now_us,
    )


def i5_grants_follow_the_line(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    for name, ledger, before, after in touched(world, step):
        new = [
            token
            for token in grants(before, after)
            if token not in reservations(after)
            and after.record[token]["attempt"] not in ledger.passing
        ]
        for group in {after.record[token].get("group") for token in new}:
            places = [
                place_in_line(world, name, token)
                for token in new
                if after.record[token].get("group") == group
            ]
            if places != sorted(places):
                broken("I5", f"granted out of line in one step: {places}")
        waiting = [t for t in (*after.queue, *after.adrift) if step.after.live(name, t, world.now)]
        for token in new:
            group = after.record[token].get("group")
            for other in waiting:
                if group != after.record[other].get("group"):
                    continue
                if place_in_line(world, name, other) < place_in_line(world, name, token):
                    broken("I5", f"{token} was granted {name} before {other}, which is first")
            deadline = before.deadlines.get(token)
            leaves = before.record.get(token, {}).get("state") == "leaving"  # until then
            late = deadline is not None and deadline <= world.now and not leaves
            if token != step.token and late:
                broken("I5", f"{token} was granted {name} after its deadline")
        noted = ((token, int(rec["place"])) for token, rec in after.record.items())
        for token, place in (*after.queue.items(), *noted):
            if place != ledger.places.get(base_of(token), place):
                broken("I5", f"{token} stands at {place}, not at {ledger.places[base_of(token)]}")


def i6_nobody_holds_and_waits(world: World, step: Step) -> None:
    for name, _, _, after in touched(world, step):
        rows = [set(after.holders), set(after.queue), set(after.adrift), after.overdue]
        if sum(map(len, rows)) != len(set().union(*rows)):
            broken("I6", f"a token stands twice at {name}: {rows}")
        bases = [base_of(token) for row in rows for token in row]
        twice = {base for base in bases if bases.count(base) > 1}
        if twice:
            broken("I6", f"one message stands twice at {name}: {twice}")


def i7_records_match_what_stands(world: World, step: Step) -> None:
    if step.after.strays:
        broken("I7", f"stray keys: {step.after.strays}")
    _parked_are_listed(step.after)
    for name, _, _, after in touched(world, step):
        if set(after.record) != after.standing:
            broken("I7", f"records of {name} {set(after.record)} differ from {after.standing}")
        if set(after.deadlines) & set(after.holders):
            broken("I7", f"holders of {name} have deadlines: {after.deadlines}")
        for token, rec in after.record.items():
            _state_is(name, after, token, rec["state"])
        _index_matches(world, name, after)
        _keys_live_as_long_as_the_lock(world, name, after)


def _parked_are_listed(after: Snapshot) -> None:
    """What is told of parked messages by route is what stands in the queues, and no more."""
    parked: dict[str, dict[str, int]] = {}
    for state in after.locks.values():
        for token in (*state.queue, *state.adrift):
            rec = state.record.get(token, {})
            if rec.get("parked"):
                route = parked.setdefault(f"{rec['realm']}:{rec['queue']}", {})
                route[token] = arrival_of(rec)
    if parked != after.parked:
        broken("I7", f"listed as parked are {after.parked}, not {parked}")
    sizes = {
        route: sum(len(_body(after, token)) for token in tokens) for route, tokens in parked.items()
    }
    if sizes != after.parked_bytes:
        broken("I7", f"bytes of parked messages are {after.parked_bytes}, not {sizes}")
    if set(parked) != after.parked_routes:
        broken("I7", f"routes with parked messages are {after.parked_routes}, not {set(parked)}")


def _body(after: Snapshot, token: str) -> bytes:
    bodies = (state.bodies.get(base_of(token)) for state in after.locks.values())
    return next(body for body in bodies if body is not None)


def _state_is(name: str, state: LockState, token: str, said: str) -> None:
    row = (
        HOLDING
        if token in state.holders
        else QUEUED
        if token in state.queue
        else {"adrift"}
        if token in state.adrift
        else OVER
    )
    if said not in row:
        broken("I7", f"{token} of {name} says {said!r}, and stands in {row}")
    if said in {"parked", "adrift", *OVER} and base_of(token) not in state.bodies:
        broken("I7", f"{token} of {name} is {said} without a body")


def entries_of(attempt: str) -> set[str]:
    """Return under what the index knows an attempt: itself and, of a later one, its task's id."""
    return {attempt} if attempt.endswith("/0/0") else {attempt, f"@{attempt.rsplit('/', 2)[0]}"}


def _index_matches(world: World, name: str, state: LockState) -> None:
    ledger = world.ledgers[name]
    entries = [(entry, token) for entry, tokens in state.index.items() for token in tokens]
    for entry, token in entries:
        if any(entry in entries_of(attempt) for attempt, t in ledger.expired if t == token):
            continue
        if entry not in entries_of(state.record.get(token, {}).get("attempt", "")):
            broken("I7", f"the index leads from {entry} to {token} of {name}, which is not there")
    for token, rec in state.record.items():
        if not rec["attempt"] or rec["state"] in HOLDING:
            continue
        if not all(token in state.index.get(entry, ()) for entry in entries_of(rec["attempt"])):
            broken("I7", f"{token} of {name} waits and is not in the index")


def ruled_for_ever(ledger: Ledger) -> bool:
    """Whether an operator has set what only another call ends."""
    flow = ledger.flow
    paused = ledger.paused and flow.paused_until is None
    limited = ledger.ruled and flow.ruled_until is None
    return bool(paused or limited or (flow.rates_ruled and flow.rates_until is None))


def _keys_live_as_long_as_the_lock(  # noqa: C901  # a list of facts
    world: World, name: str, state: LockState
) -> None:
    keys = state.parts - {"bodies", "done"}
    if ruled_for_ever(world.ledgers[name]):
        if "meta" in state.ends:
            broken("I7", f"what operators have set of {name} would expire: {state.ends}")
        keys -= {"meta"}
    if state.bodies:
        if state.ends.keys() & keys:
            broken("I7", f"keys of {name} would expire beside a body: {state.ends}")
    elif keys - state.ends.keys():
        broken("I7", f"keys of {name} would stay for ever: {keys - state.ends.keys()}")
    elif state.standing:
        last = max(*state.holders.values(), *state.deadlines.values(), world.now, 0)
        if any(state.ends[part] < last for part in keys):
            broken("I7", f"a key of {name} expires before its last lease: {state.ends}, {last}")
    elif keys - {"meta"}:
        broken("I7", f"{name} is idle and keeps {keys}")
    if state.done and state.ends.get("done", 0) < max(state.done.values()):
        broken("I7", f"done marks of {name} expire early, or never")


def i8_a_parked_body_stays_until_its_task_is_settled(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    for name, ledger, _, after in touched(world, step):
        leads = {base_of(token): token for token in after.standing}
        for token in after.standing:
            twin = after.record.get(token, {}).get("twin")
            if twin:
                leads[base_of(twin)] = token
        for base in ledger.kept:
            if after.bodies.get(base) != f"body of {base}".encode():
                broken("I8", f"the body of {base} is gone from {name}, and its task is not settled")
            if base not in leads:
                broken("I8", f"the body of {base} is at {name}, and nothing leads to it")
        for base in after.bodies:
            if base not in ledger.kept:
                broken("I8", f"{name} keeps the body of {base}, whose task is settled")


def i9_the_lock_is_free_within_its_longest_lease(world: World, step: Step) -> None:
    for name, ledger, _, after in touched(world, step):
        for token, till in after.holders.items():
            longest = ledger.leases.get(base_of(token), 0)
            if till > world.now + longest:
                broken("I9", f"{token} holds {name} for {till - world.now} ms, lease {longest}")


RULINGS = {
    "paused_until": "paused",
    "ruled_until": "ruled",
    "rates_until": "ruled_rates",
}
"""When what an operator has set ends -> what that is."""


def _without_ended(raw: dict[str, Any], now: int) -> dict[str, Any]:
    """Return the keys without what an operator has set and has ended: the next sweep deletes it."""
    kept = dict(raw)
    for key, value in raw.items():
        if not key.endswith((":flow", ":meta")):
            continue
        fields = dict(zip(value[::2], value[1::2], strict=True))
        for till, what in RULINGS.items():
            if till in fields and float(fields[till]) <= now:
                del fields[till]
                fields.pop(what, None)
        kept[key] = fields
        if not fields:
            del kept[key]
    return kept


def i10_asking_again_changes_nothing(world: World, step: Step) -> None:
    if not step.verb.startswith("again "):
        return
    before, after = (_without_ended(each.raw, world.now) for each in (step.before, step.after))
    if before != after:
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        broken("I10", f"{step.verb} changed {[(k, before.get(k), after.get(k)) for k in changed]}")


def i11_extend_never_creates(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    if verb(step) != "extend":
        return
    for name, _, before, after in touched(world, step):
        valid = before.valid(world.now)
        for token, till in after.holders.items():
            if token not in before.holders:
                broken("I11", f"extend made {token} a holder of {name}")
            if till != before.holders[token] and token not in valid:
                broken("I11", f"extend revived {token} of {name}")
            if till < before.holders[token]:
                broken("I11", f"extend shortened the lease of {token} of {name}")
        lease, *tokens = step.asked
        for token, held in zip(tokens, step.reply, strict=True):
            if held != (token in valid or token in before.overdue):
                broken("I11", f"extend told {token} of {name} {held}")
            if (
                held
                and after.holders.get(token, after.deadlines.get(token, 0))
                < world.now + lease * 1000
            ):
                broken("I11", f"extend told {token} of {name} more than it did")


def _flow_ends(  # noqa: PLR0911  # a list of reasons
    world: World, ledger: Ledger, after: LockState
) -> list[float]:
    """Return when the answer for who waits can change without a call, beside ends of leases."""
    flow = ledger.flow
    if not after.queue:
        return []
    if is_closed(world, ledger):
        if not ledger.paused:
            return [flow.closed]
        return [] if flow.paused_until is None else [max(flow.paused_until, flow.closed)]
    if len(after.holders) >= ledger.limit:
        raised = ledger.ruled and ledger.ruled < ledger.declared and flow.ruled_until
        return [raised] if raised else []
    if all(group_is_full(after, after.record[token], world.now) for token in after.queue):
        return []
    opens = rate_opens(world, ledger, after)
    if opens > world.now_us:
        ruled = [flow.rates_until] if flow.rates_ruled and flow.rates_until else []
        return [*ruled, math.ceil(opens / 1000)] if opens < math.inf else ruled
    return [world.now]


def i12_somebody_looks_again_in_time(  # noqa: C901, PLR0912  # a list of facts
    world: World, step: Step
) -> None:
    if verb(step) == "take_due":
        for name, state in step.after.locks.items():
            if state.due is not None and state.due < world.now and len(step.reply) < 100:
                broken("I12", f"{name} was due at {state.due} and was not taken")
            if state.due is not None and state.due > max(
                world.now + DEFER, step.before.locks[name].due or 0
            ):
                broken("I12", f"{name} was put off to {state.due}")
        return
    if verb(step) == "wait" or (verb(step) == "charge" and not may_grant(step)):
        return  # it looks at no lock
    for name, ledger, before, after in touched(world, step):
        waits = set(after.queue) | set(after.adrift) | after.overdue
        if not waits and not after.bodies:
            named = [t for t in after.holders if after.record.get(t, {}).get("indexed")]
            if named and after.due is None:
                broken("I12", f"{named} of {name} may die, and would stay in the index")
            if after.due is None or verb(step) == "kick":
                ledger.expired_due = None
            if after.due is not None and ledger.expired_due is None and not named:
                broken("I12", f"nobody waits for {name}, and it is due at {after.due}")
            continue
        if may_grant(step):
            late = [t for t in waits if after.deadlines.get(t, world.now + 1) <= world.now]
            if late:
                broken("I12", f"{late} stand at {name} after their deadline")
        ends = [*after.holders.values(), *after.deadlines.values()]
        if after.adrift:
            ends.append(world.now + ADRIFT)
        if after.adrift and verb(step) != "kick":
            new = after.adrift.keys() - before.adrift.keys()
            ends.append(world.now if new or before.due is None else before.due)
        ends += _flow_ends(world, ledger, after)
        if after.due is None or after.due > min(ends, default=world.now + ADRIFT):
            broken("I12", f"{name} is looked at at {after.due}, too late for {sorted(ends)}")

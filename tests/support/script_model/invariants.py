"""The invariants: one function each, checked after every step.

A function takes the world (with its records, which do not depend on the keys) and the step (the
keys before and after it). It raises :class:`InvariantBroken` with its name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from celery_singleton_lock.core.model import CLAIM_UNANSWERED, Claim, Ending, Verdict
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.store.worker_operations import DEFER as DEFER_SECONDS
from support.script_model.flow import (
    cost_of,
    costs_of,
    group_is_full,
    known_rates,
    log_of,
    opens_at,
    unclaimed,
)
from support.script_model.snapshot import LockState, Snapshot
from support.script_model.world import Asker, Ledger, Step, World

GRACE = 60_000
ADRIFT = 5_000
DEFER = round(1000 * DEFER_SECONDS)
OPERATORS = {"reset", "pause", "resume", "set_limit", "set_rates", "reopen"}
GRANTING = {"acquire", "park", "claim", "release", "kick", "left", "revoke", "charge"} | OPERATORS
QUEUED = {"waiting", "parked"}
HOLDING = {"running", "granted", "reserved", "held_after"}
OVER = {"overdue", "replaced", "revoked", "rejected", "leaving"}
DELAY, MOST_DELAY = 1_000, 60_000
UNCLAIMED = 9e15


class InvariantBroken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


def verb(step: Step) -> str:
    return step.verb.removeprefix("again ")


def may_grant(step: Step) -> bool:
    """Whether the call grants; a charge to a lock without rates does nothing."""
    if verb(step) == "charge":
        return bool(step.before.locks[step.lock].flow.get(""))
    return verb(step) in GRANTING


def touched(world: World, step: Step) -> Iterator[tuple[str, Ledger, LockState, LockState]]:
    """Yield the step's lock, if it has one."""
    if step.lock:
        name = step.lock
        yield name, world.ledgers[name], step.before.locks[name], step.after.locks[name]


def grants(before: LockState, after: LockState) -> list[str]:
    """Return the tokens that were granted in this step, in the order of their fences."""
    new = [
        token
        for token in after.holders
        if token not in before.holders
        or after.record.get(token, {}).get("fence") != before.record.get(token, {}).get("fence")
    ]
    return sorted(new, key=lambda token: int(after.record.get(token, {}).get("fence", 0)))


def reservations(state: LockState) -> set[str]:
    return {token for token in state.holders if token.startswith(("keep:", "held:"))}


def ends_unanswered(world: World, step: Step, before: LockState) -> bool:
    """Whether this step ends a delivery whose claim was not answered. It has not begun."""
    told = step.asker is not None and step.asker.claim.copy == CLAIM_UNANSWERED
    return told and verb(step) == "park" and step.token in before.valid(world.now)


def comes_unanswered(step: Step, before: LockState, after: LockState) -> bool:
    """Whether this step stores a message whose delivery with the unanswered claim is gone."""
    told = step.asker is not None and step.asker.claim.copy == CLAIM_UNANSWERED
    return told and verb(step) == "park" and step.asker.base in after.bodies.keys() - before.bodies


def place_of(world: World, claim: Claim) -> int:
    """Return the place of a new waiter: its arrival minus its head start."""
    return max(0, min(claim.place, world.now_us) - head_start_of(claim))


def head_start_of(claim: Claim) -> int:
    return json.loads(claim.flow or "{}").get("head_start", 0)


def arrival_of(rec) -> int:
    return int(rec.get("arrived") or rec["place"])


def place_in_line(world: World, name: str, token: str) -> tuple[int, str]:
    ledger = world.ledgers[name]
    return ledger.places.get(base_of(token), 0), token


# -- I1 to I12 -------------------------------------------------------------------------------------


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


# -- beyond the list -------------------------------------------------------------------------------


def every_token_is_granted_once(world: World, step: Step) -> None:
    """A token is granted once, so a late holder of a former delivery owns nothing (I10, T5)."""
    for name, ledger, before, after in touched(world, step):
        for token in grants(before, after):
            rec = after.record.get(token, {})
            if rec.get("parked") and token in ledger.granted:
                broken("I10", f"{token} was granted {name} for a second time")
            if base_of(token) in ledger.kept:
                ledger.granted.add(token)


def settled_attempts_do_not_come_back(world: World, step: Step) -> None:
    """What is settled is settled: a late copy of an ended task ends quietly (I8, T34)."""
    if verb(step) not in {"acquire", "park"} or step.asker is None:
        return
    for name, ledger, before, _ in touched(world, step):
        attempt, base = step.asker.owner.attempt, step.asker.base
        if step.token in before.standing:
            continue
        done = ledger.settled.get(base, 0) > world.now or (
            step.asker.claim.copy in {1, CLAIM_UNANSWERED}
            and ledger.settled.get(attempt, 0) > world.now
        )
        if done != (step.reply.verdict is Verdict.DONE):
            broken("I8", f"{step.token} of {attempt} at {name} was told {step.reply.verdict}")


def an_attempt_is_here_once(world: World, step: Step) -> None:
    """However often a message is delivered, one delivery holds or waits (T14).

    Two messages that are not marked are two calls with one task id, and each runs.
    """
    for name, _, _, after in touched(world, step):
        is_twin = verb(step) == "park" and step.reply.verdict is Verdict.TWIN
        if is_twin and step.token in after.standing:
            broken("T14", f"{step.token} stands at {name}, and was told that another does")
        here: dict[str, list[str]] = {}
        for token in after.standing:
            here.setdefault(after.record[token]["attempt"], []).append(token)
        for attempt, tokens in here.items():
            bases = {base_of(token) for token in tokens}
            marked = [token for token in tokens if after.record[token].get("copy")]
            if attempt and len(tokens) > 1 and (marked or len(bases) < len(tokens)):
                broken("T14", f"{attempt} stands at {name} as {tokens}, of which {marked}")


def a_reservation_is_kept_for_its_attempt(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    """Nobody gets a permit that a retried task keeps; its next attempt gets it at once (T42)."""
    for name, ledger, before, after in touched(world, step):
        for attempt, until in ledger.reserved.items():
            if until > world.now and after.holders.get(f"keep:{attempt}", 0) < until:
                broken("T42", f"{name} was kept for {attempt} until {until}, and is not")
        if step.asker is None or step.asker.owner.attempt not in ledger.passing:
            continue
        if ledger.flow.held_back:
            if step.token != _first(after):
                broken("T42", f"{step.token} found {name} reserved and closed, and is not next")
            continue
        if verb(step) == "park" and not _consumed(world, step, after, step.token):
            continue  # it has come, and nobody is there to run it
        if len(before.valid(world.now)) <= ledger.limit and step.token not in after.holders:
            broken("T42", f"{step.token} found {name} reserved, and was told {step.reply.verdict}")


def _first(state: LockState) -> str:
    return min(state.queue, key=lambda token: (state.queue[token], token), default="")


def a_paused_lock_is_granted_to_nobody(world: World, step: Step) -> None:
    """Nor does any of its messages leave for the broker."""
    for name, ledger, before, after in touched(world, step):
        new = [token for token in grants(before, after) if token not in reservations(after)]
        if is_closed(world, ledger) and new:
            broken("pause", f"{new} were granted {name}, which is closed")
        if is_closed(world, ledger) and verb(step) == "kick" and step.reply:
            broken("pause", f"{step.reply} leave {name}, which is paused")


def a_lock_stays_taken_after_a_success(world: World, step: Step) -> None:
    """Nobody gets the permit of a task that has succeeded before its time is over."""
    for name, ledger, _, after in touched(world, step):
        for token, until in ledger.held_after.items():
            if until > world.now and after.holders.get(token, 0) < until:
                broken("hold", f"{name} was to stay taken by {token} until {until}, and is not")
        for token, rec in after.record.items():
            if (rec["state"] == "held_after") != (token in ledger.held_after):
                broken("hold", f"{token} of {name} is {rec['state']}")


def who_is_replaced_makes_room_and_does_not_run(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    """The oldest message of a task makes room for its newest, and is ended by a worker."""
    for name, ledger, before, after in touched(world, step):
        for token in grants(before, after):
            if base_of(token) in ledger.replaced:
                broken("replace", f"{token} was replaced at {name}, and granted")
        for token, rec in after.record.items():
            known = base_of(token) in ledger.replaced - ledger.rejected
            if (rec["state"] == "replaced") != known:
                broken("replace", f"{token} of {name} is {rec['state']}")
        if verb(step) != "park" or not step.asker.claim.replace or not step.asker.claim.max_waiting:
            continue
        if step.reply.verdict is Verdict.FULL and step.token not in before.standing:
            mine = _its_like(after, step.asker)
            if mine:
                broken("replace", f"{step.token} was told FULL at {name} beside {mine}")


def who_is_revoked_does_not_run(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    """A message that waits leaves the line when its task is revoked, and is ended by a worker."""
    for name, ledger, before, after in touched(world, step):
        for token in grants(before, after):
            if base_of(token) in ledger.revoked:
                broken("revoke", f"{token} of {name} was revoked, and granted")
        for token, rec in after.record.items():
            known = base_of(token) in ledger.revoked - ledger.rejected
            if (rec["state"] == "revoked") != known:
                broken("revoke", f"{token} of {name} is {rec['state']}")
        if verb(step) != "revoke":
            continue
        waits = _waits_as_a_message(world, step, before)
        if (step.reply.verdict is Verdict.RELEASED) != waits:
            broken("revoke", f"{step.token} of {name}, {waits=}, was told {step.reply.verdict}")
        if waits and _consumed(world, step, before, step.token) and not _told(step):
            broken("revoke", f"no worker was told that {step.token} of {name} was revoked")


def _waits_as_a_message(world: World, step: Step, state: LockState) -> bool:
    """Whether the step's token is a message of its realm that waits, and not for too long."""
    rec = state.record.get(step.token, {})
    lines = {*state.queue, *state.adrift, *state.delayed}
    waits = step.token in lines and bool(rec.get("parked"))
    if step.token in state.delayed:
        return rec["realm"] == step.asked[0]
    in_time = state.deadlines.get(step.token, world.now + 1) > world.now
    if rec.get("state") == "leaving" and not in_time:  # nobody told what became of it
        return rec["realm"] == step.asked[0]
    return waits and in_time and rec["realm"] == step.asked[0]


def _consumed(world: World, step: Step, state: LockState, token: str) -> bool:
    return bool(step.before.takers(state.record.get(token, {}), world.now))


def _told(step: Step) -> bool:
    """Whether an inbox has a verdict on the step's token that was not there before."""
    heads = [json.loads(entry.partition(b"\n")[0]) for _, entry in _news(step)]
    return any((h["token"], h["verdict"]) == (step.token, "revoked") for h in heads)


def _news(step: Step) -> Iterator[tuple[str, bytes]]:
    """Yield what this step put into an inbox, and into whose."""
    for worker, entries in step.after.inboxes.items():
        for entry in entries[len(step.before.inboxes.get(worker, ())) :]:
            yield worker, entry


def _its_like(state: LockState, asker: Asker) -> list[str]:
    """Return the messages of its task that an asker could replace."""
    parcel = asker.parcel
    near = [t for t, route in state.adrift.items() if route == f"{parcel.realm}:{parcel.queue}"]
    return [
        token
        for token in (*state.queue, *near)
        if (rec := state.record[token]).get("parked")
        and (rec["task"], rec["realm"]) == (asker.owner.task, parcel.realm)
    ]


def a_full_redis_refuses_whole_or_not_at_all(world: World, step: Step) -> None:
    """Only what takes memory is refused, and then nothing has changed (T39)."""
    charges = verb(step) == "charge" and may_grant(step)
    takes_memory = verb(step) in {"acquire", "park"} or charges
    if step.refused != (world.full and takes_memory):
        said = "refused" if step.refused else "not refused"
        broken("T39", f"{step.verb} of {step.token} was {said}, {world.full=}")
    if step.refused and step.before.raw != step.after.raw:
        broken("T39", f"{step.verb} of {step.token} was refused, and left something behind")


def who_is_rejected_does_not_run(world: World, step: Step) -> None:
    """A message that its task has rejected is kept until a worker has published it."""
    for name, ledger, before, after in touched(world, step):
        for token in grants(before, after):
            if base_of(token) in ledger.rejected:
                broken("reject", f"{token} of {name} was rejected, and granted")
        for token, rec in after.record.items():
            if rec["state"] == "rejected" and base_of(token) not in ledger.rejected:
                broken("reject", f"{token} of {name} is rejected, and its task has not done that")


def who_keeps_coming_back_lets_others_pass(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    """Returns are counted; the first keeps its place, and each later one waits out a delay."""
    if verb(step) == "reset":
        return  # an operator's
    for name, _, before, after in touched(world, step):
        arrived = {step.token} if verb(step) == "park" else set()  # from the broker, not back
        for token in after.standing - before.standing - arrived:
            if comes_unanswered(step, before, after) and base_of(token) == step.asker.base:
                continue  # from the broker
            former = [t for t in before.record if base_of(t) == base_of(token)]
            if not former or not after.record[token].get("parked"):
                continue
            was, rec = before.record[former[0]], after.record[token]
            unread = step.ending is Ending.UNREAD and step.token == former[0]
            counts = was["state"] == "running" or unread
            if step.token == former[0] and (
                step.ending in {Ending.REJECT, Ending.LATER} or ends_unanswered(world, step, before)
            ):
                counts = False
            returns = int(was.get("returns", 0)) + counts
            if int(rec.get("returns", 0)) != returns:
                broken("returns", f"{token} of {name} has come back {returns} times: {rec}")
            doublings = returns - (1 if unread else 2)
            delays = (
                counts
                and doublings >= 0
                and not any(was.get(end) for end in ("by", "revoked", "rejected"))
            )
            until = world.now + min(DELAY * 2**doublings, MOST_DELAY) if delays else None
            if (after.deadlines.get(token) if token in after.delayed else None) != until:
                broken("returns", f"{token} of {name} is to be delayed until {until}: {rec}")


def a_wait_lasts_as_long_as_was_asked(world: World, step: Step) -> None:
    """Neither shorter, whatever happens to others, nor longer than the next sweep."""
    for name, ledger, before, after in touched(world, step):
        goes_on = step.token if step.ending is Ending.LATER else ""
        _carry_waits_over(world, ledger, before, after, goes_on)
        for token, (until, _) in ledger.waits.items():
            waits = token in after.queue or token in after.adrift
            if waits and until <= world.now and may_grant(step):
                broken("wait", f"{token} waits for {name}, and was to until {until}")
            if until > world.now and after.record.get(token, {}).get("state") == "overdue":
                broken("wait", f"{token} may wait for {name} until {until}, and is overdue")
            waited = token in before.queue or token in before.adrift
            gone = token not in after.standing and token != step.token and verb(step) != "left"
            if waited and gone and until > world.now:
                broken("wait", f"{token} may wait for {name} until {until}, and is gone")
        ledger.waits = {t: wait for t, wait in ledger.waits.items() if t in after.standing}


def _carry_waits_over(
    world: World, ledger: Ledger, before: LockState, after: LockState, goes_on: str
) -> None:
    """A message that goes back waits on, under its next token; one that ran waits anew.

    So does one that was stored beside its waiter in a slot. A task that is to run later waits on.
    """
    for token, (until, seconds) in list(ledger.waits.items()):
        following = [t for t in after.standing - {token} if base_of(t) == base_of(token)]
        if token in after.standing or not following or token not in before.record:
            continue
        del ledger.waits[token]
        rec = before.record[token]
        wait, anew = seconds, rec["state"] == "running" and token != goes_on
        if rec.get("twin") and not rec.get("parked"):
            if not rec.get("wait"):
                continue  # its message may wait for ever
            wait, anew = int(rec["wait"]), True
        if not any(rec.get(end) for end in ("by", "revoked")):
            ledger.waits[following[0]] = (world.now + wait if anew else until, wait)
    for token in (before.delayed - after.delayed) & ledger.waits.keys():
        seconds = ledger.waits[token][1]
        ledger.waits[token] = (world.now + seconds, seconds)


def a_grant_reaches_who_was_granted(world: World, step: Step) -> None:
    """Once: in the inbox of a live worker that consumes its queue, or in its client's wake list."""
    if verb(step) == "receive":
        return
    told: Counter[str] = Counter()
    for worker, entry in _news(step):
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
                and _consumed(world, step, after, token) != told[token]
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
    for worker, entry in _news(step):
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
    _, realm, patience = step.asked
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


def no_grant_is_above_the_rate(world: World, step: Step) -> None:
    """Starts in a period, grants that are not claimed included, are at most the rate."""
    for name, ledger, before, after in touched(world, step):
        if not set(grants(before, after)) - reservations(after):
            continue
        rates, _ = known_rates(after, world.now)
        granted = list(unclaimed(after, world.now))
        for rate in rates:
            opens = opens_at(ledger.flow, [rate], granted, None, world.now_us)
            if opens > world.now_us:
                broken("rate", f"more than {rate} of {name} start: {ledger.flow}, {granted}")


def no_group_is_above_its_limit(world: World, step: Step) -> None:
    for name, _, before, after in touched(world, step):
        for token in grants(before, after):
            rec = after.record[token]
            most, group = rec.get("group_limit"), rec.get("group", "")
            valid = [t for t in after.valid(world.now) if after.record[t].get("group", "") == group]
            if most and len(valid) > int(most) and token not in reservations(after):
                broken("group", f"{valid} of {group} hold {name}, and its limit is {most}")


def flow_keys_match_what_stands(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    """Lines, groups and counted grants, as I7 has it; keys that expire, or do not."""
    for name, _, _, after in touched(world, step):
        flow = after.flow
        if may_grant(step):
            counted = {t for t, at in flow.get("log", {}).items() if at >= UNCLAIMED}
            granted = {t for t, rec in after.record.items() if rec["state"] == "granted"}
            if known_rates(after, world.now)[1] and counted != granted & after.holders.keys():
                broken("I7", f"{counted} count as granted at {name}, and {granted} are")
        if "vt" in flow.get("", {}):
            _lines_match(name, after, world.ledgers[name].flow.expired_lines, world.now)
        elif [part for part in flow if part.startswith(("line:", "groups", "heads", "full"))]:
            broken("I7", f"{name} has no groups, and keeps {flow.keys()}")
        for part in flow:
            ends = after.ends.get(f"flow:{part}")
            if ends is None and not after.bodies and not ruled_for_ever(world.ledgers[name]):
                broken("I7", f"flow:{part} of {name} would stay for ever")
            if ends is not None and after.bodies and part in {"", "groups", "heads", "full"}:
                broken("I7", f"flow:{part} of {name} would expire beside a body")


def _lines_of(after: LockState, expired: set[str], now: int) -> dict[str, dict[str, float]]:
    """Return who waits by group, without clients that died and whose line has expired unswept."""
    lines: dict[str, dict[str, float]] = {}
    for token, place in after.queue.items():
        group = after.record[token].get("group", "")
        if group not in expired or after.deadlines.get(token, now) > now - GRACE:
            lines.setdefault(group, {})[token] = place
    return lines


def _lines_match(name: str, after: LockState, expired: set[str], now: int) -> None:
    lines = _lines_of(after, expired, now)
    found = {part[5:]: line for part, line in after.flow.items() if part.startswith("line:")}
    if found != lines:
        broken("I7", f"the lines of {name} are {found}, not {lines}")
    # The line of clients that died expires; the group is removed when it is next.
    here = {member[17:] for member in after.flow.get("groups", {})} - (expired - lines.keys())
    full = set(after.flow.get("full", {})) - (expired - lines.keys())
    if here & full or here | full != set(lines):
        broken("I7", f"groups of {name} are {here} and {full}, not {set(lines)}")
    heads = {member[17:] for member in after.flow.get("groups", {})}
    if set(after.flow.get("heads", {})) != heads:
        broken("I7", f"heads of {name} are {after.flow.get('heads')}, not {heads}")
    for group, line in lines.items():
        place, _ = min((place, token) for token, place in line.items())
        head = after.flow.get("heads", {}).get(group)
        if head is not None and head != f"{place:016.0f}:{group}":
            broken("I7", f"the head of {group} of {name} is {head}, not {place}")
    if set(after.flow.get("idle", {})) & set(lines):
        broken("I7", f"groups of {name} wait and are idle: {after.flow['idle']}")


ALL: tuple[Callable[[World, Step], None], ...] = (
    i1_unexpired_holders_never_exceed_the_limit,
    i6_nobody_holds_and_waits,
    i2_what_a_client_believes_the_server_keeps,
    i3_fences_grow_in_grant_order,
    i4_full_or_no_live_waiter,
    i5_grants_follow_the_line,
    i7_records_match_what_stands,
    i8_a_parked_body_stays_until_its_task_is_settled,
    i9_the_lock_is_free_within_its_longest_lease,
    i10_asking_again_changes_nothing,
    i11_extend_never_creates,
    i12_somebody_looks_again_in_time,
    every_token_is_granted_once,
    settled_attempts_do_not_come_back,
    an_attempt_is_here_once,
    a_reservation_is_kept_for_its_attempt,
    a_paused_lock_is_granted_to_nobody,
    a_lock_stays_taken_after_a_success,
    who_is_replaced_makes_room_and_does_not_run,
    who_is_revoked_does_not_run,
    who_is_rejected_does_not_run,
    who_keeps_coming_back_lets_others_pass,
    a_wait_lasts_as_long_as_was_asked,
    a_grant_reaches_who_was_granted,
    a_grant_goes_to_a_worker_with_a_free_slot,
    a_grant_is_passed_on_only_before_it_begins,
    messages_leave_for_their_own_broker,
    neglected_tells_what_nobody_looks_at,
    answers_tell_what_the_keys_say,
    no_grant_is_above_the_rate,
    no_group_is_above_its_limit,
    flow_keys_match_what_stands,
)


def broken(invariant: str, message: str) -> NoReturn:
    raise InvariantBroken(invariant, message)


def check(world: World, step: Step) -> None:
    """Take note of the step in the ledgers, then check every invariant."""
    a_full_redis_refuses_whole_or_not_at_all(world, step)
    if step.refused:
        return  # all is as it was
    if step.lock:
        note(world, step)
    for invariant in ALL:
        invariant(world, step)


# -- what is known independently of the keys -------------------------------------------------------


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
        if token not in before.record and token.startswith(("keep:", "held:")):
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
            _note_wait(world, ledger, step.token, step.asker.parcel.deadline)
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
    others = _its_like(after, step.asker)
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
        _note_remembered(ledger, rec, base, world.now + round(done_for * 1000))


def _note_remembered(ledger, rec, base, until) -> None:
    """A rejected message may come back from its broker: its attempt is not remembered."""
    ledger.settled[base] = until
    if not rec.get("rejected") or rec.get("publish_at"):
        ledger.settled[rec["attempt"]] = until


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
        first = _first(after)
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
    if step.reply.verdict is Verdict.RELEASED:
        ledger.revoked.add(base_of(step.token))


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

"""Invariants of tasks: each runs once, or is withdrawn, and waits as long as it may."""

from __future__ import annotations

import json

from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.core.owner_token import base_of
from support.script_model.invariants.facts import (
    DELAY,
    MOST_DELAY,
    broken,
    comes_unanswered,
    ends_unanswered,
    grants,
    may_grant,
    news,
    reservations,
    touched,
    verb,
)
from support.script_model.invariants.locks import is_closed
from support.script_model.snapshot import LockState
from support.script_model.world import Asker, Ledger, Step, World

CLOCK_MS = 1000
"""Most milliseconds by which the clocks of a worker and of the server are taken to differ."""


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
            _may_be_copy_of_ended(ledger, attempt, step.asker.claim.copy)
            and ledger.settled.get(attempt, 0) > world.now
        )
        if done != (step.reply.verdict is Verdict.DONE):
            broken("I8", f"{step.token} of {attempt} at {name} was told {step.reply.verdict}")


def _may_be_copy_of_ended(ledger: Ledger, attempt: str, copy: int) -> bool:
    """Whether a message can be a copy of the ended one: if it is known to be later, it is not."""
    if copy > 1:
        return ledger.ended.get(attempt, 0) >= copy // 1000 - CLOCK_MS
    return copy == 1


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
            if step.token != first_in_queue(after):
                broken("T42", f"{step.token} found {name} reserved and closed, and is not next")
            continue
        if verb(step) == "park" and not consumed(world, step, after, step.token):
            continue  # it has come, and nobody is there to run it
        if len(before.valid(world.now)) <= ledger.limit and step.token not in after.holders:
            broken("T42", f"{step.token} found {name} reserved, and was told {step.reply.verdict}")


def first_in_queue(state: LockState) -> str:
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
            mine = its_like(after, step.asker)
            if mine:
                broken("replace", f"{step.token} was told FULL at {name} beside {mine}")


def who_is_revoked_does_not_run(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    """A message that has not begun frees its lock when its task is revoked; a worker ends it."""
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
        released = waits or _was_taken(world, step, ledger, before)
        if (step.reply.verdict is Verdict.RELEASED) != released:
            broken("revoke", f"{step.token} of {name}, {waits=}, was told {step.reply.verdict}")
        if waits and consumed(world, step, before, step.token) and not _told(step):
            broken("revoke", f"no worker was told that {step.token} of {name} was revoked")


def _waits_as_a_message(world: World, step: Step, state: LockState) -> bool:
    """Whether the step's token is a message of its realm that waits, and not for too long.

    Or it was granted, and has not begun: then its message is still stored.
    """
    rec = state.record.get(step.token, {})
    is_stored = bool(rec.get("parked")) and base_of(step.token) in state.bodies
    if step.token in state.holders and rec.get("state") == "granted" and is_stored:
        return rec["realm"] == step.asked[0]
    lines = {*state.queue, *state.adrift, *state.delayed}
    waits = step.token in lines and bool(rec.get("parked"))
    if step.token in state.delayed:
        return rec["realm"] == step.asked[0]
    in_time = state.deadlines.get(step.token, world.now + 1) > world.now
    if rec.get("state") == "leaving" and not in_time:  # nobody told what became of it
        return rec["realm"] == step.asked[0]
    return waits and in_time and rec["realm"] == step.asked[0]


def _was_taken(world: World, step: Step, ledger: Ledger, before: LockState) -> bool:
    """Whether an earlier revoke took this grant, which is remembered for a time."""
    return step.token not in before.record and ledger.taken.get(step.token, 0) > world.now


def consumed(world: World, step: Step, state: LockState, token: str) -> bool:
    return bool(step.before.takers(state.record.get(token, {}), world.now))


def _told(step: Step) -> bool:
    """Whether an inbox has a verdict on the step's token that was not there before."""
    heads = [json.loads(entry.partition(b"\n")[0]) for _, entry in news(step)]
    told = [(base_of(head["token"]), head["verdict"]) for head in heads]
    return (base_of(step.token), "revoked") in told


def its_like(state: LockState, asker: Asker) -> list[str]:
    """Return the messages of its task that an asker could replace."""
    to_park = asker.to_park
    near = [t for t, route in state.adrift.items() if route == f"{to_park.realm}:{to_park.queue}"]
    return [
        token
        for token in (*state.queue, *near)
        if (rec := state.record[token]).get("parked")
        and (rec["task"], rec["realm"]) == (asker.owner.task, to_park.realm)
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


_UNCOUNTED = {Ending.REJECT, Ending.LATER, Ending.REFUSED}


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
            refused = step.ending is Ending.REFUSED and step.token == former[0]
            if step.token == former[0] and (
                step.ending in _UNCOUNTED or ends_unanswered(world, step, before)
            ):
                counts = False
            returns = int(was.get("returns", 0)) + counts
            if int(rec.get("returns", 0)) != returns:
                broken("returns", f"{token} of {name} has come back {returns} times: {rec}")
            doublings = returns - (1 if unread else 2)
            delays = (refused or (counts and doublings >= 0)) and not any(
                was.get(end) for end in ("by", "revoked", "rejected")
            )
            delay = min(DELAY * 2**doublings, MOST_DELAY)
            if refused:
                delay = round(step.asked[2].seconds * 1000)
            until = world.now + delay if delays else None
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

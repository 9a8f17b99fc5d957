"""What a step did: grants, ends, places."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NoReturn

from celery_singleton_lock.core.model import Claim
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.store.worker_operations import DEFER as DEFER_SECONDS
from support.script_model.snapshot import LockState
from support.script_model.world import Ledger, Step, World

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


def news(step: Step) -> Iterator[tuple[str, bytes]]:
    """Yield what this step put into an inbox, and into whose."""
    for worker, entries in step.after.inboxes.items():
        for entry in entries[len(step.before.inboxes.get(worker, ())) :]:
            yield worker, entry


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
    told = step.asker is not None and step.asker.claim.unanswered
    return told and verb(step) == "park" and step.token in before.valid(world.now)


def comes_unanswered(step: Step, before: LockState, after: LockState) -> bool:
    """Whether this step stores a message whose delivery with the unanswered claim is gone."""
    told = step.asker is not None and step.asker.claim.unanswered
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


def broken(invariant: str, message: str) -> NoReturn:
    raise InvariantBroken(invariant, message)

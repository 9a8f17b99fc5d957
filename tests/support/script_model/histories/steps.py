"""Steps that several histories share."""

from __future__ import annotations

from dataclasses import replace

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.model import Ending, Verdict
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.core.rate import Rate, packed
from support.script_model.flow import COSTED, FAIR
from support.script_model.world import ONE, Asker, World


def leaves(world, *askers, worker="w1"):
    """Park messages that nobody takes, and return them on their way to the broker."""
    for asker in askers:
        world.park(asker)
    strays = world.kick(ONE, worker)
    world.published |= {(stray.seal, stray.token) for stray in strays}
    return strays


def comes_back(world, parked, ending=Ending.AGAIN):
    """A worker begins with a message, which comes back."""
    got = world.receive("w1")
    assert base_of(got.token) == parked.base
    if ending is not Ending.UNREAD:
        world.claim(ONE, got.token)
    world.release(ONE, got.token, ending, worker="w1", lost=True)
    return got


def comes_as_copy(world, asker):
    """A marked delivery, which would wait if it were not found to be a twin."""
    copy = world.new_asker(asker.claim.name, attempt=asker.owner.attempt, copy=True)
    assert world.acquire(copy, 30.0).verdict is Verdict.TWIN


def costs(world: World, group: str, cost: int, **facts) -> Asker:
    asker = world.new_asker(FAIR, plain=True, **facts)
    flow = packed((Rate(COSTED, cost=cost),), group=Group(group))
    return replace(asker, claim=asker.claim._replace(flow=flow))

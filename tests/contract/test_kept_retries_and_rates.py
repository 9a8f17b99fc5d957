"""A retry that kept its permit, on a lock with rates and costs."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import Rate, ending_at_rate, packed, rates_of
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = pytest.mark.contract

REALM = "f" * 16
BY = Operator("test")


@pytest.fixture
def store(lock_client):
    store = RedisAdminStore(lock_client, claim_lease=60.0)
    store.worker_heartbeat("w", REALM, ["q"], 600.0, 9)
    return store


def owner(retries):
    return Owner(f"token{retries}.0", f"m/{retries}/0", "t", "w")


def claim(rate, *, ends=False):
    flow = packed(rates_of(rate))
    return Claim("k", flow=ending_at_rate(flow) if ends else flow)


def keep(store):
    store.release("k", owner(0).token, Ending.KEEP, reserve=Reservation("m/1/0", 600.0))


def test_a_retry_that_ends_above_its_rate_leaves_no_permit_taken(store):
    """Nobody else could start until the reservation lapses."""
    assert store.acquire(owner(0), claim("1/h")).verdict is Verdict.GRANTED
    keep(store)
    assert store.acquire(owner(1), claim("1/h", ends=True)).verdict is Verdict.BLOCKED
    assert not store.inspect("k").holders


@pytest.mark.parametrize("parks", [False, True])
def test_a_retry_that_costs_too_much_leaves_no_permit_taken(store, parks):
    rate = Rate("9/h", cost=2)
    assert store.acquire(owner(0), claim(rate)).verdict is Verdict.GRANTED
    store.set_rates("k", rates_of(Rate("1/h", cost=1)), by=BY)
    keep(store)
    if parks:
        ask = store.park(owner(1), claim(rate), MessageToPark(b"body", REALM, "q"))
    else:
        ask = store.acquire(owner(1), claim(rate))
    assert ask.verdict is Verdict.TOO_COSTLY
    assert not store.inspect("k").holders


def test_a_retry_that_waits_already_and_costs_too_much_does_not_start(store):
    assert store.acquire(owner(0), claim(Rate("9/h", cost=2))).verdict is Verdict.GRANTED
    store.park(owner(1), claim(Rate("9/h", cost=5)), MessageToPark(b"body", REALM, "q"))
    store.set_rates("k", rates_of(Rate("3/h", cost=1)), by=BY)
    keep(store)
    assert not store.inspect("k").holders

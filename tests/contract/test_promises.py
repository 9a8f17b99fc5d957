"""Sentences of docs/guarantees.md that no other test holds."""

from __future__ import annotations

import pytest

from celery_singleton_lock.model import Claim, Ending, Owner, Parcel, Verdict, base_of, new_token
from celery_singleton_lock.store.redis import RedisStore

pytestmark = pytest.mark.contract

NAME = "account:42"
LEASE = 30.0
CLAIM = 0.2


@pytest.fixture
def store(redis_client):
    """A store with one worker, which has to claim a grant at once."""
    store = RedisStore(redis_client, claim_lease=CLAIM)
    store.beat("w", "R", ["q"], 10.0)
    yield store
    store.close()


def message(attempt=""):
    return Owner(new_token(), attempt, "app.task", host="host", pid=1)


def park(store, who, **claim):
    parcel = Parcel(f"body of {who.attempt}".encode(), "R", "q")
    return store.park(who, Claim(NAME, LEASE, **claim), parcel).verdict


def test_a_message_that_is_parked_again_is_kept_once(store):
    """Redelivered before it was acknowledged: neither a second place in the queue nor a copy."""
    store.acquire(message("first/0/0"), Claim(NAME, LEASE))
    assert park(store, message("second/0/0")) is Verdict.WAITING
    assert park(store, message("second/0/0"), copy=True) is Verdict.TWIN
    view = store.inspect(NAME)
    assert (view.waiting, view.bodies) == (1, 1)


def test_a_delivery_that_its_worker_lost_keeps_its_place(store):
    """Handed out and never claimed: it is handed out again, ahead of those who came later."""
    holder = message("first/0/0")
    store.acquire(holder, Claim(NAME, LEASE))
    second, third = message("second/0/0"), message("third/0/0")
    for who in (second, third):
        park(store, who)
    store.release(NAME, holder.token, Ending.FINAL)
    assert store.receive("w", 1.0).token == second.token
    store.wait(NAME, "nobody", CLAIM + 0.05)
    store.kick(NAME)
    again = store.receive("w", 1.0)
    assert base_of(again.token) == base_of(second.token)
    assert again.body == b"body of second/0/0"
    assert store.inspect(NAME).waiting == 1

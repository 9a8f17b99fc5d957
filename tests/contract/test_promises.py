"""Sentences of docs/guarantees.md that no other test holds."""

from __future__ import annotations

import pytest

from celery_singleton_lock.model import Claim, Ending, Owner, Parcel, Verdict, base_of, new_token
from celery_singleton_lock.store.redis import RedisStore
from celery_singleton_lock.store.scripts import load_scripts

pytestmark = pytest.mark.contract

NAME = "account:42"
LEASE = 30.0
CLAIM = 0.2


@pytest.fixture
def store(lock_client):
    """A store with one worker, which has to claim a grant at once."""
    store = RedisStore(lock_client, claim_lease=CLAIM)
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


def test_renewals_beside_it_do_not_keep_a_message_adrift(lock_client):
    """Nobody consumed it when it was parked. A sweeper looks after 5 s, whoever renews meanwhile.

    A permit is free, and its worker has come: renewals every 4 s must not put the look off.
    """
    clock = "local function server_time() return tonumber(redis.call('GET', 'now')) end"
    store, now = RedisStore(lock_client, scripts=load_scripts(clock)), 1_800_000_000_000_000
    lock_client.set("now", now)
    holder = message("first/0/0")
    store.acquire(holder, Claim(NAME, 12.0, limit=2))
    store.park(message("second/0/0"), Claim(NAME, 12.0, limit=2), Parcel(b"body", "R", "q"))
    assert store.inspect(NAME).adrift == 1
    seen = []
    for seconds in (4, 8, 12):
        lock_client.set("now", now + seconds * 1_000_000)
        assert store.extend([(NAME, holder.token, 12.0)]) == [True]
        seen += [seconds] if NAME in store.take_due(10) else []
    assert seen[:1] == [8]
    store.beat("w", "R", ["q"], 10.0)
    store.kick(NAME)
    assert store.receive("w", 1.0).body == b"body"
    store.close()

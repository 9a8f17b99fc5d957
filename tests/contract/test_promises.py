"""Sentences of docs/guarantees.md that no other test holds."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Parcel, Verdict, base_of, new_token
from celery_singleton_lock.store.redis.sync import RedisStore
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


@pytest.fixture
def timed(lock_client):
    """A store whose server's clock stands at the number of seconds that it is set to."""
    clock = "local function server_time() return redis.call('GET', 'now') end"
    store = RedisStore(lock_client, scripts=load_scripts(clock))
    store.set_clock = lambda seconds: lock_client.set(
        "now", 1_800_000_000_000_000 + seconds * 10**6
    )
    store.set_clock(0)
    yield store
    store.close()


def adrift_beside(store, holder):
    """Park a message that nobody consumes, beside the holder of one of two permits."""
    store.acquire(holder, Claim(NAME, 12.0, limit=2))
    store.park(message("second/0/0"), Claim(NAME, 12.0, limit=2), Parcel(b"body", "R", "q"))
    assert store.inspect(NAME).adrift == 1


def test_what_goes_adrift_is_looked_at_at_once_whoever_comes_by(timed):
    """As when Redis was away, and no worker has told yet that it lives: the first one takes it."""
    adrift_beside(timed, message("first/0/0"))
    timed.acquire(message("third/0/0"), Claim(NAME, 12.0, limit=2))
    timed.beat("w", "R", ["q"], 10.0)
    assert timed.take_due(10) == [NAME]
    timed.kick(NAME, worker="w", realm="R")
    timed.release(NAME, timed.inspect(NAME).holders[0].token, Ending.FINAL)
    assert timed.receive("w", 1.0).body == b"body"


def test_renewals_beside_it_do_not_keep_a_message_adrift(timed):
    """Nobody consumes it. A sweeper looks at once, then every 5 s, whoever renews meanwhile.

    A permit is free, and its worker comes: renewals every 4 s must not put the look off.
    """
    holder, seen = message("first/0/0"), []
    adrift_beside(timed, holder)
    for seconds in (0, 4, 8, 12):
        timed.set_clock(seconds)
        assert timed.extend([(NAME, holder.token, 12.0)]) == [True]
        if NAME in timed.take_due(10):
            seen.append(seconds)
            timed.kick(NAME)
    assert seen == [0, 8]
    timed.beat("w", "R", ["q"], 10.0)
    timed.kick(NAME)
    assert timed.receive("w", 1.0).body == b"body"

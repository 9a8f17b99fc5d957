"""Sentences of docs/guarantees.md that no other test covers."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import base_of, new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import load_scripts
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

NAME = "account:42"
LEASE = 30.0
CLAIM = 20.0


@pytest.fixture
def store(lock_client):
    """A store with one worker, which has to claim a grant at once."""
    store = RedisStore(lock_client, claim_lease=CLAIM)
    store.worker_heartbeat("w", "R", ["q"], 600.0)
    yield store
    store.close()


def message(attempt=""):
    return Owner(new_token(), attempt, "app.task", host="host", pid=1)


def park(store, who, **claim):
    to_park = MessageToPark(f"body of {who.attempt}".encode(), "R", "q")
    return store.park(who, Claim(NAME, LEASE, **claim), to_park).verdict


def test_a_message_that_is_parked_again_is_kept_once(store):
    """Redelivered before it was acknowledged: neither a second place in the queue nor a copy."""
    store.acquire(message("first/0/0"), Claim(NAME, LEASE))
    assert park(store, message("second/0/0")) is Verdict.WAITING
    assert park(store, message("second/0/0"), copy=True) is Verdict.TWIN
    view = store.inspect(NAME)
    assert (view.waiting, view.bodies) == (1, 1)


def test_a_delivery_that_its_worker_lost_keeps_its_place(store):
    """Delivered and never claimed: it is delivered again, before later messages."""
    holder = message("first/0/0")
    store.acquire(holder, Claim(NAME, LEASE))
    second, third = message("second/0/0"), message("third/0/0")
    for who in (second, third):
        park(store, who)
    store.release(NAME, holder.token, Ending.FINAL)
    assert store.receive("w", 30.0).token == second.token
    let_pass(store, 25)
    store.sweep_and_grant(NAME)
    again = store.receive("w", 30.0)
    assert base_of(again.token) == base_of(second.token)
    assert again.body == b"body of second/0/0"
    assert store.inspect(NAME).waiting == 1


@pytest.fixture
def timed(lock_client):
    """A store with a server clock that the test sets."""
    clock = "local function server_time() return redis.call('GET', 'now') end"
    store = RedisStore(lock_client, scripts=load_scripts(clock))
    store.set_clock = lambda seconds: lock_client.set(
        "now", 1_800_000_000_000_000 + seconds * 10**6
    )
    store.set_clock(0)
    yield store
    store.close()


def adrift_beside(store, holder):
    """Park a message without a consumer, while one of two permits is held."""
    store.acquire(holder, Claim(NAME, 12.0, limit=2))
    store.park(message("second/0/0"), Claim(NAME, 12.0, limit=2), MessageToPark(b"body", "R", "q"))
    assert store.inspect(NAME).adrift == 1


def test_an_adrift_message_is_handled_by_the_next_worker_at_once(timed):
    """As after an outage of Redis, before any heartbeat: the first worker gets it."""
    adrift_beside(timed, message("first/0/0"))
    timed.acquire(message("third/0/0"), Claim(NAME, 12.0, limit=2))
    timed.worker_heartbeat("w", "R", ["q"], 600.0)
    assert timed.take_due_locks(10) == [NAME]
    timed.sweep_and_grant(NAME, worker="w", realm="R")
    timed.release(NAME, timed.inspect(NAME).holders[0].token, Ending.FINAL)
    assert timed.receive("w", 30.0).body == b"body"


def test_renewals_beside_it_do_not_keep_a_message_adrift(timed):
    """Nobody consumes it. A sweeper looks at once, then every 5 s, whoever renews meanwhile.

    A permit is free, and its worker comes: renewals every 4 s must not put the look off.
    """
    holder, seen = message("first/0/0"), []
    adrift_beside(timed, holder)
    for seconds in (0, 4, 8, 12):
        timed.set_clock(seconds)
        assert timed.extend([(NAME, holder.token, 12.0)]) == [True]
        if NAME in timed.take_due_locks(10):
            seen.append(seconds)
            timed.sweep_and_grant(NAME)
    assert seen == [0, 8]
    timed.worker_heartbeat("w", "R", ["q"], 600.0)
    timed.sweep_and_grant(NAME)
    assert timed.receive("w", 30.0).body == b"body"

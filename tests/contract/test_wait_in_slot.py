"""To wait in a slot: in the queue, at one's place, under one's own token."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict, new_token
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.lock.wait_for_turn import stand_in_line
from support.waiting import eventually

pytestmark = pytest.mark.contract

NAME = "account:42"


@pytest.fixture
def store(lock_client):
    store = RedisStore(lock_client, claim_lease=0.2)
    yield store
    store.close()


@pytest.fixture
def holder(store):
    """Somebody who holds the lock."""
    who = Owner(new_token())
    store.acquire(who, Claim(NAME))
    return who


@pytest.fixture
def aside():
    """A thread for who waits."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def stand(store, who, timeout, lease=30.0):
    return stand_in_line(store, SystemClock(), who, Claim(NAME, lease), timeout)


def tokens(store):
    return [holder.token for holder in store.inspect(NAME).holders]


def test_a_free_lock_is_taken_at_once(store):
    """The lease counts from the question, which came before the answer."""
    began = SystemClock().monotonic()
    who = Owner(new_token())
    reply, asked = stand(store, who, 5.0)
    assert reply.verdict is Verdict.GRANTED
    assert began <= asked <= SystemClock().monotonic()
    assert tokens(store) == [who.token]


def test_who_waits_gets_the_lock_as_it_is_given_back(store, holder, aside):
    """For a whole lease, counted from the claim and not from the first question."""
    who = Owner(new_token())
    waiting = aside.submit(stand, store, who, 10.0, 20.0)
    eventually(lambda: store.inspect(NAME).waiting == 1)
    freed = SystemClock().monotonic()
    store.release(NAME, holder.token, Ending.FINAL)
    reply, asked = waiting.result(5)
    assert reply.verdict is Verdict.GRANTED
    assert asked >= freed
    (held,) = store.inspect(NAME).holders
    assert held.token == who.token
    assert 15 < held.expires_in <= 20


def test_whose_time_is_up_leaves_the_queue(store, holder):
    """And does not take the lock with it."""
    reply, _ = stand(store, Owner(new_token()), 0.1)
    assert reply.verdict is Verdict.RELEASED
    assert store.inspect(NAME).waiting == 0
    assert tokens(store) == [holder.token]


def test_who_was_given_up_for_dead_stands_in_line_again_as_the_same(store, holder, aside):
    """The grant lapsed before it was claimed; others know the task by its token."""
    lapsed = threading.Event()
    claim = store.claim

    def late(owner, name, lease):
        if not lapsed.is_set():
            eventually(lambda: store.kick(NAME) == [] and not tokens(store))
            lapsed.set()
        return claim(owner, name, lease)

    store.claim = late
    who = Owner(new_token())
    waiting = aside.submit(stand, store, who, 10.0)
    eventually(lambda: store.inspect(NAME).waiting == 1)
    store.release(NAME, holder.token, Ending.FINAL)
    reply, _ = waiting.result(5)
    assert lapsed.is_set()
    assert reply.verdict is Verdict.GRANTED
    assert tokens(store) == [who.token]

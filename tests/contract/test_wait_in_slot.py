"""The wait in a pool slot: in the queue, with a rank and an owner token."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.lock.wait_for_turn import wait_in_slot
from celery_singleton_lock.store.redis.sync import RedisStore
from support.passing_time import let_pass
from support.waiting import eventually

pytestmark = pytest.mark.contract

NAME = "account:42"


@pytest.fixture
def store(lock_client):
    store = RedisStore(lock_client, claim_lease=20.0)
    yield store
    store.close()


@pytest.fixture
def holder(store):
    """The holder of the lock."""
    who = Owner(new_token())
    store.acquire(who, Claim(NAME))
    return who


@pytest.fixture
def aside():
    """A thread for who waits."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def stand(store, who, timeout, lease=30.0):
    return wait_in_slot(store, SystemClock(), who, Claim(NAME, lease), timeout)


def tokens(store):
    return [holder.token for holder in store.inspect(NAME).holders]


def test_a_free_lock_is_taken_at_once(store):
    """The lease counts from the question, which came before the answer."""
    began = SystemClock().monotonic()
    who = Owner(new_token())
    reply, asked = stand(store, who, 60.0)
    assert reply.verdict is Verdict.GRANTED
    assert began <= asked <= SystemClock().monotonic()
    assert tokens(store) == [who.token]


def test_a_waiting_task_gets_the_lock_at_its_release(store, holder, aside):
    """For a whole lease, counted from the claim and not from the first question."""
    who = Owner(new_token())
    waiting = aside.submit(stand, store, who, 60.0, 200.0)
    eventually(lambda: store.inspect(NAME).waiting == 1)
    freed = SystemClock().monotonic()
    store.release(NAME, holder.token, Ending.FINAL)
    reply, asked = waiting.result(60)
    assert reply.verdict is Verdict.GRANTED
    assert asked >= freed
    (held,) = store.inspect(NAME).holders
    assert held.token == who.token
    assert 150 < held.expires_in <= 200


def test_whose_time_is_up_leaves_the_queue(store, holder):
    """And does not take the lock with it."""
    reply, _ = stand(store, Owner(new_token()), 0.1)
    assert reply.verdict is not Verdict.GRANTED
    assert store.inspect(NAME).waiting == 0
    assert tokens(store) == [holder.token]


def test_a_waiter_that_expired_is_queued_again_with_its_token(store, holder, aside):
    """The grant lapsed before it was claimed; others know the task by its token."""
    lapsed = threading.Event()
    claim = store.claim

    def late(owner, name, lease, **options):
        if not lapsed.is_set():
            eventually(lambda: tokens(store) == [who.token])
            let_pass(store, 25)
            store.sweep_and_grant(NAME)
            assert not tokens(store)
            lapsed.set()
        return claim(owner, name, lease, **options)

    store.claim = late
    who = Owner(new_token())
    waiting = aside.submit(stand, store, who, 60.0)
    eventually(lambda: store.inspect(NAME).waiting == 1)
    store.release(NAME, holder.token, Ending.FINAL)
    reply, _ = waiting.result(60)
    assert lapsed.is_set()
    assert reply.verdict is Verdict.GRANTED
    assert tokens(store) == [who.token]

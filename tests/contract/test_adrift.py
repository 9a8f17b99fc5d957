"""Many messages that no live worker takes, at one lock: none is hidden by the others."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Parcel, Verdict, new_token
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = pytest.mark.contract

NAME = "a"
ROUTES = 150
"""More than one script looks at."""
MOST_LOOKS = 40
"""For 2,000 messages; each look takes up to 100."""


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client)
    yield store
    store.close()


def park(store, queue="q", task="app.task", **claim):
    who = Owner(new_token(), f"{new_token()}/0/0", task)
    reply = store.park(who, Claim(NAME, **claim), Parcel(b"body", "R", queue))
    return who.token, reply.verdict


def adrift(store):
    return store.client.zcard(store.keyspace.lock(NAME).adrift)


@pytest.fixture
def parked(store):
    """Return the tokens by queue; no worker consumes any of the queues."""
    tokens = {f"q{number:03}": park(store, f"q{number:03}")[0] for number in range(ROUTES)}
    assert adrift(store) == ROUTES
    return tokens


@pytest.mark.parametrize("queue", ["q000", "q075", "q149"])
def test_a_worker_gets_its_message_although_many_queues_have_no_worker(store, parked, queue):
    store.beat("w", "R", [queue], 30)
    newcomer = Owner(new_token(), "new/0/0", "app.task", "w")
    assert store.acquire(newcomer, Claim(NAME)).verdict is Verdict.BLOCKED
    assert [holder.token for holder in store.inspect(NAME).holders] == [parked[queue]]
    assert adrift(store) == ROUTES - 1


def test_messages_of_many_queues_queue_again_when_another_worker_consumes_them(store, parked):
    """A look queues some of them again, and sends none of the others to the broker."""
    holder = Owner(new_token())
    assert store.acquire(holder, Claim(NAME)).verdict is Verdict.GRANTED
    store.beat("w", "R", list(parked), 30)
    looks = 0
    while adrift(store):
        assert store.kick(NAME, worker="other", realm="R") == []
        looks += 1
        assert looks <= ROUTES
    store.release(NAME, holder.token, Ending.FINAL)
    (granted,) = store.inspect(NAME).holders
    assert granted.token == parked["q000"], "the oldest comes first"


def test_messages_of_many_queues_all_leave_for_the_broker(store, parked):
    left = set()
    looks = 0
    while adrift(store):
        strays = store.kick(NAME, worker="w", realm="R")
        looks += 1
        assert looks <= ROUTES
        for stray in strays:
            left.add(stray.queue)
            assert store.left(NAME, stray.seal, [stray.token], sent=True) == 1
    assert left == set(parked)


def test_the_oldest_of_a_task_is_replaced_although_many_of_another_are_older(store):
    store.beat("w", "R", ["q"], 30)
    store.acquire(Owner(new_token()), Claim(NAME))
    older = [park(store, task="app.other")[0] for _ in range(150)]
    mine, _ = park(store)
    full = len(older) + 1
    newest, verdict = park(store, max_waiting=full, replace=True)
    assert verdict is Verdict.WAITING
    queue = [
        token.decode() for token in store.client.zrange(store.keyspace.lock(NAME).queue, 0, -1)
    ]
    assert queue == [*older, newest]
    assert mine not in queue


def test_two_thousand_messages_without_a_worker_leave_within_a_bounded_number_of_looks(store):
    """Of one queue, as after a roll-back to workers without locks."""
    owners = [Owner(new_token(), f"t{number}/0/0", "app.task") for number in range(2000)]
    parcel = Parcel(b"body", "R", "q")
    store.park_many([(owner, Claim(NAME), parcel) for owner in owners])
    left = set()
    for _ in range(MOST_LOOKS):
        strays = store.kick(NAME, worker="w", realm="R")
        left |= {stray.token for stray in strays}
        if strays:
            store.left(NAME, strays[0].seal, [stray.token for stray in strays], sent=True)
    assert left == {owner.token for owner in owners}
    assert store.inspect(NAME).bodies == 0

"""One sweep by hand moves on what nobody looks at, and wakes who could run it."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin.sweep import Swept, sweep_once
from celery_singleton_lock.core.model import Claim, Owner, Parcel, new_token
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = pytest.mark.contract

BY = Operator("jane", "desk")


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client)
    yield store
    store.close()


def park(store, name, queue="q"):
    who = Owner(token := new_token(), f"{token}/0/0", "app.task")
    store.park(who, Claim(name), Parcel(b"body", "R", queue))
    return who.token


def make_due(store, *names):
    """As if it was long ago that they wanted a look."""
    for name in names:
        store.client.zadd(store.keyspace.lock(name).due, {name: 1})


def test_a_sweep_grants_what_the_dead_have_left(store):
    store.acquire(Owner(new_token()), Claim("a", lease=0.05))
    store.beat("w", "R", ["q"], 30)
    token = park(store, "a")
    store.wait("a", "nobody", 0.1)
    make_due(store, "a")
    assert sweep_once(store, BY) == Swept(locks=1)
    assert [holder.token for holder in store.inspect("a").holders] == [token]


def test_where_no_worker_is_live_the_messages_go_to_the_broker(store):
    """All of this broker: an autoscaler sees that there is work."""
    for name in ("a", "b"):
        park(store, name)
        park(store, name)
    make_due(store, "a", "b")
    sent = []
    assert sweep_once(store, BY, "R", sent.append) == Swept(locks=2, published=4)
    assert sorted((stray.name, stray.queue, stray.body) for stray in sent) == [
        (name, "q", b"body") for name in ("a", "a", "b", "b")
    ]
    assert store.inspect("a").bodies == 0


def test_copies_are_of_this_broker_and_only_where_they_can_be_sent(store):
    park(store, "a")
    make_due(store, "a")
    sent = []
    assert sweep_once(store, BY, "S", sent.append) == Swept(locks=1, adrift=1)
    assert sent == []
    make_due(store, "a")
    assert sweep_once(store, BY, "R") == Swept(locks=1, adrift=1)


def test_more_locks_than_one_look_takes_are_all_swept(store):
    names = [f"a{number}" for number in range(300)]
    for number, name in enumerate(names):
        if number % 30 == 0:
            park(store, name)
        make_due(store, name)
    assert sweep_once(store, BY) == Swept(locks=300, adrift=10)


def test_nothing_to_do_is_nothing_done(store):
    assert sweep_once(store, BY) == Swept(0, 0, 0)

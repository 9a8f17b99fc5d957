"""A sweep by an operator handles what no worker sweeps, and grants waiters."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin.sweep import Swept, sweep_once
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.passing_time import let_pass
from support.waiters import park

pytestmark = pytest.mark.contract

BY = Operator("jane", "desk")


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client, claim_lease=60.0)
    yield store
    store.close()


def make_due(store, *names):
    """As if their sweep were long overdue."""
    for name in names:
        store.client.zadd(store.keyspace.lock(name).due, {name: 1})


def test_a_sweep_grants_what_the_dead_have_left(store):
    store.acquire(Owner(new_token()), Claim("a", lease=20.0))
    store.worker_heartbeat("w", "R", ["q"], 600)
    token = park(store, "a")
    let_pass(store, 25)
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


def test_messages_are_sent_although_workers_of_another_application_sweep_their_locks(store):
    """Else an autoscaler that has stopped all workers of one application would start none again."""
    store.worker_heartbeat("theirs", "S", ["q"], 600)
    for name in ("a", "b"):
        park(store, name)
        park(store, name, "t2", realm="S", queue="gone")
    make_due(store, "a", "b")
    store.sweep_and_grant_many(store.take_due_locks(), worker="theirs", realm="S")
    assert store.take_due_locks() == []
    sent = []
    assert sweep_once(store, BY, "R", sent.append) == Swept(locks=2, published=2)
    assert sweep_once(store, BY, "R", sent.append).published == 0
    assert sorted((each.name, each.queue) for each in sent) == [("a", "q"), ("b", "q")]


def test_more_locks_than_one_look_takes_are_all_swept(store):
    names = [f"a{number}" for number in range(300)]
    for number, name in enumerate(names):
        if number % 30 == 0:
            park(store, name)
        make_due(store, name)
    assert sweep_once(store, BY) == Swept(locks=300, adrift=10)


def test_nothing_to_do_is_nothing_done(store):
    assert sweep_once(store, BY) == Swept(0, 0, 0)

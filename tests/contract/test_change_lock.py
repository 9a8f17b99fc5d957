"""Changes of one lock, as the command line and Flower make them: what is done, what is refused."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin import Operator, Refused, change_lock
from celery_singleton_lock.admin.change_lock import UnknownName, drop_warning, find_waiter
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiters import hold, park

pytestmark = pytest.mark.contract

BY = Operator("jane", why="too many")


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client, claim_lease=60.0)
    store.worker_heartbeat("w", "R", ["q"], 600)
    yield store
    store.close()


def queue(store, name="a"):
    """Return the task ids in the queue, in order."""
    return [each.task_id for each in store.list_waiters(name, "queue").waiting]


def test_a_mistyped_name_is_not_paused_or_limited_and_a_similar_one_is_named(store):
    """Nothing is written, so the audit has no entry. Both accept it by force."""
    hold(store, "account:42")
    for change in (
        lambda **how: change_lock.pause(store, "acount:42", BY, **how),
        lambda **how: change_lock.set_limit(store, "acount:42", 2, BY, **how),
    ):
        with pytest.raises(UnknownName, match=r"no lock 'acount:42' is known.*account:42"):
            change()
        assert not store.audit()
    assert change_lock.pause(store, "acount:42", BY, force=True)
    assert change_lock.set_limit(store, "other", 2, BY, force=True) == 2


def test_a_known_lock_is_paused_once_and_limited(store):
    hold(store, "a")
    assert change_lock.pause(store, "a", BY)
    assert not change_lock.pause(store, "a", Operator("jane", why="once more"))
    assert store.inspect("a").paused.endswith(": too many")
    assert change_lock.set_limit(store, "a", 3, BY) == 3
    assert change_lock.set_limit(store, "a", None, BY) == 1


def test_a_waiter_is_found_by_its_token_and_by_its_task_id(store):
    hold(store, "a")
    park(store, "a", "t1")
    found = find_waiter(store, "a", "t1")
    assert find_waiter(store, "a", found.token).task_id == "t1"
    with pytest.raises(Refused, match="does not wait for 'a'"):
        find_waiter(store, "a", "t2")


def test_two_messages_with_one_id_are_refused_with_their_tokens(store):
    hold(store, "a")
    park(store, "a", "t")
    park(store, "a", "t")
    with pytest.raises(Refused, match="2 messages with the id t") as refused:
        change_lock.promote(store, "a", "t", BY)
    for each in store.list_waiters("a", "queue").waiting:
        assert each.token in str(refused.value)


def test_a_holder_is_no_waiter(store):
    token = new_token()
    store.acquire(Owner(token, "h/0/0", "shop.settle"), Claim("a"))
    for who in (token, "h"):
        with pytest.raises(Refused, match="holds 'a' and does not wait for it: use release"):
            find_waiter(store, "a", who)


def test_a_promoted_waiter_is_next(store):
    hold(store, "a")
    for task_id in ("t1", "t2", "t3"):
        park(store, "a", task_id)
    assert change_lock.promote(store, "a", "t3", BY).task_id == "t3"
    assert queue(store) == ["t3", "t1", "t2"]


def test_a_waiter_that_is_not_in_the_queue_cannot_be_promoted(store):
    """It is being sent back to the broker."""
    hold(store, "a")
    store.take_out_messages("a", [park(store, "a", "gone")], 60, new_token())
    with pytest.raises(Refused, match="gone is not in the queue: its state is leaving"):
        change_lock.promote(store, "a", "gone", BY)


def test_dropped_tasks_are_told_and_a_client_that_waits_is_not(store):
    """A client queues again, so no result is stored for it."""
    hold(store, "a")
    park(store, "a", "t1")
    store.acquire(Owner(new_token(), "slot/0/0", "shop.settle"), Claim("a"), wait=60.0)
    found = store.list_waiters("a", "queue").waiting
    assert "queues again within seconds" in drop_warning(found)
    assert drop_warning(found[:1]) == "It will not run."
    told = []
    gone = change_lock.drop(store, "a", found, BY, dropped=told.append)
    assert len(gone) == 2
    assert [(each.task_id, each.message) for each in told] == [("t1", gone[0].message)]
    assert told[0].message
    assert queue(store) == []

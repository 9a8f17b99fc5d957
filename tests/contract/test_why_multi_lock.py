"""why for tasks with several locks: which they wait for, and which they keep."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock.admin import Operator, why
from celery_singleton_lock.admin.bulk_parked import Pace, drain, purge
from celery_singleton_lock.admin.lock_views import show_lock
from celery_singleton_lock.admin.multi_lock_views import kept_by, parked_elsewhere, standing_of
from celery_singleton_lock.admin.select_parked import Filter
from celery_singleton_lock.cli.render import detail
from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = pytest.mark.contract

A, B = "account:1", "account:2"


@pytest.fixture
def store(lock_client):
    store = RedisAdminStore(lock_client, claim_lease=60.0)
    store.worker_heartbeat("worker-2#a1b2c3", "R", ["q"], 600)
    yield store
    store.close()


@pytest.fixture
def task(store):
    """The task transfer[3f2a91c0…] has the first lock, and is parked at the second."""
    first = Owner(new_token(), "3f2a91c0-1/0/0", "bank.transfer", "worker-2#a1b2c3", "h", 7)
    store.acquire(Owner(new_token(), "other/0/0", "bank.audit", "worker-3#a1", "h", 8), Claim(B))
    store.acquire(first, Claim(A))
    second = first._replace(token=new_token(), attempt="3f2a91c0-1/0/77")
    lock_set = LockSet((Part(A, first.token), Part(B, second.token)), at=1)
    body = json.dumps({"headers": lock_set.header()}).encode() + b"\nbody"
    store.park(second, Claim(B), MessageToPark(body, "R", "q"))
    return "3f2a91c0-1", first, second


def test_why_names_the_lock_that_a_task_waits_for_and_those_it_keeps(store, task):
    task_id, _, second = task
    answer = why(store, task_id)
    assert (answer.state, answer.lock, answer.token, answer.rank) == ("parked", B, second.token, 1)
    assert answer.keeps == (A,)
    assert answer.sentence.startswith("blocked ")
    assert answer.sentence.endswith("you are next; holds 'account:1' meanwhile")


def test_why_names_them_also_for_a_task_that_was_parked_at_the_first_lock(store, task):
    """Then the index knows the task at both."""
    task_id, first, _ = task
    store.release(A, first.token, Ending.AGAIN)
    blocker = Owner(new_token())
    store.acquire(blocker, Claim(A))
    store.park(first, Claim(A), MessageToPark(b"body", "R", "q"))
    store.release(A, blocker.token, Ending.FINAL)
    store.claim(first, A, 30)
    assert len(store.locate_tasks([task_id])) == 2
    assert standing_of(store, task_id)[0] == B
    assert why(store, task_id).keeps == (A,)


def test_a_lock_that_was_lost_is_not_called_kept(store, task):
    task_id, first, second = task
    store.release(A, first.token, Ending.AGAIN)
    assert kept_by(store, B, second.token) == ()
    assert "keeps" not in why(store, task_id).sentence


def test_a_waiter_behind_a_kept_lock_is_told_what_its_holder_waits_for(store, task):
    """So the lock that holds up both can be found."""
    store.park(
        Owner(new_token(), "behind/0/0", "bank.settle"), Claim(A), MessageToPark(b"b", "R", "q")
    )
    sentence = why(store, "behind").sentence
    assert "by transfer[3f2a91c0] on worker-2 (which waits for 'account:2'), lease" in sentence


def test_a_kept_lock_is_shown_as_kept_and_by_whom(store, task):
    _, first, _ = task
    found = show_lock(store, A)
    assert found.elsewhere == {first.token: B}
    (line,) = [line for line in detail(found) if line.startswith("holder")]
    assert "transfer[3f2a91c0] on worker-2 (which waits for 'account:2')" in line
    assert line.endswith(", kept")
    assert show_lock(store, B).elsewhere == {}


@pytest.mark.parametrize("granted", [False, True])
def test_no_pid_is_named_of_a_task_that_waits_for_another_lock(store, task, granted):
    """That process runs other tasks by now, and the operator is told to kill it."""
    _, first, second = task
    if granted:  # and it has not begun
        store.release(B, store.inspect(B).holders[0].token, Ending.FINAL)
    found = show_lock(store, A)
    assert found.elsewhere == {first.token: B}
    assert [(holder.pid, holder.host) for holder in found.view.holders] == [(0, "")]
    assert not [line for line in detail(found) if line.startswith("process")]
    (other,) = show_lock(store, B).view.holders
    assert other.pid == (0 if granted else 8)
    if granted:
        store.claim(second, B, 30.0)
        assert show_lock(store, A).elsewhere == {}
        assert show_lock(store, A).view.holders[0].pid == 0, "that process only began to wait"
        assert show_lock(store, B).view.holders[0].pid == 7


def test_no_pid_is_named_of_a_task_that_has_ended_or_waits_for_its_retry(store):
    owner = Owner(new_token(), "x/0/0", "bank.audit", "worker-2#a1b2c3", "h", 7)
    store.acquire(owner, Claim(A))
    assert show_lock(store, A).view.holders[0].pid == 7
    store.release(A, owner.token, Ending.HOLD, reserve=Reservation("", 60.0))
    (ended,) = show_lock(store, A).view.holders
    assert (ended.state, ended.pid) == ("held_after", 0)


def test_a_running_task_or_a_task_with_one_lock_is_explained_as_usual(store, task):
    running = store.inspect(B).holders
    assert parked_elsewhere(store, B, running) == {}
    assert standing_of(store, "nobody") is None


@pytest.fixture
def kept(store, task):
    """Return the holder of the first lock, unless it is released."""
    return lambda: [holder.task_id for holder in store.inspect(A).holders]


def test_what_a_purged_task_kept_is_given_back_at_once(store, task, kept):
    """If its message is requested, to store its result."""
    purge(store, Filter(B), Operator("jane", action="purge"), dropped=lambda _: None)
    assert kept() == []


def test_what_a_drained_task_kept_is_given_back_at_once(store, task, kept):
    """It is delivered by the broker as if it had never been parked."""
    sent = []
    by = Operator("jane", action="drain")
    drain(store, Filter(B), by, realm="R", publish=sent.append, pace=Pace(0))
    assert len(sent) == 1
    assert kept() == []


def test_what_another_delivery_may_use_is_left_to_its_lease(store, task, kept):
    """Granted but not claimed: the task may still run, and holds its kept locks."""
    _, _, second = task
    store.reset(B)
    store.release(B, second.token, Ending.AGAIN)
    purge(store, Filter(B), Operator("jane", action="purge"), dropped=lambda _: None)
    assert store.inspect(B).waiting == 0
    assert kept() == ["3f2a91c0-1"]

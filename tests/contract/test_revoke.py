"""A parked message of a revoked task is found by its task id, and delivered to be ended."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

NAME, SHORT = "account:42", 20.0


@pytest.fixture(params=["redis", "asyncio", "cluster", "in_memory"])
def kind(request):
    """Each kind of store there is."""
    return request.param


@pytest.fixture
def store(make_store):
    """A worker W lives that consumes q; a delivery comes again after :func:`lapse`."""
    store = make_store(claim_lease=SHORT)
    store.worker_heartbeat("W", "R", ["q"], 6000)
    return store


def hold(store, limit=1):
    who = Owner(new_token())
    assert store.acquire(who, Claim(NAME, limit=limit)).verdict is Verdict.GRANTED
    return who.token


def park(store, attempt, name=NAME, queue="q", limit=1):
    who = Owner(new_token(), attempt)
    assert (
        store.park(who, Claim(name, limit=limit), MessageToPark(b"body", "R", queue)).verdict
        is Verdict.WAITING
    )
    return who.token


def revoke(store, token, **more):
    return store.deliver_revoked(NAME, token, realm=more.pop("realm", "R"), **more).verdict


def received(store, within=30.0):
    delivery = store.receive("W", within)
    return delivery and (delivery.verdict, delivery.body, delivery.token)


def test_a_granted_task_that_has_not_begun_frees_the_lock_when_it_is_revoked(store):
    """It kept the lock until its worker had a free slot: the next one waited for 38 s."""
    held = hold(store)
    token, following = park(store, "id1/0/0"), park(store, "id2/0/0")
    store.release(NAME, held, Ending.FINAL)
    assert received(store)[::2] == ("granted", token)
    assert revoke(store, token, worker="W") is Verdict.RELEASED
    told = [received(store), received(store)]
    assert {verdict for verdict, _, _ in told} == {"revoked", "granted"}
    (again,) = (each for verdict, _, each in told if verdict == "revoked")
    assert store.claim(Owner(token), NAME, 30.0).verdict is Verdict.ABSENT
    assert store.claim(Owner(following), NAME, 30.0).verdict is Verdict.GRANTED
    assert revoke(store, again, worker="W") is Verdict.ABSENT, "it holds nothing"
    store.release(NAME, again, Ending.FINAL)
    store.release(NAME, following, Ending.FINAL)
    assert store.inspect(NAME).bodies == 0


def test_a_worker_that_hears_of_a_revoke_later_learns_that_its_grant_was_taken(store):
    """Else it would keep the other locks of that task until it has a free slot."""
    held = hold(store)
    token = park(store, "id1/0/0")
    store.release(NAME, held, Ending.FINAL)
    assert revoke(store, token, worker="W") is Verdict.RELEASED
    assert revoke(store, token, worker="W") is Verdict.RELEASED, "the call is repeated"
    (found,) = store.locate_tasks(["id1"])
    store.release(*found, Ending.FINAL)
    assert revoke(store, token, worker="W") is Verdict.RELEASED, "another worker has ended it"
    let_pass(store, 121)
    assert revoke(store, token, worker="W") is Verdict.ABSENT


def test_a_worker_does_not_hear_that_a_grant_was_taken_which_has_lapsed(store):
    """Its message is delivered again, and runs."""
    held = hold(store)
    token = park(store, "id1/0/0")
    store.release(NAME, held, Ending.FINAL)
    lapse(store)
    assert revoke(store, token, worker="W") is Verdict.ABSENT


def test_a_task_that_has_begun_keeps_its_lock_when_it_is_revoked(store):
    held = hold(store)
    token = park(store, "id1/0/0")
    store.release(NAME, held, Ending.FINAL)
    assert store.claim(Owner(token), NAME, 30.0).verdict is Verdict.GRANTED
    assert revoke(store, token, worker="W") is Verdict.ABSENT
    assert [each.token for each in store.inspect(NAME).holders] == [token]


def test_a_task_that_has_begun_to_acquire_its_locks_keeps_them_when_it_is_revoked(store):
    """Its start is logged later, so its state is that of a grant."""
    held = hold(store)
    token = park(store, "id1/0/0")
    store.release(NAME, held, Ending.FINAL)
    claimed = store.claim(Owner(token), NAME, 30.0, kept_elsewhere=True, later=True)
    assert claimed.verdict is Verdict.GRANTED
    assert revoke(store, token, worker="W") is Verdict.ABSENT
    assert [each.token for each in store.inspect(NAME).holders] == [token]


def lapse(store):
    """Let so much time pass that a grant has lapsed; then sweep."""
    let_pass(store, 25)
    store.sweep_and_grant(NAME, worker="W")


def test_a_waiter_is_found_by_its_task_id_after_any_number_of_retries(store):
    """Of the given ids, the waiting ones are returned with lock and token."""
    hold(store)
    token = park(store, "id1/3/0")
    assert store.locate_tasks(["id0", "id1", "id1/3/0"]) == [(NAME, token)]
    assert store.locate_tasks([]) == []


def test_ended_tasks_leave_the_index(store, all_keys):
    """Nothing of a settled task stays in the index."""
    held = hold(store)
    token = park(store, "id1/0/0")
    store.release(NAME, held, Ending.FINAL)
    assert store.claim(Owner(token, "id1/0/0"), NAME, 30).verdict is Verdict.GRANTED
    store.release(NAME, token, Ending.FINAL)
    assert store.locate_tasks(["id1"]) == []
    assert not all_keys("csl:*:index")


@pytest.mark.parametrize("limit", [1, 2])
def test_a_dead_holder_without_waiters_leaves_the_index(store, all_keys, limit):
    """It was parked, acknowledged and killed: a sweep comes, though nobody wants the lock.

    The keys of the lock expire by themselves; the index is shared, and does not.
    """
    held = [hold(store, limit) for _ in range(limit)]
    token = park(store, "id1/0/0", limit=limit)
    store.release(NAME, held.pop(), Ending.FINAL)
    assert store.claim(Owner(token, "id1/0/0"), NAME, SHORT, acks_early=True).verdict == "granted"
    for other in held:
        store.release(NAME, other, Ending.FINAL)

    def swept():
        store.sweep_and_grant_many(store.take_due_locks())
        return not all_keys("csl:*:index")

    assert not swept(), "it runs"
    let_pass(store, 25)
    assert swept()
    assert not all_keys("csl:*:due")


def test_the_end_of_an_attempt_leaves_a_later_one_in_the_index(store):
    """A retry waits while its first attempt, which was parked too, ends."""
    held = hold(store)
    first = park(store, "id1/0/0")
    store.release(NAME, held, Ending.FINAL)
    store.claim(Owner(first, "id1/0/0"), NAME, 30)
    retry = park(store, "id1/1/0")
    other = hold_after(store, first)
    assert store.locate_tasks(["id1"]) == [(NAME, retry)]
    store.release(NAME, other, Ending.FINAL)


def hold_after(store, first):
    """Add a waiter, so that the retry stays parked when the first lock is released."""
    blocker = Owner(new_token())
    store.acquire(blocker, Claim(NAME, place=1), wait=30)
    store.release(NAME, first, Ending.FINAL)
    return blocker.token


def test_t17_a_revoked_message_is_delivered_while_the_lock_is_held(store):
    """It leaves the queue at once; its body stays until a worker has settled it."""
    held = hold(store)
    token, behind = park(store, "id1/0/0"), park(store, "id2/0/0")
    assert revoke(store, token) is Verdict.RELEASED
    assert received(store) == ("revoked", b"body", token)
    view = store.inspect(NAME)
    assert [waiter.token for waiter in view.waiters] == [behind]
    assert (view.waiting, view.bodies) == (1, 2)
    assert [holder.token for holder in view.holders] == [held]
    assert store.release(NAME, token, Ending.FINAL).verdict is Verdict.RELEASED
    assert store.inspect(NAME).bodies == 1


def test_a_revoked_message_whose_worker_died_is_delivered_again_as_revoked(store):
    """Until a worker has ended it, and never as one that may run."""
    hold(store)
    token = park(store, "id1/0/0")
    revoke(store, token)
    assert received(store)
    lapse(store)
    assert received(store)
    store.release(NAME, token, Ending.AGAIN, worker="W")  # a worker that closes gives it back
    lapse(store)
    assert received(store)[0] == "revoked"
    assert store.inspect(NAME).bodies == 1


def test_a_revoked_message_without_a_consumer_is_ended_by_the_next_worker(store):
    """Adrift: no worker that consumes its queue lives; the first that does gets the verdict."""
    held = hold(store)
    token = park(store, "id1/0/0", queue="other")
    store.release(NAME, held, Ending.FINAL)
    assert store.inspect(NAME).adrift == 1
    assert revoke(store, token) is Verdict.RELEASED
    assert received(store, 0.05) is None
    store.worker_heartbeat("W", "R", ["q", "other"], 6000)
    lapse(store)
    assert received(store)[0] == "revoked"


def test_the_holder_of_the_lock_is_not_revoked(store):
    """A revoke ends no run, no client's wait, and nothing of another broker."""
    held = hold(store)
    waiter = Owner(new_token())
    store.acquire(waiter, Claim(NAME), wait=30)
    token = park(store, "id1/0/0")
    assert revoke(store, held) is Verdict.ABSENT
    assert revoke(store, waiter.token) is Verdict.ABSENT
    assert revoke(store, token, realm="another") is Verdict.ABSENT
    assert revoke(store, "nobody.0") is Verdict.ABSENT
    view = store.inspect(NAME)
    assert (len(view.holders), view.waiting, view.bodies) == (1, 2, 1)


def test_a_run_that_an_older_worker_had_queue_again_keeps_its_lock(redis_client):
    """An older worker knows nothing of the delay of a message, and leaves a note of it behind."""
    store = RedisAdminStore(redis_client, claim_lease=SHORT)
    store.worker_heartbeat("W", "R", ["q"], 6000)
    held = hold(store)
    token = park(store, "id1/0/0")
    store.release(NAME, held, Ending.FINAL)
    store.claim(Owner(token), NAME, 30)
    records = store.keyspace.lock(NAME).record
    noted = {**json.loads(redis_client.hget(records, token)), "delayed": "1"}
    redis_client.hset(records, token, json.dumps(noted))
    assert received(store)
    assert revoke(store, token) is Verdict.ABSENT
    assert received(store, 0.05) is None
    assert [holder.token for holder in store.inspect(NAME).holders] == [token]


def test_a_revoke_asked_twice_delivers_once(store):
    """Every worker gets the revoke, and one of them ends the task."""
    hold(store)
    token = park(store, "id1/0/0")
    assert revoke(store, token) is Verdict.RELEASED
    assert revoke(store, token) is Verdict.ABSENT
    assert received(store)
    assert received(store, 0.05) is None

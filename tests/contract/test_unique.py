"""Entries of unique calls, on every store that has them."""

from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.unique import EntryState, UniqueCall
from celery_singleton_lock.store.cluster.sync import ClusterStore
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.redis.sync import RedisStore

pytestmark = pytest.mark.contract

REALM, QUEUE = "r", "q"
FOREIGN = (
    "[]",
    "7",
    '{"id": 7, "state": "sent", "retries": 0}',
    '{"id": "b", "state": "sent"}',
    '{"id": "b", "retries": 0}',
    '{"id": "b", "state": "here", "retries": 0}',
)
"""What another program may store under the key of an entry."""


@pytest.fixture(params=["by redis-py", "direct", "in a Cluster"])
def kind(request):
    return request.param


@pytest.fixture
def client(kind, request):
    return request.getfixturevalue("cluster_client" if kind == "in a Cluster" else "redis_client")


@pytest.fixture
def store(kind, client):
    if kind == "in a Cluster":
        made = ClusterStore(client)
    else:
        made = RedisStore(client, direct=kind == "direct")
    made.worker_heartbeat("w", REALM, [QUEUE], 600.0, 9)
    return made


def owner(task_id, retries=0, token=None):
    return Owner(token or f"{task_id}.0", f"{task_id}/{retries}/0", "app.task", worker="w")


def claim(*, until_start=False, late=True, most=60.0, copy=0):
    unique = UniqueCall("k", "report", until_start, most, late)
    return Claim("k", 30.0, flow=packed((), unique=unique), copy=copy)


def to_park():
    return MessageToPark(b"body", REALM, QUEUE)


def announced(store, task_id, **options):
    return store.announce("k", "report", task_id, **options)


def sent(store, task_id):
    assert announced(store, task_id).state is EntryState.ANNOUNCED
    assert store.confirm_sent("k", "report", task_id, 0, 600.0)


def entry(store, client):
    """Return the state of the entry, the task that it names, and its seconds; None if none."""
    found = announced(store, "asks")
    if found.state is EntryState.ANNOUNCED:
        store.withdraw("k", "report", "asks", 0)
        return None
    key = f"{store.keyspace.lock('k').holders.removesuffix('holders')}unique:report:call"
    return found.state.value, found.task_id, round(client.pttl(key) / 1000)


def test_the_first_call_is_announced_and_the_next_one_is_told_which(store, client):
    assert announced(store, "a") == (EntryState.ANNOUNCED, "a")
    assert announced(store, "a") == (EntryState.ANNOUNCED, "a")
    assert entry(store, client) == ("pending", "a", 30)
    assert store.confirm_sent("k", "report", "a", 0, 600.0)
    assert entry(store, client) == ("sent", "a", 600)
    assert announced(store, "a") == (EntryState.ANNOUNCED, "a"), "a retry is no duplicate"


def test_a_withdrawn_call_makes_room(store, client):
    announced(store, "a")
    assert not store.withdraw("k", "report", "b", 0), "that of another task stays"
    assert store.withdraw("k", "report", "a", 0)
    assert entry(store, client) is None


def test_a_confirmation_need_not_be_waited_for(store, client):
    for task_id in ("a", "b"):
        announced(store, task_id)
        store.confirm_soon("k", "report", task_id, 0, 600.0)
        assert entry(store, client) == ("sent", task_id, 600)
        store.withdraw("k", "report", task_id, 0)


def test_whichever_call_counts_can_be_forgotten_unless_it_is_here(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim())
    assert not store.withdraw("k", "report", "", 0)
    store.release("k", "a.0", Ending.FINAL)
    sent(store, "b")
    assert store.withdraw("k", "report", "", 0)
    assert entry(store, client) is None


@pytest.mark.parametrize("ends", ["confirm", "withdraw"])
def test_who_waits_for_another_sender_is_woken(store, ends):
    announced(store, "a")
    woken = []

    def wait(task_id):
        assert announced(store, task_id).state is EntryState.PENDING
        woken.append(store.wait("k", "unique:a", 30.0))

    threads = [threading.Thread(target=wait, args=(f"b{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    if ends == "confirm":
        store.confirm_sent("k", "report", "a", 0, 600.0)
    else:
        store.withdraw("k", "report", "a", 0)
    for thread in threads:
        thread.join(10)
    assert woken == [True] * 3


def test_of_those_who_waited_in_vain_one_takes_the_place(store):
    announced(store, "dead")
    assert announced(store, "b", instead_of="dead").state is EntryState.ANNOUNCED
    assert announced(store, "c", instead_of="dead") == (EntryState.PENDING, "b")
    assert not store.confirm_sent("k", "report", "dead", 0, 600.0)
    store.confirm_sent("k", "report", "b", 0, 600.0)
    assert announced(store, "c", instead_of="b") == (EntryState.SENT, "b"), "it was sent meanwhile"


def test_a_running_task_counts_until_it_has_ended(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim())
    assert entry(store, client) == ("here", "a", 0)
    store.release("k", "a.0", Ending.FINAL)
    assert entry(store, client) is None


def test_until_its_start_means_until_then(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim(until_start=True))
    assert entry(store, client) is None
    store.release("k", "a.0", Ending.FINAL)


@pytest.mark.parametrize("until_start", [True, False])
def test_a_parked_task_counts_until_its_start_or_end(store, client, until_start):
    store.acquire(Owner("holder"), Claim("k"))
    sent(store, "a")
    assert (
        store.park(owner("a"), claim(until_start=until_start), to_park()).verdict is Verdict.WAITING
    )
    assert entry(store, client) == ("here", "a", 0)
    store.release("k", "holder", Ending.FINAL)
    assert entry(store, client) == ("here", "a", 0)
    assert store.claim(owner("a"), "k", 30.0).verdict is Verdict.GRANTED
    assert (entry(store, client) is None) is until_start
    store.release("k", "a.0", Ending.FINAL)
    assert entry(store, client) is None


def test_a_task_that_comes_without_an_entry_makes_one(store, client):
    """It had expired, or Redis had lost it."""
    store.acquire(owner("a"), claim())
    assert entry(store, client) == ("here", "a", 0)


def test_the_entry_of_another_call_stays(store, client):
    sent(store, "b")
    store.acquire(owner("a"), claim())
    store.release("k", "a.0", Ending.FINAL)
    assert entry(store, client) == ("sent", "b", 600)


def test_a_task_whose_process_dies_counts_while_the_broker_has_it(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim()._replace(lease=0.05))
    keys = store.keyspace.lock("k")
    assert client.zscore(keys.due, "k"), "a sweeper ends the entry, though nobody waits"
    threading.Event().wait(0.1)
    store.sweep_and_grant("k")
    assert entry(store, client) == ("sent", "a", 60)


def test_a_task_that_has_ended_is_over_when_its_lease_lapses_before_its_release(store, client):
    """Redis was away at its end: the release was repeated later, and found nothing to release."""
    sent(store, "a")
    store.acquire(owner("a"), claim()._replace(lease=0.05))
    assert not store.withdraw("k", "report", "a", 0, ended=True)
    assert entry(store, client) == ("here", "a", 0)
    threading.Event().wait(0.1)
    store.sweep_and_grant("k")
    assert store.release("k", "a.0", Ending.FINAL).verdict is Verdict.ABSENT
    assert entry(store, client) is None


def test_the_end_of_a_task_is_not_that_of_its_retry(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim())
    assert store.confirm_sent("k", "report", "a", 1, 300.0)
    assert not store.withdraw("k", "report", "a", 0, ended=True)
    store.release("k", "a.0", Ending.FINAL)
    assert entry(store, client) == ("sent", "a", 300)


@pytest.mark.parametrize("confirmed", ["before", "after"])
def test_a_retry_that_ends_before_the_attempt_that_sent_it_is_over(store, client, confirmed):
    """A running call was revoked, and its retry discarded: like calls were refused for an hour."""
    sent(store, "a")
    store.acquire(owner("a"), claim())
    if confirmed == "before":
        assert store.confirm_sent("k", "report", "a", 1, 300.0)
    assert not store.withdraw("k", "report", "a", 1, ended=True)
    assert entry(store, client) == ("here", "a", 0)
    if confirmed == "after":
        assert store.confirm_sent("k", "report", "a", 1, 300.0)
    store.release("k", "a.0", Ending.FINAL)
    assert entry(store, client) is None


def test_a_task_that_was_acknowledged_early_is_over_when_its_process_dies(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim(late=False)._replace(lease=0.05))
    threading.Event().wait(0.1)
    store.sweep_and_grant("k")
    assert entry(store, client) is None


def test_a_retry_counts_from_the_first_attempt_on(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim())
    assert announced(store, "a").state is EntryState.ANNOUNCED
    assert store.confirm_sent("k", "report", "a", 1, 300.0)
    store.release("k", "a.0", Ending.FINAL)
    assert entry(store, client) == ("sent", "a", 300)
    assert not store.withdraw("k", "report", "a", 0), "the first attempt is not the last one"
    store.acquire(owner("a", 1, "second.0"), claim())
    store.release("k", "second.0", Ending.FINAL)
    assert entry(store, client) is None


def test_a_late_confirmation_is_no_retry(store, client):
    announced(store, "a")
    store.acquire(owner("a"), claim())
    assert store.confirm_sent("k", "report", "a", 0, 600.0)
    store.release("k", "a.0", Ending.FINAL)
    assert entry(store, client) is None
    assert not store.confirm_sent("k", "report", "a", 0, 600.0)
    assert entry(store, client) is None


def test_a_running_task_is_not_withdrawn(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim())
    assert not store.withdraw("k", "report", "a", 0)
    assert entry(store, client) == ("here", "a", 0)


def test_an_entry_whose_record_was_lost_does_not_count(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim())
    keys = store.keyspace.lock("k")
    client.delete(keys.holders, keys.record)
    assert entry(store, client) is None


def test_the_key_of_another_program_does_not_stop_a_lock(store, client):
    key = f"{store.keyspace.lock('k').holders.removesuffix('holders')}unique:report:call"
    client.rpush(key, "data")
    assert store.acquire(owner("a"), claim()).verdict is Verdict.GRANTED
    assert store.release("k", "a.0", Ending.FINAL).verdict is Verdict.RELEASED


@pytest.mark.parametrize("value", FOREIGN)
def test_what_another_program_has_stored_does_not_count(store, client, value):
    admin = admin_of(store)
    key = f"{store.keyspace.lock('k').holders.removesuffix('holders')}unique:report:call"
    client.set(key, value)
    assert admin.find_call("k", "report") is None
    assert not admin.forget_call("k", "report", Operator("jane"))
    assert announced(store, "a").state is EntryState.ANNOUNCED
    admin.close()


def test_a_task_whose_process_dies_while_it_waits_in_its_slot_counts(store, client):
    """Its message is not acknowledged, though the task acknowledges early."""
    store.acquire(Owner("holder"), Claim("k"))
    sent(store, "a")
    assert store.acquire(owner("a"), claim(late=False), wait=0.05).verdict is Verdict.WAITING
    threading.Event().wait(0.1)
    store.sweep_and_grant("k")
    assert entry(store, client) == ("sent", "a", 60)


def test_a_message_that_goes_back_to_the_broker_counts_there(store, client):
    """No worker takes it: it is published."""
    store.worker_heartbeat("w", REALM, [QUEUE], 0.0, 9)
    sent(store, "a")
    store.park(owner("a"), claim(), to_park())
    (stray,) = store.sweep_and_grant("k", realm=REALM)
    store.record_publish_result("k", stray.seal, [stray.token], sent=True)
    assert entry(store, client) == ("sent", "a", 60)


def test_an_operator_finds_and_forgets_the_call_that_counts(store, client):
    admin, by = admin_of(store), Operator("jane")
    assert admin.find_call("k", "report") is None
    assert not admin.forget_call("k", "report", by)
    announced(store, "a")
    state, task_id, left = admin.find_call("k", "report")
    assert (state, task_id) == (EntryState.PENDING, "a")
    assert 29 < left <= 30
    store.confirm_sent("k", "report", "a", 0, 600.0)
    assert admin.find_call("k", "report").state is EntryState.SENT
    store.acquire(owner("a"), claim())
    assert admin.find_call("k", "report") == (EntryState.PARKED_OR_HELD, "a", None)
    assert not admin.forget_call("k", "report", by), "it is not lost"
    store.release("k", "a.0", Ending.FINAL)
    sent(store, "b")
    assert admin.audit() == []
    assert admin.forget_call("k", "report", by)
    assert [(each["action"], each["lock"]) for each in admin.audit()] == [("forget-call", "k")]
    assert entry(store, client) is None
    admin.close()


def test_a_call_whose_record_was_lost_does_not_count(store, client):
    sent(store, "a")
    store.acquire(owner("a"), claim())
    client.delete(store.keyspace.lock("k").record)
    admin = admin_of(store)
    assert admin.find_call("k", "report") is None
    admin.close()


@pytest.mark.parametrize("until_start", [False, True])
def test_the_parked_retry_that_takes_its_reservation_ends_the_entry(store, client, until_start):
    """Later calls were duplicates of it for an hour."""
    sent(store, "a")
    store.acquire(owner("a"), claim(until_start=until_start))
    announced(store, "a")
    store.confirm_sent("k", "report", "a", 1, 600.0)
    store.release("k", "a.0", Ending.KEEP, reserve=Reservation("a/1/0", 30.0))
    retry = owner("a", 1, "b.0")
    store.park(retry, claim(until_start=until_start), to_park())
    assert store.claim(retry, "k", 30.0).verdict is Verdict.GRANTED
    store.release("k", "b.0", Ending.FINAL)
    assert entry(store, client) is None


def test_the_first_attempt_leaves_the_entry_to_its_parked_retry(store):
    sent(store, "a")
    store.acquire(owner("a"), claim())
    announced(store, "a")
    store.confirm_sent("k", "report", "a", 1, 600.0)
    store.park(owner("a", 1, "b.0"), claim(), to_park())
    store.release("k", "a.0", Ending.FINAL)
    assert announced(store, "c") == (EntryState.PARKED_OR_HELD, "a")


def test_a_drained_message_counts_since_the_broker_has_it(store, client):
    admin, by = admin_of(store), Operator("jane")
    store.acquire(Owner("h"), Claim("k"))
    sent(store, "a")
    store.park(owner("a"), claim(), to_park())
    admin.take_out_messages("k", ["a.0"], 60.0, "seal")
    assert len(admin.drop_waiters("k", ["a.0"], by, done_for=None, seal="seal")) == 1
    assert entry(store, client) == ("sent", "a", 60)
    admin.close()

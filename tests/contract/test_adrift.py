"""Many messages of one lock whose queues no live worker consumes: none hides the others."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import base_of, new_token, token_on
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.worker_operations import Heartbeat
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

NAME = "a"
ROUTES = 150
"""More than one script looks at."""
MOST_LOOKS = 40
"""For 2,000 messages; each look takes up to 100."""


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client, claim_lease=60.0)
    yield store
    store.close()


def park(store, queue="q", task="app.task", **claim):
    who = Owner(new_token(), f"{new_token()}/0/0", task)
    reply = store.park(who, Claim(NAME, **claim), MessageToPark(b"body", "R", queue))
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
    store.worker_heartbeat("w", "R", [queue], 600)
    newcomer = Owner(new_token(), "new/0/0", "app.task", "w")
    assert store.acquire(newcomer, Claim(NAME)).verdict is Verdict.BLOCKED
    assert [holder.token for holder in store.inspect(NAME).holders] == [parked[queue]]
    assert adrift(store) == ROUTES - 1


@pytest.mark.parametrize("queue", ["q000", "q040", "q075", "q120", "q149"])
def test_a_newcomer_of_another_worker_passes_no_message_of_a_live_one(store, parked, queue):
    store.worker_heartbeat("w", "R", [queue], 600)
    newcomer = Owner(new_token(), "new/0/0", "app.task", "other")
    assert store.acquire(newcomer, Claim(NAME)).verdict is Verdict.BLOCKED
    assert [holder.token for holder in store.inspect(NAME).holders] == [parked[queue]]


def test_messages_of_many_queues_queue_again_when_another_worker_consumes_them(store, parked):
    """A look queues some of them again, and sends none of the others to the broker."""
    holder = Owner(new_token())
    assert store.acquire(holder, Claim(NAME)).verdict is Verdict.GRANTED
    store.worker_heartbeat("w", "R", list(parked), 600)
    looks = 0
    while adrift(store):
        assert store.sweep_and_grant(NAME, worker="other", realm="R") == []
        looks += 1
        assert looks <= ROUTES
    store.release(NAME, holder.token, Ending.FINAL)
    (granted,) = store.inspect(NAME).holders
    assert granted.token == parked["q000"], "the oldest comes first"


def test_messages_of_many_queues_are_all_republished(store, parked):
    left = set()
    looks = 0
    while adrift(store):
        strays = store.sweep_and_grant(NAME, worker="w", realm="R")
        looks += 1
        assert looks <= ROUTES
        for stray in strays:
            left.add(stray.queue)
            assert store.record_publish_result(NAME, stray.seal, [stray.token], sent=True) == 1
    assert left == set(parked)


def test_no_message_is_republished_before_a_sweep_has_queued_it_again(store):
    """A look queues again up to 200 messages of a queue."""
    holder = Owner(new_token())
    to_park = MessageToPark(b"body", "R", "q")
    store.park_many(
        [
            (Owner(new_token(), f"t{number}/0/0", "app.task"), Claim(NAME), to_park)
            for number in range(250)
        ]
    )
    store.worker_heartbeat("w", "R", ["q"], 600)
    looks = 0
    while adrift(store):
        assert store.sweep_and_grant(NAME, worker="other", realm="R") == []
        looks += 1
        assert looks <= MOST_LOOKS
    assert looks > 1
    assert store.acquire(holder, Claim(NAME)).verdict is Verdict.BLOCKED


def test_a_worker_takes_no_message_before_its_tasks_are_known(store):
    """A new worker reports its tasks in a second call."""
    park(store)
    sign = Heartbeat.of("w", "R", ["q"], 600, 1, ["app.other"])
    beat = store.operations.heartbeat_call(store.keyspace.fleet, sign)
    store.client.eval(beat.script.text, len(beat.keys), *beat.keys, *beat.arguments)
    store.sweep_and_grant(NAME, worker="other", realm="")
    assert adrift(store) == 1


def test_only_a_worker_that_consumes_the_queue_sends_a_message_back_to_it(store):
    """Another one cannot know whether those have the task: they discarded what it sent."""
    token, _ = park(store)
    store.worker_heartbeat("plain", "R", ["q"], 600, tasks=["app.other"])
    store.worker_heartbeat("far", "R", ["far"], 600, tasks=["app.other"])
    for worker in ("far", ""):
        assert list(store.sweep_and_grant(NAME, worker=worker, realm="R")) == []
    (sent,) = store.sweep_and_grant(NAME, worker="plain", realm="R")
    assert sent.token == token
    store.record_publish_result(NAME, sent.seal, [token], sent=False)
    store.leave("plain", "R", ["q"])
    let_pass(store, 5)
    (sent,) = store.sweep_and_grant(NAME, worker="far", realm="R")
    assert base_of(sent.token) == base_of(token), "no worker with locks consumes it"


def test_the_oldest_of_a_task_is_replaced_although_many_of_another_are_older(store):
    store.worker_heartbeat("w", "R", ["q"], 600)
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


def test_two_thousand_messages_without_a_worker_are_republished_in_a_bounded_number_of_sweeps(
    store,
):
    """Of one queue, as after a roll-back to workers without locks."""
    owners = [Owner(new_token(), f"t{number}/0/0", "app.task") for number in range(2000)]
    to_park = MessageToPark(b"body", "R", "q")
    store.park_many([(owner, Claim(NAME), to_park) for owner in owners])
    left = set()
    for _ in range(MOST_LOOKS):
        strays = store.sweep_and_grant(NAME, worker="w", realm="R")
        left |= {stray.token for stray in strays}
        if strays:
            store.record_publish_result(
                NAME, strays[0].seal, [stray.token for stray in strays], sent=True
            )
    assert left == {owner.token for owner in owners}
    assert store.inspect(NAME).bodies == 0


def test_two_messages_with_one_task_id_both_run_though_their_copies_come_back_early(store):
    """Each copy is recognized as that of its own message, which stays parked."""
    attempt = "twice/0/0"
    for _ in range(2):
        store.park(
            Owner(new_token(), attempt, "app.task"), Claim(NAME), MessageToPark(b"body", "R", "q")
        )
    strays = store.sweep_and_grant(NAME, worker="w", realm="R")
    assert len(strays) == 2
    for stray in strays:
        come_back(store, stray)
    seal, tokens = strays[0].seal, [stray.token for stray in strays]
    assert store.record_publish_result(NAME, seal, tokens, sent=True) == 0
    assert store.inspect(NAME).bodies == 2


def test_two_messages_with_one_task_id_both_run_though_they_were_moved(store):
    """The redelivery of the second is not a duplicate of the first."""
    attempt = "twice/0/0"
    for _ in range(2):
        store.park(
            Owner(new_token(), attempt, "app.task"), Claim(NAME), MessageToPark(b"body", "R", "q")
        )
    strays = store.sweep_and_grant(NAME, worker="w", realm="R")
    tokens = [stray.token for stray in strays]
    assert store.record_publish_result(NAME, strays[0].seal, tokens, sent=True) == 2
    for stray in strays:
        assert come_back(store, stray).verdict is Verdict.WAITING
    assert store.inspect(NAME).bodies == 2


def test_a_wait_that_ends_while_the_message_is_republished_is_reported_if_that_fails(store):
    who = Owner(new_token(), "late/0/0", "app.task")
    store.park(who, Claim(NAME), MessageToPark(b"body", "R", "q", deadline=20.0))
    (stray,) = store.sweep_and_grant(NAME, worker="w", realm="R")
    let_pass(store, 25)
    store.worker_heartbeat("w", "R", ["q"], 600)
    store.record_publish_result(NAME, stray.seal, [stray.token], sent=False)
    assert store.receive("w", 30).verdict == "overdue"


def come_back(store, stray):
    """Park what a worker gets from the broker of a message that was sent there."""
    who = Owner(token_on(base_of(stray.token)), stray.attempt, "app.task")
    return store.park(
        who, Claim(NAME, place=stray.place), MessageToPark(stray.body, "R", stray.queue)
    )

"""What a store reports about lost data and remaining data."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock.admin.doctor import Health, examine
from celery_singleton_lock.admin.why import why
from celery_singleton_lock.core.model import Claim, Ending, Identity, Owner, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark, ParkedMessage
from celery_singleton_lock.store import message_operations
from celery_singleton_lock.store.redis.sync import RedisStore

pytestmark = pytest.mark.contract

NAMES = ("a", "b")


@pytest.fixture(params=["redis", "in_memory", "cluster"])
def kind(request):
    """The kinds of store that keep messages."""
    return request.param


@pytest.fixture
def store(make_store):
    return make_store()


def park(store, name, number):
    """Park a message behind a holder; return what its worker remembers of it."""
    store.acquire(Owner("holder.0"), Claim(name))
    message = ParkedMessage(name, f"t{number}.0", "app.task", f"id{number}")
    owner = Owner(message.token, f"{message.task_id}/0/0", message.task)
    store.worker_heartbeat("w", "r", ["q"], 600)
    store.park(owner, Claim(name), MessageToPark(b"body", "r", "q", None))
    return message


def test_a_store_is_the_same_until_it_has_lost_its_data(store, lose_data):
    first = store.identify()
    assert store.identify() == first
    assert store.identify().differs(first) == ""
    lose_data()
    lost = store.identify()
    assert "marker is gone" in lost.differs(first)
    assert store.identify() == lost


def test_no_marker_is_left_for_ever_when_the_last_worker_is_gone(store, each_client):
    store.identify()
    store.identify()
    times = [client.pttl(key) for client in each_client for key in client.keys("csl:*:marker")]
    assert all(0 < left <= 86_400_000 for left in times), times


def test_the_size_of_a_fleet_is_that_of_its_busiest_queue(store):
    for worker, queues in (("a", ["p"]), ("b", ["p", "q"])):
        store.worker_heartbeat(worker, "r", queues, 600)
    assert store.fleet_size("r", ["q"]) == 1
    assert store.fleet_size("r", ["p", "q"]) == 2
    assert store.fleet_size("r", []) == 0


def test_no_list_of_running_tasks_is_left_for_ever(store, each_client):
    """The worker may have died. Its list is rewritten while it has entries."""
    store.list_running("w", [("t", "k", "x.0"), ("u", "k", "y.0")], [], 60.0)
    store.list_running("w", [], [("t", "k", "x.0")], 60.0)
    keys = [(client, key) for client in each_client for key in client.keys("csl:fleet:running*")]
    assert len(keys) == 2
    assert all(0 < client.pttl(key) <= 60_000 for client, key in keys)
    assert sorted(client.zcard(key) for client, key in keys) == [1, 1]
    store.list_running("w", [], [("u", "k", "y.0")], 60.0)
    assert len([key for client in each_client for key in client.keys("csl:fleet:running*")]) == 1


def test_another_run_id_may_be_another_server_with_all_data():
    before = Identity(("m",), frozenset({"1", "2"}))
    assert "run id" in Identity(("m",), frozenset({"1", "3"})).differs(before)
    assert Identity(("m",), frozenset({"1"})).differs(before) == ""  # a master less
    assert Identity(("m",), frozenset({"1"})).differs(Identity(("",), frozenset())) == ""


def test_a_message_is_kept_until_its_task_has_ended_and_leaves_a_trace_then(store, lose_data):
    first, second = (park(store, name, number) for number, name in enumerate(NAMES))
    assert list(store.has_messages([first, second])) == [True, True]
    assert list(store.has_messages([])) == list(store.has_traces([])) == []
    store.release("a", "holder.0", Ending.FINAL)
    store.claim(Owner(first.token), "a", 30)
    store.release("a", first.token, Ending.FINAL)
    assert list(store.has_messages([first, second])) == [False, True]
    assert list(store.has_traces([first, second])) == [True, True]
    lose_data()
    assert list(store.has_traces([first, second])) == [False, False]
    store.vouch(["t1"])
    assert list(store.has_traces([first, second])) == [False, True]


def test_a_task_that_counts_as_acknowledged_from_its_start_leaves_a_trace_while_it_runs(store):
    message = park(store, "a", 1)
    store.release("a", "holder.0", Ending.FINAL)
    store.claim(Owner(message.token), "a", 30, acks_early=True)
    assert list(store.has_messages([message])) == [False]
    assert list(store.has_traces([message])) == [True]


@pytest.mark.parametrize("moves_on", [False, True])
def test_a_grant_that_came_too_late_is_no_loss_of_a_task_that_another_worker_has_begun(
    store, moves_on
):
    """A worker stood still. It parked the task once more, though the other one had run it."""
    message = park(store, "a", 1)
    store.release("a", "holder.0", Ending.FINAL)
    store.release("a", message.token, Ending.AGAIN)
    (again,) = store.inspect("a").holders
    assert again.token != message.token
    store.claim(
        Owner(again.token, worker="w"), "a", 30, acks_early=not moves_on, kept_elsewhere=moves_on
    )

    def late():
        for reply in (
            store.release("a", message.token, Ending.OFFER, worker="late"),
            store.claim(Owner(message.token, worker="late"), "a", 30, acks_early=True),
        ):
            yield reply.verdict, reply.lost

    absent = [(Verdict.ABSENT, False)] * 2
    assert list(late()) == absent
    store.reset("a")  # as if its lease had ended: its worker is gone, and nothing is stored
    assert list(late()) == absent


def test_a_message_that_was_parked_once_more_runs_if_redis_has_lost_that(redis_client):
    """Its worker parks it again, since it counts as lost. Redis has a record of the former run."""
    store = RedisStore(redis_client)
    message = park(store, "a", 1)
    store.release("a", "holder.0", Ending.FINAL)
    store.release("a", message.token, Ending.AGAIN)
    (begun,) = store.inspect("a").holders
    store.claim(Owner(begun.token, worker="w"), "a", 30, acks_early=True)
    old = {key: redis_client.dump(key) for key in redis_client.scan_iter()}
    store.release("a", begun.token, Ending.LATER, worker="w")
    offer = store.release("a", begun.token, Ending.OFFER, worker="w")
    assert offer.lost, "its worker has the message, and no other has: it must park it"
    owner = Owner(begun.token, f"{message.task_id}/0/0", message.task)
    store.park(owner, Claim("a", unanswered=True), MessageToPark(b"body", "r", "q", None))
    (granted,) = store.inspect("a").holders
    redis_client.delete(*redis_client.scan_iter())
    for key, value in old.items():
        redis_client.restore(key, 0, value)
    reply = store.claim(Owner(granted.token, worker="w"), "a", 30, acks_early=True)
    assert (reply.verdict, reply.lost) == (Verdict.ABSENT, True)
    owner = owner._replace(token=granted.token)
    store.park(owner, Claim("a", unanswered=True), MessageToPark(b"body", "r", "q", None))
    (again,) = store.inspect("a").holders
    assert again.token not in {begun.token, granted.token}, "the record of the former run is back"
    assert store.claim(owner._replace(token=again.token), "a", 30).verdict is Verdict.GRANTED
    store.close()


def test_a_run_that_began_again_keeps_its_lock_if_a_late_delivery_is_parked(redis_client):
    """Redis has lost that the first run has ended, and has granted the message once more."""
    store = RedisStore(redis_client)
    message = park(store, "a", 1)
    owner = Owner(message.token, f"{message.task_id}/0/0", message.task)
    store.release("a", "holder.0", Ending.FINAL)
    old = {key: redis_client.dump(key) for key in redis_client.scan_iter()}
    store.claim(owner, "a", 30, acks_early=True)
    store.release("a", message.token, Ending.LATER)
    store.park(owner, Claim("a", unanswered=True), MessageToPark(b"body", "r", "q", None))
    (late,) = store.inspect("a").holders
    redis_client.delete(*redis_client.scan_iter())
    for key, value in old.items():
        redis_client.restore(key, 0, value)
    store.claim(owner, "a", 30, acks_early=True)
    owner = owner._replace(token=late.token)
    store.park(owner, Claim("a", unanswered=True), MessageToPark(b"body", "r", "q", None))
    assert [holder.token for holder in store.inspect("a").holders] == [message.token]
    store.close()


@pytest.mark.parametrize("begun", [False, True])
def test_an_end_that_is_repeated_frees_no_lock_of_a_task_that_runs_again_elsewhere(store, begun):
    """Redis had lost its end, and granted it once more. The next task would run beside it."""
    message, _ = park(store, "a", 1), park(store, "a", 2)
    store.release("a", "holder.0", Ending.FINAL)
    if begun:
        store.claim(Owner(message.token, worker="w"), "a", 30)
    reply = store.release("a", message.token, Ending.REPEAT, worker="the first worker")
    assert reply.verdict is (Verdict.GRANTED if begun else Verdict.RELEASED)
    (holder,) = store.inspect("a").holders
    assert holder.token == ("t1.0" if begun else "t2.0")
    store.claim(Owner("t2.0", worker="w"), "a", 30)
    store.release("a", holder.token, Ending.REPEAT, worker="w")
    assert holder.token not in {each.token for each in store.inspect("a").holders}


def test_a_message_that_the_broker_has_is_not_lost(store):
    """The loss was reported, with the advice to send the task again."""
    first, second = (park(store, name, number) for number, name in enumerate(NAMES))
    store.leave("w", "r", ["q"])
    store.release("a", "holder.0", Ending.FINAL)
    (stray,) = store.sweep_and_grant("a", realm="r")
    store.record_publish_result("a", stray.seal, [stray.token], sent=True)
    assert list(store.has_messages([first, second])) == [False, True]
    assert list(store.has_traces([first, second])) == [True, True]
    back = first._replace(moved=True)
    assert list(store.has_traces([back])) == [False], "it has come back, and was parked again"


def lost_check(store):
    return next(check for check in examine(store, deep=False) if check.name == "lost")


def test_lost_tasks_are_reported_by_doctor_and_why(store):
    assert lost_check(store).health is Health.OK
    note = {"lock": "a", "task": "app.task", "worker": "celery@host#1", "at": 1_700_000_000}
    store.note_lost({"id1": json.dumps(note), "id\x1b2": json.dumps(note)})
    check = lost_check(store)
    assert check.health is Health.FAIL
    assert "2 parked tasks" in check.told
    assert "id1" in check.told
    assert "\x1b" not in check.told
    answer = why(store, "id1")
    assert answer.state == "lost"
    assert "celery@host parked it for 'a'" in answer.sentence
    assert "2023-11-14 22:13 UTC" in answer.sentence
    assert why(store, "id3").state == "unseen"


class App:
    def __init__(self, *seen):
        self._seen = seen

    def seen(self, task_id):
        return self._seen


@pytest.mark.parametrize("state", ["retry", "unseen"])
def test_a_retry_that_was_parked_and_lost_is_not_said_to_wait_in_the_broker(store, state):
    """The log had named the task as lost, and said that `locks why` shows it."""
    app = App(state, "waits for its retry in the broker's queue")
    note = {"lock": "a", "task": "app.task", "worker": "celery@host#1", "at": 1_700_000_000}
    store.note_lost({"id1": json.dumps(note)})
    assert why(store, "id1", app).state == "lost"
    assert why(store, "id2", app).state == {"retry": "eta"}.get(state, state)
    assert why(store, "id1", App("eta", "was received by worker-1")).state == "eta"


def test_doctor_says_where_all_lost_tasks_are_listed_before_their_list_is_deleted(store):
    """It named five of them, and asked to send "them" again and to delete the only list."""
    note = {"lock": "a", "task": "app.task", "worker": "celery@host#1", "at": 1_700_000_000}
    store.note_lost({f"id{number}": json.dumps(note) for number in range(23)})
    told = lost_check(store).told
    assert told.startswith("23 parked tasks")
    assert told.index(f"HGETALL {store.keyspace.lost} lists all") < told.index("then delete")


def test_only_so_many_losses_are_noted(store, monkeypatch):
    monkeypatch.setattr(message_operations, "MOST_LOST", 3)
    store.note_lost({f"id{number}": "{}" for number in range(2)})
    store.note_lost({f"id{number}": "{}" for number in range(2, 9)})
    assert store.losses(10) == (3, ["id0", "id1", "id2"])


def test_the_record_of_a_former_run_is_no_trace_of_a_message_that_was_parked_after_it(store):
    """Redis has lost the end of that run, and the message, as after a restart from a snapshot."""
    message = park(store, "a", 1)
    store.release("a", "holder.0", Ending.FINAL)
    owner = Owner(message.token, f"{message.task_id}/0/0", message.task, "w")
    store.claim(owner, "a", 30, acks_early=True)
    again = message._replace(former=(("a", message.token),), worker="w")
    elsewhere = again._replace(worker="another")
    assert list(store.has_traces([message, again, elsewhere])) == [True, False, True]
    store.release("a", message.token, Ending.LATER, worker="w")
    store.park(owner, Claim("a", unanswered=True), MessageToPark(b"body", "r", "q", None))
    assert list(store.has_traces([again])) == [True]
    (holder,) = store.inspect("a").holders
    store.claim(owner._replace(token=holder.token), "a", 30, acks_early=True)
    assert list(store.has_messages([again])) == [False]
    assert list(store.has_traces([again])) == [True], "it runs, and nothing is lost"

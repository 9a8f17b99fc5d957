"""Changes from Flower's page: what is asked, what is done, what is left, and what is audited."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock.admin import Operator, Refused
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.flower import changes as changes_module
from celery_singleton_lock.flower.changes import (
    ChangeRequest,
    LockChanges,
    Target,
    answer_of,
    parse_change,
)
from celery_singleton_lock.flower.rows import UnknownLock
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiters import hold, park

pytestmark = pytest.mark.contract

BY = Operator("jane", "10.0.0.7", "flower", "it hangs")


class Results:
    """Collects the tasks for which a result would be stored."""

    untold = 0
    realm = "R"
    done_for = 40_000.0

    def __init__(self):
        self.ids = []

    def tell_dropped(self, each, by):
        self.ids.append(each.task_id)


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client, claim_lease=60.0)
    store.worker_heartbeat("w", "R", ["q"], 600)
    yield store
    store.close()


@pytest.fixture
def results():
    return Results()


@pytest.fixture
def changes(store, results):
    def name_of(lock_id):
        if not lock_id.startswith("id-"):
            raise UnknownLock(lock_id)
        return lock_id.removeprefix("id-")

    return LockChanges(store, name_of, results)


def request(action, *targets, **more):
    """Return a request; a target is a lock, or a lock and a token."""
    pairs = [each if isinstance(each, tuple) else (each, "") for each in targets]
    found = tuple(Target(f"id-{name}", token) for name, token in pairs)
    return ChangeRequest(action, found, why=BY.why, **more)


def queue(store, name):
    return [each.task_id for each in store.list_waiters(name, "queue").waiting]


def audited(store):
    return {(entry["lock"], entry["action"], entry["count"]) for entry in store.audit()}


# -- locks -----------------------------------------------------------------------------------------


def test_several_locks_are_paused_limited_and_resumed_with_one_audit_entry_each(store, changes):
    for name in ("a", "b"):
        hold(store, name)
    asked = changes.question(request("pause", "a", "b"))
    assert asked["question"].startswith("Pause 2 locks?")
    assert (asked["risk"], asked["items"]) == ("", ["a", "b"])
    assert not store.inspect("a").paused
    outcome = changes.carry_out(request("pause", "a", "b"), BY)
    assert outcome.done == {"a": 1, "b": 1}
    assert store.inspect("b").paused.endswith("it hangs")
    changes.carry_out(request("limit", "a", "b", permits=4), BY)
    assert store.inspect("a").limit == 4
    assert changes.carry_out(request("resume", "a", "b"), BY).done.total() == 2
    assert audited(store) == {
        (name, action, 1) for name in "ab" for action in ("pause", "limit", "resume")
    }
    assert {entry["who"] for entry in store.audit()} == {"jane"}
    again = changes.carry_out(request("resume", "a"), BY)
    assert answer_of(request("resume", "a"), again)["text"] == "Nothing had to be changed."


def test_a_lock_that_a_task_has_closed_is_reopened_and_its_pause_stays(store, changes):
    store.close_for("a", 60.0, "by app.sync: 429")
    store.pause("a", BY)
    asked = changes.question(request("reopen", "a"))
    assert asked["question"].startswith("Reopen 1 lock? They are granted")
    assert store.inspect("a").closed
    outcome = changes.carry_out(request("reopen", "a"), BY)
    assert answer_of(request("reopen", "a"), outcome)["text"] == "Reopened 1 lock."
    view = store.inspect("a")
    assert (view.closed, bool(view.paused)) == ("", True)
    entry = store.audit(1)[0]
    assert (entry["action"], entry["lock"], entry["who"]) == ("reopen", "a", "jane")
    again = changes.carry_out(request("reopen", "a"), Operator("ann"))
    assert answer_of(request("reopen", "a"), again)["text"] == "Nothing had to be changed."


def test_a_lock_that_is_gone_does_not_stop_the_others(store, changes):
    """Its refusal is told. A lock that was in no list stops all, before anything is changed."""
    hold(store, "b")
    outcome = changes.carry_out(request("pause", "gone", "b"), BY)
    assert outcome.done == {"b": 1}
    (told,) = answer_of(request("pause", "gone", "b"), outcome)["refused"]
    assert "no lock 'gone' is known" in told
    unknown = request("resume", "b")._replace(targets=(Target("id-b"), Target("other")))
    with pytest.raises(UnknownLock):
        changes.carry_out(unknown, BY)
    assert store.inspect("b").paused


def test_an_outage_in_the_middle_tells_how_many_locks_were_left(store, changes, monkeypatch):
    for name in "abc":
        hold(store, name)
    pause = store.pause

    def pauses(name, by, **_more):
        if name == "b":
            raise BackendError("Redis did not answer.")
        return pause(name, by)

    monkeypatch.setattr(store, "pause", pauses)
    outcome = changes.carry_out(request("pause", "a", "b", "c"), BY)
    assert outcome.done == {"a": 1}
    assert outcome.refused == ["Redis did not answer. 2 of 3 were left."]


# -- waiters ---------------------------------------------------------------------------------------


def test_promoted_tasks_keep_their_order(store, changes):
    hold(store, "a")
    tokens = {task: park(store, "a", task) for task in ("t1", "t2", "t3", "t4")}
    wanted = request("promote", ("a", tokens["t3"]), ("a", tokens["t4"]))
    asked = changes.question(wanted)
    assert asked["items"] == ["app.task[t3]: a", "app.task[t4]: a"]
    assert changes.carry_out(wanted, BY).done == {"a": 2}
    assert queue(store, "a") == ["t3", "t4", "t1", "t2"]


def test_chosen_tasks_are_dropped_and_their_results_are_stored(store, changes, results):
    """The question has the risk. A task that was granted the lock meanwhile is not dropped."""
    holder = hold(store, "a")
    tokens = {task: park(store, "a", task) for task in ("t1", "t2", "t3")}
    wanted = request("drop", ("a", tokens["t1"]), ("a", tokens["t2"]))
    assert "will not run" in changes.question(wanted)["risk"]
    store.release("a", holder.token, Ending.FINAL)  # t1 has the lock
    outcome = changes.carry_out(wanted, BY)
    assert (outcome.done, results.ids) == ({"a": 1}, ["t2"])
    assert "holds 'a' and does not wait" in outcome.refused[0]
    assert queue(store, "a") == ["t3"]


def test_all_parked_tasks_of_locks_are_dropped_but_not_those_that_came_later(
    store, changes, results
):
    for name in ("a", "b"):
        hold(store, name)
        park(store, name, f"{name}1")
    asked = changes.question(request("drop", "a", "b"))
    assert asked["question"] == "Drop all 2 parked tasks permanently?"
    assert asked["items"] == ["1 of a", "1 of b"]
    park(store, "a", "late")
    wanted = request("drop", "a", "b", sure=True, asked_at=asked["asked_at"])
    outcome = changes.carry_out(wanted, BY)
    assert (outcome.done, outcome.refused) == ({"a": 1, "b": 1}, [])
    assert queue(store, "a") == ["late"]
    assert sorted(results.ids) == ["a1", "b1"]


def test_copies_of_dropped_tasks_do_not_run_for_as_long_as_those_of_ended_ones(store, changes):
    hold(store, "a")
    first, _ = park(store, "a", "t1"), park(store, "a", "t2")
    assert changes.carry_out(request("drop", ("a", first)), BY).done == {"a": 1}
    assert changes.carry_out(request("drop", "a", sure=True), BY).done == {"a": 1}
    done = store.keyspace.lock("a").done
    for attempt in ("t1/0/0", "t2/0/0"):
        left = store.client.zscore(done, attempt) / 1000 - store.time()
        assert left == pytest.approx(Results.done_for, abs=60)


def test_all_parked_tasks_are_those_of_the_apps_broker(store, changes, results):
    """Others may be those of another application, whose callers would wait for ever."""
    hold(store, "a")
    park(store, "a", "t1")
    results.realm = "another"
    with pytest.raises(Refused, match="No task of this app's broker is parked"):
        changes.question(request("drop", "a"))
    assert "Nothing was dropped" in changes.carry_out(request("drop", "a"), BY).refused[0]
    assert (queue(store, "a"), results.ids) == (["t1"], [])


def test_the_page_does_not_drop_more_than_it_can_wait_for(store, changes, monkeypatch):
    """The error names the command, which can."""
    monkeypatch.setattr(changes_module, "MAX_DROPPED", 1)
    hold(store, "a")
    with pytest.raises(Refused, match="No task of this app's broker is parked"):
        changes.question(request("drop", "a"))
    for task in ("t1", "t2"):
        park(store, "a", task)
    with pytest.raises(Refused, match="Use the command: locks purge --lock NAME"):
        changes.question(request("drop", "a"))
    assert "Use the command" in changes.carry_out(request("drop", "a"), BY).refused[0]
    assert queue(store, "a") == ["t1", "t2"]


# -- holders ---------------------------------------------------------------------------------------


def test_a_release_of_several_locks_is_bound_to_the_holders_of_the_question(store, changes):
    """Who gets the lock between the question and the answer keeps it."""
    first = hold(store, "a")
    hold(store, "b")
    asked = changes.question(request("release", "a", "b"))
    assert asked["question"] == "Take the locks from 2 holders?"
    assert "at the same time" in asked["risk"]
    store.release("a", first.token, Ending.FINAL)
    later = hold(store, "a")
    body = {"action": "release", "targets": asked["targets"], "sure": True}
    outcome = changes.carry_out(parse_change(json.dumps(body).encode()), BY)
    assert outcome.done == {"b": 1}
    assert "does not hold the lock 'a'" in outcome.refused[0]
    assert store.inspect("a").holders[0].token == later.token
    with pytest.raises(Refused, match="Nobody holds it any more"):
        changes.question(request("release", "b"))


def test_a_release_without_the_token_of_the_holder_is_refused(store, changes):
    hold(store, "a")
    assert changes.carry_out(request("release", "a"), BY).refused
    assert store.inspect("a").holders


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "Send a JSON object"),
        ({"action": "pause"}, "Send a JSON object"),
        ({"action": "explode", "targets": [{"id": "x"}]}, "use one of pause, resume"),
        ({"action": "pause", "targets": []}, "send 1 to 500"),
        ({"action": "pause", "targets": [{"id": "x"}] * 501}, "send 1 to 500"),
        ({"action": "limit", "targets": [{"id": "x"}], "permits": 0}, "send a number from 1"),
        ({"action": "limit", "targets": [{"id": "x"}], "permits": True}, "send a number from 1"),
        ({"action": "limit", "targets": [{"id": "x"}], "permits": "3"}, "send a number from 1"),
        ({"action": "drop", "targets": [{"id": "x"}], "asked_at": "nan"}, "not a finite number"),
        ({"action": "promote", "targets": [{"id": "x"}]}, "needs the token"),
    ],
)
def test_a_malformed_request_is_refused_with_what_to_send(given, told):
    with pytest.raises(ValueError, match=told):
        parse_change(json.dumps(given).encode())


def test_only_true_is_sure():
    """A text, or a number, is not."""
    for sure in ("true", 1, None, False):
        body = {"action": "pause", "targets": [{"id": "x"}], "sure": sure}
        assert not parse_change(json.dumps(body).encode()).sure

"""Why does this task not run? One sentence for each position."""

from __future__ import annotations

import re

import pytest

from celery_singleton_lock.admin import (
    Operator,
    Refused,
    force_release,
    forced_release_warning,
    list_locks,
    why,
)
from celery_singleton_lock.admin.lock_views import show_lock
from celery_singleton_lock.admin.why import why_at_lock
from celery_singleton_lock.admin.why_sentences import named, ordinal, seconds, short, worker_name
from celery_singleton_lock.core.lock_view import Holder
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.redis_keys import bucket_of
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

NAME = "account:42"
HELD = r"settle\[3f2a91c0\] on worker-2, lease (2\d|30) s left"


@pytest.fixture
def store(lock_client):
    store = RedisAdminStore(lock_client, claim_lease=60.0)
    yield store
    store.close()


@pytest.fixture
def holder(store):
    """The task settle[3f2a91c0…] on worker-2 holds the lock."""
    who = Owner(new_token(), "3f2a91c0-1/0/0", "bank.tasks.settle", "worker-2#a1b2c3", "h", 7)
    store.acquire(who, Claim(NAME))
    return who


def park(store, task_id, **message):
    who = Owner(new_token(), f"{task_id}/0/0", "bank.tasks.settle")
    store.park(who, Claim(NAME), MessageToPark(b"body", "R", "q", **message))
    return who


def live_worker(store):
    store.worker_heartbeat("worker-2#a1b2c3", "R", ["q"], 600)


class App:
    """An app that has seen some tasks."""

    def __init__(self, seen=None, queues="", consumers=()):
        self._seen, self._queues, self._consumers = seen, queues, consumers

    def seen(self, task_id):
        return self._seen

    def consumers(self, realm, queue):
        return self._consumers if (realm, queue) == ("R", "q") else ()

    def queues(self):
        return self._queues


def test_the_answer_has_the_reason_as_a_word(store, holder):
    """The same words as in events: Flower shows them, and programs need not read the sentence."""
    live_worker(store)
    for task_id in ("a", "me"):
        park(store, task_id)
    assert why(store, "me").waits_for == "holder"
    store.pause(NAME, Operator("jane", why="deploy"))
    assert why(store, "me").waits_for == "pause"
    assert why(store, "3f2a91c0-1").waits_for == ""
    assert why(store, "unknown").waits_for == ""
    store.resume(NAME, Operator("jane"))
    far = Owner(new_token(), "far/0/0", "bank.tasks.settle")
    store.park(far, Claim(NAME), MessageToPark(b"body", "R", "nobody"))
    store.promote(NAME, far.token, Operator("jane"))
    store.release(NAME, holder.token, Ending.FINAL)
    assert why(store, "far").waits_for == "worker"
    (me,) = (each for each in show_lock(store, NAME).waiting if each.task_id == "me")
    answer = why_at_lock(store, me, 1)
    assert answer.waits_for == "holder"
    assert answer.sentence.startswith("blocked")


def test_a_blocked_task_shows_its_holder_its_wait_and_its_rank(store, holder):
    live_worker(store)
    for task_id in ("a", "b", "me"):
        park(store, task_id)
    answer = why(store, "me")
    assert re.fullmatch(rf"blocked \d\.\d s by {HELD}, you are 3rd", answer.sentence)
    assert (answer.state, answer.lock, answer.rank) == ("parked", NAME, 3)
    assert answer.holders[0].token == holder.token


def test_a_paused_lock_is_named_as_the_reason(store):
    store.pause(NAME, Operator("jane", "desk", why="migration"))
    live_worker(store)
    park(store, "me")
    assert re.fullmatch(
        r"has waited \S+ s; 'account:42' is paused \(jane@desk, .* UTC: migration\), you are next",
        why(store, "me").sentence,
    )


def test_a_message_without_a_consumer_names_the_missing_queue(store):
    park(store, "me")
    answer = why(store, "me")
    assert answer.state == "adrift"
    assert (
        "no live worker with locks consumes the queue 'q': start one (celery worker -Q q)"
        in answer.sentence
    )


LOCKS_NOT = (
    "worker-2 consumes the queue 'q' and does not declare 'bank.tasks.settle' as a LockedTask: "
    "deploy the version that does, or send such tasks back to run without a lock (locks drain "
    "--queue q --task bank.tasks.settle). A worker without the task would discard them; one that "
    "has it as a plain task sends it back by itself after 5 s; locks pause prevents that"
)


def plain_worker(store, name="worker-2#a1b2c3"):
    """Its version declares another task only."""
    store.worker_heartbeat(name, "R", ["q"], 600, tasks=["bank.tasks.report"])


def test_why_names_the_worker_that_knows_the_task_only_as_a_plain_one(store):
    """After a rollback: to start another worker of that version would not help.

    After a renaming to drain would lose the tasks: such a worker discards them.
    """
    plain_worker(store)
    park(store, "me")
    answer = why(store, "me")
    assert answer.state == "adrift"
    assert re.fullmatch(
        rf"has waited \S+ s and is next, but {re.escape(LOCKS_NOT)}", answer.sentence
    )


def test_why_names_three_workers_that_do_not_lock_the_task_and_counts_the_others(store):
    for number in range(5):
        plain_worker(store, f"w{number}#a1")
    store.worker_heartbeat("other#a1", "S", ["q"], 600, tasks=["bank.tasks.settle"])
    park(store, "me")
    told = why(store, "me").sentence
    assert "but w0, w1, w2 and 2 more consume the queue 'q' and do not declare 'bank" in told


def test_why_says_that_a_new_worker_which_locks_the_task_takes_it(store):
    """It came after the sweep which found no worker for the task."""
    plain_worker(store)
    park(store, "me")
    store.worker_heartbeat("new#a1", "R", ["q"], 600, tasks=["bank.tasks.settle"])
    assert re.fullmatch(
        r"has waited \S+ s; a live worker now takes it from the queue 'q': the next sweep queues "
        "it again",
        why(store, "me").sentence,
    )


def test_why_does_not_promise_the_next_sweep_of_a_free_lock_without_a_worker_that_locks(store):
    store.acquire(Owner(new_token()), Claim(NAME, lease=20.0))
    park(store, "me")
    let_pass(store, 25)
    plain_worker(store)
    told = why(store, "me").sentence
    assert told.endswith(f"'account:42' is free, you are next, but {LOCKS_NOT}")


@pytest.mark.parametrize("with_locks", [False, True])
def test_why_does_not_say_that_a_plain_worker_ends_a_revoked_task(store, holder, with_locks):
    plain_worker(store)
    if with_locks:
        store.worker_heartbeat("new#a1", "R", ["q"], 600, tasks=["bank.tasks.settle"])
    store.deliver_revoked(NAME, park(store, "me").token, realm="R")
    told = why(store, "me").sentence
    assert ("worker-2 consumes the queue 'q' and does not declare" in told) is not with_locks
    assert "drain" not in told  # it leaves such tasks


def test_why_names_workers_of_a_release_without_locks(store):
    """Only the broker knows them: they send no heartbeat to the locks' Redis."""
    park(store, "me")
    told = why(store, "me", App(consumers=["old@host"])).sentence
    assert told.endswith(
        "and is next, but old@host consumes the queue 'q' and sends no heartbeat to the locks' "
        "Redis: it is of a version without locks, or does not reach this Redis (see its log). "
        "Start a worker with locks, or send such tasks back to run without a lock (locks drain "
        "--queue q --task bank.tasks.settle); a worker without the task would discard them"
    )


def test_a_granted_task_and_a_running_task_have_different_sentences(store):
    live_worker(store)
    me = park(store, "me")
    assert why(store, "me").state == "granted"
    assert re.fullmatch(
        r"granted to worker-2, not started: on its way there, or waits there for a free pool slot, "
        r"lease [\d.]+ s left",
        why(store, "me").sentence,
    )
    store.claim(Owner(me.token, worker="worker-2#a1b2c3"), NAME, 30.0)
    assert re.fullmatch(
        r"runs on worker-2, holds 'account:42', lease (2\d|30) s left",
        why(store, "me").sentence,
    )


def test_a_task_that_never_waited_is_found_among_the_holders(store, holder):
    assert why(store, "3f2a91c0-1").state == "running"


def test_a_task_that_waits_for_its_retry_is_explained(store, holder):
    reserved = Reservation("3f2a91c0-1/1/0", 30.0)
    store.release(NAME, holder.token, Ending.KEEP, reserve=reserved)
    assert why(store, "3f2a91c0-1").state == "reserved"


def test_a_lock_held_after_success_shows_the_remaining_time(store, holder):
    """In the answer for the task, for its waiters, and in the view of the lock."""
    kept = Reservation("", 3600.0)
    store.release(NAME, holder.token, Ending.HOLD, reserve=kept)
    live_worker(store)
    park(store, "me")
    left = r"for another (59 min \d+ s|1 h 0 min) \(lock_hold_for\)"
    told = why(store, "3f2a91c0-1")
    assert told.state == "held_after"
    assert re.fullmatch(rf"has succeeded; 'account:42' stays held {left}", told.sentence)
    assert re.fullmatch(
        rf"blocked \d\.\d s by settle\[3f2a91c0\], which has succeeded; held {left}, you are next",
        why(store, "me").sentence,
    )


def test_an_operator_ends_the_time_for_which_a_lock_stays_taken(store, holder):
    """The next waiter is granted at once, and the warning mentions no running task."""
    store.release(NAME, holder.token, Ending.HOLD, reserve=Reservation("", 3600.0))
    live_worker(store)
    me = park(store, "me")
    (kept,) = store.inspect(NAME).holders
    risk = forced_release_warning(NAME, short(kept), kept.state)
    assert risk.startswith("settle[3f2a91c0] has succeeded and does not run.")
    force_release(store, NAME, kept.token, Operator("jane", "desk"))
    assert [each.token for each in store.inspect(NAME).holders] == [me.token]


@pytest.mark.parametrize("verdict", ["overdue", "revoked"])
def test_a_verdict_names_the_worker_that_is_missing(store, holder, verdict):
    me = park(store, "me", deadline=20.0 if verdict == "overdue" else None)
    if verdict == "revoked":
        store.deliver_revoked(NAME, me.token, realm="R")
    let_pass(store, 25)
    store.sweep_and_grant(NAME)
    assert why(store, "me").state == verdict
    assert "waits for a worker that consumes the queue 'q' to end it" in why(store, "me").sentence


def test_a_task_that_is_being_drained_is_explained(store, holder):
    store.take_out_messages(NAME, [park(store, "me").token], 30, "s")
    assert why(store, "me").state == "leaving"


@pytest.mark.parametrize("state", ["eta", "finished", "received", "running"])
def test_the_app_is_asked_about_tasks_without_a_record(store, state):
    answer = why(store, "other", App((state, "ended with SUCCESS")))
    assert (answer.state, answer.sentence) == (state, "It ended with SUCCESS.")


def test_the_short_id_that_commands_show_is_enough(store, holder):
    """Of a task that waits, and of one that holds the lock and is in no index."""
    me = "285bdce1-77aa-4e0d-9f7b-0a5e3c9d1b11"
    park(store, me)
    parked = why(store, "285bdce1", App())
    assert (parked.task_id, parked.state, parked.rank) == (me, "parked", 1)
    running = why(store, "3f2a91c0", App())
    assert (running.task_id, running.state) == ("3f2a91c0-1", "running")
    assert why(store, "285bd").state == "unseen"
    assert (
        "If '285bd' is only the beginning of an id, give the whole id"
        in why(store, "285bd").sentence
    )
    assert why(store, "285b*c").state == "unseen"
    assert "beginning" not in why(store, me.replace("2", "9")).sentence


def test_a_short_id_of_several_tasks_names_them(store, holder):
    ids = [f"285bdce1-{number}" for number in range(5)]
    for each in ids:
        park(store, each)
    answer = why(store, "285bdce1")
    assert answer.state == "ambiguous"
    assert answer.sentence == (
        "No task has the id '285bdce1'. These ids begin with it: "
        f"{', '.join(ids[:3])} and 2 more. Give one whole id."
    )
    assert why(store, ids[3]).rank == 4


def test_an_id_of_the_users_own_is_not_taken_for_the_beginning_of_another(store, holder):
    park(store, "order-12")
    answer = why(store, "order-1")
    assert (answer.task_id, answer.state) == ("order-1", "ambiguous")
    assert "order-12" in answer.sentence


def test_a_task_whose_lease_has_ended_is_not_said_to_be_in_the_queue(store, holder):
    """Its worker stands still, and no other one has swept the lock yet."""
    live_worker(store)
    me = park(store, "me")
    store.release(NAME, holder.token, Ending.FINAL)
    store.claim(me, NAME, 5)
    let_pass(store, 6)
    lapsed = f"its lease of {NAME!r} has ended, and its worker has not renewed it"
    again = "a live worker queues it again within two seconds; locks doctor shows whether one lives"
    assert why(store, "me").sentence == f"{lapsed}; {again}"


def test_an_id_that_the_index_has_kept_too_long_is_unseen(store, lock_client):
    index = store.keyspace.index(bucket_of(NAME))
    lock_client.hset(index, "@285bdce1", f"{NAME}\n{new_token()}")
    assert why(store, "285bdce1").state == "unseen"


def test_every_answer_says_what_to_do_next(store):
    assert "Run the command with the app" in why(store, "x").sentence
    answer = why(store, "x", App(queues="celery holds 37 messages"))
    assert answer.state == "unseen"
    assert (
        "it has not reached a worker (look at the queue: celery holds 37 messages"
        in answer.sentence
    )


def test_why_does_not_claim_that_a_task_killed_with_its_worker_is_redelivered(store):
    """If it had begun and is acknowledged early, it is lost. An operator may have dropped it."""
    for answer in (why(store, "x" * 36), why(store, "x" * 36, App())):
        assert "lost only if it had begun and is acknowledged early" in answer.sentence
        assert "an operator has dropped it (locks audit)" in answer.sentence


def test_why_does_not_advise_to_send_a_task_again_that_the_broker_redelivers(store):
    """A dead worker had prefetched it, or it waits between two tries: it would run twice."""
    for answer in (why(store, "x" * 36), why(store, "x" * 36, App())):
        assert "Otherwise the broker redelivers it" in answer.sentence
        assert "Do not send it again unless you know that it had begun" in answer.sentence
        assert 'between two tries (lock_on_conflict="requeue")' in answer.sentence


def test_locks_are_sorted_and_cut(store, holder):
    store.acquire(Owner(new_token()), Claim("z"))
    park(store, "me")
    store.release("y", Owner(new_token()).token, Ending.FINAL)
    assert [lock.name for lock in list_locks(store)] == [NAME, "z"]
    assert [lock.name for lock in list_locks(store, order="waiting", most=1)] == [NAME]
    with pytest.raises(ValueError, match="use one of name, waiting"):
        list_locks(store, order="size")


def test_a_lock_is_shown_with_all_that_wait_wherever_they_do(store, holder):
    live_worker(store)
    park(store, "a")
    store.deliver_revoked(NAME, park(store, "b").token, realm="R")
    detail = show_lock(store, NAME)
    assert [(each.task_id, each.state) for each in detail.waiting] == [
        ("a", "parked"),
        ("b", "revoked"),
    ]
    assert detail.view.holders[0].token == holder.token
    assert len(show_lock(store, NAME, waiters=1).waiting) == 1


def test_t28_a_refused_release_names_the_present_holder(store, holder):
    by = Operator("jane")
    with pytest.raises(Refused, match=rf"nobody\.0 does not hold .*settle.*{holder.token}"):
        force_release(store, NAME, "nobody.0", by)
    waiter = park(store, "me")
    with pytest.raises(Refused, match=r"waits for the lock .*there is nothing to release"):
        force_release(store, NAME, waiter.token, by)
    force_release(store, NAME, holder.token, by)
    assert store.inspect(NAME).holders == ()


def test_one_operator_who_releases_two_holders_is_told_of_each(store):
    """The second one was called released, since the audit had an entry of the same operator."""
    by = Operator("jane")
    first, second = (Owner(new_token()) for _ in range(2))
    for owner in (first, second):
        store.acquire(owner, Claim("pool", 30.0, 2))
    force_release(store, "pool", first.token, by)
    force_release(store, "pool", first.token, by)  # may be repeated
    store.release("pool", second.token, Ending.FINAL)
    with pytest.raises(Refused, match="has released it"):
        force_release(store, "pool", second.token, by)
    (entry,) = store.audit()
    assert (entry["token"], entry["count"]) == (first.token, 1)


@pytest.mark.parametrize(
    ("duration", "text"),
    [(0.44, "0.4 s"), (41.2, "41 s"), (119, "119 s"), (423, "7 min 3 s"), (18130, "5 h 2 min")],
)
def test_durations_are_readable(duration, text):
    assert seconds(duration) == text


@pytest.mark.parametrize(
    ("rank", "text"),
    [(1, "next"), (2, "2nd"), (3, "3rd"), (11, "11th"), (21, "21st"), (112, "112th"), (4, "4th")],
)
def test_ranks_are_readable(rank, text):
    assert ordinal(rank) == f"you are {text}"


def test_a_waiter_of_a_free_lock_waits_for_the_next_sweep(store):
    """Its holder's lease has ended, and no sweep has happened since."""
    store.acquire(Owner(new_token()), Claim(NAME, lease=20.0))
    live_worker(store)
    park(store, "first")
    park(store, "me")
    let_pass(store, 25)
    assert re.fullmatch(
        r"has waited \S+ s; 'account:42' is free, you are 2nd: the next sweep grants it",
        why(store, "me").sentence,
    )


def test_a_waiter_of_a_free_lock_without_a_consumer_is_explained(store):
    """No sweep comes: all workers are gone, and so is the holder's lease."""
    store.acquire(Owner(new_token()), Claim(NAME, lease=20.0))
    park(store, "me")
    let_pass(store, 25)
    assert re.fullmatch(
        r"has waited \S+ s; 'account:42' is free, you are next, but no live worker with locks "
        r"consumes the queue 'q': start one \(celery worker -Q q\)",
        why(store, "me").sentence,
    )


def test_a_holder_is_shown_with_its_known_facts(store, holder):
    answer = why(store, "3f2a91c0-1")
    assert (answer.task_id, answer.lock, answer.token) == ("3f2a91c0-1", NAME, holder.token)
    assert (answer.rank, answer.waited, answer.paused) == (0, 0.0, "")
    assert [each.token for each in answer.holders] == [holder.token]


def test_a_verdict_is_shown_with_its_time(store, holder):
    me = park(store, "me")
    store.deliver_revoked(NAME, me.token, realm="R")
    assert re.fullmatch(
        r"revoked after \d\.\d s; waits for a worker that .*", why(store, "me").sentence
    )


def test_facts_of_the_app_are_shown_by_task_id(store):
    assert why(store, "other", App(("eta", "waits until noon"))).task_id == "other"
    seen = App(("finished", "ended with SUCCESS"))
    assert why(store, "other", seen).sentence == "It ended with SUCCESS."
    assert why(store, "other").task_id == "other"


def test_a_holder_that_an_app_calls_finished_is_not_looked_for(store, holder):
    """A search through all locks is slow, and an ended task holds none."""
    assert why(store, "3f2a91c0-1", App(("finished", "ended with SUCCESS"))).state == "finished"


def test_a_task_that_runs_although_it_was_revoked_runs(store, holder):
    """A worker that does not have it stores REVOKED; its own one cannot end it in a thread."""
    revoked = App(("revoked", "ended with REVOKED"))
    assert why(store, "3f2a91c0-1", revoked).state == "running"
    told = why(store, "another", revoked)
    assert (told.state, told.sentence) == ("finished", "It ended with REVOKED.")
    assert why(store, "3f2a91c0-1", App(("running", "runs on worker-2"))).lock == NAME


def test_without_queue_lengths_the_sentence_is_complete(store):
    told = why(store, "x", App()).sentence
    assert "it has not reached a worker (look at the queue; does a worker" in told


def who(number, **more):
    return Holder(f"t{number}", "bank.settle", f"{number}23456789", expires_in=number, **more)


def test_three_holders_are_named_and_the_others_counted():
    one, two, three = (f"settle[{n}2345678], lease {n}.0 s left" for n in (1, 2, 3))
    assert named((who(1), who(2), who(3))) == f"{one}; {two}; {three}"
    assert named((who(1), who(2), who(3), who(4))) == f"{one}; {two}; {three} and 1 more"


def test_a_worker_is_named_by_all_but_what_makes_its_id_unique():
    assert worker_name("celery#1@host#a1b2") == "celery#1@host"
    assert worker_name("worker-2") == "worker-2"


def test_a_client_is_shown_unchanged():
    client = Holder("t", host="h", pid=7)
    assert short(client) == str(client)


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (9.94, "9.9 s"), (10.0, "10 s"), (59.6, "60 s"), (119.6, "2 min 0 s"),
        (3599, "59 min 59 s"), (3600, "1 h 0 min"), (86_399, "23 h 59 min"), (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_a_duration_changes_its_unit_where_people_do(duration, text):
    assert seconds(duration) == text


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (0, "not in the queue"), (-1, "not in the queue"), (12, "you are 12th"),
        (13, "you are 13th"),
        (14, "you are 14th"), (22, "you are 22nd"), (23, "you are 23rd"), (113, "you are 113th"),
        (101, "you are 101st"), (1111, "you are 1,111th"), (2003, "you are 2,003rd"),
    ],
)  # fmt: skip
def test_high_ranks_and_no_rank_are_readable(rank, text):
    assert ordinal(rank) == text


def test_a_task_that_is_returned_often_is_explained(store):
    """It is neither in the queue nor running; the answer says for how long."""
    live_worker(store)
    who = park(store, "c1")
    store.release(NAME, who.token, Ending.UNREAD)
    answer = why(store, "c1")
    assert answer.state == "delayed"
    assert answer.sentence == (
        "has started and returned unfinished 1 time: it is back in the queue within a minute, "
        "behind other waiters"
    )


def test_a_task_one_of_whose_locks_redis_refuses_is_explained(store):
    """The sentence names that lock, until the task is back in the queue of this one."""
    who = park(store, "c1")
    store.release(NAME, who.token, Ending.REFUSED, reserve=Reservation("b", 30.0))
    answer = why(store, "c1")
    assert answer.state == "delayed"
    assert answer.sentence == (
        "does not start, since Redis refuses 'b', which it takes, too: it is back in the queue "
        "within a minute, behind other waiters"
    )


def test_a_rejected_task_names_the_queue_that_ends_it(store):
    """Its message is kept until a worker has sent it to its dead letters."""
    who = park(store, "c1")
    store.release(NAME, who.token, Ending.REJECT)
    answer = why(store, "c1")
    assert answer.state == "rejected"
    assert answer.sentence.startswith("rejected by its task after")


def test_all_parked_calls_with_one_id_are_found(store, holder):
    """The end of one leaves the others where they are, and findable."""
    first, second, third = (park(store, "c1") for _ in range(3))
    found = {token for _, token in store.locate_tasks(["c1"])}
    assert found == {first.token, second.token, third.token}
    store.release(NAME, second.token, Ending.FINAL)
    assert {token for _, token in store.locate_tasks(["c1"])} == found - {second.token}
    store.release(NAME, first.token, Ending.FINAL)
    assert list(store.locate_tasks(["c1"])) == [(NAME, third.token)]

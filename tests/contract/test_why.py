"""Why does this task not run? One sentence, at each point of its way."""

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
from celery_singleton_lock.admin.why import named, ordinal, seconds, short, worker_name
from celery_singleton_lock.core.redis_keys import bucket_of
from celery_singleton_lock.core.model import (
    Claim,
    Ending,
    Holder,
    Owner,
    Parcel,
    Reservation,
    new_token,
)
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = pytest.mark.contract

NAME = "account:42"
HELD = r"settle\[3f2a91c0\] on worker-2, lease (29|30) s left"


@pytest.fixture
def store(lock_client):
    store = RedisAdminStore(lock_client)
    yield store
    store.close()


@pytest.fixture
def holder(store):
    """The task settle[3f2a91c0…] on worker-2 holds the lock."""
    who = Owner(new_token(), "3f2a91c0-1/0/0", "bank.tasks.settle", "worker-2#a1b2c3", "h", 7)
    store.acquire(who, Claim(NAME))
    return who


def park(store, task_id, **parcel):
    who = Owner(new_token(), f"{task_id}/0/0", "bank.tasks.settle")
    store.park(who, Claim(NAME), Parcel(b"body", "R", "q", **parcel))
    return who


def live_worker(store):
    store.beat("worker-2#a1b2c3", "R", ["q"], 30)


class App:
    """A witness that has seen some tasks."""

    def __init__(self, seen=None, queues=""):
        self._seen, self._queues = seen, queues

    def seen(self, task_id):
        return self._seen

    def queues(self):
        return self._queues


def test_a_blocked_task_is_told_by_whom_for_how_long_and_its_rank(store, holder):
    live_worker(store)
    for task_id in ("a", "b", "me"):
        park(store, task_id)
    answer = why(store, "me")
    assert re.fullmatch(rf"blocked 0\.\d s by {HELD}, you are 3rd", answer.sentence)
    assert (answer.state, answer.lock, answer.rank) == ("parked", NAME, 3)
    assert answer.holders[0].token == holder.token


def test_a_paused_lock_is_named_as_the_reason(store):
    store.pause(NAME, Operator("jane", "desk", why="migration"))
    live_worker(store)
    park(store, "me")
    assert re.fullmatch(
        r"waits for \S+ s; 'account:42' is paused \(jane@desk, .* UTC: migration\), you are next",
        why(store, "me").sentence,
    )


def test_a_message_that_no_worker_consumes_says_which_worker_is_missing(store):
    park(store, "me")
    answer = why(store, "me")
    assert answer.state == "adrift"
    assert (
        "no live worker consumes the queue 'q': start one (celery worker -Q q)" in answer.sentence
    )


def test_a_granted_task_is_on_its_way_and_a_running_one_holds(store):
    live_worker(store)
    me = park(store, "me")
    assert why(store, "me").state == "granted"
    assert "on its way to worker-2," in why(store, "me").sentence
    store.claim(Owner(me.token, worker="worker-2#a1b2c3"), NAME, 30.0)
    assert re.fullmatch(
        r"runs on worker-2, holds 'account:42', lease (29|30) s left",
        why(store, "me").sentence,
    )


def test_a_task_that_never_waited_is_found_among_the_holders(store, holder):
    assert why(store, "3f2a91c0-1").state == "running"


def test_a_task_between_two_tries_is_told_so(store, holder):
    reserved = Reservation("3f2a91c0-1/1/0", 30.0)
    store.release(NAME, holder.token, Ending.KEEP, reserve=reserved)
    assert why(store, "3f2a91c0-1").state == "reserved"


def test_a_lock_that_stays_taken_after_a_success_is_told_with_the_time_that_is_left(store, holder):
    """To who asks for the task, to who waits behind it, and to who looks at the lock."""
    kept = Reservation("", 3600.0)
    store.release(NAME, holder.token, Ending.HOLD, reserve=kept)
    live_worker(store)
    park(store, "me")
    left = r"for another (59 min \d+ s|1 h 0 min) \(lock_hold_for\)"
    told = why(store, "3f2a91c0-1")
    assert told.state == "held_after"
    assert re.fullmatch(rf"has succeeded; 'account:42' stays taken {left}", told.sentence)
    assert re.fullmatch(
        rf"blocked 0\.\d s by settle\[3f2a91c0\], which has succeeded; taken {left}, you are next",
        why(store, "me").sentence,
    )


def test_an_operator_ends_the_time_for_which_a_lock_stays_taken(store, holder):
    """The next is granted at once, and nobody is told that a task may still be running."""
    store.release(NAME, holder.token, Ending.HOLD, reserve=Reservation("", 3600.0))
    live_worker(store)
    me = park(store, "me")
    (kept,) = store.inspect(NAME).holders
    risk = forced_release_warning(NAME, short(kept), kept.state)
    assert risk.startswith("settle[3f2a91c0] has succeeded, and does not run.")
    force_release(store, NAME, kept.token, Operator("jane", "desk"))
    assert [each.token for each in store.inspect(NAME).holders] == [me.token]


@pytest.mark.parametrize("verdict", ["overdue", "revoked"])
def test_a_verdict_names_the_worker_that_is_missing(store, holder, verdict):
    me = park(store, "me", deadline=0.05 if verdict == "overdue" else None)
    if verdict == "revoked":
        store.revoke(NAME, me.token, realm="R")
    store.wait(NAME, "nobody", 0.1)
    store.kick(NAME)
    assert why(store, "me").state == verdict
    assert "a worker that consumes the queue 'q' has to end it" in why(store, "me").sentence


def test_a_task_that_is_being_drained_is_told_so(store, holder):
    store.seal(NAME, [park(store, "me").token], 30, "s")
    assert why(store, "me").state == "leaving"


@pytest.mark.parametrize("state", ["eta", "finished", "received", "running"])
def test_what_no_lock_knows_an_app_may_know(store, state):
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
        "If '285bd' is only the beginning of an id, give all of it" in why(store, "285bd").sentence
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
        "No task with the id '285bdce1' is known. Of those that begin so are known: "
        f"{', '.join(ids[:3])} and 2 more. Give the whole id of the one that is meant."
    )
    assert why(store, ids[3]).rank == 4


def test_an_id_of_the_users_own_is_not_taken_for_the_beginning_of_another(store, holder):
    park(store, "order-12")
    answer = why(store, "order-1")
    assert (answer.task_id, answer.state) == ("order-1", "ambiguous")
    assert "order-12" in answer.sentence


def test_an_id_that_the_index_has_kept_too_long_is_unseen(store, lock_client):
    index = store.keyspace.index(bucket_of(NAME))
    lock_client.hset(index, "@285bdce1", f"{NAME}\n{new_token()}")
    assert why(store, "285bdce1").state == "unseen"


def test_it_is_never_a_dead_end(store):
    assert "Ask with the app" in why(store, "x").sentence
    answer = why(store, "x", App(queues="celery holds 37 messages"))
    assert answer.state == "unseen"
    assert "it never reached a worker (see the queue: celery holds 37 messages" in answer.sentence


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
    store.revoke(NAME, park(store, "b").token, realm="R")
    detail = show_lock(store, NAME)
    assert [(each.task_id, each.state) for each in detail.waiting] == [
        ("a", "parked"),
        ("b", "revoked"),
    ]
    assert detail.view.holders[0].token == holder.token
    assert len(show_lock(store, NAME, waiters=1).waiting) == 1


def test_t28_a_refused_release_says_who_holds_the_lock_now(store, holder):
    by = Operator("jane")
    with pytest.raises(Refused, match=rf"nobody\.0 does not hold .*settle.*{holder.token}"):
        force_release(store, NAME, "nobody.0", by)
    waiter = park(store, "me")
    with pytest.raises(Refused, match=r"waits for the lock .*drop it instead"):
        force_release(store, NAME, waiter.token, by)
    force_release(store, NAME, holder.token, by)
    assert store.inspect(NAME).holders == ()


@pytest.mark.parametrize(
    ("duration", "text"),
    [(0.44, "0.4 s"), (41.2, "41 s"), (119, "119 s"), (423, "7 min 3 s"), (18130, "5 h 2 min")],
)
def test_durations_are_told_as_people_do(duration, text):
    assert seconds(duration) == text


@pytest.mark.parametrize(
    ("rank", "text"),
    [(1, "next"), (2, "2nd"), (3, "3rd"), (11, "11th"), (21, "21st"), (112, "112th"), (4, "4th")],
)
def test_ranks_are_told_as_people_do(rank, text):
    assert ordinal(rank) == f"you are {text}"


def test_a_free_lock_says_that_a_sweep_grants_it(store):
    """Its holder's lease has ended, and nobody has looked since."""
    store.acquire(Owner(new_token()), Claim(NAME, lease=0.05))
    live_worker(store)
    park(store, "first")
    park(store, "me")
    store.wait(NAME, "nobody", 0.1)
    assert re.fullmatch(
        r"waits for \S+ s; 'account:42' is free, you are 2nd: a sweep grants it",
        why(store, "me").sentence,
    )


def test_a_free_lock_for_whose_queue_no_worker_is_left_says_so(store):
    """No sweep comes: all workers are gone, and so is the holder's lease."""
    store.acquire(Owner(new_token()), Claim(NAME, lease=0.05))
    park(store, "me")
    store.wait(NAME, "nobody", 0.1)
    assert re.fullmatch(
        r"waits for \S+ s; 'account:42' is free, you are next: no live worker consumes the queue "
        r"'q', start one \(celery worker -Q q\)",
        why(store, "me").sentence,
    )


def test_what_is_known_of_a_holder_is_told_with_it(store, holder):
    answer = why(store, "3f2a91c0-1")
    assert (answer.task_id, answer.lock, answer.token) == ("3f2a91c0-1", NAME, holder.token)
    assert (answer.rank, answer.waited, answer.paused) == (0, 0.0, "")
    assert [each.token for each in answer.holders] == [holder.token]


def test_a_verdict_says_what_it_was_and_after_how_long(store, holder):
    me = park(store, "me")
    store.revoke(NAME, me.token, realm="R")
    assert re.fullmatch(r"revoked after 0\.\d s; a worker that .*", why(store, "me").sentence)


def test_what_an_app_knows_is_told_by_id(store):
    assert why(store, "other", App(("eta", "waits until noon"))).task_id == "other"
    seen = App(("finished", "ended with SUCCESS"))
    assert why(store, "other", seen).sentence == "It ended with SUCCESS."
    assert why(store, "other").task_id == "other"


def test_a_holder_that_an_app_calls_finished_is_not_looked_for(store, holder):
    """To look through all locks takes long; what has ended holds none."""
    assert why(store, "3f2a91c0-1", App(("finished", "ended with SUCCESS"))).state == "finished"
    assert why(store, "3f2a91c0-1", App(("running", "runs on worker-2"))).lock == NAME


def test_without_a_word_on_queues_the_sentence_is_whole(store):
    told = why(store, "x", App()).sentence
    assert "it never reached a worker (see the queue; was it sent to one" in told


def who(number, **more):
    return Holder(f"t{number}", "bank.settle", f"{number}23456789", expires_in=number, **more)


def test_three_holders_are_named_and_the_others_counted():
    one, two, three = (f"settle[{n}2345678], lease {n}.0 s left" for n in (1, 2, 3))
    assert named((who(1), who(2), who(3))) == f"{one}; {two}; {three}"
    assert named((who(1), who(2), who(3), who(4))) == f"{one}; {two}; {three} and 1 more"


def test_a_worker_is_named_by_all_but_what_makes_its_id_unique():
    assert worker_name("celery#1@host#a1b2") == "celery#1@host"
    assert worker_name("worker-2") == "worker-2"


def test_who_is_no_task_is_shown_as_it_is():
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
        (0, "not in line"), (-1, "not in line"), (12, "you are 12th"), (13, "you are 13th"),
        (14, "you are 14th"), (22, "you are 22nd"), (23, "you are 23rd"), (113, "you are 113th"),
        (101, "you are 101st"), (1111, "you are 1,111th"), (2003, "you are 2,003rd"),
    ],
)  # fmt: skip
def test_a_place_far_behind_or_none_is_told_as_people_do(rank, text):
    assert ordinal(rank) == text


def test_a_task_that_keeps_coming_back_says_that_others_pass(store):
    """It is neither in line nor running, and somebody will want to know for how long."""
    live_worker(store)
    who = park(store, "c1")
    store.release(NAME, who.token, Ending.UNREAD)
    answer = why(store, "c1")
    assert answer.state == "delayed"
    assert answer.sentence == (
        "has come back 1 time: others pass, and it queues again within a minute"
    )


def test_a_rejected_task_says_who_has_to_end_it(store):
    """Its message is kept until a worker has sent it to its dead letters."""
    who = park(store, "c1")
    store.release(NAME, who.token, Ending.REJECT)
    answer = why(store, "c1")
    assert answer.state == "rejected"
    assert answer.sentence.startswith("rejected by its task after")


def test_all_parked_calls_with_one_id_are_found(store, holder):
    """The end of one leaves the others where they are, and findable."""
    first, second, third = (park(store, "c1") for _ in range(3))
    found = {token for _, token in store.find(["c1"])}
    assert found == {first.token, second.token, third.token}
    store.release(NAME, second.token, Ending.FINAL)
    assert {token for _, token in store.find(["c1"])} == found - {second.token}
    store.release(NAME, first.token, Ending.FINAL)
    assert list(store.find(["c1"])) == [(NAME, third.token)]

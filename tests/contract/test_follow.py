"""Messages of duplicates that wait for the result of the first task (``lock_on_duplicate``)."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin.backlog import SLACK
from celery_singleton_lock.admin.bulk_parked import Pace, drain
from celery_singleton_lock.admin.doctor import Health, examine
from celery_singleton_lock.admin.export_parked import export, restore
from celery_singleton_lock.admin.select_parked import Filter
from celery_singleton_lock.admin.why import why
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.unique import EntryState, UniqueCall
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import ClusterAdminStore, RedisAdminStore
from support.passing_time import let_pass, stop_time

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
REALM = "f" * 16
LOOK = 10
"""Seconds after which a follower looks by itself."""


@pytest.fixture
def store(lock_client, kind):
    made = ClusterAdminStore if kind == "cluster" else RedisAdminStore
    store = made(lock_client, claim_lease=50_000.0)
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    return store


def owner(who, retries=0):
    return Owner(f"{who}.{retries}", f"{who}/{retries}/0", "app.task", "w")


def start(store, who="first", *, is_sent=True):
    """Let the first call be sent, and its task hold the lock."""
    send(store, who)
    return acquire(store, who)


def send(store, who="first"):
    assert store.announce("k", "key", who).state is EntryState.ANNOUNCED
    assert store.confirm_sent("k", "key", who, 0, 600.0)


def acquire(store, who="first", retries=0):
    unique = UniqueCall("k", "key", until_start=False, most=60.0, late=False)
    claim = Claim("k", 60_000.0, flow=packed((), unique=unique))
    assert store.acquire(owner(who, retries), claim).verdict is Verdict.GRANTED


def park(store, who="b", *, of="first", deadline=None, **more):
    unique = UniqueCall("k", "key", until_start=False, most=60.0, late=False, follows=of)
    claim = Claim("k", 60_000.0, flow=packed((), unique=unique), **more)
    return store.park(owner(who), claim, MessageToPark(b"body", REALM, "q", deadline))


def end(store, who="first", ending=Ending.FINAL, retries=0):
    return store.release("k", f"{who}.{retries}", ending, worker="w")


def end_token(store, token, ending=Ending.FINAL):
    return store.release("k", token, ending, worker="w")


def sweep(store):
    store.sweep_and_grant("k", worker="w")


def assert_delivered(store, *expected):
    """Assert what has come to the worker: (verdict, who, whom it follows)."""
    found = []
    while (each := store.receive("w", 10.0 if len(found) < len(expected) else 0.01)) is not None:
        found.append((each.verdict, each.token.partition(".")[0], each.by))
    assert found == list(expected)


def tokens_delivered(store):
    found = []
    while (each := store.receive("w", 0.01)) is not None:
        found.append(each.token.partition(".")[0])
    return found


def state(store, token="b.0"):
    found = store.locate_token("k", token).waiting
    return found and (found.state, found.follows)


@on_all_stores
def test_lists_count_every_follower_of_a_task_that_runs(store):
    """Redis has no message of a task that got its lock at once; it has that of a granted one."""
    start(store)
    for who in "bc":
        park(store, who)
    (lock,) = store.summarise_locks()
    assert (lock.held, lock.aside) == (1, 2)
    end(store)
    store.park(owner("a"), Claim("stored", 60_000.0), MessageToPark(b"body", REALM, "q", None))
    (stored,) = store.summarise_locks("stored")
    assert (stored.held, stored.bodies, stored.aside) == (1, 1, 0)


@on_all_stores
def test_a_follower_waits_out_of_the_queue_and_is_delivered_when_the_first_task_ends(store):
    start(store)
    reply = park(store)
    assert (reply.verdict, reply.rank, reply.waits_for) == (
        Verdict.WAITING,
        0,
        WaitsFor.FOLLOWING,
    )
    assert state(store) == ("following", "first")
    assert store.inspect("k").waiting == 0
    assert_delivered(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    assert end(store, "b").verdict is Verdict.RELEASED
    assert state(store) is None
    assert store.inspect("k").bodies == 0


def claim(store, pid, worker="w", number=0):
    """Let a process claim the end of the follower's task; return whether it may end it."""
    owner = Owner(f"b.{number}", "b/0/0", "app.task", worker, "host", pid)
    return store.claim(owner, "k", 10.0).verdict is not Verdict.ABSENT


def deliver_and_claim(store):
    """Let a process begin to end the follower's task."""
    start(store)
    park(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    assert claim(store, 1)


@on_all_stores
def test_one_process_ends_a_follower(store):
    """Else its links are called twice. A claim whose reply was lost has the same reply again."""
    deliver_and_claim(store)
    assert claim(store, 1)
    assert not claim(store, 2)
    assert not claim(store, 1, worker="another")
    assert end(store, "b").verdict is Verdict.RELEASED
    assert not claim(store, 1)


@on_all_stores
def test_a_claim_tells_a_message_that_redis_has_lost_from_one_that_is_elsewhere(store):
    """Its worker has the message in hand. Else it would take the task for one that has ended."""
    unknown = Owner("x.0", "x/0/0", "app.task", "w")
    assert store.claim(unknown, "k", 10.0).lost
    for ending in (Ending.OFFER, Ending.AGAIN, Ending.LATER):
        assert store.release("k", "x.0", ending, worker="w").lost
    assert not store.release("k", "x.0", Ending.FINAL, worker="w").lost
    deliver_and_claim(store)
    end(store, "b", Ending.AGAIN)  # stored under a later token
    assert not store.claim(owner("b"), "k", 10.0).lost
    assert not end(store, "b", Ending.OFFER).lost
    let_pass(store, 1.1)
    sweep(store)
    end_token(store, "b.1")
    for token in ("b.0", "b.1"):
        assert not store.claim(owner("b")._replace(token=token), "k", 10.0).lost


@on_all_stores
def test_a_worker_that_stops_leaves_a_follower_to_the_thread_that_ends_it(store):
    deliver_and_claim(store)
    for ending in (Ending.RETURN, Ending.OFFER):
        assert end(store, "b", ending).verdict is Verdict.GRANTED
    assert_delivered(store)
    assert end(store, "b").verdict is Verdict.RELEASED
    assert store.inspect("k").bodies == 0


@on_all_stores
def test_a_follower_comes_again_if_the_process_that_ends_it_dies(store):
    """Its worker says so, or dies too."""
    deliver_and_claim(store)
    end(store, "b", Ending.AGAIN)
    let_pass(store, 1.1)
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))
    assert claim(store, 2, number=1)
    assert not claim(store, 3, number=1)
    let_pass(store, 11)
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))
    assert claim(store, 3, number=1)


@on_all_stores
def test_a_follower_that_runs_itself_can_be_given_back(store):
    deliver_and_claim(store)
    end(store, "b", Ending.LATER)
    assert_delivered(store, ("granted", "b", ""))
    assert end_token(store, "b.1", Ending.RETURN).verdict is Verdict.RELEASED
    assert_delivered(store, ("granted", "b", ""))


@on_all_stores
def test_a_purge_leaves_a_follower_that_a_process_ends(store):
    """Else its task ends twice, and its chord counts it twice."""
    deliver_and_claim(store)
    assert store.drop_waiters("k", ["b.0"], Operator("ann")) == []
    assert end(store, "b").verdict is Verdict.RELEASED


@on_all_stores
def test_a_drain_leaves_a_follower_that_a_process_ends(store):
    """Else the message that it sends ends the task again, and calls its links twice."""
    deliver_and_claim(store)
    assert store.take_out_messages("k", ["b.0"], 60, "seal") == []
    assert end(store, "b").verdict is Verdict.RELEASED


@on_all_stores
def test_no_process_ends_a_follower_that_a_drain_sends_off(store):
    start(store)
    park(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    assert len(store.take_out_messages("k", ["b.0"], 60, "seal")) == 1
    assert not claim(store, 1)
    store.record_publish_result("k", "seal", ["b.0"], sent=False)
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))
    assert claim(store, 1)


@on_all_stores
def test_why_says_whether_the_first_task_has_ended(store):
    start(store)
    park(store)
    assert "follows first, which was sent before and has the lock 'k'" in why(store, "b").sentence
    end(store)
    assert "follows first, which has ended or was lost: w ends it" in why(store, "b").sentence
    end(store, "b", Ending.RETURN)  # its worker could not read the result
    told = why(store, "b").sentence
    assert "has ended or was lost. A worker could not end it" in told
    assert "If the result backend does not answer" in told


@on_all_stores
def test_a_follower_takes_no_lock_and_no_room(store):
    start(store)
    park(store, max_waiting=0)
    assert state(store) == ("following", "first")
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    assert store.inspect("k").holders == ()


@on_all_stores
def test_a_follower_that_comes_when_the_first_task_has_ended_is_delivered_at_once(store):
    start(store)
    end(store)
    park(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_follower_waits_while_the_broker_has_the_message_of_the_first_task(store):
    send(store)
    park(store)
    let_pass(store, LOOK + 1)
    sweep(store)
    assert_delivered(store)
    acquire(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_follower_is_not_lost_if_the_message_of_the_first_task_is(store, lock_client, all_keys):
    """The entry expires. Without a result the follower runs itself."""
    send(store)
    park(store)
    (entry,) = all_keys("*:call")
    lock_client.delete(entry)
    let_pass(store, LOOK + 1)
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))
    end(store, "b", Ending.LATER)
    assert_delivered(store, ("granted", "b", ""))


@on_all_stores
def test_followers_wait_while_the_first_task_is_retried(store):
    start(store)
    park(store)
    assert store.announce("k", "key", "first").state is EntryState.ANNOUNCED
    store.confirm_sent("k", "key", "first", 1, 600.0)
    end(store)
    assert_delivered(store)
    acquire(store, retries=1)
    assert_delivered(store)
    end(store, retries=1)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_follower_without_a_result_queues_behind_those_who_hold_the_lock(store):
    start(store)
    park(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    assert store.acquire(owner("x"), Claim("k", 60_000.0)).verdict is Verdict.GRANTED
    end(store, "b", Ending.LATER)
    assert state(store, "b.1")[0] == "parked"
    end(store, "x")
    assert_delivered(store, ("granted", "b", ""))


def let_the_worker_die(store):
    store.worker_heartbeat("w", REALM, ["q"], 1.0, 99)
    let_pass(store, 2)


def let_it_live(store):
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    sweep(store)
    sweep(store)


def drift(store):
    return next(check.health for check in examine(store) if check.name == "drift")


def backlog(store):
    return sum(each.waiting for each in store.parked(REALM).values())


def published(store):
    """Let a worker that does not consume the queue publish what nobody takes."""
    store.worker_heartbeat("other", REALM, ["other"], 60_000.0, 99)
    return store.sweep_and_grant("k", worker="other", realm=REALM, patience=5.0)


@on_all_stores
def test_a_follower_that_no_worker_takes_goes_back_to_the_broker(store):
    """Such as when the task is no longer one that locks."""
    start(store)
    park(store)
    let_the_worker_die(store)
    end(store)
    sweep(store)
    assert state(store)[0] == "adrift"
    let_pass(store, 6)
    (message,) = published(store)
    assert (message.token, message.body) == ("b.0", b"body")
    assert store.record_publish_result("k", message.seal, ["b.0"], sent=True) == 1
    assert store.inspect("k").bodies == 0


@on_all_stores
def test_followers_count_as_backlog_only_when_the_first_task_has_ended(store):
    """Else a limit of parked messages stops the queue that has the retry of the first task."""
    start(store)
    park(store)
    assert backlog(store) == 0
    let_the_worker_die(store)
    end(store)
    sweep(store)
    assert backlog(store) == 1
    let_it_live(store)
    assert_delivered(store, ("following", "b", "first"))
    assert backlog(store) == 1
    end(store, "b")
    assert backlog(store) == 0


@on_all_stores
def test_doctor_takes_no_follower_for_a_wrong_counter(store):
    start(store)
    for number in range(2 * SLACK):
        park(store, f"f{number}")
    assert drift(store) is Health.OK
    end(store)
    sweep(store)
    sweep(store)
    assert backlog(store) == 2 * SLACK
    assert drift(store) is Health.OK


@on_all_stores
def test_a_follower_adrift_has_the_result_of_the_first_task_when_a_worker_lives(store):
    start(store)
    park(store)
    let_the_worker_die(store)
    end(store)
    sweep(store)
    let_it_live(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_follower_follows_on_if_it_could_not_be_published(store):
    start(store)
    park(store)
    let_the_worker_die(store)
    end(store)
    sweep(store)
    let_pass(store, 6)
    (message,) = published(store)
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    store.record_publish_result("k", message.seal, [message.token], sent=False)
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_the_wait_of_a_follower_adrift_times_out(store):
    start(store)
    park(store, deadline=100.0)
    let_the_worker_die(store)
    end(store)
    sweep(store)
    let_pass(store, 100)
    sweep(store)
    assert state(store)[0] == "overdue"


@on_all_stores
def test_an_operator_can_drain_a_follower(store):
    start(store)
    park(store)
    sent = []

    def publish(message):
        end(store)
        assert state(store)[0] == "leaving"
        sent.append(message.token)

    drain(store, Filter(), Operator("ann"), realm=REALM, publish=publish, pace=Pace(0))
    assert sent == ["b.0"]
    assert_delivered(store)
    assert store.inspect("k").bodies == 0


@on_all_stores
def test_a_follower_that_was_not_drained_follows_on(store):
    start(store)
    park(store)
    store.take_out_messages("k", ["b.0"], 60.0, "s")
    store.record_publish_result("k", "s", ["b.0"], sent=False)
    assert state(store) == ("following", "first")
    end(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_of_the_followers_of_a_lost_task_one_runs_and_the_others_follow_it(store):
    start(store)
    for each in "bcd":
        park(store, each)
    end(store)
    assert_delivered(store, *[("following", each, "first") for each in "bcd"])
    for each in "bcd":
        end(store, each, Ending.LATER)
    assert_delivered(store, ("granted", "b", ""))
    assert [state(store, f"{each}.1") for each in "cd"] == [("following", "b")] * 2
    assert store.announce("k", "key", "new") == (EntryState.PARKED_OR_HELD, "b")
    assert store.claim(owner("b")._replace(token="b.1"), "k", 60.0, acks_early=True)
    end_token(store, "b.1")
    sweep(store)
    assert_delivered(store, ("following", "c", "b"), ("following", "d", "b"))


@on_all_stores
def test_a_follower_that_comes_late_has_the_result_of_the_one_that_ran_instead(store):
    """It got no slot before that one had ended."""
    start(store)
    for each in "bc":
        park(store, each)
    end(store)
    end(store, "b", Ending.LATER)
    end_token(store, "b.1")
    end(store, "c", Ending.LATER)
    assert state(store, "c.1") == ("following", "b")


@on_all_stores
def test_a_follower_follows_the_next_call_of_its_kind_if_the_first_task_left_no_result(store):
    start(store)
    park(store)
    end(store)
    start(store, "second")
    end(store, "b", Ending.LATER)
    assert state(store, "b.1") == ("following", "second")


@on_all_stores
def test_followers_run_if_a_second_task_leaves_no_result_either(store):
    """Else thousands that raise Ignore would follow each other."""
    start(store)
    for each in "bcd":
        park(store, each)
    end(store)
    for each in "bcd":
        end(store, each, Ending.LATER)
    end_token(store, "b.1")
    sweep(store)
    end_token(store, "c.1", Ending.LATER)
    send(store, "new")
    end_token(store, "d.1", Ending.LATER)
    assert state(store, "d.2") == ("parked", "")
    assert_delivered(
        store,
        *[("following", each, "first") for each in "bcd"],
        ("granted", "b", ""),
        *[("following", each, "b") for each in "cd"],
        ("granted", "c", ""),
    )


@on_all_stores
def test_a_follower_does_not_run_if_the_first_task_counts_again_meanwhile(store):
    """It has raised RetryLater, or its retry was announced late."""
    start(store)
    park(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    acquire(store, retries=1)
    end(store, "b", Ending.LATER)
    assert state(store, "b.1") == ("following", "first")
    end(store, retries=1)
    assert_delivered(store, ("following", "b", "first"))
    end_token(store, "b.1", Ending.LATER)
    assert store.announce("k", "key", "new") == (EntryState.PARKED_OR_HELD, "b")


@on_all_stores
def test_followers_wait_while_the_first_task_waits_to_run_again_later(store):
    """It has raised RetryLater, and its worker parks it now."""
    start(store)
    park(store)
    end(store, ending=Ending.LATER)
    assert_delivered(store)
    assert store.announce("k", "key", "new") == (EntryState.SENT, "first")


@on_all_stores
def test_a_follower_whose_worker_stops_follows_on(store):
    start(store)
    park(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    end(store, "b", Ending.AGAIN)
    assert_delivered(store)
    let_pass(store, 1.1)
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_follower_is_delivered_ever_more_rarely_if_the_result_is_out_of_reach(store, lock_client):
    """Else followers would fill all slots and the log while the result backend is away."""
    store = type(store)(lock_client, claim_lease=5.0)
    start(store)
    park(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    for number, delay in enumerate([1, 2, 4, 8, 12, 12]):
        end_token(store, f"b.{number}", Ending.AGAIN)
        let_pass(store, delay - 1)
        sweep(store)
        assert_delivered(store)
        let_pass(store, 2)
        sweep(store)
        assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_follower_is_delivered_again_if_no_worker_ends_it(store):
    start(store)
    park(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    let_pass(store, 50_001)
    store.worker_heartbeat("w", REALM, ["q"], 60_000.0, 99)
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_follower_whose_wait_has_timed_out_fails(store):
    start(store)
    park(store, deadline=3.0)
    let_pass(store, 3.1)
    sweep(store)
    assert_delivered(store, ("overdue", "b", ""))
    assert state(store)[0] == "overdue"


@on_all_stores
def test_a_revoked_follower_ends(store):
    start(store)
    park(store)
    reply = store.deliver_revoked("k", "b.0", realm=REALM, worker="w")
    assert reply.verdict is Verdict.RELEASED
    assert_delivered(store, ("revoked", "b", ""))
    end(store)
    assert_delivered(store)


@on_all_stores
def test_a_withdrawn_call_wakes_its_followers(store):
    """Its sending has failed, or it was skipped or revoked before its start."""
    send(store)
    park(store)
    assert store.withdraw("k", "key", "first", 0)
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_forgotten_call_wakes_its_followers(store):
    send(store)
    park(store)
    assert store.forget_call("k", "key", by=Operator("ann"))
    sweep(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_followers_of_another_first_task_stay(store):
    start(store)
    park(store)
    end(store)
    assert_delivered(store, ("following", "b", "first"))
    send(store, "second")
    park(store, "c", of="second")
    assert state(store, "c.0") == ("following", "second")
    assert_delivered(store)


@on_all_stores
def test_a_follower_does_not_wait_for_the_next_call_of_its_kind(store):
    """It came late: its first task has ended, and another call counts now."""
    start(store)
    end(store)
    start(store, "second")
    park(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_a_repeated_request_and_a_copy_change_nothing(store):
    start(store)
    assert park(store).verdict is Verdict.WAITING
    assert park(store).verdict is Verdict.WAITING
    assert store.inspect("k").bodies == 1
    end(store)
    assert_delivered(store, ("following", "b", "first"))


@on_all_stores
def test_one_script_wakes_some_of_many_followers_and_the_next_ones_wake_the_others(store):
    stop_time(store)  # none of them looks by itself, however long it takes to park them
    start(store)
    many = [f"f{number:03}" for number in range(250)]
    for each in many:
        park(store, each)
    end(store)
    assert_delivered(store, *[("following", each, "first") for each in many[:100]])
    for _ in range(2):
        sweep(store)
    assert tokens_delivered(store) == many[100:]


@on_all_stores
def test_followers_that_looked_by_themselves_are_not_woken_as_well(store):
    """Two workers would have the same one, and could call its links twice."""
    start(store)
    many = [f"f{number:03}" for number in range(300)]
    for each in many:
        park(store, each)
    let_pass(store, LOOK + 2)
    for _ in range(3):
        sweep(store)  # the earlier ones look
    let_pass(store, 4)  # now the later ones look, and the earlier ones are woken
    end(store)
    for _ in range(5):
        sweep(store)
    assert sorted(tokens_delivered(store)) == many


@on_all_stores
def test_many_followers_do_not_delay_what_else_is_due(store, lock_client):
    """A sweep handles 100 deadlines. At most 20 of them each second are looks of followers."""
    stop_time(store)
    start(store)
    for number in range(400):
        park(store, f"f{number}")
    at = store.keyspace.lock("k").deadlines
    looks = [score / 1000 for _, score in lock_client.zrange(at, 0, -1, withscores=True)]
    assert max(looks) - min(looks) >= 400 / 20 - LOOK
    let_pass(store, LOOK + 20)
    for _ in range(4):
        sweep(store)
    let_pass(store, LOOK)
    park(store, "impatient", deadline=1.0)
    let_pass(store, 2)
    sweep(store)
    assert state(store, "impatient.0")[0] == "overdue"


@on_all_stores
def test_nothing_is_left_when_all_has_ended(store, lock_client):
    start(store)
    park(store)
    end(store)
    end(store, "b")
    left = [key for key in lock_client.keys("*") if b"followers" in key]
    assert left == []


def test_a_follower_moves_to_another_broker(store):
    """Otherwise nobody gives it the result after a change of the broker."""
    start(store)
    park(store)
    lines = list(export(store, Filter(), Operator("jane")))
    store.leave("w", REALM, ["q"])
    assert restore(store, lines, Operator("jane"), realm="S").done == {"k": 1}
    assert state(store)[0] == "following"
    store.worker_heartbeat("other", "S", ["q"], 60_000.0, 99)
    end(store)
    found = store.receive("other", 10.0)
    assert (found.verdict, found.token.partition(".")[0]) == ("following", "b")
    assert list(store.find_contradictions("k")) == []

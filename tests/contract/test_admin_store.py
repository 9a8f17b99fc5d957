"""The operator's view of every store: reading, and actions that grant the next waiter."""

from __future__ import annotations

import re

import pytest

from celery_singleton_lock import Lock, locked
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.owner_token import base_of, new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.errors import BackendRefused, LockConflict, LockTimeout
from celery_singleton_lock.store.operator import redis as redis_admin
from celery_singleton_lock.store.operator.base import PARTS, Operator
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

NAME = "account:42"


@pytest.fixture(params=["redis", "cluster", "in_memory"])
def kind(request):
    """Each kind of store that has these verbs."""
    return request.param


@pytest.fixture
def store(make_store):
    return make_store(claim_lease=20.0)


def by(**more):
    return Operator("jane", "desk-1", "test", "stuck", **more)


def owner(attempt="", task="app.task", **more):
    return Owner(new_token(), attempt, task, host="host", pid=1, **more)


def hold(store, name=NAME, lease=30.0, limit=1, **more):
    who = owner(**more)
    assert store.acquire(who, Claim(name, lease, limit)).verdict is Verdict.GRANTED
    return who


def wait(store, name=NAME, **claim):
    who = owner()
    assert store.acquire(who, Claim(name, **claim), wait=30.0).verdict is Verdict.WAITING
    return who


def park(store, task_id="t", name=NAME, queue="q", body=b"body \xff\n", **more):
    who = owner(f"{task_id}/0/0", **more)
    store.park(who, Claim(name), MessageToPark(body, "R", queue))
    return who


def live_worker(store, worker="w", queues=("q",)):
    store.worker_heartbeat(worker, "R", queues, 3000)


def tokens(store, name=NAME):
    return [holder.token for holder in store.inspect(name).holders]


def line(store, name=NAME, part="queue", most=100):
    """The tokens of the waiters, page by page."""
    found, after = [], ""
    while True:
        page = store.list_waiters(name, part, after, most)
        found += [each.token for each in page.waiting]
        after = page.end
        if not after:
            return found


# -- looking ---------------------------------------------------------------------------------------


def test_all_locks_are_listed_with_holder_lease_and_queue(store):
    holder = hold(store, worker="w1#ab")
    wait(store)
    hold(store, "b\nc" + "x" * 300)
    store.release("gone", hold(store, "gone").token, Ending.FINAL)
    found = {lock.name: lock for lock in store.summarise_locks()}
    assert set(found) == {NAME, "b\nc" + "x" * 300, "gone"}
    lock = found[NAME]
    assert (lock.held, lock.waiting, lock.adrift, lock.bodies, lock.limit) == (1, 1, 0, 0, 1)
    assert lock.holders[0].token == holder.token
    assert lock.holders[0].worker == "w1#ab"
    assert 15 < lock.holders[0].expires_in <= 30
    assert not lock.is_idle
    assert found["gone"].is_idle


def test_a_list_is_filtered_by_part_or_pattern_of_the_name_long_ones_too(store):
    long = "long:" + "x" * 300
    for name in ("account:1", "account:2", "bill:1", long):
        hold(store, name)
    assert {lock.name for lock in store.summarise_locks("account")} == {"account:1", "account:2"}
    assert {lock.name for lock in store.summarise_locks("*:1")} == {"account:1", "bill:1"}
    assert {lock.name for lock in store.summarise_locks("long:xx")} == {long}


LONG = "long:" + "x" * 300


def test_locks_with_waiters_are_found_without_reading_all_locks(store, lock_client):
    """Those in the queue, and those without a worker; by all of them, no lock that only runs."""
    live_worker(store)
    hold(store, "runs")
    for name, waiting in ((NAME, 2), (LONG, 1), ("a\nb", 1)):
        hold(store, name)
        for number in range(waiting):
            park(store, f"{name}{number}", name)
    park(store, "adrift", "nobody", queue="unknown")
    counted = {name: waiting for name, waiting, _ in store.count_waiters()}
    assert counted == {NAME: 2, LONG: 1, "a\nb": 1, "nobody": 1}
    (broken,) = (key for key in (store.keyspace.lock("a\nb").queue,) if lock_client.delete(key))
    lock_client.set(broken, "x")
    counted = {name: waiting for name, waiting, _ in store.count_waiters()}
    assert counted == {NAME: 2, LONG: 1, "nobody": 1}


def test_no_lock_has_waiters_after_all_have_ended(store):
    live_worker(store)
    holder = hold(store)
    tokens_of = [park(store, f"t{n}").token for n in range(2)]
    store.release(NAME, holder.token, Ending.FINAL, worker="w")
    for token in tokens_of:
        assert store.claim(owner()._replace(token=token), NAME, 30.0).verdict is Verdict.GRANTED
        assert [each[0] for each in store.count_waiters()] == [NAME]  # it has waited
        store.release(NAME, token, Ending.FINAL, worker="w")
    assert list(store.count_waiters()) == []


@pytest.mark.parametrize(
    ("order", "least", "most"), [("oldest", 0, 20), ("held", 2, 2), ("lease", 30, 60)]
)
def test_locks_with_waiters_are_counted_with_the_number_of_their_order(store, order, least, most):
    for name in (NAME, LONG):
        for _ in range(2):
            hold(store, name, lease=60.0, limit=2)
        park(store, name, name)
        park(store, name + "too", name)
    found = {name: number for name, _, number in store.count_waiters(order)}
    assert set(found) == {NAME, LONG}
    assert all(least <= number <= most for number in found.values())


def test_more_locks_with_waiters_than_one_script_counts_are_found(store, monkeypatch):
    monkeypatch.setattr(redis_admin, "COUNTED", 1)
    names = {f"a{number}" for number in range(150)}
    for name in names:
        hold(store, name)
        wait(store, name)
    assert {each[0] for each in store.count_waiters()} == names


def test_a_running_task_is_located_by_its_id_or_the_start_of_it(store, lock_client):
    """A lock's name may hold any sign. What has ended is no longer listed."""
    one, two, other = ("abc-1", NAME, "x.0"), ("abc-2", "a\nb", "y.0"), ("def", LONG, "z.0")
    store.list_running("w1", [one, other], [], 60.0)
    store.list_running("w2", [two], [], 60.0)
    assert sorted(store.locate_running("abc-")) == [one, two]
    assert store.locate_running("def") == [other]
    store.list_running("w1", [], [one, other], 60.0)
    assert store.locate_running("abc-") == [two]
    lock_client.zadd(store.keyspace.running, {"w2": 1})
    assert store.locate_running("") == []
    store.list_running("w1", [one], [], 60.0)
    assert lock_client.zcard(store.keyspace.running) == 1, "the list of a dead worker has expired"
    assert 0 < lock_client.pttl(store.keyspace.running_of("w1")) <= 60_000


def test_named_locks_are_summarised_in_order_and_unknown_ones_omitted(store):
    for name in ("b", "a", LONG):
        hold(store, name)
    found = store.summarise_named(["b", "unknown", LONG, "a"])
    assert [lock.name for lock in found] == ["b", LONG, "a"]
    assert [lock.held for lock in found] == [1, 1, 1]
    assert store.summarise_named([]) == []
    assert store.key_count() >= 9


def test_a_lock_whose_keys_hold_other_data_hides_no_other_lock(store, lock_client):
    hold(store)
    other = store.keyspace.lock("other")
    hold(store, "other")
    lock_client.delete(other.holders)
    lock_client.set(other.holders, "x")
    found = {lock.name: lock.broken for lock in store.summarise_locks()}
    assert found == {NAME: False, other.meta: True}


@pytest.mark.parametrize("junk", ["no JSON", "[1]", '{"pid": [1]}', "{\n"])
def test_a_lock_with_an_invalid_record_hides_no_other_lock(store, lock_client, junk):
    hold(store)
    other = store.keyspace.lock("other")
    token = hold(store, "other").token
    lock_client.hset(other.record, token, junk)
    found = {lock.name: lock.broken for lock in store.summarise_locks()}
    assert found == {NAME: False, other.meta: True}


def test_reading_changes_nothing(store, lock_client):
    hold(store)
    waiter = wait(store)
    before = {key: lock_client.dump(key) for key in lock_client.scan_iter()}
    list(store.summarise_locks())
    store.locate_token(NAME, waiter.token)
    for part in PARTS:
        line(store, part=part)
    assert {key: lock_client.dump(key) for key in lock_client.scan_iter()} == before


def test_waiters_are_listed_page_by_page_in_order(store):
    live_worker(store)
    hold(store)
    parked = [park(store, f"t{i}").token for i in range(7)]
    assert line(store, most=3) == parked
    page = store.list_waiters(NAME, "queue", most=2)
    assert [each.task_id for each in page.waiting] == ["t0", "t1"]
    first = page.waiting[0]
    assert (first.state, first.task, first.queue, first.realm) == ("parked", "app.task", "q", "R")
    assert first.size == len(b"body \xff\n")


def test_a_page_ends_between_two_places_not_between_two_tokens_of_one(store):
    hold(store)
    parked = set()
    for i in range(6):
        who = owner(f"t{i}/0/0")
        store.park(who, Claim(NAME, place=1000 + i // 3), MessageToPark(b"", "R", "q"))
        parked.add(who.token)
    assert set(line(store, most=2)) == parked
    assert len(line(store, most=2)) == 6


def test_messages_without_a_consumer_are_listed_page_by_page_too(store):
    parked = [park(store, f"t{i}").token for i in range(5)]
    assert line(store, part="adrift", most=2) == parked
    assert line(store) == []


def test_the_position_of_a_token_is_reported(store):
    holder = hold(store)
    waiter = park(store, "abc")
    assert store.locate_token(NAME, holder.token).expires_in > 15
    standing = store.locate_token(NAME, waiter.token)
    assert (standing.rank, standing.waiting.task_id, standing.ended) == (1, "abc", False)
    live_worker(store)
    store.release(NAME, holder.token, Ending.FINAL)
    store.release(NAME, waiter.token, Ending.FINAL)
    assert store.locate_token(NAME, waiter.token).waiting is None
    assert store.locate_token(NAME, waiter.token).ended


# -- forced release --------------------------------------------------------------------------------


def test_t28_a_forced_release_needs_the_holders_token(store):
    holder, waiter = hold(store), wait(store)
    for wrong in (waiter.token, "nobody.0"):
        assert store.force_release(NAME, wrong, by()).verdict is Verdict.ABSENT
    assert tokens(store) == [holder.token]
    assert store.audit() == []


def test_t28_a_forced_release_is_fenced_audited_and_grants_to_the_next(store):
    first = owner(attempt="id1/0/0")
    fence = store.acquire(first, Claim(NAME)).fencing_token
    waiter = wait(store)
    assert store.force_release(NAME, first.token, by()).verdict is Verdict.RELEASED
    assert tokens(store) == [waiter.token]
    assert store.inspect(NAME).fencing_token > fence
    assert store.release(NAME, first.token, Ending.FINAL).verdict is Verdict.ABSENT
    assert store.extend([(NAME, first.token, 30.0)]) == [False]
    (entry,) = store.audit()
    told = {key: entry[key] for key in ("action", "lock", "who", "host", "via", "why", "count")}
    assert told == {
        "action": "release",
        "lock": NAME,
        "who": "jane",
        "host": "desk-1",
        "via": "test",
        "why": "stuck",
        "count": 1,
    }
    assert abs(entry["at"] - store.time()) < 30
    assert (entry["task"], entry["attempt"], entry["token"]) == ("app.task", "id1/0/0", first.token)


def test_t28_the_message_of_a_released_holder_goes_to_the_end_of_the_queue(store):
    live_worker(store)
    stuck, following = park(store, "stuck"), park(store, "following")
    assert tokens(store) == [stuck.token]
    store.force_release(NAME, stuck.token, by())
    assert tokens(store) == [following.token]
    (back,) = line(store)
    assert base_of(back) == base_of(stuck.token)
    assert store.body(NAME, back) == b"body \xff\n"


def test_t28_a_dropped_message_and_its_late_copies_do_not_run(store):
    live_worker(store)
    stuck = park(store, "stuck")
    store.force_release(NAME, stuck.token, by(), keep=False)
    assert store.body(NAME, stuck.token) is None
    copy = owner("stuck/0/0")
    assert store.acquire(copy, Claim(NAME, copy=True)).verdict is Verdict.DONE


def test_a_retry_runs_though_the_permit_that_was_kept_for_it_is_released(store):
    """Also if the broker has marked it as redelivered."""
    first = owner("again/0/0")
    store.acquire(first, Claim(NAME))
    reserve = Reservation("again/1/0", 30.0)
    store.release(NAME, first.token, Ending.KEEP, reserve=reserve)
    (permit,) = tokens(store)
    store.force_release(NAME, permit, by(), keep=False)
    assert store.acquire(owner("again/1/0"), Claim(NAME, copy=True)).verdict is Verdict.GRANTED


# -- drop, promote ---------------------------------------------------------------------------------


def test_dropped_waiters_are_returned_and_the_next_waiter_is_granted(store):
    live_worker(store)
    holder = hold(store)
    parked = [park(store, f"t{i}").token for i in range(3)]
    dropped = store.drop_waiters(NAME, [*parked[:2], holder.token, "nobody.0"], by(), whole=True)
    assert [each.task_id for each in dropped] == ["t0", "t1"]
    assert dropped[0].message == b"body \xff\n"
    assert line(store) == parked[2:]
    assert tokens(store) == [holder.token]
    assert store.body(NAME, parked[0]) is None
    assert store.locate_tasks(["t0"]) == []
    (entry,) = store.audit()
    assert (entry["action"], entry["count"]) == ("drop", 2)
    assert "body" not in str(entry)


def test_a_copy_of_a_dropped_message_ends_quietly_unless_it_may_run(store):
    hold(store)
    park(store, "gone")
    kept = park(store, "kept")
    first = line(store)[0]
    store.drop_waiters(NAME, [first], by())
    store.drop_waiters(NAME, [kept.token], by(), done_for=None)
    copies = [owner(f"{task}/0/0") for task in ("gone", "kept")]
    answers = [store.acquire(copy, Claim(NAME, copy=True)).verdict for copy in copies]
    assert answers == [Verdict.DONE, Verdict.BLOCKED]


def test_one_purge_is_one_audit_entry(store):
    hold(store)
    parked = [park(store, f"t{i}").token for i in range(4)]
    purge = by(action="purge")
    store.drop_waiters(NAME, parked[:2], purge)
    store.drop_waiters(NAME, parked[2:], purge)
    store.drop_waiters(NAME, [wait(store).token], by())
    assert [(e["action"], e["count"]) for e in store.audit()] == [("drop", 1), ("purge", 4)]


def test_a_promoted_waiter_is_next_from_any_rank(store):
    holder = hold(store)
    parked = [park(store, f"t{i}") for i in range(3)]
    nobodys = park(store, "n", queue="nobody's")
    assert store.promote(NAME, parked[2].token, by()).rank == 1
    live_worker(store)
    assert line(store)[0] == parked[2].token
    assert store.promote(NAME, nobodys.token, by()).rank == 1
    assert store.promote(NAME, holder.token, by()).verdict is Verdict.ABSENT
    store.release(NAME, holder.token, Ending.FINAL)  # no worker has nobody's: the next one is
    assert tokens(store) == [parked[2].token]
    live_worker(store, queues=("nobody's",))
    store.promote(NAME, parked[1].token, by())
    store.promote(NAME, nobodys.token, by())
    store.release(NAME, parked[2].token, Ending.FINAL)
    assert tokens(store) == [nobodys.token]


# -- draining --------------------------------------------------------------------------------------


def test_a_sealed_message_is_not_granted_and_comes_back_to_its_place(store):
    live_worker(store)
    holder = hold(store)
    parked = [park(store, f"t{i}").token for i in range(3)]
    (sealed,) = store.take_out_messages(NAME, [parked[0], holder.token], 20, "s")
    assert (sealed.task_id, sealed.message) == ("t0", b"body \xff\n")
    store.release(NAME, holder.token, Ending.FINAL)
    assert tokens(store) == [parked[1]]
    store.claim(Owner(parked[1]), NAME, 3000.0)
    let_pass(store, 25)
    store.sweep_and_grant(NAME)
    assert line(store)[0] == parked[0]
    assert store.body(NAME, parked[0]) == b"body \xff\n"


def test_a_message_without_a_consumer_can_be_taken_out_and_parked_again(store):
    parked = park(store)
    assert len(store.take_out_messages(NAME, [parked.token], 20, "s")) == 1
    assert line(store, part="overdue") == [parked.token]
    let_pass(store, 25)
    live_worker(store)
    store.sweep_and_grant(NAME)
    assert tokens(store) == [parked.token]


# -- pause, limit ----------------------------------------------------------------------------------


def test_a_paused_lock_is_not_granted_and_its_holder_keeps_running(store):
    live_worker(store)
    holder = hold(store)
    parked = park(store)
    assert store.pause(NAME, by())
    assert not store.pause(NAME, by())
    assert re.fullmatch(
        r"jane@desk-1, \d{4}-\d\d-\d\d \d\d:\d\d UTC: stuck", store.inspect(NAME).paused
    )
    assert store.extend([(NAME, holder.token, 30.0)]) == [True]
    beside = store.acquire(owner(), Claim(NAME))
    assert (beside.holder.token, beside.paused) == (holder.token, store.inspect(NAME).paused)
    assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.RELEASED
    blocked = store.acquire(owner(), Claim(NAME))
    assert (blocked.verdict, blocked.holder) == (Verdict.BLOCKED, None)
    assert blocked.waits_for is store.inspect(NAME).waits_for is WaitsFor.PAUSE
    assert blocked.paused == store.inspect(NAME).paused
    store.sweep_and_grant(NAME)
    assert store.claim(parked, NAME, 30.0).verdict is Verdict.WAITING
    assert tokens(store) == []
    assert store.resume(NAME, by())
    assert not store.resume(NAME, by())
    assert tokens(store) == [parked.token]
    assert [entry["action"] for entry in store.audit()] == ["resume", "pause"]


def test_the_reason_of_a_wait_is_in_the_refusal_and_in_the_view(store):
    """Both are the result of the decision, with the earliest time at which it can change."""
    holder = hold(store, lease=20.0)
    refused = store.acquire(owner(), Claim(NAME))
    assert refused.waits_for is store.inspect(NAME).waits_for is WaitsFor.HOLDER
    for told in (refused, store.inspect(NAME)):
        assert 10.0 < told.next_look <= 20.0
    park(store)
    store.release(NAME, holder.token, Ending.FINAL)
    assert store.inspect(NAME).waits_for is None
    adrift = store.park(
        Owner(line(store, part="adrift")[0], "t/0/0"), Claim(NAME), MessageToPark(b"", "R", "q")
    )
    assert adrift.waits_for is WaitsFor.WORKER


def test_code_that_did_not_get_a_paused_lock_hears_that_it_is_paused(store, lock_client):
    """And by whom: only that operator knows when it will be resumed."""
    store.pause(NAME, by())
    with pytest.raises(LockTimeout, match=r"is paused \(jane@desk-1, .*: stuck\)") as raised:
        Lock(lock_client, NAME, blocking=False).__enter__()
    assert (raised.value.waits_for, raised.value.holder) == (WaitsFor.PAUSE, "")

    @locked(NAME, lock_client, on_conflict="fail")
    def settle():
        """Never run."""

    with pytest.raises(LockConflict) as refused:
        settle()
    assert refused.value.waits_for == WaitsFor.PAUSE


def test_a_retry_is_told_that_its_last_attempt_is_one_of_several_holders(store):
    """Else `skip` or `fail` ends the retry, although that attempt is about to release it."""
    first = hold(store, attempt="first/0/0", limit=2, lease=20.0)
    last = hold(store, attempt="task/0/0", limit=2)
    for attempt, holder in [
        ("task/1/0", last),
        ("task/0/1", last),
        ("other/1/0", first),
        ("other/0/0", first),
    ]:
        reply = store.acquire(owner(attempt), Claim(NAME, limit=2))
        assert reply.verdict is Verdict.BLOCKED
        assert reply.holder.token == holder.token


@pytest.mark.parametrize("comes", ["before the release", "after it"])
def test_a_retry_does_not_start_on_a_paused_lock(store, comes):
    """Neither one that is parked already, nor one for which the permit was kept."""
    live_worker(store)
    first = hold(store, attempt="task/0/0")
    retry = Owner(new_token(), "task/1/0", "app.task")
    if comes == "before the release":
        store.park(retry, Claim(NAME), MessageToPark(b"body", "R", "q"))
    store.pause(NAME, by())
    store.release(NAME, first.token, Ending.KEEP, reserve=Reservation("task/1/0", 30.0))
    if comes == "after it":
        assert store.acquire(retry, Claim(NAME)).verdict is Verdict.BLOCKED
        store.park(retry, Claim(NAME), MessageToPark(b"body", "R", "q"))
    assert tokens(store) == []
    store.resume(NAME, by())
    assert tokens(store) == [retry.token]


@pytest.mark.parametrize("comes", ["before the release", "after it", "and waits in its slot"])
def test_nobody_passes_a_retry_whose_permit_was_kept_when_its_lock_is_resumed(store, comes):
    """A pause begins and ends between two attempts: those who wait are behind the second one."""
    live_worker(store)
    first, other = hold(store, attempt="task/0/0"), park(store)
    retry, to_park = Owner(new_token(), "task/1/0", "app.task"), MessageToPark(b"body", "R", "q")
    if comes == "before the release":
        store.park(retry, Claim(NAME), to_park)
    store.pause(NAME, by())
    store.release(NAME, first.token, Ending.KEEP, reserve=Reservation("task/1/0", 30.0))
    if comes == "after it":
        for _ in range(2):  # as after a lost reply
            assert store.acquire(retry, Claim(NAME)).verdict is Verdict.BLOCKED
        store.park(retry, Claim(NAME, max_waiting=1), to_park)
    if comes == "and waits in its slot":
        waits = store.acquire(retry, Claim(NAME, max_waiting=1), wait=30.0)
        assert (waits.verdict, waits.rank) == (Verdict.WAITING, 1)
    assert (tokens(store), line(store)) == ([], [retry.token, other.token])
    store.resume(NAME, by())
    assert tokens(store) == [retry.token]


def test_no_message_of_a_paused_lock_starts_because_its_task_keeps_no_lock(store):
    """The mode of the task is ``off`` or ``observe`` now; what was parked before waits on."""
    live_worker(store)
    holder = hold(store)
    parked = park(store)
    store.pause(NAME, by())
    assert store.deliver_unlocked([NAME], ["app.task"], 9, worker="w", realm="R") == 0
    store.resume(NAME, by())
    assert store.deliver_unlocked([NAME], ["app.task"], 9, worker="w", realm="R") == 1
    assert set(tokens(store)) == {holder.token, parked.token}


def test_no_message_of_a_paused_lock_leaves_for_the_broker(store):
    """A worker that does not lock its task would run it there."""
    parked = park(store)
    store.pause(NAME, by())
    assert store.sweep_and_grant(NAME, realm="R") == []
    store.resume(NAME, by())
    assert [each.token for each in store.sweep_and_grant(NAME, realm="R")] == [parked.token]


def test_an_unused_lock_stays_paused(store, lock_client):
    """Other keys expire after a minute; this one stays until the lock is resumed."""
    store.release(NAME, hold(store).token, Ending.FINAL)
    store.pause(NAME, by())
    meta = store.keyspace.lock(NAME).meta
    assert lock_client.ttl(meta) == -1
    assert store.acquire(owner(), Claim(NAME)).verdict is Verdict.BLOCKED
    assert lock_client.ttl(meta) == -1
    assert [lock.paused for lock in store.summarise_locks()] == [True]
    store.resume(NAME, by())
    assert store.acquire(owner(), Claim(NAME)).verdict is Verdict.GRANTED
    assert lock_client.ttl(meta) > 0


def test_a_paused_lock_with_a_free_permit_is_not_due_for_a_sweep(store):
    live_worker(store)
    store.pause(NAME, by())
    park(store)
    assert store.take_due_locks() == []


def test_an_operators_limit_overrides_the_declared_ones(store):
    live_worker(store)
    first = hold(store)
    parked = [park(store, f"t{i}").token for i in range(3)]
    assert store.set_limit(NAME, 3, by()) == 3
    assert set(tokens(store)) == {first.token, *parked[:2]}
    for token in parked[:2]:
        store.claim(Owner(token), NAME, 30.0)
    assert store.inspect(NAME).limit == 3
    assert store.inspect(NAME).limit_set
    assert store.set_limit(NAME, 1, by()) == 1
    store.release(NAME, first.token, Ending.FINAL)
    assert set(tokens(store)) == set(parked[:2])
    store.release(NAME, parked[0], Ending.FINAL)
    store.release(NAME, parked[1], Ending.FINAL)
    assert tokens(store) == [parked[2]]
    assert store.set_limit(NAME, None, by()) == 1
    assert [entry["action"] for entry in store.audit()] == ["limit"] * 3


def test_a_limit_for_a_whole_queue_does_not_stop_redis_until_all_are_granted(store):
    """20,000 grants in one script stopped it for 2.3 s: heartbeats and renewals came too late."""
    live_worker(store)
    hold(store)
    parked = {park(store, f"t{i}").token for i in range(250)}
    store.set_limit(NAME, 1000, by())
    assert len(tokens(store)) == 101
    sweeps = 0
    while not parked <= set(tokens(store)):
        assert NAME in store.take_due_locks() or sweeps
        store.sweep_and_grant(NAME)
        sweeps += 1
    assert sweeps == 2


def test_the_declared_limit_counts_again_after_an_operators(store):
    store.acquire(owner(), Claim(NAME, limit=3))
    store.set_limit(NAME, 1, by())
    assert store.acquire(owner(), Claim(NAME, limit=3)).verdict is Verdict.BLOCKED
    assert store.set_limit(NAME, None, by()) == 3
    assert store.acquire(owner(), Claim(NAME, limit=3)).verdict is Verdict.GRANTED


# -- the audit -------------------------------------------------------------------------------------


@pytest.mark.not_in_memory("a thousand calls take a minute there")
def test_the_audit_keeps_the_last_thousand(store):
    for _ in range(1010):
        store.resume(NAME, by()) or store.pause(NAME, by())
    assert len(store.audit(5000)) == 1000
    assert len(store.audit(3)) == 3


def test_a_lock_expires_with_a_dead_holder_that_an_operator_has_terminated(store, lock_client):
    """Its task is audited, and does not end: no key of the lock stays for ever."""
    who = hold(store)
    store.write_audit_entry(NAME, by(action="terminate"), token=who.token)
    keys = store.keyspace.lock(NAME)
    for key in (keys.holders, keys.record, keys.meta):
        assert 0 < lock_client.pttl(key) <= 90_000, key


def test_nothing_is_changed_if_the_audit_cannot_be_written(store, lock_client):
    """The key holds other data: the action is refused before a write."""
    lock_client.set(f"{store.keyspace.fleet_of(NAME)}:audit", "x")
    holder, waiter = hold(store), wait(store)
    store.announce(NAME, "report", "lost")
    for step in (
        lambda: store.force_release(NAME, holder.token, by()),
        lambda: store.drop_waiters(NAME, [waiter.token], by()),
        lambda: store.promote(NAME, waiter.token, by()),
        lambda: store.pause(NAME, by()),
        lambda: store.set_limit(NAME, 2, by()),
        lambda: store.forget_call(NAME, "report", by()),
    ):
        with pytest.raises(BackendRefused):
            step()
    assert store.find_call(NAME, "report") is not None
    assert tokens(store) == [holder.token]
    assert line(store) == [waiter.token]

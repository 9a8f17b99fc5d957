"""What every store promises to its operators: a look at all, and steps that move the line on."""

from __future__ import annotations

import re

import pytest

from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.core.model import (
    Claim,
    Ending,
    Owner,
    Parcel,
    Verdict,
    base_of,
    new_token,
)
from celery_singleton_lock.store.operator.base import PARTS, Operator

pytestmark = pytest.mark.contract

NAME = "account:42"


@pytest.fixture(params=["redis", "cluster", "in_memory"])
def kind(request):
    """Each kind of store that has these verbs."""
    return request.param


@pytest.fixture
def store(make_store):
    return make_store(claim_lease=0.25)


def by(**more):
    return Operator("jane", "desk-1", "test", "stuck", **more)


def owner(attempt="", task="app.task", **more):
    return Owner(new_token(), attempt, task, host="host", pid=1, **more)


def hold(store, name=NAME, lease=30.0, **more):
    who = owner(**more)
    assert store.acquire(who, Claim(name, lease)).verdict is Verdict.GRANTED
    return who


def wait(store, name=NAME, **claim):
    who = owner()
    assert store.acquire(who, Claim(name, **claim), wait=30.0).verdict is Verdict.WAITING
    return who


def park(store, task_id="t", name=NAME, queue="q", body=b"body \xff\n", **more):
    who = owner(f"{task_id}/0/0", **more)
    store.park(who, Claim(name), Parcel(body, "R", queue))
    return who


def live_worker(store, worker="w", queues=("q",)):
    store.beat(worker, "R", queues, 30)


def tokens(store, name=NAME):
    return [holder.token for holder in store.inspect(name).holders]


def line(store, name=NAME, part="queue", most=100):
    """Tokens of who waits, page by page."""
    found, after = [], ""
    while True:
        page = store.page(name, part, after, most)
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
    found = {lock.name: lock for lock in store.glances()}
    assert set(found) == {NAME, "b\nc" + "x" * 300, "gone"}
    lock = found[NAME]
    assert (lock.held, lock.waiting, lock.adrift, lock.bodies, lock.limit) == (1, 1, 0, 0, 1)
    assert lock.holders[0].token == holder.token
    assert lock.holders[0].worker == "w1#ab"
    assert 29 < lock.holders[0].expires_in <= 30
    assert not lock.is_idle
    assert found["gone"].is_idle


def test_a_list_is_filtered_by_part_or_pattern_of_the_name_long_ones_too(store):
    long = "long:" + "x" * 300
    for name in ("account:1", "account:2", "bill:1", long):
        hold(store, name)
    assert {lock.name for lock in store.glances("account")} == {"account:1", "account:2"}
    assert {lock.name for lock in store.glances("*:1")} == {"account:1", "bill:1"}
    assert {lock.name for lock in store.glances("long:xx")} == {long}


def test_a_lock_whose_keys_hold_something_else_hides_no_other(store, lock_client):
    hold(store)
    other = store.keyspace.lock("other")
    hold(store, "other")
    lock_client.delete(other.holders)
    lock_client.set(other.holders, "x")
    found = {lock.name: lock.broken for lock in store.glances()}
    assert found == {NAME: False, other.meta: True}


@pytest.mark.parametrize("junk", ["no JSON", "[1]", '{"pid": [1]}', "{\n"])
def test_a_lock_whose_record_is_none_hides_no_other(store, lock_client, junk):
    hold(store)
    other = store.keyspace.lock("other")
    token = hold(store, "other").token
    lock_client.hset(other.record, token, junk)
    found = {lock.name: lock.broken for lock in store.glances()}
    assert found == {NAME: False, other.meta: True}


def test_looking_changes_nothing(store, lock_client):
    hold(store)
    waiter = wait(store)
    before = {key: lock_client.dump(key) for key in lock_client.scan_iter()}
    list(store.glances())
    store.look(NAME, waiter.token)
    for part in PARTS:
        line(store, part=part)
    assert {key: lock_client.dump(key) for key in lock_client.scan_iter()} == before


def test_who_waits_is_paged_in_order(store):
    live_worker(store)
    hold(store)
    parked = [park(store, f"t{i}").token for i in range(7)]
    assert line(store, most=3) == parked
    page = store.page(NAME, "queue", most=2)
    assert [each.task_id for each in page.waiting] == ["t0", "t1"]
    first = page.waiting[0]
    assert (first.state, first.task, first.queue, first.realm) == ("parked", "app.task", "q", "R")
    assert first.size == len(b"body \xff\n")


def test_a_page_ends_between_two_places_not_between_two_tokens_of_one(store):
    hold(store)
    parked = set()
    for i in range(6):
        who = owner(f"t{i}/0/0")
        store.park(who, Claim(NAME, place=1000 + i // 3), Parcel(b"", "R", "q"))
        parked.add(who.token)
    assert set(line(store, most=2)) == parked
    assert len(line(store, most=2)) == 6


def test_messages_that_nobody_consumes_are_paged_too(store):
    parked = [park(store, f"t{i}").token for i in range(5)]
    assert line(store, part="adrift", most=2) == parked
    assert line(store) == []


def test_a_token_is_told_where_it_stands(store):
    holder = hold(store)
    waiter = park(store, "abc")
    assert store.look(NAME, holder.token).expires_in > 29
    standing = store.look(NAME, waiter.token)
    assert (standing.rank, standing.waiting.task_id, standing.ended) == (1, "abc", False)
    live_worker(store)
    store.release(NAME, holder.token, Ending.FINAL)
    store.release(NAME, waiter.token, Ending.FINAL)
    assert store.look(NAME, waiter.token).waiting is None
    assert store.look(NAME, waiter.token).ended


# -- forced release --------------------------------------------------------------------------------


def test_t28_a_forced_release_needs_the_token_of_who_holds_it(store):
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
    assert abs(entry["at"] - store.time()) < 5
    assert (entry["task"], entry["attempt"], entry["token"]) == ("app.task", "id1/0/0", first.token)


def test_t28_what_is_kept_of_a_released_holder_goes_to_the_end_of_the_line(store):
    live_worker(store)
    stuck, following = park(store, "stuck"), park(store, "following")
    assert tokens(store) == [stuck.token]
    store.force_release(NAME, stuck.token, by())
    assert tokens(store) == [following.token]
    (back,) = line(store)
    assert base_of(back) == base_of(stuck.token)
    assert store.body(NAME, back) == b"body \xff\n"


def test_t28_or_it_is_dropped_and_late_copies_end_quietly(store):
    live_worker(store)
    stuck = park(store, "stuck")
    store.force_release(NAME, stuck.token, by(), keep=False)
    assert store.body(NAME, stuck.token) is None
    copy = owner("stuck/0/0")
    assert store.acquire(copy, Claim(NAME, copy=True)).verdict is Verdict.DONE


# -- drop, promote ---------------------------------------------------------------------------------


def test_dropped_waiters_are_gone_and_returned_and_the_line_goes_on(store):
    live_worker(store)
    holder = hold(store)
    parked = [park(store, f"t{i}").token for i in range(3)]
    dropped = store.drop(NAME, [*parked[:2], holder.token, "nobody.0"], by(), whole=True)
    assert [each.task_id for each in dropped] == ["t0", "t1"]
    assert dropped[0].message == b"body \xff\n"
    assert line(store) == parked[2:]
    assert tokens(store) == [holder.token]
    assert store.body(NAME, parked[0]) is None
    assert store.find(["t0"]) == []
    (entry,) = store.audit()
    assert (entry["action"], entry["count"]) == ("drop", 2)
    assert "body" not in str(entry)


def test_a_copy_of_a_dropped_message_ends_quietly_unless_it_may_run(store):
    hold(store)
    park(store, "gone")
    kept = park(store, "kept")
    first = line(store)[0]
    store.drop(NAME, [first], by())
    store.drop(NAME, [kept.token], by(), done_for=None)
    copies = [owner(f"{task}/0/0") for task in ("gone", "kept")]
    answers = [store.acquire(copy, Claim(NAME, copy=True)).verdict for copy in copies]
    assert answers == [Verdict.DONE, Verdict.BLOCKED]


def test_the_steps_of_one_purge_are_one_entry_of_the_audit(store):
    hold(store)
    parked = [park(store, f"t{i}").token for i in range(4)]
    purge = by(action="purge")
    store.drop(NAME, parked[:2], purge)
    store.drop(NAME, parked[2:], purge)
    store.drop(NAME, [wait(store).token], by())
    assert [(e["action"], e["count"]) for e in store.audit()] == [("drop", 1), ("purge", 4)]


def test_a_promoted_waiter_is_next_wherever_it_stood(store):
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
    (sealed,) = store.seal(NAME, [parked[0], holder.token], 0.2, "s")
    assert (sealed.task_id, sealed.message) == ("t0", b"body \xff\n")
    store.release(NAME, holder.token, Ending.FINAL)
    assert tokens(store) == [parked[1]]
    store.claim(Owner(parked[1]), NAME, 30.0)
    store.wait(NAME, "nobody", 0.3)
    store.kick(NAME)
    assert line(store)[0] == parked[0]
    assert store.body(NAME, parked[0]) == b"body \xff\n"


def test_a_message_that_nobody_consumes_is_sealed_and_comes_back_too(store):
    parked = park(store)
    assert len(store.seal(NAME, [parked.token], 0.1, "s")) == 1
    assert line(store, part="overdue") == [parked.token]
    store.wait(NAME, "nobody", 0.2)
    live_worker(store)
    store.kick(NAME)
    assert tokens(store) == [parked.token]


# -- pause, limit ----------------------------------------------------------------------------------


def test_a_paused_lock_is_granted_to_nobody_and_its_holder_goes_on(store):
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
    assert blocked.paused == store.inspect(NAME).paused
    store.kick(NAME)
    assert store.claim(parked, NAME, 30.0).verdict is Verdict.WAITING
    assert tokens(store) == []
    assert store.resume(NAME, by())
    assert not store.resume(NAME, by())
    assert tokens(store) == [parked.token]
    assert [entry["action"] for entry in store.audit()] == ["resume", "pause"]


def test_a_lock_stays_paused_while_nobody_uses_it(store, lock_client):
    """Its keys would go after a minute; this one outlives the lock until it is resumed."""
    store.release(NAME, hold(store).token, Ending.FINAL)
    store.pause(NAME, by())
    meta = store.keyspace.lock(NAME).meta
    assert lock_client.ttl(meta) == -1
    assert store.acquire(owner(), Claim(NAME)).verdict is Verdict.BLOCKED
    assert lock_client.ttl(meta) == -1
    assert [lock.paused for lock in store.glances()] == [True]
    store.resume(NAME, by())
    assert store.acquire(owner(), Claim(NAME)).verdict is Verdict.GRANTED
    assert lock_client.ttl(meta) > 0


def test_a_paused_lock_wants_no_look_for_its_free_permit(store):
    live_worker(store)
    store.pause(NAME, by())
    park(store)
    assert store.take_due() == []


def test_an_operators_limit_goes_before_the_declared_ones(store):
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


def test_nothing_is_changed_where_it_cannot_be_audited(store, lock_client):
    """Another program's key in that place: the step is refused before it writes."""
    lock_client.set(f"{store.keyspace.fleet_of(NAME)}:audit", "x")
    holder, waiter = hold(store), wait(store)
    for step in (
        lambda: store.force_release(NAME, holder.token, by()),
        lambda: store.drop(NAME, [waiter.token], by()),
        lambda: store.promote(NAME, waiter.token, by()),
        lambda: store.pause(NAME, by()),
        lambda: store.set_limit(NAME, 2, by()),
    ):
        with pytest.raises(BackendRefused):
            step()
    assert tokens(store) == [holder.token]
    assert line(store) == [waiter.token]

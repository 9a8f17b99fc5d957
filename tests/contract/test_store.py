"""The contract of every store. The numbers are those of docs/traps.md.

The tests use only the protocol in :mod:`celery_singleton_lock.store.base`, so that all stores
behave the same. Tests of Redis alone are in ``test_redis_store.py``.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import (
    Claim,
    Ending,
    Owner,
    Reservation,
    Verdict,
)
from celery_singleton_lock.core.owner_token import base_of, new_token, token_on
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import ClusterAdminStore, RedisAdminStore
from support.granted_tokens import granted_tokens
from support.passing_time import let_pass, stop_time

pytestmark = pytest.mark.contract

NAME = "account:42"
ONE_PERMIT = pytest.mark.not_on_quorum("two majorities need not name the same holders")
NO_MESSAGES = pytest.mark.not_on_quorum("messages stay with the broker: one server would have them")
NO_OPERATORS = pytest.mark.not_on_quorum("no server knows alone what an operator has set")
A_TURN = pytest.mark.not_on_quorum("who cancels gives its turn up, which is not yet the lock")
JANE = Operator("jane", "desk", "test")
LEASE = 3000.0
SHORT = 20.0
"""A lease whose end a test lets come, by :func:`lapse`; it does not end before."""
SOON = 30.0
"""Most seconds to wait for what is there already."""


@pytest.fixture(params=["redis", "asyncio", "cluster", "quorum", "in_memory"])
def kind(request):
    """Each kind of store there is."""
    return request.param


@pytest.fixture
def store(make_store):
    """A store; a grant must be claimed before :func:`lapse`."""
    return make_store(claim_lease=SHORT)


@pytest.fixture
def operators(kind, lock_client):
    """What operators use, on the servers of the store."""
    return (ClusterAdminStore if kind == "cluster" else RedisAdminStore)(lock_client)


def owner(attempt="", **more):
    return Owner(new_token(), attempt, "app.task", host="host", pid=1, **more)


def claim(lease=LEASE, name=NAME, **more):
    return Claim(name, lease, **more)


def to_park(body=b"body \xff\n", realm="R", queue="q", **more):
    return MessageToPark(body, realm, queue, **more)


def held_by(store, lease=LEASE, **more):
    """Acquire the lock for a new owner."""
    who = owner(**more)
    assert store.acquire(who, claim(lease)).verdict is Verdict.GRANTED
    return who


def waits(store, seconds=LEASE, lease=LEASE):
    who = owner()
    assert store.acquire(who, claim(lease), wait=seconds).verdict is Verdict.WAITING
    return who


def lapse(store):
    """Let so much time pass that a short lease has ended."""
    let_pass(store, 25)


def tokens(store, name=NAME):
    return [holder.token for holder in store.inspect(name).holders]


# -- taking and giving back ------------------------------------------------------------------------


def test_t3_a_refused_client_changes_nothing(store):
    first = held_by(store)
    refused = owner()
    assert store.acquire(refused, claim()).verdict is Verdict.BLOCKED
    assert store.release(NAME, refused.token, Ending.FINAL).verdict is Verdict.ABSENT
    assert store.acquire(owner(), claim()).verdict is Verdict.BLOCKED
    assert tokens(store) == [first.token]


def test_t5_a_stale_holder_frees_nothing(store):
    stale = held_by(store, SHORT)
    lapse(store)
    successor = held_by(store)
    assert store.release(NAME, stale.token, Ending.FINAL).verdict is Verdict.ABSENT
    assert store.extend([(NAME, stale.token, LEASE)]) == [False]
    assert store.claim(stale, NAME, LEASE).verdict is Verdict.ABSENT
    assert tokens(store) == [successor.token]


def test_t7_after_a_crash_the_lock_is_free_within_one_lease_and_never_held_twice(store):
    held_by(store, SHORT)
    restarted = owner()
    assert store.acquire(restarted, claim()).verdict is Verdict.BLOCKED
    lapse(store)
    assert store.acquire(restarted, claim()).verdict is Verdict.GRANTED


@NO_MESSAGES
def test_a_lock_with_hold_for_stays_held_after_success_and_expires(store):
    """It is not renewed or claimed, and its end does not count as an expired lease."""
    first = held_by(store, attempt="id/0/0")
    kept = Reservation("", SHORT)
    done = store.release(NAME, first.token, Ending.HOLD, reserve=kept)
    assert done.verdict is Verdict.RELEASED
    refused = store.acquire(owner(), claim())
    assert refused.verdict is Verdict.BLOCKED
    assert 0 < refused.next_look <= SHORT
    assert (refused.holder.state, refused.holder.task_id) == ("held_after", "id")
    assert store.claim(owner()._replace(token=refused.holder.token), NAME, LEASE).verdict is (
        Verdict.ABSENT
    )
    lapse(store)
    held_by(store)
    assert "lapses" not in store.inspect(NAME).counters


@NO_MESSAGES
@pytest.mark.parametrize("late", [False, True])
def test_a_waiter_is_granted_the_lock_when_lock_hold_for_is_over(store, late):
    """A lease that had ended before keeps nothing."""
    first = held_by(store, SHORT if late else LEASE)
    behind = waits(store)
    if late:
        lapse(store)
    store.release(NAME, first.token, Ending.HOLD, reserve=Reservation("", SHORT))
    if not late:
        assert tokens(store) == [f"held:{first.token}"]
        lapse(store)
        store.sweep_and_grant(NAME)
    assert tokens(store) == [behind.token]


@NO_MESSAGES
def test_each_permit_stays_held_for_its_own_time(store):
    """With a limit of two the other is granted meanwhile."""
    first, second = owner(), owner()
    for who in (first, second):
        assert store.acquire(who, claim(limit=2)).verdict is Verdict.GRANTED
    store.release(NAME, first.token, Ending.HOLD, reserve=Reservation("", LEASE))
    store.release(NAME, second.token, Ending.FINAL)
    assert store.acquire(owner(), claim(limit=2)).verdict is Verdict.GRANTED
    assert store.acquire(owner(), claim(limit=2)).verdict is Verdict.BLOCKED


def test_t12_l23_extend_never_creates_a_lease_or_restores_an_expired_one(store):
    assert store.extend([(NAME, owner().token, LEASE)]) == [False]
    lapsed = held_by(store, SHORT)
    lapse(store)
    assert store.extend([(NAME, lapsed.token, LEASE)]) == [False]
    waiter = owner()
    held_by(store)
    store.acquire(waiter, claim(), wait=LEASE)
    assert store.extend([(NAME, waiter.token, LEASE)]) == [False]
    assert waiter.token not in tokens(store)


def test_extend_renews_many_locks_and_never_shortens(store):
    owners = [(f"lock:{number}", owner()) for number in range(20)]
    for name, who in owners:
        store.acquire(who, claim(SHORT, name))
    asked = [(name, who.token, LEASE) for name, who in owners] + [("lock:0", "nobody.0", LEASE)]
    assert store.extend(asked) == [True] * 20 + [False]
    store.extend([("lock:3", owners[3][1].token, SHORT)])
    assert store.inspect("lock:3").holders[0].expires_in > LEASE / 2


@ONE_PERMIT
def test_t13_capacity_is_whole_again_within_one_lease(store):
    for lease in (SHORT, LEASE, LEASE):
        assert store.acquire(owner(), claim(lease, limit=3)).verdict is Verdict.GRANTED
    assert store.acquire(owner(), claim(limit=3)).verdict is Verdict.BLOCKED
    lapse(store)
    assert store.acquire(owner(), claim(limit=3)).verdict is Verdict.GRANTED
    assert store.acquire(owner(), claim(limit=3)).verdict is Verdict.BLOCKED


@ONE_PERMIT
def test_t22_many_clients_never_exceed_the_limit(store):
    inside, peak, guard = [0], [0], threading.Lock()

    def client(_):
        for _ in range(6):
            who = owner()
            reply = store.acquire(who, claim(limit=2), wait=LEASE)
            while reply.verdict is not Verdict.GRANTED:
                store.wait(NAME, who.token, 0.2)
                reply = store.claim(who, NAME, LEASE)
                if reply.verdict is Verdict.ABSENT:
                    reply = store.acquire(who, claim(limit=2), wait=LEASE)
            with guard:
                inside[0] += 1
                peak[0] = max(peak[0], inside[0])
            with guard:
                inside[0] -= 1
            store.release(NAME, who.token, Ending.FINAL)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
    assert 1 <= peak[0] <= 2
    assert store.inspect(NAME).holders == ()


def test_l1_l13_every_call_may_be_repeated(store):
    first, second = owner(), owner()
    grants = [store.acquire(first, claim()) for _ in range(2)]
    assert grants[0].verdict is grants[1].verdict is Verdict.GRANTED
    assert grants[0].fencing_token == grants[1].fencing_token
    ranks = [store.acquire(second, claim(), wait=LEASE).rank for _ in range(2)]
    assert ranks == [1, 1]
    verdicts = [store.release(NAME, first.token, Ending.FINAL).verdict for _ in range(2)]
    assert verdicts == [Verdict.RELEASED, Verdict.ABSENT]
    assert granted_tokens(store, NAME) == [second.token]
    claims = [store.claim(second, NAME, LEASE) for _ in range(2)]
    assert claims[0].fencing_token == claims[1].fencing_token > grants[0].fencing_token
    assert store.wait(NAME, second.token, SOON)
    assert not store.wait(NAME, second.token, 0.01)


def test_l2_l4_a_claim_needs_its_own_grant(store):
    held_by(store)
    waiter = waits(store)
    assert store.claim(waiter, NAME, LEASE).verdict is Verdict.WAITING
    assert store.claim(owner(), NAME, LEASE).verdict is Verdict.ABSENT
    assert waiter.token not in tokens(store)


def test_l3_l9_l17_a_granted_waiter_that_dies_delays_the_next_by_its_claim_lease_only(store):
    holder = held_by(store)
    dead, alive = waits(store), waits(store)
    store.release(NAME, holder.token, Ending.FINAL)
    assert store.wait(NAME, dead.token, SOON)  # it popped its wake-up, and died
    assert store.claim(alive, NAME, LEASE).verdict is Verdict.WAITING
    lapse(store)
    assert store.claim(alive, NAME, LEASE).verdict is Verdict.GRANTED


def test_l10_a_grant_needs_no_signal(store):
    holder = held_by(store)
    waiter = waits(store)
    store.release(NAME, holder.token, Ending.FINAL)
    assert store.claim(waiter, NAME, LEASE).verdict is Verdict.GRANTED


def test_l5_l6_a_lapsed_lease_leaves_a_usable_lock(store):
    held_by(store, SHORT)
    waiter = waits(store)
    lapse(store)
    assert store.claim(waiter, NAME, LEASE).verdict is Verdict.GRANTED
    assert store.acquire(owner(), claim()).verdict is Verdict.BLOCKED


@A_TURN
def test_l7_a_cancel_after_the_grant_reports_the_grant(store):
    holder = held_by(store)
    waiter = waits(store)
    store.release(NAME, holder.token, Ending.FINAL)
    assert store.release(NAME, waiter.token, Ending.CANCEL).verdict is Verdict.GRANTED
    assert tokens(store) == [waiter.token]


def test_a_cancel_in_time_leaves_the_queue(store):
    holder = held_by(store)
    waiter = waits(store)
    assert store.release(NAME, waiter.token, Ending.CANCEL).verdict is Verdict.RELEASED
    store.release(NAME, holder.token, Ending.FINAL)
    assert tokens(store) == []


def test_l8_l11_a_waiter_gets_the_end_of_the_first_lease(store):
    held_by(store, LEASE / 2)
    reply = store.acquire(owner(), claim(), wait=LEASE)
    assert LEASE / 3 < reply.next_look <= LEASE / 2
    assert reply.rank == 1
    assert reply.holder is not None


def test_l14_tokens_are_random_and_number_their_deliveries():
    made = {new_token() for _ in range(1000)}
    assert len(made) == 1000
    assert all(token == f"{base_of(token)}.0" for token in made)
    assert base_of("without-number") == "without-number"


@pytest.mark.parametrize("lease", [0, -1, float("nan"), float("inf"), None, 1e300, 0.0001, "5"])
def test_l24_invalid_leases_are_refused_before_a_write(store, kind, lease):
    holder = held_by(store)
    waiter = owner()
    calls = [
        lambda: store.acquire(waiter, claim(lease, "other")),
        lambda: store.extend([(NAME, holder.token, lease)]),
        lambda: store.claim(holder, NAME, lease),
        lambda: store.park(waiter, claim(lease, "other"), to_park()),
    ]
    for call in calls[: 3 if kind == "quorum" else 4]:
        with pytest.raises(ConfigurationError, match="lease"):
            call()
    assert store.inspect("other").fencing_token == 0
    assert store.inspect(NAME).holders[0].expires_in > LEASE / 2


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"limit": -1}, {"limit": 1.5}, {"place": -1}, {"max_waiting": -1}]
)
def test_invalid_claims_are_refused(store, wrong):
    with pytest.raises(ConfigurationError):
        store.acquire(owner(), claim(**wrong))


@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf"), 1e300])
def test_invalid_wait_times_are_refused(store, wait):
    with pytest.raises(ConfigurationError):
        store.acquire(owner(), claim(), wait=wait)


@NO_MESSAGES
@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf"), 1e300])
def test_invalid_deadlines_of_messages_are_refused(store, wait):
    with pytest.raises(ConfigurationError):
        store.park(owner(), claim(), to_park(deadline=wait))


ANY_NAME = pytest.mark.parametrize(
    "name", ["a", "a:b", "ä ü", "{x}", "a\nb", "x" * 300, "wake:t.0", "%d %s", 'quo"te', "due"]
)


@ANY_NAME
def test_any_name_is_one_lock(store, name):
    who = owner()
    assert store.acquire(who, claim(name=name)).verdict is Verdict.GRANTED
    assert store.acquire(owner(), claim(name=f"{name}.")).verdict is Verdict.GRANTED
    assert store.acquire(owner(), claim(name=name)).verdict is Verdict.BLOCKED
    assert store.extend([(name, who.token, LEASE)]) == [True]
    assert store.release(name, who.token, Ending.FINAL).verdict is Verdict.RELEASED
    assert tokens(store, name) == []


@NO_MESSAGES
@ANY_NAME
def test_messages_are_kept_at_a_lock_of_any_name(store, name):
    who = owner("id/0/0")
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    assert store.acquire(who, claim(name=name)).verdict is Verdict.GRANTED
    assert store.park(owner("two/0/0"), claim(name=name), to_park()).verdict is Verdict.WAITING
    copy = owner("two/0/0")
    assert store.acquire(copy, claim(name=name, copy=True)).verdict is Verdict.TWIN
    store.release(name, who.token, Ending.FINAL)
    delivery = store.receive("w", SOON)
    assert (delivery.name, delivery.body) == (name, to_park().body)
    store.release(name, delivery.token, Ending.FINAL)
    assert store.inspect(name).bodies == 0


# -- fences ----------------------------------------------------------------------------------------


def test_l28_l29_fences_grow_and_client_clocks_do_not_matter(store, monkeypatch):
    fences = []
    for hours in (0, 5, -5):
        monkeypatch.setattr(time, "time", lambda shift=hours: 1e9 + shift * 3600)
        who = owner()
        reply = store.acquire(who, claim(LEASE))
        fences.append(reply.fencing_token)
        assert LEASE / 2 < reply.lease <= LEASE
        store.release(NAME, who.token, Ending.FINAL)
    assert fences == sorted(set(fences))


# -- waiting ---------------------------------------------------------------------------------------


def test_waiters_are_granted_in_order_of_arrival_and_newcomers_wait(store):
    holder = held_by(store)
    waiters = [waits(store) for _ in range(5)]
    store.release(NAME, holder.token, Ending.FINAL)
    for waiter in waiters:
        assert store.acquire(owner(), claim()).verdict is Verdict.BLOCKED
        assert store.claim(waiter, NAME, LEASE).verdict is Verdict.GRANTED
        store.release(NAME, waiter.token, Ending.FINAL)


def test_earlier_arrivals_have_lower_ranks(store):
    now = round(store.time() * 1_000_000)
    holder = held_by(store)
    late, early, future = owner(), owner(), owner()
    store.acquire(late, claim(place=now - 1000), wait=LEASE)
    store.acquire(early, claim(place=now - 2000), wait=LEASE)
    store.acquire(future, claim(place=now + 10**12), wait=LEASE)  # nobody arrives in the future
    last = waits(store)
    ranks = [store.acquire(w, claim(), wait=LEASE).rank for w in (early, late, future, last)]
    assert ranks == [1, 2, 3, 4]
    store.release(NAME, holder.token, Ending.FINAL)
    assert granted_tokens(store, NAME) == [early.token]


def test_t23_dead_waiters_do_not_delay_a_newcomer(store):
    holder = held_by(store)
    for _ in range(250):  # more than one script removes
        waits(store, SHORT)
    lapse(store)
    alive = waits(store)
    store.release(NAME, holder.token, Ending.FINAL)

    def granted():
        store.sweep_and_grant(NAME)
        return store.claim(alive, NAME, LEASE).verdict is Verdict.GRANTED

    kicks = next(number for number in range(1, 10) if granted())
    assert kicks <= 3, "each removes some"
    assert store.inspect(NAME).waiting == 0


def test_a_waiter_that_calls_acquire_again_keeps_its_place(store):
    holder = held_by(store)
    waiter = waits(store, SHORT)
    for _ in range(4):
        let_pass(store, 10)
        assert store.acquire(waiter, claim(), wait=SHORT).verdict is Verdict.WAITING
    store.release(NAME, holder.token, Ending.FINAL)
    assert granted_tokens(store, NAME) == [waiter.token]


def test_a_full_queue_refuses_the_next_waiter(store):
    held_by(store)
    bound = claim(max_waiting=1)
    assert store.acquire(owner(), bound, wait=LEASE).verdict is Verdict.WAITING
    assert store.acquire(owner(), bound, wait=LEASE).verdict is Verdict.FULL
    assert store.inspect(NAME).waiting == 1


@NO_MESSAGES
def test_a_full_queue_refuses_a_message(store):
    held_by(store)
    waits(store)
    assert store.park(owner("p/0/0"), claim(max_waiting=1), to_park()).verdict is Verdict.FULL
    assert store.inspect(NAME).waiting == 1
    assert store.inspect(NAME).bodies == 0


@ONE_PERMIT
def test_the_lowest_declared_limit_wins(store):
    store.acquire(owner(), claim(limit=3))
    assert store.acquire(owner(), claim(limit=1)).verdict is Verdict.BLOCKED
    reply = store.acquire(owner(), claim(limit=3))
    assert (reply.verdict, reply.limit) == (Verdict.BLOCKED, 1)


@ONE_PERMIT
def test_a_higher_limit_counts_once_the_lock_has_been_free(store):
    old, new = owner(), owner()
    store.acquire(old, claim(limit=1))
    store.acquire(new, claim(limit=3), wait=LEASE)
    store.release(NAME, old.token, Ending.FINAL)
    assert store.acquire(owner(), claim(limit=3)).verdict is Verdict.BLOCKED
    store.release(NAME, new.token, Ending.FINAL)
    replies = [store.acquire(owner(), claim(limit=3)) for _ in range(3)]
    assert [reply.verdict for reply in replies] == [Verdict.GRANTED] * 3


# -- parked messages -------------------------------------------------------------------------------


def parked(store, attempt="id/0/0", **more):
    who = owner(attempt)
    assert store.park(who, claim(), to_park(**more)).verdict is Verdict.WAITING
    return who


@NO_MESSAGES
def test_a_parked_message_is_delivered_unchanged_and_stored_until_its_end(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    body = bytes(range(256)) * 10
    holder = held_by(store)
    who = parked(store, body=body)
    store.release(NAME, holder.token, Ending.FINAL)
    delivery = store.receive("w", SOON)
    assert (delivery.token, delivery.body, delivery.verdict) == (who.token, body, "granted")
    reply = store.claim(Owner(delivery.token), NAME, LEASE)
    assert reply.fencing_token == delivery.fencing_token
    assert store.body(NAME, delivery.token) == body
    assert store.bodies_of([(NAME, delivery.token), (NAME, "unknown.0")]) == [body, None]
    store.release(NAME, delivery.token, Ending.FINAL)
    assert store.body(NAME, delivery.token) is None


@NO_MESSAGES
def test_a_limit_that_was_lowered_since_holds_for_parked_messages_from_the_first_claim_on(store):
    """A new version of the app declares less, and no further message comes."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    holder = owner()
    store.acquire(holder, claim(limit=2))
    for number in range(4):
        store.park(owner(f"id{number}/0/0"), claim(limit=2), to_park())
    deliveries = [store.receive("w", SOON)]
    store.release(NAME, holder.token, Ending.FINAL)
    deliveries.append(store.receive("w", SOON))
    for delivery in deliveries:
        reply = store.claim(Owner(delivery.token), NAME, LEASE, limit=1)
        assert (reply.verdict, reply.limit) == (Verdict.GRANTED, 1)
    store.release(NAME, deliveries[0].token, Ending.FINAL)
    assert store.receive("w", 0.05) is None, "one runs still"
    store.release(NAME, deliveries[1].token, Ending.FINAL)
    last = store.receive("w", SOON)
    assert store.claim(Owner(last.token), NAME, LEASE, limit=2).limit == 1, "none is raised so"


@NO_MESSAGES
@pytest.mark.parametrize("reached", [True, False], ids=["claim executed", "claim not executed"])
def test_l13_a_message_whose_claim_was_not_answered_is_delivered_once_more(store, reached):
    """The claim may have deleted it, and its worker, which has not begun it, parks it again."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    holder = held_by(store)
    who, behind = parked(store, body=b"first"), parked(store, "id2/0/0", body=b"second")
    store.release(NAME, holder.token, Ending.FINAL)
    delivery = store.receive("w", SOON)
    if reached:
        store.claim(Owner(delivery.token), NAME, LEASE, acks_early=True)

    again = claim(copy=1, unanswered=True)
    assert store.park(who, again, to_park(b"first")).verdict is Verdict.WAITING
    second = store.receive("w", SOON)
    assert (base_of(second.token), second.body) == (base_of(who.token), b"first")
    assert second.token != delivery.token
    assert store.park(who, again, to_park(b"first")).verdict is Verdict.WAITING, "asked again"
    assert store.claim(Owner(delivery.token), NAME, LEASE).verdict is Verdict.ABSENT, "arrives late"
    assert store.claim(Owner(second.token), NAME, LEASE, acks_early=True).verdict is Verdict.GRANTED
    assert store.park(who, again, to_park(b"first")).verdict is Verdict.WAITING, "asked later"
    store.release(NAME, second.token, Ending.FINAL)
    assert store.park(who, again, to_park(b"first")).verdict is Verdict.DONE
    assert store.receive("w", SOON).token == behind.token


@NO_MESSAGES
def test_l13_a_repeated_call_takes_no_lock_from_a_message_that_was_parked_after_its_lease(store):
    """Its claim deleted it, and its lease ended; the reply to its next park is lost."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    holder = held_by(store)
    who = parked(store, body=b"first")
    store.release(NAME, holder.token, Ending.FINAL)
    delivery = store.receive("w", SOON)
    store.claim(Owner(delivery.token), NAME, SHORT, acks_early=True)
    lapse(store)
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    again = claim(copy=1, unanswered=True)
    assert store.park(who, again, to_park(b"first")).verdict is Verdict.WAITING
    second = store.receive("w", SOON)
    assert store.claim(Owner(second.token), NAME, LEASE, acks_early=True).verdict is Verdict.GRANTED
    assert store.park(who, again, to_park(b"first")).verdict is Verdict.WAITING
    assert tokens(store) == [second.token]
    assert store.receive("w", 0.05) is None


@NO_MESSAGES
def test_a_call_whose_id_is_used_again_runs_though_its_message_may_be_a_copy(store):
    """It was requeued, or has waited for its ETA, and was acknowledged unrun."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    holder = held_by(store)
    before = round(store.time() * 1e6)
    first = parked(store)
    store.release(NAME, holder.token, Ending.FINAL)
    assert store.claim(first, NAME, LEASE).verdict is Verdict.GRANTED
    store.release(NAME, first.token, Ending.FINAL, done_for=3600.0)
    lapse(store)

    def verdicts(copy):
        """Of both calls with which a worker asks."""
        asked = claim(copy=copy)
        taken = store.acquire(owner("id/0/0"), asked).verdict
        return taken, store.park(owner("id/0/0"), asked, to_park()).verdict

    assert verdicts(1) == (Verdict.DONE, Verdict.DONE), "the broker delivers it again"
    assert verdicts(before) == (Verdict.DONE, Verdict.DONE), "it came before the first one ended"
    arrived = round(store.time() * 1e6)
    assert store.acquire(owner("id/0/0"), claim(copy=arrived)).verdict is Verdict.GRANTED


def after_the_first_call(store):
    """Let a parked call run and end; return a time at which another call with its id may arrive."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    holder = held_by(store)
    first = parked(store)
    store.release(NAME, holder.token, Ending.FINAL)
    store.claim(first, NAME, LEASE)
    store.release(NAME, first.token, Ending.FINAL, done_for=3600.0)
    lapse(store)
    return round(store.time() * 1e6)


@NO_MESSAGES
def test_a_parked_call_whose_id_is_used_again_waits_though_its_message_may_be_a_copy(store):
    arrived = after_the_first_call(store)
    held_by(store)
    asked = store.park(owner("id/0/0"), claim(copy=arrived), to_park())
    assert asked.verdict is Verdict.WAITING


@NO_MESSAGES
@pytest.mark.parametrize(
    ("copy", "verdict"),
    [(0, Verdict.WAITING), (1, Verdict.DONE)],
    ids=["another call", "redelivered"],
)
def test_a_call_is_parked_again_unless_its_message_may_be_the_one_that_has_ended(
    store, copy, verdict
):
    """It has raised RetryLater, or Redis did not answer its claim. Its task id was used before."""
    arrived = after_the_first_call(store)
    second = owner("id/0/0")
    assert store.acquire(second, claim(place=arrived)).verdict is Verdict.GRANTED
    store.release(NAME, second.token, Ending.LATER)
    again = claim(place=arrived, copy=copy or arrived, unanswered=True)
    assert store.park(second, again, to_park()).verdict is verdict


@NO_MESSAGES
def test_t5_a_message_that_is_parked_again_shares_no_token_with_a_late_holder(store):
    """Two copies of it come from the broker, each after the lease of the delivery before."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    who = parked(store, body=b"first")
    store.claim(Owner(store.receive("w", SOON).token), NAME, SHORT, acks_early=True)
    deliveries = []
    for _ in range(2):
        lapse(store)
        store.worker_heartbeat("w", "R", ["q"], LEASE)
        again = claim(copy=1, unanswered=True)
        assert store.park(who, again, to_park(b"first")).verdict is Verdict.WAITING
        deliveries.append(store.receive("w", SOON).token)
        store.claim(Owner(deliveries[-1]), NAME, SHORT, acks_early=True)
    late, now = deliveries
    assert store.extend([(NAME, late, LEASE)]) == [False]
    assert store.release(NAME, late, Ending.FINAL).verdict is Verdict.ABSENT
    assert tokens(store) == [now]


@NO_MESSAGES
def test_a_delivery_that_was_not_parked_here_is_parked_if_its_claim_was_not_answered(store):
    """With several locks: the claim has settled the message at the first one."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    first = held_by(store, attempt="id/0/0")
    assert store.claim(first, NAME, LEASE, acks_early=True).verdict is Verdict.GRANTED
    again = claim(copy=1, unanswered=True)
    assert store.park(first, again, to_park(b"all")).verdict is Verdict.WAITING
    delivery = store.receive("w", SOON)
    assert (base_of(delivery.token), delivery.body) == (base_of(first.token), b"all")
    assert tokens(store) == [delivery.token] != [first.token]
    assert store.park(first, again, to_park(b"all")).verdict is Verdict.WAITING, "asked again"
    assert tokens(store) == [delivery.token]


@NO_MESSAGES
def test_a_long_message_is_fetched(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    body = b"x" * 200_000
    who = parked(store, body=body)
    assert store.receive("w", SOON).body is None
    assert store.body(NAME, who.token) == body


@NO_MESSAGES
def test_a_message_parked_at_a_free_lock_is_delivered_at_once(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    who = parked(store)
    assert tokens(store) == [who.token]
    assert store.receive("w", SOON).token == who.token


@NO_MESSAGES
def test_the_releasers_own_worker_is_preferred(store):
    for worker in ("w1", "w2", "w3"):
        store.worker_heartbeat(worker, "R", ["q"], LEASE)
    for number, worker in enumerate(("w2", "w1", "w3", "w2")):
        holder = held_by(store)
        parked(store, f"id{number}/0/0")
        store.release(NAME, holder.token, Ending.FINAL, worker=worker)
        delivery = store.receive(worker, SOON)
        store.release(NAME, delivery.token, Ending.FINAL, worker=worker)


@NO_MESSAGES
def test_t34_every_late_copy_of_a_finished_task_ends_quietly(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    who = parked(store)
    store.claim(store_owner(store.receive("w", SOON)), NAME, LEASE)
    store.release(NAME, who.token, Ending.FINAL)
    for _ in range(5):
        copy = owner("id/0/0")
        assert store.acquire(copy, claim(copy=True)).verdict is Verdict.DONE
        assert store.park(copy, claim(copy=True), to_park()).verdict is Verdict.DONE
    assert store.acquire(who, claim()).verdict is Verdict.DONE  # its own message, once more
    assert store.inspect(NAME).holders == ()
    assert store.inspect(NAME).bodies == 0


def store_owner(delivery):
    return Owner(delivery.token, host="host", pid=1)


@NO_MESSAGES
def test_a_done_mark_expires(store):
    who = parked(store)
    store.release(NAME, who.token, Ending.FINAL, done_for=SHORT)
    other = parked(store, "other/0/0")
    store.release(NAME, other.token, Ending.FINAL, done_for=LEASE)
    assert store.acquire(owner("id/0/0"), claim(copy=True)).verdict is Verdict.DONE
    lapse(store)
    assert store.acquire(owner("other/0/0"), claim(copy=True)).verdict is Verdict.DONE
    assert store.acquire(owner("id/0/0"), claim(copy=True)).verdict is Verdict.GRANTED


def test_the_end_of_a_task_that_has_waited_in_its_slot_is_remembered(store):
    """The broker still had its message, and may have delivered it again to a busy worker."""
    first, waiter = held_by(store), owner("id/0/0")
    assert store.acquire(waiter, claim(), wait=LEASE).verdict is Verdict.WAITING
    store.release(NAME, first.token, Ending.FINAL)
    assert store.claim(waiter, NAME, LEASE).verdict is Verdict.GRANTED
    store.release(NAME, waiter.token, Ending.FINAL, done_for=LEASE)
    assert store.acquire(owner("id/0/0"), claim(copy=True)).verdict is Verdict.DONE
    assert store.acquire(owner("id/0/0"), claim()).verdict is Verdict.GRANTED, "another call"


@pytest.mark.parametrize("ending", [Ending.CANCEL, Ending.FINAL])
def test_the_end_of_a_wait_is_not_the_end_of_its_task(store, ending):
    """Its message may be rejected, and come back from a dead-letter exchange.

    The wait has timed out, or the task's soft time limit has ended it.
    """
    held_by(store)
    waiter = owner("id/0/0")
    assert store.acquire(waiter, claim(), wait=LEASE).verdict is Verdict.WAITING
    store.release(NAME, waiter.token, ending)
    again = store.acquire(owner("id/0/0"), claim(copy=True), wait=LEASE)
    assert again.verdict is Verdict.WAITING


def test_an_end_is_remembered_where_the_caller_wants_it(store):
    who = held_by(store, attempt="id/0/0")
    store.release(NAME, who.token, Ending.FINAL, mark=True)
    assert store.acquire(owner("id/0/0"), claim(copy=True)).verdict is Verdict.DONE


@NO_MESSAGES
def test_t35_the_last_copy_runs_after_the_dead_holders_lease(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    held_by(store, SHORT, attempt="id/0/0")  # and its worker is killed
    copy = owner("id/0/0")
    assert store.acquire(copy, claim(copy=True)).verdict is Verdict.TWIN
    assert store.park(copy, claim(copy=True), to_park(b"copy")).verdict is Verdict.TWIN
    lapse(store)
    store.sweep_and_grant(NAME)
    delivery = store.receive("w", SOON)
    assert delivery.body == b"copy"
    assert store.claim(store_owner(delivery), NAME, LEASE).verdict is Verdict.GRANTED


@NO_MESSAGES
def test_t36_a_duplicate_runs_if_the_original_is_requeued(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    first = held_by(store, attempt="id/0/0")
    copy = owner("id/0/0")
    store.park(copy, claim(copy=True), to_park(b"copy"))
    store.release(NAME, first.token, Ending.AGAIN)
    assert store.receive("w", SOON).body == b"copy"


@NO_MESSAGES
def test_t14_a_duplicate_is_dropped_at_the_final_end(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    first = held_by(store, attempt="id/0/0")
    store.park(owner("id/0/0"), claim(copy=True), to_park(b"copy"))
    assert store.inspect(NAME).bodies == 1
    store.release(NAME, first.token, Ending.FINAL)
    assert store.inspect(NAME).bodies == 0
    assert store.receive("w", 0.05) is None


@NO_MESSAGES
def test_a_copy_that_is_parked_after_its_first_has_ended_is_done(store):
    first = held_by(store, attempt="id/0/0")
    copy = owner("id/0/0")
    assert store.acquire(copy, claim(copy=True)).verdict is Verdict.TWIN
    store.release(NAME, first.token, Ending.FINAL)
    assert store.park(copy, claim(copy=True), to_park()).verdict is Verdict.DONE


@NO_MESSAGES
def test_a_retry_is_not_a_duplicate(store):
    held_by(store, attempt="id/0/0")
    retry = owner("id/1/0")
    assert store.acquire(retry, claim(copy=True)).verdict is Verdict.BLOCKED
    assert store.park(retry, claim(copy=True), to_park()).verdict is Verdict.WAITING


@NO_MESSAGES
def test_a_copy_of_one_of_many_holders_is_a_twin(store):
    """Also of one that came after an earlier search, and until its task has ended."""
    many = [owner(f"id{number}/0/0") for number in range(250)]
    early, late = many[:240], many[240:]
    for part in (early, late):
        for who in part:
            assert store.acquire(who, claim(limit=300)).verdict is Verdict.GRANTED
        verdicts = [
            store.park(owner(who.attempt), claim(limit=300, copy=True), to_park()).verdict
            for who in (*part[:3], *part[-3:], early[100])
        ]
        assert set(verdicts) == {Verdict.TWIN}
    store.release(NAME, late[5].token, Ending.FINAL)
    copy = owner(late[5].attempt)
    assert store.acquire(copy, claim(limit=300, copy=True)).verdict is Verdict.GRANTED


@NO_MESSAGES
def test_a_second_unmarked_delivery_beside_many_holders_is_a_twin(store):
    many = [owner(f"id{number}/0/0") for number in range(120)]
    for who in many:
        assert store.acquire(who, claim(limit=150)).verdict is Verdict.GRANTED
    again = many[20]._replace(token=token_on(base_of(many[20].token)))
    assert store.acquire(again, claim(limit=150)).verdict is Verdict.TWIN
    call_of_its_own = owner(many[20].attempt)
    assert store.acquire(call_of_its_own, claim(limit=150)).verdict is Verdict.GRANTED


@NO_MESSAGES
def test_t42_a_reservation_without_its_attempt_expires(store):
    """Until then nothing is granted; then the waiter is granted, and the retry comes too late."""
    first = held_by(store, attempt="task/0/0")
    waiter = waits(store)
    kept = Reservation("task/1/0", SHORT)
    store.release(NAME, first.token, Ending.KEEP, reserve=kept)
    store.sweep_and_grant(NAME)
    assert tokens(store) == [kept.token]
    lapse(store)
    store.sweep_and_grant(NAME)
    assert tokens(store) == [waiter.token]
    assert store.acquire(owner("task/1/0"), claim()).verdict is Verdict.BLOCKED


@NO_MESSAGES
def test_t42_a_kept_permit_is_not_granted_to_an_attempt_without_a_worker(store):
    """Its queue has lost its last worker: otherwise the lock would be unused for a claim lease."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    first = held_by(store, attempt="task/0/0")
    other = parked(store, "other/0/0")
    store.release(NAME, first.token, Ending.KEEP, reserve=Reservation("task/1/0", LEASE))
    parked(store, "task/1/0", queue="nobody's")
    assert store.receive("w", SOON).token == other.token
    assert tokens(store) == [other.token]


@NO_MESSAGES
def test_only_a_refusal_says_what_the_task_waits_for(store):
    """A duplicate, an ended or an unknown task waits for nothing."""
    first, copies = held_by(store, attempt="id/0/0"), [owner("id/0/0") for _ in range(3)]
    assert store.acquire(owner(), claim()).waits_for is WaitsFor.HOLDER
    assert store.acquire(owner(), claim(), wait=LEASE).waits_for is WaitsFor.HOLDER
    told = [store.acquire(copies[0], claim(copy=True)), store.claim(owner(), NAME, LEASE)]
    told += [store.park(copies[1], claim(copy=True), to_park())]
    store.release(NAME, first.token, Ending.FINAL)
    told += [store.park(copies[2], claim(copy=True), to_park())]
    told += [store.release(NAME, copies[2].token, Ending.FINAL)]
    absent, twin = Verdict.ABSENT, Verdict.TWIN
    assert [each.verdict for each in told] == [twin, absent, twin, Verdict.DONE, absent]
    assert {each.waits_for for each in told} == {None}


@NO_OPERATORS
def test_a_retry_without_a_permit_holds_up_nobody_on_a_lock_that_was_paused(store, operators):
    """Two run, and the limit is lowered to one: who retries then has no permit to keep."""
    operators.set_limit(NAME, 2, JANE)
    retried, other = held_by(store, attempt="a/0/0"), held_by(store)
    waiter = waits(store)
    operators.set_limit(NAME, 1, JANE)
    operators.pause(NAME, JANE)
    store.release(NAME, retried.token, Ending.KEEP, reserve=Reservation("a/1/0", LEASE))
    store.release(NAME, other.token, Ending.FINAL)
    operators.resume(NAME, JANE)
    assert tokens(store) == [waiter.token]


@NO_MESSAGES
def test_a_delivery_that_its_worker_lost_comes_again_under_another_token(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    who = parked(store)
    assert store.receive("w", SOON).token == who.token
    lapse(store)
    store.sweep_and_grant(NAME)
    again = store.receive("w", SOON)
    assert again.token == f"{base_of(who.token)}.1"
    assert store.release(NAME, who.token, Ending.FINAL).verdict is Verdict.ABSENT
    assert store.acquire(who, claim()).verdict is Verdict.TWIN  # kept under its later token
    assert tokens(store) == [again.token]


@NO_MESSAGES
def test_a_message_without_a_worker_does_not_block_others_and_is_asked_for(store):
    who = parked(store)
    client = held_by(store)
    (stray,) = store.sweep_and_grant(NAME, realm="R")
    assert (stray.token, stray.queue, stray.attempt) == (who.token, "q", who.attempt)
    assert store.sweep_and_grant(NAME, realm="R") == []  # it is on its way
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    store.record_publish_result(NAME, stray.seal, [who.token], sent=False)
    store.release(NAME, client.token, Ending.FINAL)
    assert store.receive("w", SOON).token == who.token


@NO_MESSAGES
def test_t38_a_realm_gets_only_its_own_messages(store):
    mine, other = parked(store, "a/0/0", realm="R"), parked(store, "b/0/0", realm="S")
    assert [stray.token for stray in store.sweep_and_grant(NAME, realm="S")] == [other.token]
    assert [stray.token for stray in store.sweep_and_grant(NAME, realm="R")] == [mine.token]
    again = parked(store, "c/0/0", realm="S")
    store.worker_heartbeat("w", "S", ["q"], LEASE)
    store.sweep_and_grant(NAME)
    assert store.receive("w", SOON).token == again.token
    assert store.receive("w", 0.05) is None


@NO_MESSAGES
def test_t38_many_messages_of_a_dead_realm_do_not_hide_those_of_a_live_one(store):
    for number in range(250):
        store.park(owner(f"dead{number}/0/0"), claim(), to_park(realm="dead"))
    mine = parked(store, "mine/0/0")
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    store.sweep_and_grant(NAME)
    assert store.receive("w", SOON).token == mine.token


@NO_MESSAGES
def test_any_number_of_messages_without_a_consumer_is_passed(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    holder = held_by(store)
    for number in range(250):
        store.park(owner(f"dead{number}/0/0"), claim(), to_park(realm="dead"))
    mine = parked(store, "mine/0/0")
    store.release(NAME, holder.token, Ending.FINAL)
    for _ in range(3):
        assert store.take_due_locks() in ([NAME], [])
        store.sweep_and_grant(NAME)
    assert store.receive("w", SOON).token == mine.token


@NO_MESSAGES
def test_a_free_permit_with_waiters_is_due_for_a_sweep_at_once_even_after_an_extend(store):
    """One script moves only so many waiters; an extend moves none, and sets the next look."""
    holder = held_by(store)
    for number in range(250):
        store.park(owner(f"dead{number}/0/0"), claim(), to_park(realm="dead"))
    store.release(NAME, holder.token, Ending.FINAL)
    assert store.inspect(NAME).waiting > 0
    assert store.extend([(NAME, "nobody.0", LEASE)]) == [False]
    assert store.take_due_locks() == [NAME]


@NO_MESSAGES
def test_a_stopped_worker_gets_no_grant(store):
    store.worker_heartbeat("w1", "R", ["q"], LEASE)
    store.leave("w1", "R", ["q"])
    parked(store)
    assert store.inspect(NAME).adrift == 1
    store.worker_heartbeat("w2", "R", ["q"], LEASE)
    store.sweep_and_grant(NAME)
    assert store.receive("w2", SOON) is not None


@NO_MESSAGES
def test_a_deadline_delivers_with_a_verdict_until_it_is_settled(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    held_by(store)
    who = parked(store, deadline=SHORT)
    for _ in range(2):
        lapse(store)
        assert NAME in store.take_due_locks()
        store.sweep_and_grant(NAME)
        assert store.receive("w", SOON).verdict == "overdue"
    assert store.extend([(NAME, who.token, LEASE)]) == [True]
    store.release(NAME, who.token, Ending.FINAL)
    assert store.inspect(NAME).bodies == 0


@NO_MESSAGES
def test_early_acknowledgement_drops_the_body_at_the_start(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    parked(store)
    delivery = store.receive("w", SOON)
    store.claim(store_owner(delivery), NAME, SHORT, acks_early=True)
    assert store.inspect(NAME).bodies == 0
    lapse(store)
    store.sweep_and_grant(NAME)
    assert store.receive("w", 0.05) is None


# -- looking after ---------------------------------------------------------------------------------


@NO_MESSAGES
def test_t28_a_reset_is_fenced_and_admits_by_the_normal_path(store):
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    holder = held_by(store)
    who = parked(store)
    before = store.inspect(NAME).fencing_token
    assert store.reset(NAME) == 1
    assert store.release(NAME, holder.token, Ending.FINAL).verdict is Verdict.ABSENT
    delivery = store.receive("w", SOON)
    assert delivery.token == who.token
    assert delivery.fencing_token > before
    assert store.inspect(NAME).counters["resets"] == 1
    assert store.reset("never used") == 0


@NO_MESSAGES
def test_a_reset_grants_the_lock_to_the_next_waiter_not_to_the_former_holder(store):
    """The first task still runs: beside itself it must not start before the others."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    stuck = parked(store)
    store.claim(store_owner(store.receive("w", SOON)), NAME, LEASE)
    following = parked(store, "following/0/0")
    assert store.reset(NAME) == 1
    assert store.receive("w", SOON).token == following.token
    store.release(NAME, following.token, Ending.FINAL)
    again = store.receive("w", SOON)
    assert (base_of(again.token), again.body) == (base_of(stuck.token), to_park().body)


@NO_MESSAGES
def test_each_due_lock_is_returned_to_one_caller_and_none_is_left_out(store):
    names = [f"lock:{number}" for number in range(300)]
    for name in names:
        store.park(owner(f"{name}/0/0"), claim(name=name), to_park(deadline=SHORT))
    stop_time(store)  # a lock that was taken is due again after a moment
    lapse(store)
    seen: set[str] = set()
    for _ in range(4):
        taken = store.take_due_locks(100)
        assert not seen & set(taken)
        seen |= set(taken)
    assert seen == set(names)


@NO_MESSAGES
def test_a_lock_that_no_worker_sweeps_is_reported_without_a_change(store):
    """It is reported when its sweep is overdue for that long, until a worker sweeps it."""
    held_by(store, SHORT)
    parked(store)
    assert store.unswept_locks(0.0) == []  # its first look is when the lease ends
    lapse(store)
    assert store.unswept_locks(LEASE) == []
    stop_time(store)  # a lock that was taken is due again after a moment
    assert store.unswept_locks(0.0) == store.unswept_locks(0.0) == [NAME]
    assert store.take_due_locks() == [NAME]
    assert store.unswept_locks(0.0) == []


@NO_MESSAGES
def test_only_as_many_unswept_locks_are_returned_as_asked_for(store):
    """Without workers all locks are unswept; a few names are enough for a report."""
    names = {f"lock:{number}" for number in range(30)}
    for name in names:
        store.park(owner(f"{name}/0/0"), claim(name=name), to_park(deadline=SHORT))
    held_by(store)
    lapse(store)
    assert len(store.unswept_locks(0.0, 7)) == 7
    assert set(store.unswept_locks(0.0, 100)) == names


def test_inspect_changes_nothing_and_shows_lapsed_leases_as_gone(store):
    held_by(store, SHORT, attempt="id/0/0")
    waiter = waits(store)
    view = store.inspect(NAME)
    assert view.holders[0].task_id == "id"
    assert [w.token for w in view.waiters] == [waiter.token]
    assert view.waiting == 1
    lapse(store)
    assert store.inspect(NAME).holders == ()
    assert store.inspect(NAME).waiting == 1


@NO_MESSAGES
def test_a_batch_of_locks_is_swept_at_once(store):
    """Each gets its own grants, and its own messages without a consumer."""
    store.worker_heartbeat("w", "R", ["q"], LEASE)
    for name in ("one", "two"):
        assert store.acquire(owner(), claim(SHORT, name)).verdict is Verdict.GRANTED
        store.park(owner(f"{name}/0/0"), claim(name=name), to_park(name.encode()))
    stray = owner("stray/0/0")
    store.park(stray, claim(name="three"), to_park(queue="nobody's"))
    lapse(store)
    told = store.sweep_and_grant_many(["one", "two", "three"], worker="w", realm="R")
    assert [(s.name, s.token, s.queue, s.body) for s in told] == [
        ("three", stray.token, "nobody's", to_park().body)
    ]
    assert store.inbox_size("w") == 2
    assert {store.receive("w", SOON).body for _ in range(2)} == {b"one", b"two"}
    assert store.inbox_size("w") == 0
    assert store.sweep_and_grant_many([]) == []


@NO_MESSAGES
def test_a_batch_of_messages_is_parked_in_its_order(store):
    """Each gets its own answer."""
    held_by(store)
    who = [owner(f"id{number}/0/0") for number in range(3)]
    bound = claim(max_waiting=2)
    replies = store.park_many([(each, bound, to_park()) for each in who])
    assert [r.verdict for r in replies] == [Verdict.WAITING, Verdict.WAITING, Verdict.FULL]
    assert [w.token for w in store.inspect(NAME).waiters] == [w.token for w in who[:2]]
    assert store.park_many([]) == []


def test_the_server_time_increases(store):
    """Places in the queue and leases use it."""
    first = store.time()
    store.wait(NAME, "nobody", 0.1)
    assert 0.1 <= store.time() - first < LEASE


def test_a_store_reports_its_guarantees(store):
    """Text only, for the worker's log: whatever it cannot find out is "unknown"."""
    facts = store.describe()
    assert facts.keys() >= {"version", "eviction", "persistence", "replicas"}
    assert all(isinstance(fact, str) and fact for fact in facts.values())


def test_a_pool_of_threads_shares_a_store(store):
    def one(number):
        who = owner()
        name = f"lock:{number % 5}"
        granted = store.acquire(who, claim(name=name)).verdict is Verdict.GRANTED
        return granted == (store.release(name, who.token, Ending.FINAL).verdict is Verdict.RELEASED)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(200)))

"""Limits and rates that the arguments of tasks give: the newest is in force."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock.config.computed_options import Computed
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import rates_of
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.base import Operator
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

NAME = "k"
KEYS = Keyspace().lock(NAME)
HOUR = 3600
JANE = Operator("jane")


@pytest.fixture(params=["redis", "cluster", "in_memory"])
def kind(request):
    return request.param


@pytest.fixture
def store(make_store):
    return make_store(claim_lease=20.0)


def now_us(store):
    return int(store.time() * 1e6)


def claim_of(limit=None, rate=None, *, place=0, copy=0, lease=300.0, static=1):
    """Return the claim of a task whose arguments give these values."""
    rates = None if rate is None else rates_of(rate or None)
    options = Computed(limit, rates).applied(LockOptions(limit=static))
    return Claim(NAME, lease, options.declared_limit, place, copy=copy, flow=options.flow)


def ask(store, limit=None, rate=None, **claim):
    return store.acquire(Owner(new_token(), f"{new_token()}/0/0"), claim_of(limit, rate, **claim))


def ask_static(store, limit):
    return store.acquire(Owner(new_token()), Claim(NAME, 300.0, limit))


def park(store, limit=None, rate=None, **claim):
    store.worker_heartbeat("w", "R", ["q"], 10 * HOUR, 9)
    who = Owner(new_token(), f"{new_token()}/0/0", "t", "w")
    return store.park(who, claim_of(limit, rate, **claim), MessageToPark(b"body", "R", "q"))


def held(store):
    return len(store.inspect(NAME).holders)


def is_granted(reply):
    return reply.verdict is Verdict.GRANTED


def test_the_limit_of_a_call_is_in_force(store):
    for _ in range(3):
        assert is_granted(ask(store, 3))
    refused = ask(store, 3)
    assert (refused.verdict, refused.waits_for, refused.limit) == (
        Verdict.BLOCKED,
        WaitsFor.HOLDER,
        3,
    )
    view = store.inspect(NAME)
    assert (view.limit, view.limit_computed, view.limit_set) == (3, True, False)
    (listed,) = store.summarise_locks()
    assert listed.limit == 3


def test_a_raised_limit_is_in_force_at_once_for_all_who_wait(store):
    """Also on a lock that is never idle."""
    assert is_granted(ask(store, 1))
    for _ in range(4):
        assert park(store, 1).waits_for is WaitsFor.HOLDER
    park(store, 4)
    assert held(store) == 4


def test_a_lowered_limit_takes_no_lock_from_its_holders(store):
    tokens = [Owner(new_token(), f"{n}/0/0") for n in range(3)]
    for who in tokens:
        assert is_granted(store.acquire(who, claim_of(3)))
    assert not is_granted(ask(store, 1))
    assert (held(store), store.inspect(NAME).limit) == (3, 1)
    for who in tokens[:2]:
        store.release(NAME, who.token, Ending.FINAL)
    assert not is_granted(ask(store, 1))
    store.release(NAME, tokens[2].token, Ending.FINAL)
    assert is_granted(ask(store, 1))


def test_an_older_message_does_not_override(store):
    """It was delivered late, or queues again at its place."""
    old = now_us(store) - 5_000_000
    assert is_granted(ask(store, 4))
    assert is_granted(ask(store, 1, place=old))
    assert store.inspect(NAME).limit == 4


def test_a_copy_does_not_override(store):
    """A redelivered message arrives later than its first delivery."""
    assert is_granted(ask(store, 4))
    ask(store, 1, copy=1)
    assert store.inspect(NAME).limit == 4


def test_a_copy_counts_if_nothing_else_is_known(store):
    assert is_granted(ask(store, 4, copy=1))
    assert store.inspect(NAME).limit == 4


def test_a_place_from_before_the_clock_was_set_back_is_older(store):
    assert is_granted(ask(store, 1))
    let_pass(store, -60)
    park(store, 3)
    assert store.inspect(NAME).limit == 3


def test_an_older_message_does_not_override_on_an_idle_lock(store):
    who, old = Owner(new_token(), "a/0/0"), now_us(store) - 5_000_000
    store.acquire(who, claim_of(4))
    store.release(NAME, who.token, Ending.FINAL)
    assert is_granted(ask(store, 1, place=old))
    assert store.inspect(NAME).limit == 4


def test_the_lowest_limit_that_is_a_number_bounds_the_computed_one(store):
    assert is_granted(ask_static(store, 2))
    assert is_granted(ask(store, 9))
    assert not is_granted(ask(store, 9))
    assert store.inspect(NAME).limit == 2
    assert not is_granted(ask(store, 1))
    assert store.inspect(NAME).limit == 1
    assert not is_granted(ask(store, 9))  # the number is still known
    assert store.inspect(NAME).limit == 2


def test_a_number_that_is_declared_later_bounds_the_computed_one(store):
    for _ in range(3):
        assert is_granted(ask(store, 9))
    assert not is_granted(ask_static(store, 3))
    assert not is_granted(ask(store, 9))


def test_a_caller_with_a_number_is_bound_by_the_computed_limit(store):
    assert is_granted(ask(store, 1))
    assert not is_granted(ask_static(store, 9))


def test_a_computed_limit_is_kept_while_its_holders_run(store, lock_client):
    """Their leases are renewed for hours, and nobody asks for the lock meanwhile."""
    who = Owner(new_token(), "a/0/0")
    store.acquire(who, claim_of(2, lease=600.0))
    assert lock_client.pttl(KEYS.flow) >= 600_000
    lock_client.pexpire(KEYS.flow, 1000)
    store.extend([(NAME, who.token, 600.0)])
    assert lock_client.pttl(KEYS.flow) >= 600_000
    store.release(NAME, who.token, Ending.FINAL)
    assert 0 < lock_client.pttl(KEYS.flow) <= 660_000


def test_a_computed_limit_is_kept_beside_a_message_and_not_for_ever(store, lock_client):
    assert is_granted(ask(store, 1, lease=600.0))
    park(store, 1)
    assert lock_client.pttl(KEYS.flow) == -1
    (parked,) = store.inspect(NAME).waiters
    store.release(NAME, parked.token, Ending.FINAL)
    assert 0 < lock_client.pttl(KEYS.flow) <= 660_000


def test_a_lower_number_of_an_older_version_counts(store, lock_client):
    """Its script knows only the field of meta."""
    assert is_granted(ask(store, 5))
    lock_client.hset(KEYS.meta, "limit", 2)
    assert is_granted(ask(store, 5))
    assert not is_granted(ask(store, 5))
    assert store.inspect(NAME).limit == 2


def test_the_limit_of_an_operator_goes_before_the_computed_one(store):
    assert is_granted(ask(store, 1))
    assert store.set_limit(NAME, 3, JANE) == 3
    assert is_granted(ask(store, 1))
    assert is_granted(ask(store, 2))
    assert not is_granted(ask(store, 2))
    view = store.inspect(NAME)
    assert (view.limit, view.limit_set, view.limit_computed) == (3, True, False)
    assert store.set_limit(NAME, None, JANE) == 2


def test_the_rate_of_a_call_is_in_force(store):
    assert is_granted(ask(store, 9, "2/h"))
    assert is_granted(ask(store, 9, "2/h"))
    assert ask(store, 9, "2/h").waits_for is WaitsFor.RATE
    assert is_granted(ask(store, 9, "3/h"))
    assert ask(store, 9, "1/h").waits_for is WaitsFor.RATE
    assert [str(rate) for rate in store.inspect(NAME).rates] == ["1/h"]


def test_a_raised_rate_starts_all_who_wait(store):
    assert is_granted(ask(store, 9, "1/h"))
    for _ in range(3):
        assert park(store, 9, "1/h").waits_for is WaitsFor.RATE
    park(store, 9, "4/h")
    assert held(store) == 4


def test_a_call_without_a_rate_ends_the_computed_one(store):
    assert is_granted(ask(store, 9, "1/h"))
    assert ask(store, 9, "1/h").waits_for is WaitsFor.RATE
    assert is_granted(ask(store, 9, ()))
    assert not store.inspect(NAME).rates


def test_a_computed_rate_is_never_above_a_declared_one(store):
    declared = Claim(NAME, 300.0, 9, flow='{"rates":[["sliding 3600",2,3600000000,0]]}')
    assert is_granted(store.acquire(Owner(new_token()), declared))
    assert is_granted(ask(store, 9, "5/h"))
    assert ask(store, 9, "5/h").waits_for is WaitsFor.RATE
    assert [str(rate) for rate in store.inspect(NAME).rates] == ["2/h"]


def test_a_computed_limit_and_a_computed_rate_of_different_tasks_are_both_in_force(store):
    assert is_granted(ask(store, 2))
    assert is_granted(ask(store, None, "9/h", static=9))
    view = store.inspect(NAME)
    assert (view.limit, [str(rate) for rate in view.rates]) == (2, ["9/h"])


def test_an_observed_run_is_compared_with_its_computed_values(store):
    flow = claim_of(1, "1/h").flow
    assert json.loads(flow)["newest"]["limit"] == 1
    first = Owner(new_token(), "a/0/0", "t")
    observed = claim_of(2, "9/h")
    assert store.record_observation(first, observed, waits=True) is None
    assert store.record_observation(Owner(new_token(), "b/0/0", "t"), observed, waits=True) is None
    third = store.record_observation(Owner(new_token(), "c/0/0", "t"), observed, waits=True)
    assert third is not None
    assert third.waits_for is WaitsFor.HOLDER

"""An operator's pause, limit and rates end at a time, by themselves."""

from __future__ import annotations

import pytest

from celery_singleton_lock import Lock
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import Rate, packed, rates_of
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.operator.base import Operator
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

NAME = "k"
KEYS = Keyspace().lock(NAME)
MINUTE, HOUR = 60, 3600
GRACE = 60_000
"""For how long the keys of a lock live after its last use (ms)."""


@pytest.fixture(params=["redis", "cluster", "in_memory"])
def kind(request):
    return request.param


@pytest.fixture
def store(make_store):
    return make_store(claim_lease=20.0)


def by():
    return Operator("jane", "desk-1", "test", "deploy")


def ask(store, limit=1, rate=None, lease=300.0, wait=None):
    claim = Claim(NAME, lease, limit, flow=packed(rates_of(rate)))
    return store.acquire(Owner(new_token()), claim, wait=wait)


def is_granted(reply):
    return reply.verdict is Verdict.GRANTED


def park(store, limit=1):
    store.worker_heartbeat("w", "R", ["q"], 10 * HOUR, 9)
    who = Owner(new_token(), f"{new_token()}/0/0", "t", "w")
    return store.park(who, Claim(NAME, 300.0, limit), MessageToPark(b"body", "R", "q"))


def due_in(store, lock_client):
    """Return the seconds until somebody looks at the lock again."""
    return float(lock_client.zscore(KEYS.due, NAME)) / 1000 - store.time()


# -- pause -----------------------------------------------------------------------------------------


def test_a_pause_for_a_time_ends_without_a_call(store):
    assert store.pause(NAME, by(), seconds=10 * MINUTE)
    refused = ask(store)
    assert (refused.verdict, refused.waits_for) == (Verdict.BLOCKED, WaitsFor.PAUSE)
    assert 9 * MINUTE < refused.next_look <= 10 * MINUTE
    view = store.inspect(NAME)
    assert 9 * MINUTE < view.pause_left <= 10 * MINUTE
    assert view.next_look == view.pause_left
    let_pass(store, 10 * MINUTE)
    view = store.inspect(NAME)
    assert (view.paused, view.pause_left, view.waits_for) == ("", 0.0, None)
    assert not store.resume(NAME, by())
    assert is_granted(ask(store))


def test_a_waiting_task_is_granted_when_the_pause_ends(store, lock_client):
    """It is due then, so the sweep of any worker grants it."""
    store.pause(NAME, by(), seconds=10 * MINUTE)
    parked = park(store)
    assert (parked.verdict, parked.waits_for) == (Verdict.WAITING, WaitsFor.PAUSE)
    assert 9 * MINUTE < parked.next_look <= 10 * MINUTE
    assert due_in(store, lock_client) <= 10 * MINUTE
    store.sweep_and_grant(NAME, worker="w")
    assert not store.inspect(NAME).holders
    let_pass(store, 10 * MINUTE)
    store.sweep_and_grant(NAME, worker="w")
    assert len(store.inspect(NAME).holders) == 1


def test_who_releases_a_paused_lock_hears_when_the_pause_ends(store):
    holder = Owner(new_token())
    store.acquire(holder, Claim(NAME, 300.0))
    park(store)
    store.pause(NAME, by(), seconds=10 * MINUTE)
    told = store.release(NAME, holder.token, Ending.FINAL)
    assert told.waits_for is WaitsFor.PAUSE
    assert 9 * MINUTE < told.next_look <= 10 * MINUTE


def test_the_end_of_a_pause_does_not_come_back_if_the_clock_is_set_back(store):
    """The first call after the end deletes the pause."""
    store.pause(NAME, by(), seconds=10 * MINUTE)
    let_pass(store, 10 * MINUTE)
    store.sweep_and_grant(NAME)
    let_pass(store, -5 * MINUTE)
    assert is_granted(ask(store))


def test_a_later_pause_replaces_the_end(store):
    store.pause(NAME, by(), seconds=10 * MINUTE)
    assert store.pause(NAME, by(), seconds=20 * MINUTE)
    let_pass(store, 15 * MINUTE)
    assert ask(store).waits_for is WaitsFor.PAUSE
    assert store.pause(NAME, by())  # without an end
    let_pass(store, 20 * MINUTE)
    assert ask(store).waits_for is WaitsFor.PAUSE
    assert not store.pause(NAME, by())
    assert store.pause(NAME, by(), seconds=MINUTE)
    assert store.resume(NAME, by())
    assert is_granted(ask(store))


def test_a_pause_after_the_end_of_an_earlier_one_is_a_new_pause(store):
    """Also if no call came between them."""
    store.pause(NAME, by(), seconds=MINUTE)
    let_pass(store, MINUTE)
    assert store.pause(NAME, by())
    assert ask(store).waits_for is WaitsFor.PAUSE
    assert store.inspect(NAME).pause_left == 0.0


def test_the_keys_live_as_long_as_the_pause_and_no_longer(store, lock_client):
    store.pause(NAME, by(), seconds=HOUR)
    left = lock_client.pttl(KEYS.meta)
    assert HOUR * 1000 <= left <= HOUR * 1000 + GRACE
    ask(store)
    assert lock_client.pttl(KEYS.meta) >= HOUR * 1000 - GRACE / 2
    store.pause(NAME, by())
    assert lock_client.pttl(KEYS.meta) == -1
    store.resume(NAME, by())
    assert 0 < lock_client.pttl(KEYS.meta) <= GRACE


def test_a_renewal_neither_forgets_a_pause_nor_keeps_it_for_ever(store, lock_client):
    holder = Owner(new_token())
    store.acquire(holder, Claim(NAME, 30.0))
    store.pause(NAME, by(), seconds=HOUR)
    assert store.extend([(NAME, holder.token, 30.0)]) == [True]
    assert HOUR * 1000 - GRACE / 2 <= lock_client.pttl(KEYS.meta) <= HOUR * 1000 + GRACE
    assert store.inspect(NAME).paused


# -- limit -----------------------------------------------------------------------------------------


def test_a_limit_for_a_time_ends_without_a_call(store):
    assert store.set_limit(NAME, 2, by(), seconds=HOUR) == 2
    assert is_granted(ask(store, 1))
    assert is_granted(ask(store, 1))
    assert not is_granted(ask(store, 1))
    view = store.inspect(NAME)
    assert (view.limit, view.limit_set) == (2, True)
    assert HOUR - MINUTE < view.limit_left <= HOUR
    let_pass(store, HOUR)
    view = store.inspect(NAME)
    assert (view.limit, view.limit_set, view.limit_left) == (1, False, 0.0)


def test_a_task_behind_a_lower_limit_starts_when_that_ends(store, lock_client):
    """Though its holder keeps the lock: it is due then."""
    assert is_granted(ask(store, 2, lease=10 * HOUR))
    store.set_limit(NAME, 1, by(), seconds=HOUR)
    parked = park(store, 2)
    assert (parked.verdict, parked.waits_for) == (Verdict.WAITING, WaitsFor.HOLDER)
    assert HOUR - MINUTE < parked.next_look <= HOUR + 1
    assert due_in(store, lock_client) <= HOUR + 1
    let_pass(store, HOUR)
    store.sweep_and_grant(NAME, worker="w")
    assert len(store.inspect(NAME).holders) == 2


def test_holders_above_a_lower_limit_keep_their_permits(store):
    for _ in range(3):
        assert is_granted(ask(store, 3))
    assert store.set_limit(NAME, 1, by(), seconds=HOUR) == 1
    assert len(store.inspect(NAME).holders) == 3
    assert not is_granted(ask(store, 3))


def test_a_limit_for_a_time_replaces_one_without_an_end(store):
    store.set_limit(NAME, 5, by())
    store.set_limit(NAME, 2, by(), seconds=HOUR)
    let_pass(store, HOUR)
    assert is_granted(ask(store, 1))
    assert not is_granted(ask(store, 1))


def test_the_end_of_a_limit_leaves_the_pause(store):
    store.pause(NAME, by(), seconds=2 * HOUR)
    store.set_limit(NAME, 5, by(), seconds=HOUR)
    let_pass(store, HOUR)
    store.sweep_and_grant(NAME)
    assert store.inspect(NAME).paused
    assert HOUR - MINUTE < store.inspect(NAME).pause_left <= HOUR


# -- rates -----------------------------------------------------------------------------------------


def test_a_rate_of_an_operator_goes_before_those_of_the_tasks(store):
    """Also if it is higher; and starts that were counted still count."""
    assert is_granted(ask(store, 9, "1/m"))
    assert ask(store, 9, "1/m").waits_for is WaitsFor.RATE
    assert not store.set_rates(NAME, [Rate("3/m")], by())
    assert is_granted(ask(store, 9, "1/m"))
    assert is_granted(ask(store, 9, "1/m"))
    assert ask(store, 9, "1/m").waits_for is WaitsFor.RATE
    view = store.inspect(NAME)
    assert (str(view.rates[0]), view.rates[0].started) == ("3/m", 3)
    assert (view.rates_set, view.rates_left) == (True, 0.0)
    assert store.set_rates(NAME, [], by())
    view = store.inspect(NAME)
    assert (str(view.rates[0]), view.rates_set) == ("1/m", False)


def test_a_lock_without_a_rate_gets_that_of_an_operator(store):
    """Its tasks know nothing of rates."""
    store.set_rates(NAME, [Rate("2/h")], by())
    assert is_granted(ask(store, 9))
    assert is_granted(ask(store, 9))
    refused = ask(store, 9)
    assert refused.waits_for is WaitsFor.RATE
    assert HOUR - MINUTE < refused.next_look <= HOUR + 1
    store.set_rates(NAME, [], by())
    assert is_granted(ask(store, 9))


def test_a_rate_for_a_time_ends_without_a_call(store, lock_client):
    store.set_rates(NAME, [Rate("1/d")], by(), seconds=HOUR)
    assert is_granted(ask(store, 9))
    parked = park(store, 9)
    assert parked.waits_for is WaitsFor.RATE
    assert HOUR - MINUTE < parked.next_look <= HOUR + 1
    assert due_in(store, lock_client) <= HOUR + 1
    assert HOUR - MINUTE < store.inspect(NAME).rates_left <= HOUR
    let_pass(store, HOUR)
    assert not store.inspect(NAME).rates
    store.sweep_and_grant(NAME, worker="w")
    assert len(store.inspect(NAME).holders) == 1  # the lease of the first has ended
    let_pass(store, -MINUTE)
    assert not store.inspect(NAME).rates_set


def test_starts_under_the_rate_of_an_operator_count_in_that_of_the_tasks(store):
    """Which has a longer period."""
    store.set_rates(NAME, [Rate("9/s")], by(), seconds=10 * MINUTE)
    for _ in range(2):
        assert is_granted(ask(store, 9, "2/h"))
        let_pass(store, 2)
    let_pass(store, 10 * MINUTE)
    refused = ask(store, 9, "2/h")
    assert refused.waits_for is WaitsFor.RATE
    assert 45 * MINUTE < refused.next_look <= 50 * MINUTE


def test_starts_under_the_rate_of_an_operator_move_a_smooth_rate(store):
    smooth = Rate("1/h", kind="smooth")
    store.set_rates(NAME, [Rate("9/s")], by(), seconds=10 * MINUTE)
    assert is_granted(ask(store, 9, smooth))
    let_pass(store, 10 * MINUTE)
    assert ask(store, 9, smooth).waits_for is WaitsFor.RATE


def test_the_keys_live_as_long_as_the_rate_and_no_longer(store, lock_client):
    store.set_rates(NAME, [Rate("9/s")], by(), seconds=HOUR)
    for key in (KEYS.meta, KEYS.flow):
        assert HOUR * 1000 <= lock_client.pttl(key) <= HOUR * 1000 + GRACE
    holder = Owner(new_token())
    store.acquire(holder, Claim(NAME, 30.0))
    store.extend([(NAME, holder.token, 30.0)])
    store.release(NAME, holder.token, Ending.FINAL)
    for key in (KEYS.meta, KEYS.flow):
        assert HOUR * 1000 - GRACE / 2 <= lock_client.pttl(key) <= HOUR * 1000 + GRACE
    store.set_rates(NAME, [Rate("9/s")], by())
    for key in (KEYS.meta, KEYS.flow):
        assert lock_client.pttl(key) == -1
    store.set_rates(NAME, [], by())
    for key in (KEYS.meta, KEYS.flow):
        assert 0 < lock_client.pttl(key) <= GRACE + 1000


def test_a_grant_before_the_first_rate_counts_when_it_is_claimed(store):
    holder, waiter = Owner(new_token()), Owner(new_token())
    store.acquire(holder, Claim(NAME, 300.0))
    store.acquire(waiter, Claim(NAME, 300.0), wait=300.0)
    store.release(NAME, holder.token, Ending.FINAL)
    store.set_rates(NAME, [Rate("1/h")], by())
    assert is_granted(store.claim(waiter, NAME, 300.0))
    store.release(NAME, waiter.token, Ending.FINAL)
    assert ask(store).waits_for is WaitsFor.RATE


# -- what is told ----------------------------------------------------------------------------------


def test_the_audit_has_value_and_end(store):
    store.set_rates(NAME, [Rate("9/s"), Rate("100/h")], by(), seconds=HOUR)
    store.set_limit(NAME, 5, by(), seconds=HOUR)
    store.pause(NAME, by(), seconds=HOUR)
    store.set_rates(NAME, [], by())
    cleared, pause, limit, rate = store.audit()
    assert (cleared["action"], cleared["to"]) == ("rate", "as declared")
    assert "until" not in cleared
    assert (rate["action"], rate["to"]) == ("rate", "9/s, 100/h")
    assert (limit["action"], limit["to"]) == ("limit", "5")
    for entry in (pause, limit, rate):
        assert HOUR - MINUTE < entry["until"] - store.time() <= HOUR


def test_a_lock_in_the_list_is_paused_only_until_the_end(store):
    store.pause(NAME, by(), seconds=HOUR)
    store.set_limit(NAME, 7, by(), seconds=HOUR)
    (listed,) = store.summarise_locks()
    assert (listed.paused, listed.limit) == (True, 7)
    let_pass(store, HOUR)
    (listed,) = store.summarise_locks()
    assert (listed.paused, listed.limit) == (False, 0)


def test_code_that_waits_gets_the_lock_when_the_pause_ends(store, lock_client, no_heartbeat):
    """Without a heartbeat it asks again only at that time."""
    store.pause(NAME, by(), seconds=0.5)
    with Lock(lock_client, NAME, blocking_timeout=30.0):
        pass

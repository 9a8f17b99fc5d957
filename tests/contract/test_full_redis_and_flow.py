"""A full Redis (``noeviction``) and locks with rates, costs and groups."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import Rate, packed, rates_of
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiters import hold, park

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("maxmemory")]

JANE = Operator("jane")


@pytest.fixture
def store(make_redis):
    server = make_redis("--maxmemory-policy", "noeviction")
    with server.client(decode_responses=False) as client:
        made = RedisAdminStore(client, claim_lease=60.0)
        made.worker_heartbeat("w", "R", ["q"], 600.0, 99)
        yield made
        made.close()


def fill(store):
    """Whatever is there is too much."""
    store.client.config_set("maxmemory", "1")


def run_next(store):
    """Run the next delivered message to its end; return its token, or None if there is none."""
    delivery = store.receive("w", 0.01)
    if delivery is None:
        return None
    claimed = store.claim(Owner(delivery.token, worker="w"), "k", 60.0)
    assert claimed.verdict is Verdict.GRANTED
    store.release("k", delivery.token, Ending.FINAL, worker="w")
    return delivery.token


def test_groups_take_turns_on_a_full_redis(store):
    """Each of the parked tasks runs, and a quiet group is not behind the backlog of another."""
    first = hold(store, "k", flow=packed((), group=Group("large")))
    large = [park(store, "k", flow=packed((), group=Group("large"))) for _ in range(4)]
    small = [park(store, "k", flow=packed((), group=Group("small"))) for _ in range(2)]
    fill(store)
    store.release("k", first.token, Ending.FINAL, worker="w")
    order = [run_next(store) for _ in range(6)]
    assert set(order[:3]) >= {small[0]}
    assert set(order[:4]) >= set(small)
    assert sorted(order) == sorted(large + small)
    assert run_next(store) is None
    view = store.inspect("k")
    assert (view.waiting, view.bodies, view.groups_waiting) == (0, 0, 0)


def test_starts_count_for_the_rate_on_a_full_redis(store):
    """Neither the rate nor the budget is exceeded while Redis takes nothing new."""
    flow = packed(rates_of(["4/h", Rate("100/h", cost=40)]))
    first = hold(store, "k", flow=flow)
    parked = [park(store, "k", flow=flow) for _ in range(3)]
    fill(store)
    store.release("k", first.token, Ending.FINAL, worker="w")
    assert run_next(store) == parked[0]
    assert run_next(store) is None
    view = store.inspect("k")
    assert view.waits_for is WaitsFor.RATE
    assert [(str(rate), rate.started) for rate in view.rates] == [
        ("4/h", 2),
        ("100/h, 80 used", 80),
    ]


def test_an_operator_changes_a_lock_of_a_full_redis(store):
    """It may be what empties it."""
    flow = packed(rates_of("1/h"))
    first = hold(store, "k", flow=flow)
    parked = [park(store, "k", flow=flow) for _ in range(2)]
    fill(store)
    store.pause("k", JANE, seconds=60.0)
    store.release("k", first.token, Ending.FINAL, worker="w")
    store.set_rates("k", [Rate("9/h")], JANE)
    assert run_next(store) is None
    store.resume("k", JANE)
    store.sweep_and_grant("k", worker="w", realm="R")
    assert [run_next(store) for _ in range(2)] == parked


def test_a_charge_that_a_full_redis_refuses_changes_nothing(store):
    """It may be repeated with the same id when there is room, and counts once."""
    rate = Rate("100/h", cost=40)
    me = hold(store, "k", flow=packed(rates_of(rate)))
    fill(store)
    with pytest.raises(BackendRefused, match="maxmemory"):
        store.charge("k", me.token, "c1", 10, [rate.key])
    assert store.inspect("k").rates[0].started == 40
    store.client.config_set("maxmemory", "0")
    for _ in range(2):
        store.charge("k", me.token, "c1", 10, [rate.key])
    assert store.inspect("k").rates[0].started == 50


def test_a_refused_message_with_a_group_leaves_nothing(store):
    """Its worker still has it, and parks it later."""
    hold(store, "k", flow=packed((), group=Group("a")))
    fill(store)
    flow = packed(rates_of("5/h"), group=Group("b"))
    with pytest.raises(BackendRefused, match="maxmemory"):
        park(store, "k", flow=flow)
    with pytest.raises(BackendRefused, match="maxmemory"):
        store.acquire(Owner(new_token()), Claim("free", flow=flow))
    view = store.inspect("k")
    assert (view.waiting, view.groups, view.rates) == (0, (), ())
    assert store.inspect("free").fencing_token == 0

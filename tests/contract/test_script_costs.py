"""What a call costs does not depend on how many wait."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Owner
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.redis.sync import RedisStore
from support.script_costs import SIZES, calls, costs, grows, warm_up

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("INFO commandstats")]

AT_START = {"describe"}
"""Verbs that no task, no client and no sweep calls."""

IN_PROCESS = {"too_few"}
"""Verbs that ask no server."""


@pytest.fixture(scope="module")
def found(redis_server):
    """Costs of every verb at 10, 1,000 and 100,000 waiters."""
    with redis_server.client(decode_responses=False) as client:
        warm_up(client)
        yield {size: costs(client, size) for size in SIZES}
        client.flushall()


def test_t25_every_verb_runs_as_many_commands_at_any_length_of_the_queue(found):
    """Counted by Redis: those that the client sends, and those that scripts run."""
    assert grows(found) == {}


def test_t25_no_verb_runs_many_commands(found):
    """Except where it says how many it looks at: replace, and whoever looks at all 64 buckets.

    Operators read a report of each, in parts, and begin it anew.
    """
    for what, cost in found[100_000].items():
        most = 200 if what in {"park, and replace the oldest", "take_due"} else 65
        assert cost.inside / cost.sent <= most, (what, cost)
        assert cost.sent <= (200 if "observed" in what else 65), (what, cost)


def test_t25_no_call_takes_long_beside_a_hundred_thousand(found):
    """Sorted sets grow by a logarithm; nothing else may."""
    for what, cost in found[100_000].items():
        assert cost.usec <= 4 * found[1_000][what].usec + 200, (what, cost, found[1_000][what])


def test_the_cost_of_every_verb_is_counted(redis_client):
    """One that is left out could grow unnoticed."""
    known = calls(RedisStore(redis_client), Owner("nobody.0"))
    counted = {what.split(",")[0].split(":")[0] for what in known}
    assert (
        counted
        == {name for name in vars(Store) if not name.startswith("_")} - AT_START - IN_PROCESS
    )

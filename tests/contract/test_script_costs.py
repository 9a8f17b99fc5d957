"""The cost of a call does not depend on the number of waiters."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.model import Owner
from celery_singleton_lock.store.base import LockStore, MessageStore, ReplicaStore, WorkerStore
from celery_singleton_lock.store.redis.sync import RedisStore
from support.script_costs import SIZES, calls, costs, grows, warm_up

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("INFO commandstats")]

AT_START = {"describe", "schema"}
"""Verbs that no task, no client and no sweep calls."""

IN_PROCESS = {"too_few"}
"""Verbs that ask no server."""

PROTOCOLS = (LockStore, MessageStore, WorkerStore, ReplicaStore)
BY_OPERATORS = {"switches", "observations", "clear_observations"}
"""What operators call, with a cost that could grow."""

MORE = {"park, and replace the oldest": 200, "take_due_locks": 200, "reset, and grant": 75}
"""Verbs that run more commands than the others, and how many at most."""


@pytest.fixture(scope="module")
def found(redis_server):
    """Costs of every verb at 10, 1,000 and 100,000 waiters."""
    with redis_server.client(decode_responses=False) as client:
        warm_up(client)
        yield {size: costs(client, size) for size in SIZES}
        client.flushall()


@pytest.mark.full
def test_t25_every_verb_runs_as_many_commands_at_any_length_of_the_queue(found):
    """Counted by Redis: those that the client sends, and those that scripts run."""
    assert grows(found) == {}


@pytest.mark.full
def test_t25_no_verb_runs_many_commands(found):
    """Except where it says how many it looks at: replace, and whoever looks at all 64 buckets.

    Operators read a report of each, in parts, and begin it anew. A reset also notes what it took.
    """
    for what, cost in found[100_000].items():
        most = MORE.get(what, 65)
        assert cost.inside / cost.sent <= most, (what, cost)
        assert cost.sent <= (200 if "observations" in what else 65), (what, cost)


@pytest.mark.full
def test_t25_no_call_takes_long_beside_a_hundred_thousand(found):
    """Sorted sets grow by a logarithm; nothing else may. To read them all takes over 10 ms."""
    for what, cost in found[100_000].items():
        assert cost.usec <= 4 * found[1_000][what].usec + 3_000, (what, cost, found[1_000][what])


def test_the_cost_of_every_verb_is_counted(redis_client):
    """The cost of a missing one could grow unnoticed."""
    known = calls(RedisStore(redis_client), Owner("nobody.0"))
    counted = {what.split(",")[0].split(":")[0] for what in known}
    verbs = {name for each in PROTOCOLS for name in vars(each) if not name.startswith("_")}
    assert counted == (verbs | BY_OPERATORS) - AT_START - IN_PROCESS

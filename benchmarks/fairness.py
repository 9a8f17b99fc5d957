"""Row ``fairness`` of :mod:`benchmarks.flow`: groups that share a lock, in the scripts.

One task runs at a time, so the unit of a wait is the time that one task takes.

- *wait*: tasks that start from the parking of a small group's task up to and with its own start,
  beside many parked messages of another group. The task that runs meanwhile is the first of them.
- *off*: how far the starts of a group are from its share, at most, after any number of starts.
- *usec of a start*: what scripts take in Redis to claim and to release.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import redis

from benchmarks import crowd, report
from benchmarks.meter import script_cost
from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.model import Ending, Owner
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.store.redis.sync import RedisStore

KEY: Final = "api"
FEW: Final = 10
MANY: Final = 10_000
WAITING: Final = 10_000
STARTS: Final = 200
SMALL: Final = 100
"""Tasks of the small group, parked one after the other."""

WEIGHTS: Final = {"a": 1.0, "b": 3.0}

Found = dict[str, Any]


class Line:
    """The messages that wait for one lock, and the worker that runs them one by one."""

    def __init__(self, client: redis.Redis, store: RedisStore) -> None:
        self._client, self._store = client, store
        self._ids = crowd.task_ids(1)

    def park(self, count: int, groups: Sequence[Group]) -> None:
        """Park messages, of each group in turn."""
        flows = [packed((), group=group) for group in groups]
        crowd.park(self._store, itertools.repeat(KEY), self._ids, count, flows)

    def start(self) -> str:
        """Run the task that was granted; return its group.

        Raises:
            RuntimeError: none was.
        """
        granted = self._store.receive(crowd.WORKER, 5.0)
        if granted is None:
            msg = "no task was granted"
            raise RuntimeError(msg)
        owner = Owner(granted.token, "", crowd.TASK, crowd.WORKER, "host", 7)
        self._store.claim(owner, KEY, crowd.LEASE)
        record = json.loads(self._client.hget(Keyspace().lock(KEY).record, granted.token))
        self._store.release(KEY, granted.token, Ending.FINAL, worker=crowd.WORKER)
        return str(record["group"])

    def cost(self) -> float:
        """Return the microseconds in scripts for each start."""
        _, before = script_cost(self._client)
        for _ in range(STARTS):
            self.start()
        _, after = script_cost(self._client)
        return round((after - before) / STARTS, 1)


@contextlib.contextmanager
def line() -> Iterator[Line]:
    with RedisServer() as server, server.client(decode_responses=False) as client:
        store = RedisStore(client, claim_lease=crowd.LEASE)
        crowd.join_fleet(store)
        yield Line(client, store)
        store.close()


def fairness(parked: int) -> Found:
    """Return what groups wait and cost."""
    waits = small_beside(parked)
    return {
        "parked": parked,
        "wait_p50": report.percentile(waits, 50),
        "wait_p99": report.percentile(waits, 99),
        "off": off_the_share(),
        "usec_of_a_start": start_cost(MANY),
        "usec_of_a_start_at_few": start_cost(FEW),
        "groups": MANY,
        "few": FEW,
    }


def small_beside(parked: int) -> list[int]:
    """Return after how many starts each task of a small group starts."""
    waits = []
    with line() as waiting:
        waiting.park(parked, [Group("large")])
        for _ in range(SMALL):
            waiting.park(1, [Group("small")])
            waits.append(next(n for n in itertools.count(1) if waiting.start() == "small"))
    return waits


def off_the_share() -> float:
    """Return how many starts a group of two is off its share, at most."""
    groups = [Group(name, None, weight) for name, weight in WEIGHTS.items()]
    share = WEIGHTS["a"] / sum(WEIGHTS.values())
    with line() as waiting:
        waiting.park(4 * STARTS, groups)
        waiting.start()  # it was granted before the others came
        started = 0
        off = []
        for number in range(1, STARTS + 1):
            started += waiting.start() == "a"
            off.append(abs(started - share * number))
    return round(max(off), 2)


def start_cost(groups: int) -> float:
    with line() as waiting:
        waiting.park(WAITING, [Group(f"g{number}", 2) for number in range(groups)])
        return waiting.cost()


def fairness_targets(found: Found) -> list[Found]:
    growth = found["usec_of_a_start"] / found["usec_of_a_start_at_few"]
    return [
        report.target("wait of a small group, p99, in tasks", found["wait_p99"], most=3),
        report.target("starts off the share by weights 1 and 3", found["off"], most=1),
        report.target(f"start, of that with {found['few']} groups", round(growth, 2), most=1.5),
    ]


def fairness_table(found: Found) -> str:
    rows = [[name.replace("_", " "), value] for name, value in found.items()]
    return report.table(["groups of a lock", ""], rows)

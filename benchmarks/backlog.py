"""Row ``backlog`` of :mod:`benchmarks.flow`: many messages that wait for a rate.

- *bytes beyond the body*: memory of a parked message in Redis, less its body.
- *usec of a start*: what scripts take in Redis from the end of one task to the start of the next.
- *leaves the broker*: messages a second that two workers take from the broker's queue and park.
- *others*: from sending a plain task of another queue to its start meanwhile, and alone.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any, Final

import redis

from benchmarks import crowd, report
from benchmarks.meter import script_cost
from benchmarks.rates import ALONE, delays, jobs
from benchmarks.rig import Rig, Worker
from celery_singleton_lock import Rate
from celery_singleton_lock.core.model import Ending, Owner
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore

FEW: Final = 1_000
KEY: Final = "tenant:1"
OFTEN: Final = packed((Rate("40/s"),))
"""Often enough for a measurement, and so rarely that the messages wait for it."""

STARTS: Final = 100
"""Starts of which the cost of one is the mean."""

CLOSED: Final = "1/3s"

Found = dict[str, Any]


def backlog(asked: argparse.Namespace) -> Found:
    """Return what many parked messages cost, and how fast the broker gets rid of them."""
    return {**in_redis(asked.parked), **out_of_broker(asked.processes, asked.published)}


def in_redis(count: int) -> Found:
    with RedisServer() as server, server.client(decode_responses=False) as client:
        store = RedisAdminStore(client, claim_lease=crowd.LEASE)
        crowd.join_fleet(store)
        ids = crowd.task_ids(count)
        before = memory(client)
        length = crowd.park(store, itertools.repeat(KEY), ids, FEW, [OFTEN])
        few = start_cost(client, store)
        crowd.park(store, itertools.repeat(KEY), ids, count - FEW, [OFTEN])
        each = (memory(client) - before) / (count - STARTS)
        many = start_cost(client, store)
        store.close()
    return {
        "parked": count,
        "bytes_beyond": round(each - length),
        "usec_of_a_start": many,
        "usec_of_a_start_at_few": few,
        "few": FEW,
    }


def memory(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def start_cost(client: redis.Redis, store: RedisStore) -> float:
    """Return the microseconds in scripts for each start: sweep at the due time, claim, release."""
    _, before = script_cost(client)
    for _ in range(STARTS):
        while (granted := store.receive(crowd.WORKER, 0.03)) is None:
            store.sweep_and_grant(KEY, worker=crowd.WORKER)
        owner = Owner(granted.token, "", crowd.TASK, crowd.WORKER, "host", 7)
        store.claim(owner, KEY, crowd.LEASE)
        store.release(KEY, granted.token, Ending.FINAL, worker=crowd.WORKER)
    _, after = script_cost(client)
    return round((after - before) / STARTS, 1)


def out_of_broker(processes: int, count: int) -> Found:
    with Rig(["rated"], processes, count + 4 * ALONE, workers=2, rate=CLOSED) as rig:
        worker = rig.workers["rated"]
        worker.board.clear()
        alone = delays(worker, 0, ALONE)
        with worker.held_back():
            worker.publish(jobs("backlog", count, 2 * ALONE))
        began = time.monotonic()
        beside = delays(worker, ALONE, ALONE)
        with rig.broker.client() as client:
            while left(client, worker):
                time.sleep(0.01)
        took = time.monotonic() - began
    return {
        "published": count,
        "leaves_the_broker_per_second": round(count / took),
        "alone_p50_ms": round(report.percentile(alone, 50), 2),
        "alone_p99_ms": round(report.percentile(alone, 99), 2),
        "others_p50_ms": round(report.percentile(beside, 50), 2),
        "others_p99_ms": round(report.percentile(beside, 99), 2),
    }


def left(client: redis.Redis, worker: Worker) -> int:
    """Return how many messages of the rate are in the broker, in its queue or unacknowledged."""
    return int(client.llen(worker.peer)) + int(client.hlen("unacked"))


def backlog_targets(found: Found) -> list[Found]:
    growth = found["usec_of_a_start"] / found["usec_of_a_start_at_few"]
    delay = found["others_p50_ms"] / found["alone_p50_ms"]
    return [
        report.target(f"start, of that with {found['few']} parked", round(growth, 2), most=1.3),
        report.target("others beside the backlog, of alone", round(delay, 2), most=2.0),
    ]


def backlog_table(found: Found) -> str:
    rows = [[name.replace("_", " "), value] for name, value in found.items()]
    return report.table(["many messages behind a rate", ""], rows)

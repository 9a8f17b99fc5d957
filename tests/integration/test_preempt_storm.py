"""Thousands of preemptions in a row, and never two bodies at the same time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiting import eventually
from support.workers import CeleryWorker

KEYS = 4
STUBBORN = 40
"""Of so many calls, one goes on and must be killed."""


@pytest.mark.parametrize("number", [120, pytest.param(10_000, marks=pytest.mark.long)])
def test_calls_that_preempt_each_other_never_overlap(sending_app, redis_url, redis_client, number):
    """Two workers; most bodies let the exception out, and a few must be killed."""
    each = number // KEYS
    name = "integration.preempt_app.storm"
    patient = redis.Redis.from_url(redis_url, socket_timeout=None)

    def play(key):
        for version in range(each + 1):
            sending_app.send_task(name, (key, version, version % STUBBORN == 7))
            began = patient.blpop(f"began:{key}", 60)
            assert began is not None, f"{version} of {key} does not begin"
            assert int(began[1]) == version
        redis_client.set(f"over:{key}", 1)

    started = time.monotonic()
    options = {"concurrency": KEYS}
    with (
        CeleryWorker("integration.preempt_app", redis_url, **options),
        CeleryWorker("integration.preempt_app", redis_url, **options),
        ThreadPoolExecutor(KEYS) as threads,
        patient,
    ):
        list(threads.map(play, range(KEYS)))
        took = time.monotonic() - started
        store = RedisAdminStore(redis_client)
        for key in range(KEYS):
            lock = f"storm:{key}"
            eventually(lambda lock=lock: not store.inspect(lock).holders, message="it is free")
            assert store.inspect(lock).counters["preempted"] == each
    assert redis_client.lrange("overlaps", 0, -1) == []
    print(f"{each * KEYS} preemptions in {took:.0f} s, no overlap")

"""Tasks with groups."""

import os
import time

import redis
from celery import Celery

from celery_singleton_lock import LockedTask

URL = os.environ["CELERY_RESULT_BACKEND"]
app = Celery("fair", broker=os.environ["CELERY_BROKER_URL"], backend=URL)
app.conf.singleton_lock_backend = URL
client = redis.Redis.from_url(URL)


def until_opened(gate):
    while not client.exists(gate):
        time.sleep(0.05)


@app.task(base=LockedTask, lock_key="api", lock_fair_by="{tenant}")
def call(tenant, n, gate=""):
    client.rpush("order", tenant)
    if gate:
        until_opened(gate)
    return n


@app.task(
    base=LockedTask, lock_key="shared", lock_limit=3, lock_fair_by="{tenant}", lock_fair_limit=1
)
def limited(tenant, n):
    most = client.incr(f"now:{tenant}")
    client.rpush(f"most:{tenant}", most)
    time.sleep(0.05)
    client.decr(f"now:{tenant}")
    return n


@app.task(
    base=LockedTask,
    lock_key="shared2",
    lock_limit=3,
    lock_fair_by=lambda tenant, gate: tenant,
    lock_fair_limit=1,
)
def held(tenant, gate):
    until_opened(gate)


@app.task(
    base=LockedTask,
    lock_key="skipping",
    lock_limit=3,
    lock_on_conflict="skip",
    lock_fair_by="{tenant}",
    lock_fair_limit=1,
)
def skipping(tenant, gate):
    until_opened(gate)

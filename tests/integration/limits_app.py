"""Tasks whose arguments give limit and rate."""

import os
import time

import redis
from celery import Celery

from celery_singleton_lock import LockedTask

URL = os.environ["CELERY_RESULT_BACKEND"]
app = Celery("limits", broker=os.environ["CELERY_BROKER_URL"], backend=URL)
app.conf.singleton_lock_backend = URL
client = redis.Redis.from_url(URL)


@app.task(base=LockedTask, lock_key="plan", lock_limit="{permits}")
def by_plan(n, permits):
    client.incr("running")
    while not client.exists("go"):
        time.sleep(0.02)
    return n


@app.task(base=LockedTask, lock_key="rated", lock_limit=9, lock_rate=lambda n, rate: rate)
def by_rate(n, rate):
    return n


@app.task(base=LockedTask, lock_key="usual")
def usual(n):
    return n

"""Tasks with several locks that have rates."""

import os
import time

import redis
from celery import Celery

from celery_singleton_lock import Limit, LockedTask

URL = os.environ["CELERY_RESULT_BACKEND"]
app = Celery("rate_sets", broker=os.environ["CELERY_BROKER_URL"], backend=URL)
app.conf.singleton_lock_backend = URL
app.conf.singleton_lock_lease = 15.0
client = redis.Redis.from_url(URL)

KEYS = {
    "1:tenant:{tenant}": Limit(1, rate="3/2s"),
    "2:crm": 2,
    "3:llm": Limit(None, rate="4/2s"),
}


def ask(tenant, n):
    client.rpush("began", f"{tenant}:{n}")
    time.sleep(0.05)
    return n


early = app.task(base=LockedTask, name="early", lock_keys=KEYS)(ask)
late = app.task(base=LockedTask, name="late", lock_keys=KEYS, acks_late=True)(ask)


@app.task(base=LockedTask, name="waits", lock_keys={"a": Limit(5, rate="1/h"), "b": 1})
def waits(n):
    return n


@app.task(base=LockedTask, name="quick", lock_keys={"a": Limit(5, rate="1/h"), "c": 1})
def quick(n):
    return n


@app.task(
    base=LockedTask,
    name="cool_down",
    lock_on_conflict="skip",
    lock_on_rate="skip",
    lock_keys={"d": Limit(5), "e": Limit(5, rate="1/h")},
)
def cool_down(n):
    return n

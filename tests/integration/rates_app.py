"""Tasks with rates."""

import os
import time

import redis
from celery import Celery

from celery_singleton_lock import LockedTask, Rate

URL = os.environ["CELERY_RESULT_BACKEND"]
app = Celery("rates", broker=os.environ["CELERY_BROKER_URL"], backend=URL)
app.conf.singleton_lock_backend = URL
client = redis.Redis.from_url(URL, socket_timeout=None)


def began(name):
    client.rpush(f"began:{name}", time.time())


@app.task(base=LockedTask, lock_key="sliding", lock_limit=3, lock_rate="4/2s")
def sliding(n):
    began("sliding")
    return n


@app.task(base=LockedTask, lock_key="smooth", lock_rate=Rate("10/s", kind="smooth"))
def smooth(n):
    began("smooth")
    return n


@app.task(
    base=LockedTask, lock_key="spaced", lock_limit=None, lock_rate=Rate("10/s", kind="smooth")
)
def spaced(n):
    began("spaced")
    return n


@app.task(base=LockedTask, lock_key="long", lock_limit=9, lock_rate="1/s")
def long(n):
    time.sleep(4)
    return n


@app.task(base=LockedTask, lock_key="daily", lock_rate="1/d")
def daily(n):
    return n


@app.task(
    base=LockedTask, lock_key="k", lock_on_conflict="skip", lock_rate="1/d", lock_on_rate="skip"
)
def cool_down(n):
    return n


@app.task(base=LockedTask, lock_key="f", lock_rate="1/d", lock_on_rate="fail")
def failing(n):
    return n


@app.task(base=LockedTask, lock_key="busy", lock_rate="1/d", lock_on_rate="fail")
def busy(n):
    began("busy")
    client.blpop("go", timeout=60)
    return n


@app.task(base=LockedTask, lock_key="r", lock_rate="2/2s", max_retries=3)
def retrying(n):
    began("retrying")
    if retrying.request.retries < 2:
        raise retrying.retry(countdown=0)
    return n


@app.task
def plain(n):
    return n

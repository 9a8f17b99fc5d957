"""Tasks of which only the newest call of a burst runs."""

import os

import redis
from celery import Celery, chord

from celery_singleton_lock import LockedTask, RetryLater

URL = os.environ["CELERY_RESULT_BACKEND"]
app = Celery("debounce", broker=os.environ["CELERY_BROKER_URL"], backend=URL)
app.conf.singleton_lock_backend = URL
client = redis.Redis.from_url(URL)


@app.task(base=LockedTask, lock_key="index:{document}", lock_debounce=5)
def index(document, version):
    client.rpush("ran", version)
    return version


@app.task(base=LockedTask, lock_key="slow", lock_debounce=600)
def slow(version):
    client.rpush("ran", version)
    return version


@app.task(base=LockedTask, lock_key="seen:{document}", lock_debounce=600, lock_mode="observe")
def seen(document, version):
    client.rpush("ran", version)
    return version


@app.task(base=LockedTask, lock_key="first:{document}", lock_debounce=5, lock_debounce_first="run")
def first(document, version):
    client.rpush("ran", version)
    return version


@app.task(base=LockedTask, bind=True, lock_key="flaky", lock_debounce=1.0, max_retries=1)
def flaky(self):
    if client.incr("tries") == 1:
        raise self.retry(countdown=0)
    return int(client.get("tries"))


@app.task(base=LockedTask, lock_key="later", lock_debounce=1.0)
def later():
    if client.incr("tries") == 1:
        raise RetryLater(0.2)
    return int(client.get("tries"))


@app.task
def collect(results):
    return results


@app.task(ignore_result=True)
def send_chord():
    client.set("body", chord([index.s("a", 1), index.s("a", 2)])(collect.s()).id)

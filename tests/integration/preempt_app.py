"""Tasks whose newest call replaces the one that runs."""

import os
import re
import time
from pathlib import Path

import redis
from celery import Celery, chord

from celery_singleton_lock import LockedTask, LockPreempted

URL = os.environ["CELERY_RESULT_BACKEND"]
app = Celery("preempt", broker=os.environ["CELERY_BROKER_URL"], backend=URL)
app.conf.singleton_lock_backend = URL
app.conf.broker_transport_options = {"visibility_timeout": 60}
client = redis.Redis.from_url(URL)

NEWEST = {"base": LockedTask, "bind": True, "lock_on_conflict": "preempt", "lock_preempt_max": 1000}


def begin(version):
    """Note how many bodies run. Call it in a ``try``: a body may be interrupted at any line."""
    client.sadd("inside", version)
    client.rpush("began", f"{version}:{client.scard('inside')}")


def body(task, version, seconds):
    """Note begin and end of a run. It ends when ``go:<version>`` is set, or after a time."""
    try:
        begin(version)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not client.exists(f"go:{version}"):
            time.sleep(0.005)
    except LockPreempted as error:
        client.rpush("preempted", f"{version}:{error.by}")
        raise
    finally:
        client.srem("inside", version)
        client.rpush("ended", version)
    return version


@app.task(**NEWEST, lock_key="build:{branch}")
def build(self, branch, version, seconds=60.0):
    return body(self, version, seconds)


@app.task(**NEWEST, lock_key="late:{branch}", acks_late=True, reject_on_worker_lost=True)
def late(self, branch, version, seconds=60.0):
    return body(self, version, seconds)


@app.task(
    **NEWEST, lock_key="auto:{branch}", autoretry_for=(Exception,), retry_kwargs={"countdown": 0}
)
def auto(self, branch, version, seconds=60.0):
    client.incr("attempts")
    return body(self, version, seconds)


@app.task(**NEWEST, lock_key="again:{branch}")
def again(self, branch, version, seconds=60.0):
    try:
        return body(self, version, seconds)
    except LockPreempted as error:
        raise self.retry(exc=error, countdown=0) from None


@app.task(**NEWEST, lock_key="clean:{branch}")
def clean(self, branch, version):
    """Ends with a result, although it was preempted."""
    try:
        body(self, version, 60.0)
    except LockPreempted:
        return "cleaned up"
    return "ran"


@app.task(**NEWEST, lock_key="short", lock_lease=1.5)
def short(self, version):
    return body(self, version, 60.0)


@app.task(**NEWEST, lock_key="slow")
def slow(self, version):
    """Cleans up until ``clean`` is set."""
    try:
        return body(self, version, 60.0)
    finally:
        while version == 1 and not client.exists("clean"):
            time.sleep(0.01)


def stubborn_body(version):
    """Neither returns nor lets the exception out."""
    begin(version)
    while not client.exists(f"go:{version}"):
        try:
            time.sleep(0.05)
        except LockPreempted:
            client.rpush("preempted", version)
    client.srem("inside", version)
    return version


@app.task(**NEWEST, lock_key="stubborn", lock_preempt_grace=0.3)
def stubborn(self, version):
    return stubborn_body(version)


@app.task(
    **NEWEST,
    lock_key="stubborn late",
    lock_preempt_grace=0.3,
    acks_late=True,
    reject_on_worker_lost=True,
)
def stubborn_late(self, version):
    return stubborn_body(version)


@app.task(**NEWEST, lock_key="native", lock_preempt_grace=0.3)
def native(self, version):
    """Stays in C code, which holds the GIL, if it is the first one."""
    client.rpush("began", f"{version}:1")
    if version == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")
    return version


@app.task(**NEWEST, lock_key="watch")
def watch(self, version):
    """Looks by itself, as a task in a thread must."""
    try:
        begin(version)
        while not client.exists(f"go:{version}"):
            if self.lock.preempted:
                client.rpush("preempted", version)
                self.lock.ensure_held()
            time.sleep(0.01)
    finally:
        client.srem("inside", version)
    return version


@app.task(base=LockedTask, lock_key="build:{branch}")
def other(branch, version):
    """Shares the lock, and parks."""
    begin(version)
    client.srem("inside", version)
    return version


@app.task
def collect(results):
    return results


@app.task(ignore_result=True)
def send_chord():
    client.set("body", chord([build.s("c", 1), collect.s([])])(collect.s()).id)


TAKE_OUT = client.register_script(
    "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1])"
)
"""Deletes the key of a body that has ended."""


@app.task(
    base=LockedTask,
    lock_key="storm:{key}",
    lock_on_conflict="preempt",
    lock_preempt_max=1_000_000,
    lock_preempt_grace=0.2,
    ignore_result=True,
)
def storm(key, version, stubborn):
    """Note each other body of the same key whose process lives."""
    own, name = f"{version}:{os.getpid()}", f"body:{key}"
    try:
        before = client.set(name, own, get=True)
        if before and Path(f"/proc/{before.decode().partition(':')[2]}").exists():
            client.rpush("overlaps", f"{before.decode()} {own}")
        client.rpush(f"began:{key}", version)
        stay(key, stubborn=stubborn)
    finally:
        TAKE_OUT([name], [own])


def stay(key, *, stubborn):
    """Stay until the storm is over; if stubborn, whatever is raised."""
    while not client.exists(f"over:{key}"):
        try:
            time.sleep(0.05)
        except LockPreempted:
            if not stubborn:
                raise

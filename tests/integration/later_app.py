"""Tasks that raise RetryLater, or close their lock for a time."""

import os
import signal
import time

import redis
from celery import Celery

from celery_singleton_lock import LockedTask, RetryLater, observe
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.events import LockClosed
from celery_singleton_lock.worker.execution.tracer import LockTracer

URL = os.environ["CELERY_RESULT_BACKEND"]
app = Celery("later", broker=os.environ["CELERY_BROKER_URL"], backend=URL)
app.conf.singleton_lock_backend = URL
app.conf.task_reject_on_worker_lost = True
client = redis.Redis.from_url(URL)


class Hooked(LockedTask):
    """Notes which hooks Celery calls."""

    abstract = True

    def on_failure(self, *_args):
        client.rpush("hooks", "failure")

    def on_retry(self, *_args):
        client.rpush("hooks", "retry")


def times(n):
    """Return how often the task with this number has begun."""
    client.rpush("began", f"{n} {time.time()}")
    return client.incr(f"times:{n}")


def limited(self, n, seconds=1.0, first=1):
    """Be refused by an API the first times, then return how often it retried and began."""
    began = times(n)
    if began <= first:
        raise RetryLater(seconds, why="429 from the API")
    return [n, self.request.retries, began]


options = {"bind": True, "base": Hooked, "autoretry_for": (Exception,), "max_retries": 0}
early = app.task(name="early", lock_key="early", **options)(limited)
late = app.task(name="late", lock_key="late", acks_late=True, **options)(limited)
unlocked = app.task(name="unlocked", lock_key="unlocked", lock_mode="off", **options)(limited)
observed = app.task(name="observed", lock_key="observed", lock_mode="observe", **options)(limited)
in_time = app.task(name="in_time", lock_key="in_time", lock_wait_timeout=3, **options)(limited)
full = app.task(name="full", lock_key="full", lock_max_waiting=0, **options)(limited)
skips = app.task(name="skips", lock_key="skips", lock_on_conflict="skip", **options)(limited)


@app.task(bind=True, name="plain")
def plain(self, n):
    raise RetryLater(30)


@app.task(name="add")
def add(numbers):
    return sum(n[0] for n in numbers)


@observe(app, LockClosed)
def note_close(event):
    """Called in the main process of a worker."""
    client.rpush("closed", f"{event.task_id} {event.seconds} {event.why} {event.lock}")


@app.task(base=LockedTask, bind=True, name="pausing", lock_key="pausing")
def pausing(self, n):
    times(n)
    if n == 1:
        self.lock.pause(2, why="429")
    return n


@app.task(base=LockedTask, bind=True, name="both", lock_keys=["a", "b"], acks_late=True)
def both(self, n, name=""):
    if times(n) == 1:
        raise RetryLater(1, name=name)
    return n


leave = LockTracer.leave


def leave_and_die(self, header, ending, *args):
    """Kill this process once, right after the script that closes the lock."""
    leave(self, header, ending, *args)
    if ending is Ending.LATER and client.getdel("die"):
        os.kill(os.getpid(), signal.SIGKILL)


LockTracer.leave = leave_and_die

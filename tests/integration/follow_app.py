"""Tasks whose duplicates have the result of the first task."""

import os

import redis
from celery import Celery, current_task
from celery.exceptions import Ignore

from celery_singleton_lock import LockedTask


class OutOfStock(Exception):
    """What a first task raises."""


def redis_of_task():
    return redis.Redis.from_url(current_task.app.conf.result_backend, socket_timeout=None)


def note(name, *values):
    redis_of_task().rpush(name, *values)


def run(month, what):
    """Run until a test says ``go``; then do what it says."""
    client = redis_of_task()
    client.rpush("pid", os.getpid())
    client.rpush("ran", what)
    _, said = client.blpop("go", 60)
    if said == b"fail":
        raise OutOfStock(month, 7)
    if said == b"ignore":
        raise Ignore
    return {"from": what}


def run_twice(self, month, what):
    result = run(month, what)
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return result


def collect(results):
    return results


def after(result):
    note("linked", str(result["from"]))
    return result


def after_error(request, error, traceback):
    note("errors", f"{request.id} {error!r}")


def other(month):
    return month


def make_app(broker, backend):
    """Return an app; tests send its tasks, and a worker runs them."""
    app = Celery("follow", broker=broker, backend=backend)
    app.conf.singleton_lock_backend = backend
    options = {
        "base": LockedTask,
        "lock_key": "report:{month}",
        "lock_unique": "until_done",
        "lock_on_duplicate": "follow",
        "shared": False,
    }
    app.task(run, name="report", **options)
    app.task(run, name="impatient", lock_wait_timeout=1, **options)
    app.task(run, name="brief", lock_lease=3, **options)
    app.task(run, name="late", acks_late=True, reject_on_worker_lost=True, **options)
    app.task(run_twice, name="retried", bind=True, max_retries=1, **options)
    for plain in (collect, after, after_error, other):
        app.task(plain, name=plain.__name__, shared=False)
    return app


if "CELERY_BROKER_URL" in os.environ:
    app = make_app(os.environ["CELERY_BROKER_URL"], os.environ["CELERY_RESULT_BACKEND"])

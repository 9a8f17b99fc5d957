"""Tasks of which a call is not sent while one like it exists."""

import os
from contextlib import contextmanager

import redis
from celery import Celery, current_task
from celery.worker.request import Request

from celery_singleton_lock import LockedTask


def redis_of_task():
    return redis.Redis.from_url(current_task.app.conf.result_backend, socket_timeout=None)


def run(month, what):
    """Run until a test says ``go``."""
    client = redis_of_task()
    client.rpush("ran", what)
    client.blpop(f"go:{what}", 60)
    return what


def run_for_user(month, what, user):
    return run(month, what)


def run_twice(self, month, what):
    run(month, what)
    if self.request.retries == 0:
        raise self.retry(countdown=1, args=(month, "again"))
    return what


def run_and_clean_up(self, month, what):
    run(month, what)
    try:
        raise self.retry(countdown=1)
    finally:
        redis_of_task().blpop("go:clean", 60)


def run_late(month, what):
    redis_of_task().rpush("pid", os.getpid())
    return run(month, what)


def replace_by(self, month):
    raise self.replace(current_task.app.tasks["started"].si(month, "instead"))


class OwnRequest(Request):
    """Does not pass the dispatcher of its worker."""


TASKS = {
    "started": (run, {"lock_unique": "until_started"}),
    "done": (run, {"lock_unique": "until_done"}),
    "seconds": (run, {"lock_unique": 600}),
    "strict": (run, {"lock_unique": "until_done", "lock_on_duplicate": "raise"}),
    "skips": (run, {"lock_unique": "until_done", "lock_on_conflict": "skip"}),
    "retried": (run_twice, {"lock_unique": "until_done", "bind": True, "max_retries": 1}),
    "cleans_up": (run_and_clean_up, {"lock_unique": "until_done", "bind": True}),
    "by_user": (run_for_user, {"lock_unique": "until_done", "lock_unique_key": "{user}"}),
    "late": (
        run_late,
        {"lock_unique": "until_done", "acks_late": True, "reject_on_worker_lost": True},
    ),
}


def make_app(url, locks=None):
    """Return an app; tests send its tasks, and a worker runs them."""
    app = Celery("unique", broker=url, backend=url)
    app.conf.singleton_lock_backend = locks or os.environ.get("LOCKS_URL", url)
    for name, (function, options) in TASKS.items():
        task = app.task(
            function,
            name=name,
            base=LockedTask,
            lock_key="report:{month}",
            shared=False,
            **options,
        )
        if "OWN_REQUEST" in os.environ:
            type(app.tasks[task.name]).Request = OwnRequest
    app.task(replace_by, name="replaced", bind=True, shared=False)
    app.task(
        run,
        name="keyed",
        base=LockedTask,
        lock_key=lambda month, what: f"report:{month}",
        lock_unique="until_done",
        shared=False,
    )
    return app


@contextmanager
def sending(app):
    """Close what an app has opened to send tasks and to wait for their results."""
    with app:
        yield app
        app.backend.result_consumer.stop()
        store = app.tasks["done"]._lock_extension.store()
        store.close()
        store.client.connection_pool.disconnect()
        app.backend.client.connection_pool.disconnect()


if "CELERY_BROKER_URL" in os.environ:
    app = make_app(os.environ["CELERY_RESULT_BACKEND"])

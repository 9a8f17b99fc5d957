"""An app whose ``task_cls`` is LockedTask."""

import os

from celery import Celery

from celery_singleton_lock import LockedTask

app = Celery(
    "task_class",
    broker=os.environ["CELERY_BROKER_URL"],
    backend=os.environ["CELERY_RESULT_BACKEND"],
    task_cls=LockedTask,
)
app.conf.singleton_lock_backend = app.conf.broker_url
app.conf.result_chord_retry_interval = 0.1


@app.task(lock_key="account:{account_id}")
def settle(account_id):
    """Return the account."""
    return account_id


@app.task
def add(numbers):
    """Return the sum."""
    return sum(numbers)

"""The task book on a Celery with changed internals, or with a user's own Request class.

``BREAK`` says how, before the worker starts:

* ``own``: tasks have a Request class that knows nothing of locks;
* ``derived``: it is derived from ours, as it should be;
* ``shared``: so it is, and tasks without locks have it too, as from a common base class;
* ``composed``: Celery makes its request classes without asking the task;
* ``unwrapped``: Celery redefines methods after it has made the class;
* ``replaced``: another bootstep puts itself before the pool, and does not ask us.
"""

from __future__ import annotations

import os
from typing import Any

from celery import bootsteps
from celery.worker import request as celery_request
from celery.worker import strategy

from celery_singleton_lock import LockedTask
from celery_singleton_lock.worker.request import LockedRequest
from integration.worker_app import app

BREAK = os.environ["BREAK"]
original = celery_request.create_request_cls


class OwnRequest(celery_request.Request):
    """A user's class."""


class DerivedRequest(LockedRequest):
    """A user's class, the right way."""


def composed(base: Any, task: Any, *args: Any, **options: Any) -> Any:
    """Ignore what the task asks for."""
    return original(celery_request.Request, task, *args, **options)


def unwrapped(base: Any, task: Any, *args: Any, **options: Any) -> Any:
    """Put Celery's methods into the class once it is there."""
    made = original(base, task, *args, **options)
    plain = original(celery_request.Request, task, *args, **options)
    made.execute_using_pool = plain.execute_using_pool
    made.on_success = plain.on_success
    return made


class Replaced(bootsteps.StartStopStep):
    """Goes to the pool directly."""

    requires = ("celery_singleton_lock.worker.bootsteps:ConsumerStep",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        consumer.on_task_request = consumer.controller.process_task


@app.task(bind=True, max_retries=1, default_retry_delay=0)
def act_plain(self: Any, n: int) -> int:
    """Take no lock, and succeed at the second attempt."""
    if not self.request.retries:
        raise self.retry()
    return n


if BREAK in ("own", "derived", "shared"):
    app.finalize()
    name = "OwnRequest" if BREAK == "own" else "DerivedRequest"
    for task in app.tasks.values():
        if isinstance(task, LockedTask) or (BREAK == "shared" and task.name == act_plain.name):
            type(task).Request = f"integration.changed_celery_app:{name}"
elif BREAK in ("composed", "unwrapped"):
    made = {"composed": composed, "unwrapped": unwrapped}[BREAK]
    celery_request.create_request_cls = strategy.create_request_cls = made
else:
    app.steps["consumer"].add(Replaced)

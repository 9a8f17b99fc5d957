"""Tasks of celery-batches with locks: each batch is one holder."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery
from celery_batches import Batches

from celery_singleton_lock import LockedTask, current_lock, observe
from celery_singleton_lock.events import LockRefused

URL = os.environ.get("CELERY_BROKER_URL", "memory://")
OPTIONS: dict[str, Any] = json.loads(os.environ.get("BATCH", "{}"))

app = Celery("batches", broker=URL, backend=URL, set_as_current=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=20,
    task_ignore_result=False,
    **OPTIONS.pop("conf", {}),
)


class LockedBatches(LockedTask, Batches):
    """A batch of two messages."""

    flush_every = 2
    flush_interval = 0.2


def declare(name: str, **options: Any) -> None:
    """Declare a task whose batches all have the lock ``batch``."""

    @app.task(
        bind=True, base=LockedBatches, name=name, shared=False,
        **{"lock_key": "batch", "lock_lease": 10, **options},
    )  # fmt: skip
    def add(self: Any, requests: Any) -> None:
        """Write down the batch, and wait until its gate is opened."""
        client = redis.Redis.from_url(URL)
        inside = client.incr("inside")
        gate = next((r.kwargs["hold"] for r in requests if r.kwargs.get("hold")), None)
        ran = {
            "ids": [r.id for r in requests],
            "inside": inside,
            "lock": current_lock().name,
            "held": self.lock.held,
            "names": [lock.name for lock in self.locks],
            "pid": os.getpid(),
            "at": float("{}.{:06}".format(*client.time())),
        }
        client.rpush("runs", json.dumps(ran))
        while gate and not client.exists(gate):
            time.sleep(0.02)
        client.decr("inside")
        for request in requests:
            self.app.backend.mark_as_done(request.id, len(requests), request=request)
        client.close()


declare("park", **OPTIONS)
declare("skip", lock_on_conflict="skip")
declare("fail", lock_on_conflict="fail")
declare("patient", lock_wait_timeout=0.5)
declare("both", lock_key=None, lock_keys=["batch", "other"])
declare("observe", lock_mode="observe")
declare("off", lock_mode="off")


if os.environ.get("BATCH_SHARED"):

    @app.task(name="usual", base=LockedTask, shared=False, lock_key="batch", lock_wait_timeout=600)
    def usual(n: int, gate: str = "") -> int:
        """Wait until its gate is opened; parked where the lock is taken."""
        client = redis.Redis.from_url(URL)
        client.rpush("usual", n)
        while gate and not client.exists(gate):
            time.sleep(0.02)
        client.close()
        return n


@observe(app, LockRefused)
def note(event: LockRefused) -> None:
    """Write down how a message was refused."""
    client = redis.Redis.from_url(URL)
    client.rpush("refused", event.policy)
    client.close()


@app.task(name="plain", shared=False)
def plain(results: Any) -> Any:
    """Return what it is given."""
    return results

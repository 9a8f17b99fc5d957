"""Tasks for pytest-celery's workers. They write to the Redis of the result backend.

A module of its own, without what only the tests' machine has: pytest-celery copies its source into
the worker's volume.
"""

from __future__ import annotations

import json
import time

from celery import Task, shared_task

from celery_singleton_lock import LockedTask, current_lock

HOLD = 120.0
"""Most seconds for which a task waits for its gate."""


@shared_task(bind=True, base=LockedTask, name="cluster.act", lock_key="k:{key}")
def act(self: Task, key: str, n: int, gate: str = "") -> int:
    """Wait for a gate, if one is named, and return ``n``."""
    client = self.app.backend.client
    facts = {"key": key, "n": n, "on": self.request.hostname, "fence": current_lock().fencing_token}
    client.rpush("journal", json.dumps({"e": "start", **facts}))
    deadline = time.monotonic() + HOLD
    while gate and not client.exists(f"gate:{gate}"):
        if time.monotonic() > deadline:
            text = f"nobody opened {gate}"
            raise TimeoutError(text)
        time.sleep(0.01)
    client.rpush("journal", json.dumps({"e": "end", **facts}))
    return n

"""Calls of an API with a quota for each customer: 100 calls and 1,000 tokens a minute."""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock import LockedTask, Rate, RetryLater

URL = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
PERIOD = os.environ.get("QUOTA_PERIOD", "m")

app = Celery("quota", broker=URL, backend=URL)
api = redis.Redis.from_url(URL)  # the API, in this example


@app.task(
    base=LockedTask,
    bind=True,
    acks_late=True,
    lock_key="customer:{customer}",
    lock_rate=[f"100/{PERIOD}", Rate(f"1000/{PERIOD}", cost="{tokens}")],
)
def ask(self: Any, customer: str, tokens: int) -> float:
    """Return when the API answered. While it answers 429, no task of the customer calls it."""
    busy_ms = api.pttl(f"busy:{customer}")
    if busy_ms > 0:
        api.incr(f"refused:{customer}")
        self.lock.charge(-tokens)  # a refused call has used none
        raise RetryLater(busy_ms / 1000, why="429 from the API")
    return time.time()

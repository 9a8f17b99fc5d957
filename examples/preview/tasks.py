"""The preview of a document: only that of its newest version is wanted."""

from __future__ import annotations

import os
import time

import redis
from celery import Celery

from celery_singleton_lock import LockedTask, LockPreempted

URL = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")

app = Celery("preview", broker=URL, backend=URL)
log = redis.Redis.from_url(URL, decode_responses=True)


@app.task(base=LockedTask, lock_key="preview:{document}", lock_on_conflict="preempt")
def preview(document: str, version: int) -> str:
    """Draw ten pages. A newer call ends this one, which cleans up first."""
    log.rpush(f"log:{document}", f"version {version} begins")
    try:
        for _ in range(10):
            time.sleep(0.2)  # draws a page
    except LockPreempted:
        log.rpush(f"log:{document}", f"version {version} ends for a newer one")
        raise
    log.rpush(f"log:{document}", f"version {version} is drawn")
    return f"{document}, version {version}"

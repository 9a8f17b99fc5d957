"""A Celery app with its locks on several servers, and a number that one task may change."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery

from celery_singleton_lock import LockedTask

app = Celery(
    "quorum", broker=os.environ["CELERY_BROKER_URL"], backend=os.environ["CELERY_RESULT_BACKEND"]
)
app.conf.update(
    singleton_lock_backend=os.environ["QUORUM_SERVERS"].split(),
    singleton_lock_on_conflict=os.environ.get("QUORUM_POLICY", "requeue"),
    singleton_lock_requeue_delay=0.1,
    singleton_lock_requeue_max=0.3,
    singleton_lock_wait_timeout=60,
    singleton_lock_lease=9,
    singleton_lock_backend_options={"longest_lease": 9, "server_timeout": 1.0},
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("QUORUM_VISIBLE", "3600")),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
)


@app.task(bind=True, base=LockedTask, lock_key="number:{name}", acks_late=True)
def add_one(self, name: str, folder: str) -> int:
    """Read, wait, and write: two at once would lose one of their additions."""
    number = Path(folder) / name
    before = int(number.read_text()) if number.exists() else 0
    gate = os.environ.get("QUORUM_GATE", "")
    deadline = time.monotonic() + 120
    while gate and not (Path(folder) / gate).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.02)
    number.write_text(str(before + 1))
    with (Path(folder) / f"{name}.fences").open("a") as fences:
        fences.write(f"{self.lock.fencing_token}\n")
    return before + 1

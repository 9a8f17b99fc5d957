"""A report from beat that takes longer than its interval, and must not overlap itself."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery

from celery_singleton_lock import LockedTask

URL = "redis://localhost:6379/0"
EVERY = float(os.environ.get("REPORT_EVERY", "10"))  # seconds
LOG = Path(os.environ.get("REPORT_LOG", "report.log"))

app = Celery("report", broker=URL, backend=URL)
app.conf.beat_schedule = {
    "report": {"task": "tasks.report", "schedule": EVERY},
    "report-catching-up": {"task": "tasks.report_catching_up", "schedule": EVERY},
}


def build(name: str) -> None:
    with LOG.open("a", buffering=1) as log:
        log.write(f"{name} begins\n")
        time.sleep(2.5 * EVERY)
        log.write(f"{name} ends\n")


@app.task(base=LockedTask, lock_args=[], lock_on_conflict="skip")
def report() -> None:
    """A run that is due while another one runs is skipped: it ends as REVOKED, with the reason."""
    build("report")


@app.task(base=LockedTask, lock_args=[], lock_max_waiting=1, lock_on_full="skip")
def report_catching_up() -> None:
    """If one or more runs are due while another one runs, one more run follows it."""
    build("report_catching_up")

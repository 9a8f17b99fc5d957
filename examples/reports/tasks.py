"""Reports that many ask for at once are made once. Three ways to treat a duplicate."""

from __future__ import annotations

import os
import time

import redis
from celery import Celery

from celery_singleton_lock import LockedTask

URL = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
TAKES = float(os.environ.get("REPORT_TAKES", "1"))  # seconds

app = Celery("reports", broker=URL, backend=URL)
made = redis.Redis.from_url(URL, decode_responses=True)


@app.task(base=LockedTask, lock_key="report:{month}", lock_unique="until_done")
def report(month: str) -> str:
    """A duplicate is not sent: its caller has the result of the first call."""
    return make(f"report of {month}")


@app.task(
    base=LockedTask,
    lock_key="invoices:{month}",
    lock_unique="until_done",
    lock_on_duplicate="raise",
)
def invoices(month: str) -> str:
    """A duplicate is not sent: its caller gets DuplicateTask."""
    return make(f"invoices of {month}")


@app.task(
    base=LockedTask,
    lock_key="chart:{month}",
    lock_unique="until_done",
    lock_on_duplicate="follow",
)
def chart(month: str) -> str:
    """A duplicate is sent, and ends with the result of the first call. So it may be in a chord."""
    return make(f"chart of {month}")


@app.task
def page(charts: list[str]) -> str:
    """Put charts on a page."""
    return f"a page with {len(charts)} charts"


def make(what: str) -> str:
    """Take some time, and count how often this was made."""
    time.sleep(TAKES)
    made.incr(f"made:{what}")
    return what

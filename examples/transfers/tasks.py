"""Transfers between accounts in a plain store. Each transfer locks both accounts."""

from __future__ import annotations

import os

import redis
from celery import Celery

from celery_singleton_lock import LockedTask

URL = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")

app = Celery("transfers", broker=URL, backend=URL)
bank = redis.Redis.from_url(URL, decode_responses=True)


@app.task(base=LockedTask, lock_keys=["account:{source}", "account:{target}"])
def transfer(source: int, target: int, amount: int) -> None:
    """Read both balances, then write both: without the locks, two at a time would lose money."""
    balances = {number: int(bank.get(f"balance:{number}") or 0) for number in (source, target)}
    balances[source] -= amount
    balances[target] += amount
    bank.mset({f"balance:{number}": balance for number, balance in balances.items()})

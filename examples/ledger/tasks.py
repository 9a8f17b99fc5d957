"""A ledger that refuses a former lock holder by its fencing token."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing

from celery import Celery

from celery_singleton_lock import LockedTask, current_lock

URL = "redis://localhost:6379/0"
FILE = os.environ.get("LEDGER_DB", "ledger.db")

app = Celery("ledger", broker=URL, backend=URL)
app.conf.singleton_lock_lease = float(os.environ.get("LEDGER_LEASE", "30"))


class StaleFence(Exception):
    """A later holder of the account's lock has already written."""


def open_ledger() -> None:
    with closing(sqlite3.connect(FILE)) as db:
        db.executescript("""
            PRAGMA journal_mode = WAL;
            CREATE TABLE IF NOT EXISTS account
                (id INTEGER PRIMARY KEY, balance INTEGER, fence INTEGER);
        """)


def post(account_id: int, amount: int, fence: int) -> None:
    """Add an amount, unless the account has seen a higher fence.

    The check and the write are one statement, so nothing can come between them.
    """
    with closing(sqlite3.connect(FILE, timeout=10)) as db, db:
        rows = db.execute(
            "INSERT INTO account VALUES (:id, :amount, :fence) ON CONFLICT (id) DO UPDATE "
            "SET balance = balance + :amount, fence = :fence WHERE fence <= :fence",
            {"id": account_id, "amount": amount, "fence": fence},
        ).rowcount
    if rows == 0:
        msg = f"account {account_id} has seen a fence above {fence}"
        raise StaleFence(msg)


def balance(account_id: int) -> int:
    with closing(sqlite3.connect(FILE)) as db:
        row = db.execute("SELECT balance FROM account WHERE id = ?", [account_id]).fetchone()
    return row[0] if row else 0


@app.task(base=LockedTask, lock_key="account:{account_id}")
def settle(account_id: int, amount: int, seconds: float = 0.0) -> int:
    time.sleep(seconds)  # a call to the bank; the machine may be suspended here for minutes
    post(account_id, amount, current_lock().fencing_token)
    return balance(account_id)

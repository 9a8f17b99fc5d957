"""A flash sale: many orders for one stock number, with a delay between read and write."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing

from celery import Celery

from celery_singleton_lock import LockedTask

URL = "redis://localhost:6379/0"
FILE = os.environ.get("FLASH_SALE_DB", "flash_sale.db")

app = Celery("flash_sale", broker=URL, backend=URL)


def database() -> closing[sqlite3.Connection]:
    """Return a connection on which each statement is a transaction of its own."""
    return closing(sqlite3.connect(FILE, timeout=10, isolation_level=None))


def open_shop(stock: dict[str, int]) -> None:
    with database() as db:
        db.executescript("""
            PRAGMA journal_mode = WAL;
            DROP TABLE IF EXISTS stock;
            DROP TABLE IF EXISTS sales;
            CREATE TABLE stock (product TEXT PRIMARY KEY, items INTEGER);
            CREATE TABLE sales (product TEXT, buyer INTEGER);
        """)
        db.executemany("INSERT INTO stock VALUES (?, ?)", stock.items())


def sell(product: str, buyer: int) -> bool:
    """Read, wait, write: correct for one order at a time, wrong for two."""
    with database() as db:
        (items,) = db.execute("SELECT items FROM stock WHERE product = ?", [product]).fetchone()
        if items == 0:
            return False
        time.sleep(0.01)  # payment
        db.execute("UPDATE stock SET items = ? WHERE product = ?", [items - 1, product])
        db.execute("INSERT INTO sales VALUES (?, ?)", [product, buyer])
        return True


@app.task
def buy_unlocked(product: str, buyer: int) -> bool:
    return sell(product, buyer)


@app.task(base=LockedTask, lock_key="product:{product}")
def buy(product: str, buyer: int) -> bool:
    return sell(product, buyer)

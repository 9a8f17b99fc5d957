"""The demo's Celery app: a shop that can oversell, and two tasks that sell.

``celery -A celery_singleton_lock.demo.shop worker`` starts the worker. CELERY_BROKER_URL is the URL
of its broker, CSL_DEMO_DIR the directory of the shops.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from celery import Celery, signals

from celery_singleton_lock.task import LockedTask

DIRECTORY: Final = "CSL_DEMO_DIR"
LOCK_KEY: Final = "product:{product}"
READY: Final = "worker.ready"
PATIENCE: Final = 10.0
"""Seconds that a writer waits for another. SQLite allows one at a time."""

AFTER_THE_SALE: Final = 0.4
"""Share of an order's work that follows the sale, so that some kills happen after the sale."""

app: Final = Celery("flash-sale")
app.conf.update(
    broker_url=os.environ.get("CELERY_BROKER_URL"),
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    # The message goes back to the queue if the process that runs it dies.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
)


# --- the tasks ------------------------------------------------------------------------------------


@app.task  # type: ignore[untyped-decorator]  # celery is untyped
def buy(*, run: str, order: int, product: str, units: int, work: float) -> None:
    """Sell without a lock: read the stock, work, write the stock."""
    sell(run, order, product, units, work, fence=0)


@app.task(base=LockedTask, lock_key=LOCK_KEY, bind=True)  # type: ignore[untyped-decorator]
def buy_locked(self: Any, *, run: str, order: int, product: str, units: int, work: float) -> None:
    """Sell, one order per product at a time. The decorator is the only difference."""
    sell(run, order, product, units, work, fence=self.lock.fencing_token)


def sell(run: str, order: int, product: str, units: int, work: float, *, fence: int) -> None:
    """Serve one order. The code is the same with and without the lock.

    The lock serializes the orders of a product. It cannot undo the work of a killed process, whose
    message is delivered again. The task must handle that:

    * The sale is atomic: order and stock are written in one transaction.
    * It is idempotent by order number: if the process is killed after the transaction, the next
      delivery finds the order and does not sell again.
    * It is fenced: the transaction carries the fencing token, and the shop refuses a lower token
      than it has seen. So a former holder, which was paused or cut off, cannot write later.
    """
    directory = Path(os.environ[DIRECTORY])
    shop, events = Shop(directory, run), EventFile(directory, run)
    events.write("start", order, product, fence)
    if not shop.has(order):
        stock = shop.stock(product)
        time.sleep(work * (1 - AFTER_THE_SALE))  # payment, label …
        sold = min(units, stock)
        shop.record(order, product, sold, stock - sold, fence)
        time.sleep(work * AFTER_THE_SALE)
    events.write("end", order, product, fence)


# --- the shop: a store with a race ----------------------------------------------------------------


class StaleFenceError(RuntimeError):
    """A task with a later grant has written already."""


class Shop:
    """Stock and orders of one run, in SQLite. A read followed by a write is a race.

    Args:
        directory: directory of the shops.
        run: name of the run. Each run has its own shop.
    """

    def __init__(self, directory: Path, run: str) -> None:
        """Set the path. Each call opens the file."""
        self._path = directory / f"{run}.sqlite"

    def create(self, stock: Mapping[str, int]) -> None:
        """Create the tables, with a stock."""
        with self._transaction() as tables:
            tables.execute("CREATE TABLE stock (product TEXT PRIMARY KEY, units INT, fence INT)")
            tables.execute("CREATE TABLE orders (id INT PRIMARY KEY, product TEXT, units INT)")
            tables.executemany("INSERT INTO stock VALUES (?, ?, 0)", stock.items())

    def has(self, order: int) -> bool:
        """Whether the order was served."""
        return bool(self._rows("SELECT 1 FROM orders WHERE id = ?", order))

    def stock(self, product: str) -> int:
        """Return the units in stock."""
        return int(self._rows("SELECT units FROM stock WHERE product = ?", product)[0][0])

    def record(self, order: int, product: str, sold: int, left: int, fence: int) -> None:
        """Write the order (0 units: sold out) and the new stock, in one transaction.

        Raises:
            StaleFenceError: a task with a later grant has written. Nothing was changed.
        """
        with self._transaction() as tables:
            written = tables.execute(
                "UPDATE stock SET units = ?, fence = ? WHERE product = ? AND fence <= ?",
                (left, fence, product, fence),
            )
            if written.rowcount != 1:
                msg = f"order {order}: a later holder of {product} has written already"
                raise StaleFenceError(msg)
            tables.execute("INSERT INTO orders VALUES (?, ?, ?)", (order, product, sold))

    def left(self) -> dict[str, int]:
        """Return the stock of each product."""
        return dict(self._rows("SELECT product, units FROM stock"))

    def orders(self) -> dict[int, int]:
        """Return the units sold to each served order."""
        return dict(self._rows("SELECT id, units FROM orders"))

    def sold(self) -> dict[str, int]:
        """Return the units sold of each product."""
        return dict(self._rows("SELECT product, SUM(units) FROM orders GROUP BY product"))

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._transaction() as tables:
            return tables.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=PATIENCE)) as tables, tables:
            # Without fsync: only a crash of the machine loses data, not the kill of a process.
            tables.execute("PRAGMA synchronous = OFF")
            yield tables


class EventFile:
    """A file with one line for each start and each end of a task.

    Each line is one write to a file opened for appending, so lines of several processes do not mix,
    and the lines of a killed process stay.
    """

    def __init__(self, directory: Path, run: str) -> None:
        """Set the path."""
        self._path = directory / f"{run}.events"
        self._offset = 0

    def write(self, kind: str, order: int, product: str, fence: int) -> None:
        """Append an event of this process, with the present time."""
        event = [kind, time.monotonic(), os.getpid(), order, product, fence]
        line = json.dumps(event).encode() + b"\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def read(self) -> Iterable[list[Any]]:
        """Return the events that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


# --- start and end of the worker ------------------------------------------------------------------


@signals.worker_init.connect  # type: ignore[untyped-decorator]  # celery is untyped
def end_with_the_demo(**_: object) -> None:
    """End the worker when its standard input is closed, which means that the demo was killed."""
    if DIRECTORY in os.environ and os.getpgrp() == os.getpid():
        threading.Thread(target=_await_the_end, name="demo-await-end", daemon=True).start()


def _await_the_end() -> None:
    while os.read(0, 64):
        pass
    shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


@signals.worker_ready.connect  # type: ignore[untyped-decorator]  # celery is untyped
def report_ready(**_: object) -> None:
    """Create the file that shows the demo that the worker is ready."""
    Path(os.environ[DIRECTORY], READY).touch()

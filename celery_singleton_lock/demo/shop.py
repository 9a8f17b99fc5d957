# it plays work by sleeping; no lock decision is made here
"""The flash sale's Celery app: a shop that can oversell, and the two tasks that buy in it.

The worker is started with ``celery -A celery_singleton_lock.demo.shop worker``; it finds its broker
in CELERY_BROKER_URL, and the shops in the directory CSL_DEMO_DIR.
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
"""Seconds that a writer waits for another; SQLite has one at a time."""

AFTER_THE_SALE: Final = 0.4
"""Share of an order's work that follows the sale, so that kills strike there as well."""

app = Celery("flash-sale")
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
    """Buy as most first versions do: look at the stock, work, write the stock back."""
    sell(run, order, product, units, work, fence=0)


@app.task(base=LockedTask, lock_key=LOCK_KEY, bind=True)  # type: ignore[untyped-decorator]
def buy_locked(self: Any, *, run: str, order: int, product: str, units: int, work: float) -> None:
    """Buy, one order at a time per product. That line above is the whole difference."""
    sell(run, order, product, units, work, fence=self.lock.fencing_token)


def sell(run: str, order: int, product: str, units: int, work: float, *, fence: int) -> None:
    """Serve one order: the same code, with and without the lock.

    The lock keeps two orders of a product apart. It cannot undo what a killed process has half
    done, and its message comes again; that is the task's part, and takes three things:

    * the sale is one step: the order and the new stock are written in one transaction, so a kill
      leaves both or neither;
    * it is idempotent by order number: what was killed after that step finds its order, and does
      not buy again;
    * that step is fenced: it carries the number of the grant, and the shop refuses a lower one than
      it has seen, so a holder that was only believed dead (paused, cut off) cannot write later.
    """
    directory = Path(os.environ[DIRECTORY])
    shop, marks = Shop(directory, run), Marks(directory, run)
    marks.write("start", order, product, fence)
    if not shop.has(order):
        stock = shop.stock(product)
        time.sleep(work * (1 - AFTER_THE_SALE))  # ask the bank, print the label …
        sold = min(units, stock)
        shop.record(order, product, sold, stock - sold, fence)
        time.sleep(work * AFTER_THE_SALE)
    marks.write("end", order, product, fence)


# --- the shop: a store with a race ----------------------------------------------------------------


class StaleFenceError(RuntimeError):
    """Somebody with a later grant has written already."""


class Shop:
    """Stock and orders of one run, in SQLite. What lies between a read and a write is a race.

    Args:
        directory: where the shops are.
        run: name of the run, which has a shop of its own.
    """

    def __init__(self, directory: Path, run: str) -> None:
        """Know the place; each call opens the file anew."""
        self._path = directory / f"{run}.sqlite"

    def open_doors(self, stock: Mapping[str, int]) -> None:
        """Make the tables, and fill the shelves."""
        with self._transaction() as tables:
            tables.execute("CREATE TABLE stock (product TEXT PRIMARY KEY, units INT, fence INT)")
            tables.execute("CREATE TABLE orders (id INT PRIMARY KEY, product TEXT, units INT)")
            tables.executemany("INSERT INTO stock VALUES (?, ?, 0)", stock.items())

    def has(self, order: int) -> bool:
        """Whether the order was served."""
        return bool(self._rows("SELECT 1 FROM orders WHERE id = ?", order))

    def stock(self, product: str) -> int:
        """Return how many units are on the shelf."""
        return int(self._rows("SELECT units FROM stock WHERE product = ?", product)[0][0])

    def record(self, order: int, product: str, sold: int, left: int, fence: int) -> None:
        """Write the order (0 units: sold out) and the new stock, in one transaction.

        Raises:
            StaleFenceError: a later grant has written; nothing was changed.
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
        """Return the units sold to each order that was served."""
        return dict(self._rows("SELECT id, units FROM orders"))

    def sold(self) -> dict[str, int]:
        """Return the units of each product that were sold, by the orders."""
        return dict(self._rows("SELECT product, SUM(units) FROM orders GROUP BY product"))

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._transaction() as tables:
            return tables.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=PATIENCE)) as tables, tables:
            # A crash of this machine would lose the shop, a killed process does not.
            tables.execute("PRAGMA synchronous = OFF")
            yield tables


class Marks:
    """A run's journal: one line when a task has begun, one when it has ended.

    Each line is one write to a file opened for appending, so lines of several processes do not mix,
    and what a killed process has written stays.
    """

    def __init__(self, directory: Path, run: str) -> None:
        """Know the place."""
        self._path = directory / f"{run}.marks"
        self._offset = 0

    def write(self, kind: str, order: int, product: str, fence: int) -> None:
        """Append a mark of this process, now."""
        mark = [kind, time.monotonic(), os.getpid(), order, product, fence]
        line = json.dumps(mark).encode() + b"\n"
        journal = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(journal, line)
        finally:
            os.close(journal)

    def read(self) -> Iterable[list[Any]]:
        """Return the marks that were written since the last call."""
        try:
            with self._path.open("rb") as journal:
                journal.seek(self._offset)
                whole, newline, _ = journal.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


# --- the worker's life ----------------------------------------------------------------------------


@signals.worker_init.connect  # type: ignore[untyped-decorator]  # celery is untyped
def end_with_the_demo(**_: object) -> None:
    """End when standard input ends: the demo holds its other side, and has been killed itself."""
    if DIRECTORY in os.environ and os.getpgrp() == os.getpid():
        threading.Thread(target=_await_the_end, name="demo-lifeline", daemon=True).start()


def _await_the_end() -> None:
    while os.read(0, 64):
        pass
    shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


@signals.worker_ready.connect  # type: ignore[untyped-decorator]  # celery is untyped
def tell_ready(**_: object) -> None:
    """Tell the demo that orders are taken."""
    Path(os.environ[DIRECTORY], READY).touch()

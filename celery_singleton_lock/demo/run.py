"""One run of the flash sale: publish the orders, wait until they are served, kill processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from celery_singleton_lock.demo.figures import Figures, figures_of
from celery_singleton_lock.demo.history import History
from celery_singleton_lock.demo.killer import Killer
from celery_singleton_lock.demo.shop import EventFile, Shop, app
from celery_singleton_lock.demo.signals import tick
from celery_singleton_lock.demo.worker import Worker
from celery_singleton_lock.demo.workload import STOCK, Order

STALLED: Final = 12.0
"""Seconds without progress after which a run ends. Its open orders count as lost."""


class Display(Protocol):
    """Shows a run in progress."""

    def watch(self, run: Run) -> None:
        """Show the state of a run. Called often."""
        ...


@dataclass(frozen=True, slots=True)
class Variant:
    """The properties in which the three runs differ.

    Args:
        name: ``plain``, ``locked`` or ``killed``.
        title: display text.
        task: the task that serves an order.
        kills: number of processes to kill.
    """

    name: str
    title: str
    task: Any
    kills: int = 0

    @property
    def is_locked(self) -> bool:
        """Whether its tasks are locked."""
        return self.name != "plain"


class Run:
    """One run.

    Args:
        variant: the variant of this run.
        orders: the orders, by time of arrival.
        worker: the Celery worker.
        url: URL of the broker.
        directory: directory of the shops.
        seed: seed of the kills.
    """

    def __init__(
        self,
        variant: Variant,
        orders: list[Order],
        worker: Worker,
        *,
        url: str,
        directory: Path,
        seed: int,
    ) -> None:
        """Create the shop with its stock."""
        self.variant = variant
        self.orders = orders
        self.history: History = History()
        self.started: float = 0.0
        self.ended: float = 0.0
        self.shop: Shop = Shop(directory, variant.name)
        self.shop.create(STOCK)
        self._events = EventFile(directory, variant.name)
        self._worker = worker
        self._url = url
        self._killer = Killer(variant.kills, len(orders), seed)
        self._unsent = deque(orders)
        self._last_progress = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the start until now, or until the end."""
        return (self.ended or time.monotonic()) - self.started

    @property
    def published(self) -> int:
        """Number of orders that were published."""
        return len(self.orders) - len(self._unsent)

    def execute(self, display: Display, until: float) -> Figures:
        """Publish the orders as they arrive, and wait until all are served.

        Args:
            display: shows the run.
            until: monotonic time at which the run ends in any case.

        Raises:
            DemoError: the worker has ended.
        """
        self.started = self._last_progress = time.monotonic()
        task = self.variant.task
        # With the URL, because CELERY_BROKER_URL may name the user's own broker.
        with app.connection_for_write(self._url) as connection, connection.Producer() as producer:
            while not self._is_over(until):
                self._publish(lambda order: task.apply_async((), order, producer=producer))
                self._observe()
                display.watch(self)
                tick()
        self.ended = time.monotonic()
        return self._figures()

    def _is_over(self, until: float) -> bool:
        now = time.monotonic()
        served = not self._unsent and len(self.history.finished()) == len(self.orders)
        return served or now > until or now - self._last_progress > STALLED

    def _publish(self, send: Callable[[dict[str, object]], object]) -> None:
        while self._unsent and self._unsent[0].arrives <= self.seconds:
            order = self._unsent.popleft()
            send(
                {
                    "run": self.variant.name,
                    "order": order.number,
                    "product": order.product,
                    "units": order.units,
                    "work": order.work,
                }
            )
            self._last_progress = time.monotonic()

    def _observe(self) -> None:
        self._worker.ensure_running()
        if self.history.add(self._events.read()):
            self._last_progress = time.monotonic()
        self._killer.kill_if_due(self.history, self._events)

    def _figures(self) -> Figures:
        sent = self.orders[: self.published]
        return figures_of(sent, self.shop.orders(), self.shop.left(), self.history, self.seconds)

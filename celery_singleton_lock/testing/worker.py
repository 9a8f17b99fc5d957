"""A worker in a thread of this process, without the delays of kombu and Celery."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, Final

from celery.contrib.testing.worker import start_worker

POLL: Final = 0.01
"""Seconds between two polls of a broker in memory; kombu's default is 1 s."""


@contextmanager
def worker_in_thread(
    app: Any, *, pool: str = "threads", concurrency: int = 4, **options: Any
) -> Iterator[Any]:
    """Run a worker in a thread of this process, within a ``with`` block.

    The app needs a broker that this process can reach, such as ``broker_url = "memory://"``.

    Args:
        app: the Celery app.
        pool: ``threads``, or ``solo``: one task at a time. With ``solo`` a granted task starts up
            to 2 s later, at the next iteration of Celery's event loop.
        concurrency: number of tasks that run at the same time.
        options: those of ``celery.contrib.testing.worker.start_worker``.

    Yields:
        Celery's worker.
    """
    options.setdefault("perform_ping_check", False)
    with (
        _logging_kept(),
        _quick_broker(app),
        start_worker(app, pool=pool, concurrency=concurrency, **options) as worker,
    ):
        yield worker
        # After this line, start_worker() requests the worker to stop. Without the broadcast, the
        # worker would notice that up to 2 s later.
        Timer(POLL, _rouse, [app]).start()


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Restore the root logger, which a worker changes: later tests would see no warnings."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextmanager
def _quick_broker(app: Any) -> Iterator[None]:
    before = app.conf.broker_transport_options
    app.conf.broker_transport_options = {"polling_interval": POLL, **(before or {})}
    try:
        yield
    finally:
        app.conf.broker_transport_options = before


def _rouse(app: Any) -> None:
    """Wake the event loops of the workers."""
    app.control.broadcast("ping")

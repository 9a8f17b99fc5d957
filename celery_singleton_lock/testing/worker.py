"""A worker in a thread of this process, as quick as tests want it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, Final

from celery.contrib.testing.worker import start_worker

POLL: Final = 0.01
"""Seconds between two looks for messages at a broker in memory; kombu looks once a second."""


@contextmanager
def worker_in_thread(
    app: Any, *, pool: str = "threads", concurrency: int = 4, **options: Any
) -> Iterator[Any]:
    """Run a worker of an app in a thread of this process, within a ``with`` block.

    The app needs a broker that this process can reach: ``broker_url = "memory://"`` will do.

    Args:
        app: the Celery app.
        pool: ``threads``; or ``solo``, one task at a time, where each parked task begins up to 2 s
            after its turn has come, when Celery's main loop goes round.
        concurrency: how many tasks run at once.
        options: as of ``celery.contrib.testing.worker.start_worker``.

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
        # It is told to end behind this line, and would look for that in up to 2 s.
        Timer(POLL, _rouse, [app]).start()


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Undo what a worker does to the root logger: tests behind it would see no warnings."""
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
    """Have the main loops of workers go round."""
    app.control.broadcast("ping")

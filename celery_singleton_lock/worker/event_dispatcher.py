"""Celery's dispatcher of events, made to take those of locks."""

from __future__ import annotations

from typing import Any


def open_buffers(dispatcher: Any) -> None:
    """Have a place for each group of events before a thread sends the first of one.

    Celery's dispatcher makes it then, without its mutex: in the midst of the main loop's look at
    all of them, that look raises, and ends the worker.
    """
    for group in ("task", "lock"):
        dispatcher._group_buffer[group]  # noqa: SLF001  # a defaultdict makes it


def admit(dispatcher: Any) -> None:
    """Have ``lock-…`` events sent as those of tasks are: whenever these are, and in batches."""
    if dispatcher.groups:
        dispatcher.groups.add("lock")
    if "task" in dispatcher.buffer_group:
        dispatcher.buffer_group = {*dispatcher.buffer_group, "lock"}

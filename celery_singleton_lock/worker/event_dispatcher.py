"""Makes Celery's event dispatcher send ``lock-…`` events."""

from __future__ import annotations

from typing import Any


def open_buffers(dispatcher: Any) -> None:
    """Create the event buffers now, before several threads send events.

    Celery's dispatcher creates a buffer for the first event of a group, without holding its mutex.
    If the main loop iterates over all buffers at that moment, it raises, and the worker ends.
    """
    for group in ("task", "lock"):
        dispatcher._group_buffer[group]  # noqa: SLF001  # a defaultdict creates it


def enable_lock_events(dispatcher: Any) -> None:
    """Send ``lock-…`` events whenever task events are sent, and in batches like them."""
    if dispatcher.groups:
        dispatcher.groups.add("lock")
    if "task" in dispatcher.buffer_group:
        dispatcher.buffer_group = {*dispatcher.buffer_group, "lock"}

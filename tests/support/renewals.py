"""Wait until the lease of a held lock is renewed, as its server sees it."""

from __future__ import annotations

import time
from typing import Any

from support.waiting import eventually

MARGIN = 0.05
"""Seconds by which a renewal moves the end of a lease at least."""


def await_renewals(store: Any, name: str = "lock", times: int = 2) -> None:
    """Wait until the end of a lease has moved so many times; fail at once if nobody holds the lock.

    Args:
        store: the store.
        name: name of a lock with one holder.
        times: number of renewals.
    """
    for _ in range(times):
        # Read the clock last here, and first below: a pause must not look like a renewal.
        end = _left(store, name) + time.monotonic()

        def is_moved(end: float = end) -> bool:
            return time.monotonic() + _left(store, name) > end + MARGIN

        eventually(is_moved, message=f"the lease of {name!r} is renewed")


def _left(store: Any, name: str) -> float:
    (holder,) = store.inspect(name).holders
    return float(holder.expires_in)

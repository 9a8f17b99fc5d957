"""Closes pools of redis-py and valkey-py, of all versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def closing_pool(pool: Any) -> Iterator[Any]:
    """Close the connections of a pool at the end; in redis-py 5.0.0 it has no close()."""
    try:
        yield pool
    finally:
        pool.disconnect()

"""A worker pool that this library does not know."""

from __future__ import annotations

from celery.concurrency.base import BasePool


class OddPool(BasePool):
    """Runs nothing."""

"""A worker pool that the library cannot know."""

from __future__ import annotations

from celery.concurrency.base import BasePool


class OddPool(BasePool):
    """Runs nothing."""

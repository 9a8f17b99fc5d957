"""The commands of operators.

``celery -A app locks …`` by the entry point ``celery.commands``; ``celery-singleton-lock …`` where
there is no app.
"""

from __future__ import annotations

from celery_singleton_lock.cli.commands import locks
from celery_singleton_lock.cli.standalone import main

__all__ = ["locks", "main"]

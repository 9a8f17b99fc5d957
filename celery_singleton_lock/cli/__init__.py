"""The commands of operators.

``celery -A app locks …`` by the entry point ``celery.commands``; ``celery-singleton-lock …`` where
there is no app.
"""

from __future__ import annotations

import importlib
import sys

from celery_singleton_lock.cli.commands import locks
from celery_singleton_lock.cli.main import main

__all__ = ["locks", "main"]

if "celery.worker.control" in sys.modules:
    # In the program `celery`, which loads us before it looks for the commands of `celery inspect`;
    # the app may not have made its tasks by then, and so not have told of them.
    importlib.import_module("celery_singleton_lock.worker.remote_control")

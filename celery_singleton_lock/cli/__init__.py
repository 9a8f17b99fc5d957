"""The commands for operators.

``celery -A app locks …`` is registered by the entry point ``celery.commands``.
``celery-singleton-lock …`` needs no app.
"""

from __future__ import annotations

import importlib
import sys

from celery_singleton_lock.cli.commands import locks
from celery_singleton_lock.cli.main import main

__all__ = ["locks", "main"]

if "celery.worker.control" in sys.modules:
    # The program `celery` imports this package before it lists the commands of `celery inspect`.
    # The app may not have loaded its tasks yet, so they are registered here.
    importlib.import_module("celery_singleton_lock.worker.remote_control")

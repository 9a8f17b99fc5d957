"""The task book as another version of this library would run it: it knows another schema."""

from __future__ import annotations

import os

from celery_singleton_lock.worker.bootsteps import startup_checks_redis as backend_checks
from celery_singleton_lock.store import message_operations as store
from integration import worker_app

app = worker_app.app
backend_checks.SCHEMA = store.SCHEMA = os.environ["SCHEMA"]

"""The task book with another data schema, as another version of this library would have."""

from __future__ import annotations

import os

from celery_singleton_lock.store import operations as store
from celery_singleton_lock.worker import startup_checks_redis
from integration import worker_app

app = worker_app.app
startup_checks_redis.SCHEMA = store.SCHEMA = os.environ["SCHEMA"]

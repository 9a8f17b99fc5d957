"""The task book with another data schema, as another version of this library would have."""

from __future__ import annotations

import os

from celery_singleton_lock.store import error_mapping, operations
from celery_singleton_lock.worker import extension, startup_checks_redis
from celery_singleton_lock.worker.agent import data_loss, loop
from integration import worker_app

app = worker_app.app
schema = os.environ["SCHEMA"]
for module in (extension, operations):
    module.SCHEMA = module.FLOW_SCHEMA = schema
for module in (error_mapping, startup_checks_redis, data_loss, loop):
    module.SCHEMAS = (schema,)

"""Celery's own tests, with every task a `LockedTask`: that is each app's base class of tasks."""

from __future__ import annotations

import os

from celery import Celery
from celery.contrib.testing.app import DEFAULT_TEST_CONFIG

Celery.task_cls = "celery_singleton_lock:LockedTask"
DEFAULT_TEST_CONFIG["singleton_lock_backend"] = os.environ["REDIS_URL"]

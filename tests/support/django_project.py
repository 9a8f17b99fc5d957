"""Django in the process of the tests, which share it: settings are put in place for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import django
from django.conf import settings
from django.core.cache import caches
from django.db import connections
from django.test.utils import override_settings

REDIS = "django.core.cache.backends.redis.RedisCache"
DATABASE = "django.core.cache.backends.db.DatabaseCache"
MEMORY = "django.core.cache.backends.locmem.LocMemCache"


@contextlib.contextmanager
def project(database: str = ":memory:", **changed: Any) -> Iterator[None]:
    """Have a Django project with these settings, and a database of SQLite."""
    if not settings.configured:  # other tests may have
        settings.configure(LOGGING_CONFIG=None)
    django.setup()
    default = {"ENGINE": "django.db.backends.sqlite3", "NAME": database, "OPTIONS": {"timeout": 10}}
    before = connections.settings
    connections.settings = connections.configure_settings({"default": default})
    try:
        with override_settings(USE_TZ=True, **changed):
            yield
    finally:
        close()
        connections.settings = before


def close() -> None:
    """Close what this thread has opened."""
    caches.close_all()
    connections.close_all()
    for alias in connections:
        with contextlib.suppress(AttributeError):
            delattr(connections._connections, alias)

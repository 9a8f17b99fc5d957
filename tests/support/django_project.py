"""A Django project in the test process, with temporary settings."""

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
    """Set up a Django project with these settings and an SQLite database."""
    if not settings.configured:  # another test may have done so
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
    """Close the caches and connections of this thread."""
    caches.close_all()
    connections.close_all()
    for alias in connections:
        with contextlib.suppress(AttributeError):
            delattr(connections._connections, alias)

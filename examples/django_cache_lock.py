"""A report that is built by one caller at a time, with a lock on a Django cache."""

import os
from collections.abc import Callable

from django.conf import settings

from celery_singleton_lock.django import LockTimeout, cache_locked

if not settings.configured:  # in a project this is in settings.py
    redis = os.environ.get("CACHE_URL", "redis://localhost:6379/1")
    backend = "django.core.cache.backends.redis.RedisCache"
    settings.configure(CACHES={"default": {"BACKEND": backend, "LOCATION": redis}})


@cache_locked("report:{month}", lease=60, wait_timeout=0.2)
def build(month: str, meanwhile: Callable[[], None]) -> None:
    meanwhile()
    print(f"the report of {month} is built")


def somebody_else() -> None:
    try:
        build("May", print)
    except LockTimeout as busy:
        print(f"{busy.name} is being built by {busy.holder}")


if __name__ == "__main__":
    build("May", meanwhile=somebody_else)

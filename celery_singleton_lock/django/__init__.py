"""Locks in a Django project: put ``celery_singleton_lock.django`` into ``INSTALLED_APPS``.

This adds system checks of ``CELERY_SINGLETON_LOCK_…`` and the command ``manage.py locks``.
:class:`CacheLock` and its decorator also work without the app; they need only Django's caches::

    @cache_locked("report:{month}", lease=60, wait_timeout=5)
    def build(month): ...

See docs/django.md.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("django") is None:
    msg = (
        "celery_singleton_lock.django needs Django, which is not installed: "
        'pip install "celery-singleton-lock[django]"'
    )
    raise ImportError(msg)

from celery_singleton_lock.django.cache_lock import CacheLock, cache_locked
from celery_singleton_lock.errors import LockTimeout

__all__ = ["CacheLock", "LockTimeout", "cache_locked"]

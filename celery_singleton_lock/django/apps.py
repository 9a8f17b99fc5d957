"""The Django app. It registers the system checks."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig


class SingletonLockConfig(AppConfig):
    """``INSTALLED_APPS = [..., "celery_singleton_lock.django"]``. It has no models."""

    name = "celery_singleton_lock.django"
    label = "celery_singleton_lock"
    verbose_name: str = "Singleton locks"

    def ready(self) -> None:
        """Register the checks."""
        import_module("celery_singleton_lock.django.checks")

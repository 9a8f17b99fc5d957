"""Adds a check for tasks with unused lock options to all workers of this process.

The package imports this module once Celery is loaded. Celery's command line imports the package for
``celery locks``, so the check runs even in an app that imports nothing of this package.
"""

from __future__ import annotations

from typing import Any, Final

from celery import _state

STEP: Final = "celery_singleton_lock.worker.unlocked_tasks:UnlockedStep"


def add_check_to_app(app: Any) -> None:
    """Add the check to the workers of an app."""
    app.steps["worker"].add(STEP)


def add_check_to_all_apps() -> None:
    """Add the check to all apps, also to those that are created later."""
    _state.connect_on_app_finalize(add_check_to_app)
    for app in _state._get_active_apps():  # noqa: SLF001  # there is no public list
        add_check_to_app(app)


add_check_to_all_apps()

"""Has each worker of this process look for tasks whose lock options nobody reads.

The package imports this where Celery is loaded. Celery's command line imports the package for
``celery locks``, so that a worker looks even if its app imports nothing of this package.
"""

from __future__ import annotations

from typing import Any, Final

from celery import _state

STEP: Final = "celery_singleton_lock.worker.unlocked_tasks:UnlockedStep"


def look_at_start(app: Any) -> None:
    """Add the step that looks for such tasks to an app's workers."""
    app.steps["worker"].add(STEP)


def look_in_all() -> None:
    """Add the step to the apps that there are, and to those that come."""
    _state.connect_on_app_finalize(look_at_start)
    for app in _state._get_active_apps():  # noqa: SLF001  # Celery tells of them nowhere else
        look_at_start(app)


look_in_all()

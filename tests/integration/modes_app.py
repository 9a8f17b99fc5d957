"""The task book, and tasks that declare a mode."""

from __future__ import annotations

from celery_singleton_lock import LockedTask, current_lock
from integration.worker_app import app


def _declare(mode: str) -> None:
    @app.task(
        bind=True, base=LockedTask, name=f"act_{mode}", shared=False, lock_key="k:{key}",
        lock_mode=mode,
    )  # fmt: skip
    def act(self, key, n=0):
        """Return whether it has the lock."""
        return current_lock().held


for _mode in ("observe", "off"):
    _declare(_mode)

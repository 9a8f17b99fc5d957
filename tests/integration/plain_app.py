"""The task book after a rollback: no task takes a lock."""

from __future__ import annotations

from typing import Any

from celery import Celery

from integration import taskbook


class PlainCelery(Celery):
    """Declares each task as a plain one."""

    def task(self, *args: Any, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if not name.startswith("lock_")}
        return super().task(*args, **{**options, "base": None})


taskbook.Celery = PlainCelery  # type: ignore[misc]

from integration import worker_app  # noqa: E402  # declares its tasks as it is imported

app = worker_app.app

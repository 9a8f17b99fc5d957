"""The task book as another deployment: its task ``act`` has another name."""

from __future__ import annotations

from typing import Any

from celery import Celery

from integration import taskbook


class RenamingCelery(Celery):
    """Declares ``act`` under another name."""

    def task(self, *args: Any, **options: Any) -> Any:
        if options.get("name") == "act":
            options["name"] = "act_v2"
        return super().task(*args, **options)


taskbook.Celery = RenamingCelery  # type: ignore[misc]

from integration import worker_app  # noqa: E402  # declares its tasks as it is imported

app = worker_app.app

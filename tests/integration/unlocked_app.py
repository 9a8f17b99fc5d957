"""The task book as an older deployment: ``act`` is a plain task."""

from __future__ import annotations

from integration import worker_app

app = worker_app.app
app.tasks["act"] = app.tasks["plain"]

"""The task book as an older deployment would have it: ``act`` is a plain task there."""

from __future__ import annotations

from integration import worker_app

app = worker_app.app
app.tasks["act"] = app.tasks["plain"]

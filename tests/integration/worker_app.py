"""What ``celery -A integration.worker_app`` loads: the task book, as the test wants it."""

from __future__ import annotations

import json
import os

from integration.taskbook import build

app = build(
    os.environ["CELERY_BROKER_URL"],
    os.environ["CELERY_RESULT_BACKEND"],
    os.environ["BOOK_FOLDER"],
    json.loads(os.environ.get("BOOK_CONF", "{}")),
)

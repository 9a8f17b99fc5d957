"""``celery -A integration.worker_app``: the task book with the test's settings."""

from __future__ import annotations

import json
import os

from kombu import Queue
from kombu.common import Broadcast

from integration.taskbook import build

app = build(
    os.environ["CELERY_BROKER_URL"],
    os.environ["CELERY_RESULT_BACKEND"],
    os.environ["BOOK_FOLDER"],
    json.loads(os.environ.get("BOOK_CONF", "{}")),
)

broadcast = json.loads(os.environ.get("BOOK_BROADCAST", "{}"))
"""Task -> a queue that gives a copy to each worker."""
if broadcast:
    declared = app.conf.task_queues
    app.conf.task_queues = [
        *(Queue.from_dict(name, **options) for name, options in declared.items()),
        *(Broadcast(name) for name in sorted(set(broadcast.values()))),
    ]
    app.conf.task_routes = {task: {"queue": queue} for task, queue in broadcast.items()}

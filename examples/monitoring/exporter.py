"""Export the number of parked tasks even if no worker runs, for autoscalers that scale to zero.

``python exporter.py`` serves http://localhost:9540/metrics.
"""

from __future__ import annotations

import os
import threading

from celery import Celery
from prometheus_client import CollectorRegistry, start_http_server

from celery_singleton_lock.metrics import export

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")

if __name__ == "__main__":
    app = Celery("exporter", broker=BROKER)
    registry = CollectorRegistry()
    export(app, registry)
    start_http_server(int(os.environ.get("PORT", "9540")), registry=registry)
    threading.Event().wait()

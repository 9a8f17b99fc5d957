"""Export the number of parked tasks even if no worker runs, for autoscalers that scale to zero.

``python exporter.py`` serves http://localhost:9540/metrics. CELERY_BROKER_URL is the broker of the
workers, and LOCKS_URL their singleton_lock_backend, if they have one. If their
broker_transport_options have a global_keyprefix, queue_name_prefix or master_name, give these as
JSON in BROKER_TRANSPORT_OPTIONS: parked tasks of another broker are not counted. If they have a
singleton_lock_prefix, give it as LOCKS_PREFIX: those of another prefix are not counted, either.
LOCKS_OPTIONS is the JSON of their singleton_lock_backend_options.
"""

from __future__ import annotations

import json
import os
import threading

from celery import Celery
from prometheus_client import CollectorRegistry, start_http_server

from celery_singleton_lock.metrics import export

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
OPTIONS = json.loads(os.environ.get("BROKER_TRANSPORT_OPTIONS") or "{}")
LOCKS_OPTIONS = json.loads(os.environ.get("LOCKS_OPTIONS") or "{}")

if __name__ == "__main__":
    app = Celery("exporter", broker=BROKER)
    app.conf.broker_transport_options = OPTIONS
    app.conf.singleton_lock_backend = os.environ.get("LOCKS_URL") or None
    app.conf.singleton_lock_backend_options = LOCKS_OPTIONS
    app.conf.singleton_lock_prefix = os.environ.get("LOCKS_PREFIX") or "csl"
    registry = CollectorRegistry()
    export(app, registry)
    start_http_server(int(os.environ.get("PORT", "9540")), registry=registry)
    threading.Event().wait()

"""What the installed versions of Celery, kombu and redis-py can do."""

from __future__ import annotations

from inspect import getsource, signature

import celery
import kombu
import redis
from celery.worker import control


def _version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


CELERY = _version(celery)

TELLS_REJECTED = CELERY >= (5, 7)
"""Whether a task that rejects its message ends as FAILURE. Older versions leave it PENDING."""

TELLS_EXIT = CELERY >= (5, 7)
"""Whether a task that calls ``sys.exit`` ends as FAILURE. Older versions leave it PENDING."""

ACKS_ON_TIMEOUT = CELERY >= (5, 7)
"""Whether tasks have ``acks_on_timeout``."""

QUORUM_QUEUES = CELERY >= (5, 5)
"""Whether workers can consume RabbitMQ's quorum queues."""

HEARS_AFTER_OUTAGE = CELERY >= (5, 6)
"""Whether a prefork worker notices the end of a task that ran while the broker was lost."""

TELLS_REVOKED = "mark_as_revoked" in getsource(control.revoke)
"""Whether a worker stores the end of a revoked task at once. Older ones wait for its time."""

THREADS_ACK_LAST = CELERY >= (5, 5)
"""Whether a worker of threads that stops acknowledges messages with the last of its tasks."""

RESTORES_SOON = _version(kombu) >= (5, 7)
"""Whether ``unacked_restore_interval`` exists. Older versions look every 100 s."""

CHECKS_HOST_NAME = signature(redis.SSLConnection).parameters["ssl_check_hostname"].default is True
"""Whether a client compares the server's host name with its certificate by default."""

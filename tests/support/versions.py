"""What the installed version of Celery can do."""

from __future__ import annotations

import celery

CELERY = tuple(int(part) for part in celery.__version__.split(".")[:2])

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

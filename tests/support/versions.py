"""What this run's Celery does; some endings are told by newer ones only."""

from __future__ import annotations

import celery

CELERY = tuple(int(part) for part in celery.__version__.split(".")[:2])

TELLS_REJECTED = CELERY >= (5, 7)
"""Whether a task that rejects its message for good ends FAILURE; before, it stays PENDING."""

TELLS_EXIT = CELERY >= (5, 7)
"""Whether a task that calls ``sys.exit`` ends FAILURE; before, it stays PENDING."""

ACKS_ON_TIMEOUT = CELERY >= (5, 7)
"""Whether tasks have ``acks_on_timeout``."""

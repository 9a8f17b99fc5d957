"""Apps that are declared or configured wrongly: ``BAD`` says how."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from celery_singleton_lock import LockedTask

BAD = json.loads(os.environ["BAD"])
app = Celery("bad", broker=os.environ["CELERY_BROKER_URL"], set_as_current=False)
app.conf.update(broker_connection_retry_on_startup=True, **BAD.get("conf", {}))


def settle(account_id: int, note: str = "") -> Any:
    """Do nothing."""
    return account_id


options: dict[str, Any] = BAD.get("options", {})
base = {"base": LockedTask} if BAD.get("locked", True) else {}
app.task(name="settle", shared=False, **base, **options)(settle)
app.task(name="other", shared=False, base=LockedTask, lock_key="a:{account_id}")(settle)

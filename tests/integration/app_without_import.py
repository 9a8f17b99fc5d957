"""An app that does not import this package but declares a lock; ``BAD`` selects one."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery, Task

BAD = json.loads(os.environ["BAD"])
app = Celery("unaware", broker=os.environ["CELERY_BROKER_URL"], set_as_current=False)
app.conf.update(broker_connection_retry_on_startup=True, **BAD.get("conf", {}))


class Audited(Task):
    """A base class of the user's own."""


base: dict[str, Any] = {"base": Audited} if BAD.get("audited") else {}


@app.task(name="settle", shared=False, **base, **BAD.get("options", {}))
def settle(account_id: int) -> int:
    """Do nothing."""
    return account_id

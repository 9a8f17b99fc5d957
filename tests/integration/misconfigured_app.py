"""Apps with wrong declarations or settings; ``BAD`` selects one."""

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


class Batched(LockedTask):
    """As celery-batches has it: messages are collected, and a batch of them goes to the pool."""

    def Strategy(self, task: Any, app: Any, consumer: Any) -> Any:  # Celery's name
        """Drop all messages."""
        return lambda *_, **__: None


base = {"base": LockedTask} if BAD.get("locked", True) else {}
base = {"base": Batched} if BAD.get("batched") else base
app.task(name="settle", shared=False, **base, **options)(settle)
app.task(name="other", shared=False, base=LockedTask, lock_key="a:{account_id}")(settle)

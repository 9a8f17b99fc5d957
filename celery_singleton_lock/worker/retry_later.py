"""``raise RetryLater(30)``: close the lock for a time, then run this task again."""

from __future__ import annotations

import sys
from typing import Any

from celery import current_task
from celery.exceptions import Ignore

from celery_singleton_lock.config.timed_close import checked_close
from celery_singleton_lock.errors import ConfigurationError


class RetryLater(Ignore):  # type: ignore[misc]  # celery is untyped
    """Raise it in a task to close its lock for a time, and to run the task again after that.

    The message returns to its place in the queue of the lock. It costs no retry, stores no state,
    and calls neither ``on_failure`` nor ``on_retry``; ``autoretry_for`` does not apply.
    ``lock_wait_timeout`` and ``expires`` continue to count.

    Args:
        seconds: for how long nobody gets the lock, up to 366 days.
        why: the reason, which commands and logs show.
        name: name of the lock to close. A task with several locks must give it.

    Raises:
        ConfigurationError: an argument is invalid, or the task that creates it is a batch or is not
            a ``LockedTask``.
    """

    def __init__(self, seconds: float, why: str = "", name: str = "") -> None:
        self.seconds: float
        self.why: str
        self.seconds, self.why = checked_close(seconds, why)
        self.name = name
        _refuse_without_lock(seconds)
        super().__init__(seconds, why, name)  # pickled with these args

    def __str__(self) -> str:
        return f"run again in {self.seconds:g} s{self.why and f': {self.why}'}"


def _refuse_without_lock(seconds: float) -> None:
    """Refuse a task whose message this package cannot keep: Celery would drop it silently.

    Raises:
        ConfigurationError: the running task is such a task.
    """
    task: Any = current_task
    if not task:
        return
    if not hasattr(task, "_lock_extension"):
        msg = (
            f"RetryLater needs a LockedTask, and {task.name} is not one. Declare it with "
            f"base=LockedTask, or use self.retry(countdown={seconds!r})."
        )
        raise ConfigurationError(msg)
    batches = sys.modules.get("celery_batches")
    if batches is not None and isinstance(task, batches.Batches):  # a proxy passes as its object
        msg = (
            f"RetryLater cannot be used in a batch ({task.name}): its messages are acknowledged "
            f"together. Close the lock with self.lock.pause({seconds!r}), and send again what is "
            "left to do."
        )
        raise ConfigurationError(msg)

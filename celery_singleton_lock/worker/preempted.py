"""``LockPreempted``: a newer call of the task replaces this run."""

from __future__ import annotations

from celery.exceptions import Ignore

from celery_singleton_lock.core.model import Preempted
from celery_singleton_lock.errors import LockError
from celery_singleton_lock.worker.lock_header import task_id_of


class LockPreempted(LockError, Ignore):  # type: ignore[misc]  # celery is untyped
    """A newer call replaces this run (``lock_on_conflict="preempt"``): clean up, and end.

    The run still holds the lock, so nobody else writes meanwhile. The task ends as REVOKED, and its
    message is acknowledged; ``autoretry_for`` does not apply.

    Args:
        message: what happened.
        name: the lock's name.
        by: id of the newer task.
    """

    def __init__(self, message: str = "", name: str = "", by: str = "") -> None:
        super().__init__(message, name, by)  # pickled with these args

    @property
    def by(self) -> str:
        """Id of the newer task."""
        return str(self.args[2])


def preempted_at(name: str, by: Preempted) -> LockPreempted:
    """Return the exception of a run that must end.

    Args:
        name: name of its lock.
        by: the attempt that replaces it.
    """
    task_id = task_id_of(by.by)
    msg = (
        f"Task {task_id} is newer and replaces this run at the lock {name!r} "
        '(lock_on_conflict="preempt").'
    )
    return LockPreempted(msg, name, task_id)

"""Celery tasks that run one at a time per key.

A blocked task is parked in Redis by default, and occupies no pool slot:
``@app.task(base=LockedTask, lock_key="account:{account_id}")``
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
    ConfigurationError,
    DuplicateTask,
    LockConflict,
    LockCostError,
    LockError,
    LockLost,
    LockNameError,
    LockNotOwned,
    LockQueueFull,
    LockReentered,
    LockTimeout,
    LockUnusable,
    LockWaitTimeout,
    SchemaMismatch,
    SingletonLockError,
)

if TYPE_CHECKING:
    from celery_singleton_lock.config.multi_lock_option import Limit
    from celery_singleton_lock.core.model import CurrentLock
    from celery_singleton_lock.core.owner_token import new_token
    from celery_singleton_lock.core.rate import Rate
    from celery_singleton_lock.lock.aio import AsyncLock
    from celery_singleton_lock.lock.decorator import locked
    from celery_singleton_lock.lock.get_or_set import async_get_or_set, get_or_set
    from celery_singleton_lock.lock.reset import async_reset_all, reset_all
    from celery_singleton_lock.lock.sync import Lock
    from celery_singleton_lock.send_by_name import install
    from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
    from celery_singleton_lock.store.quorum.sync import QuorumStore
    from celery_singleton_lock.task import LockedTask
    from celery_singleton_lock.worker.execution.task_lock import current_lock, current_locks
    from celery_singleton_lock.worker.install import observe
    from celery_singleton_lock.worker.preempted import LockPreempted
    from celery_singleton_lock.worker.retry_later import RetryLater

__all__ = [
    "AsyncLock",
    "AsyncQuorumStore",
    "BackendError",
    "BackendRefused",
    "BackendUnreachable",
    "ConfigurationError",
    "CurrentLock",
    "DuplicateTask",
    "Limit",
    "Lock",
    "LockConflict",
    "LockCostError",
    "LockError",
    "LockLost",
    "LockNameError",
    "LockNotOwned",
    "LockPreempted",
    "LockQueueFull",
    "LockReentered",
    "LockTimeout",
    "LockUnusable",
    "LockWaitTimeout",
    "LockedTask",
    "QuorumStore",
    "Rate",
    "RetryLater",
    "SchemaMismatch",
    "SingletonLockError",
    "async_get_or_set",
    "async_reset_all",
    "current_lock",
    "current_locks",
    "get_or_set",
    "install",
    "locked",
    "new_token",
    "observe",
    "reset_all",
]


# Celery and redis-py are imported only when a name that needs them is first used: pytest imports
# this package in every run, for its plugin, even if no test uses locks.
_HOMES: Final = {
    "AsyncLock": "lock.aio",
    "AsyncQuorumStore": "store.quorum.aio",
    "CurrentLock": "core.model",
    "Limit": "config.multi_lock_option",
    "Lock": "lock.sync",
    "LockPreempted": "worker.preempted",
    "LockedTask": "task",
    "QuorumStore": "store.quorum.sync",
    "Rate": "core.rate",
    "RetryLater": "worker.retry_later",
    "async_get_or_set": "lock.get_or_set",
    "async_reset_all": "lock.reset",
    "current_lock": "worker.execution.task_lock",
    "current_locks": "worker.execution.task_lock",
    "get_or_set": "lock.get_or_set",
    "install": "send_by_name",
    "locked": "lock.decorator",
    "new_token": "core.owner_token",
    "observe": "worker.install",
    "reset_all": "lock.reset",
}


# With this hook a worker refuses lock options of a task that is not a LockedTask. The hook is set
# even if the app uses no other name of this package.
if "celery" in sys.modules:
    import_module(f"{__name__}.worker.celery_hook")


def __getattr__(name: str) -> Any:
    """Import a public name, or read the version, when it is first used."""
    if name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("celery-singleton-lock")
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)

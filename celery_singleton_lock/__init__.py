"""Celery tasks that run one at a time per key: leases, an orderly queue, and no held worker slots.

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
    LockConflict,
    LockError,
    LockLost,
    LockNameError,
    LockNotOwned,
    LockQueueFull,
    LockReentered,
    LockTimeout,
    LockWaitTimeout,
    SchemaMismatch,
    SingletonLockError,
)

if TYPE_CHECKING:
    from celery_singleton_lock.lock.aio import AsyncLock
    from celery_singleton_lock.lock.decorator import locked
    from celery_singleton_lock.lock.get_or_set import async_get_or_set, get_or_set
    from celery_singleton_lock.worker.extension import observe
    from celery_singleton_lock.worker.execution.tracer import current_lock, current_locks
    from celery_singleton_lock.lock.sync import Lock
    from celery_singleton_lock.core.model import CurrentLock, new_token
    from celery_singleton_lock.lock.reset import async_reset_all, reset_all
    from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
    from celery_singleton_lock.store.quorum.sync import QuorumStore
    from celery_singleton_lock.task import LockedTask

__all__ = [
    "AsyncLock",
    "AsyncQuorumStore",
    "BackendError",
    "BackendRefused",
    "BackendUnreachable",
    "ConfigurationError",
    "CurrentLock",
    "Lock",
    "LockConflict",
    "LockError",
    "LockLost",
    "LockNameError",
    "LockNotOwned",
    "LockQueueFull",
    "LockReentered",
    "LockTimeout",
    "LockWaitTimeout",
    "LockedTask",
    "QuorumStore",
    "SchemaMismatch",
    "SingletonLockError",
    "async_get_or_set",
    "async_reset_all",
    "current_lock",
    "current_locks",
    "get_or_set",
    "locked",
    "new_token",
    "observe",
    "reset_all",
]


# Celery and redis-py are imported when somebody asks for what needs them: pytest imports this
# package in every run, for its plugin, also where no test has to do with locks.
_HOMES: Final = {
    "AsyncLock": "aio",
    "AsyncQuorumStore": "store.async_quorum",
    "CurrentLock": "model",
    "Lock": "lock",
    "LockedTask": "task",
    "QuorumStore": "store.quorum",
    "async_get_or_set": "dogpile",
    "async_reset_all": "resets",
    "current_lock": "gate",
    "current_locks": "gate",
    "get_or_set": "dogpile",
    "locked": "decorator",
    "new_token": "model",
    "observe": "extension",
    "reset_all": "resets",
}


# A worker refuses lock options of a task that is no LockedTask, whatever else it imports from here.
if "celery" in sys.modules:
    import_module(f"{__name__}.celery_hook")


def __getattr__(name: str) -> Any:
    """Import what is asked for; read the version only when somebody asks."""
    if name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("celery-singleton-lock")
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)

"""The base of the handlers: access to the locks' Redis, and errors as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from celery_singleton_lock.admin import Refused
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.flower.rows import LockRows, UnknownLock
from celery_singleton_lock.flower.values import visible
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.worker.extension import PATIENCE
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.operator_actions import OperatorActions

THREADS: Final = 4
"""Largest number of requests that wait for the locks' Redis at the same time."""

LONGEST_ERROR: Final = 1000
"""Largest number of characters of an error text."""

_ATTRIBUTE: Final = "_celery_singleton_lock"


class AppLocks:
    """The locks of the app that Flower monitors. All handlers share one object.

    Args:
        capp: the Celery app.
    """

    def __init__(self, capp: Any) -> None:
        """Create the object. The first request connects."""
        self._capp = capp
        self._rows: LockRows | None = None
        self.executor: ThreadPoolExecutor = ThreadPoolExecutor(
            THREADS, thread_name_prefix="singleton-lock-flower"
        )

    def rows(self) -> LockRows:
        """Return the source of the pages' data. Call it in a thread: settings may be slow.

        Raises:
            ConfigurationError: no valid URL is configured.
        """
        if self._rows is None:
            extension = install(self._capp)
            self._rows = LockRows(admin_of(extension.new_store(PATIENCE, operator=True)))
        return self._rows

    def actions(self) -> OperatorActions:
        """Return what one change does outside of the locks' Redis."""
        return OperatorActions(self._capp, install(self._capp))


class LocksHandler:
    """A mix-in for handlers: security headers, requests to Redis in a thread, errors as JSON."""

    application: Any

    def set_default_headers(self) -> None:
        """Forbid caching and MIME type guessing."""
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")

    @property
    def locks(self) -> AppLocks:
        """The locks of the app. The first access creates them."""
        found: AppLocks | None = getattr(self.application, _ATTRIBUTE, None)
        if found is None:
            found = AppLocks(self.application.capp)
            setattr(self.application, _ATTRIBUTE, found)
        return found

    async def ask(self, question: Callable[[LockRows], Any]) -> Any:
        """Call a function in a thread. On an error, send it as JSON and return None.

        Args:
            question: a function that uses the locks' Redis.
        """
        locks = self.locks
        try:
            return await asyncio.get_running_loop().run_in_executor(
                locks.executor, lambda: question(locks.rows())
            )
        except UnknownLock as error:
            return self.refuse(404, str(error))
        except Refused as error:
            return self.refuse(409, str(error))
        except ValueError as error:
            return self.refuse(400, str(error))
        except SingletonLockError as error:
            return self.refuse(503, str(error))

    def refuse(self, status: int, sentence: str) -> None:
        """Send a status and an error text as JSON."""
        self.set_status(status)
        self.finish({"error": visible(sentence, LONGEST_ERROR)})

    set_header: Callable[..., None]
    set_status: Callable[..., None]
    finish: Callable[..., Any]


def is_read_only(options: Any) -> bool:
    """Return whether Flower runs with ``--read_only``, which exists since Flower 2.2."""
    return bool(getattr(options, "read_only", False))

"""Every error of the library, in one tree.

::

    SingletonLockError
    ├── ConfigurationError (also ValueError)      an option, setting or argument is invalid
    │   └── LockNameError                         the arguments of a call give no lock name
    ├── BackendError                              the locks' Redis did not answer, or refused
    │   ├── BackendUnreachable                    no connection, a time-out, still loading
    │   ├── BackendRefused                        scripts forbidden, no permission, full
    │   │   └── LockUnusable                      a lock's keys have other data; other locks work
    │   └── SchemaMismatch                        another version of this library wrote the data
    └── LockError                                 an error about one lock
        ├── LockNotOwned                          the caller does not hold the lock
        ├── LockLost                              the lock was held and then lost
        ├── LockConflict                          the lock is busy, and the policy is "fail"
        ├── DuplicateTask                         a call like this one was sent before
        ├── LockCostError                         the cost of a start is above the rate, or no
        number ├── LockQueueFull                         the lock is busy, and its queue is full
        ├── MaxReturnsExceeded                    the message has returned too often
        ├── LockWaitTimeout                       the wait has timed out
        │   └── LockTimeout                       the same for Lock and @locked, with the holder
        └── LockReentered                         the holder acquires the lock again

:class:`LockNotOwned` and :class:`LockLost` are final. After a :class:`BackendError` you may try
again.

The fields of each class survive pickle and Celery's JSON result backends. (An exception that cannot
be unpickled ends a prefork worker.) Messages contain no passwords: URLs are shown by
:func:`celery_singleton_lock.config.url_text.safe_url`.
"""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.message_text import printable


class SingletonLockError(Exception):
    """Base class of all errors of this library.

    Args:
        message: what happened, and what to change.
    """

    def __init__(self, message: str = "", *rest: Any) -> None:
        """Store ``message`` and the further fields as ``args``, for pickle.

        The message may contain text of a caller and be shown on a terminal, so it is made
        printable. The fields are unchanged.
        """
        super().__init__(printable(str(message)), *rest)

    @property
    def message(self) -> str:
        """The text of the error."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return self.message


class ConfigurationError(SingletonLockError, ValueError):
    """An option, setting or argument is invalid."""


class LockNameError(ConfigurationError):
    """The arguments of a call give no lock name; the message names the argument."""


class BackendError(SingletonLockError):
    """The locks' Redis did not answer, or refused a command."""


class BackendUnreachable(BackendError):
    """Redis cannot be reached, did not answer in time, or is still loading. Try again later."""


class BackendRefused(BackendError):
    """Redis refused a command: no permission, scripts are not allowed, or memory is full."""


class LockUnusable(BackendRefused):
    """The keys of one lock hold data of another type or format. Other locks work.

    Attributes:
        name: the lock's name; empty if only one lock was concerned.
    """

    name: str = ""


class SchemaMismatch(BackendError):
    """Another version of this library, with another schema, wrote the data in this Redis."""


class LockError(SingletonLockError):
    """Base class of errors about one lock.

    Args:
        message: what happened.
        name: the lock's name.
    """

    def __init__(self, message: str = "", name: str = "", *rest: Any) -> None:
        super().__init__(message, name, *rest)

    @property
    def name(self) -> str:
        """The lock's name."""
        return str(self.args[1]) if len(self.args) > 1 else ""

    @property
    def waits_for(self) -> str:
        """Why the lock was not granted, as a value of ``WaitsFor``; empty if it is not known."""
        return ""


class LockNotOwned(LockError):
    """The caller released or extended a lock that it does not hold, or has lost."""


class LockLost(LockError):
    """The lock was held, and was lost before its holder released it."""


class _LockBusy(LockError):
    """An error with the known facts about the holder."""

    def __init__(
        self,
        message: str = "",
        name: str = "",
        holder: str = "",
        expires_in: float = 0.0,
        waits_for: str = "",
    ) -> None:
        super().__init__(message, name, holder, expires_in, waits_for)

    @property
    def holder(self) -> str:
        """Text that names the holder of the lock; empty if unknown."""
        return str(self.args[2])

    @property
    def expires_in(self) -> float:
        """Seconds that were left of the holder's lease."""
        return float(self.args[3])

    @property
    def waits_for(self) -> str:
        """Why the lock was not granted."""
        return str(self.args[4])


class LockConflict(_LockBusy):
    """The lock is busy and the conflict policy is ``"fail"``.

    Args:
        message: what happened.
        name: the lock's name.
        holder: text that names the holder (task, worker), or an empty string.
        expires_in: seconds left of the holder's lease, 0 if unknown.
        waits_for: why it was not granted: ``holder``, ``rate``, ``pause``, ``redis``, ``group`` or
            ``queue``; or empty.
    """


class DuplicateTask(LockError):
    """A call like this one was sent before, so it was not sent (``lock_unique``).

    Args:
        message: what happened.
        name: name of its lock.
        task_id: id of the task that was sent before.
    """

    def __init__(self, message: str = "", name: str = "", task_id: str = "") -> None:
        super().__init__(message, name, task_id)

    @property
    def task_id(self) -> str:
        """Id of the task that was sent before."""
        return str(self.args[2])


class LockCostError(LockError, ValueError):
    """A start can never be allowed: its cost is not a whole number, or is above the lock's rate.

    The task fails with it and does not run: when it asks for its lock, or if it is parked, when it
    is next.
    """


class LockQueueFull(LockError):
    """The lock is busy, and ``lock_max_waiting`` tasks wait for it.

    Args:
        message: what happened.
        name: the lock's name.
        waits_for: see :class:`LockConflict`.
    """

    def __init__(self, message: str = "", name: str = "", waits_for: str = "") -> None:
        super().__init__(message, name, waits_for)

    @property
    def waits_for(self) -> str:
        """Why the lock was not granted."""
        return str(self.args[2])


class LockWaitTimeout(LockError):
    """The wait for the lock has timed out (``lock_wait_timeout``, ``blocking_timeout``)."""


class MaxReturnsExceeded(LockError):
    """A parked message has returned too often (``singleton_lock_max_returns``)."""


class LockTimeout(_LockBusy, LockWaitTimeout):
    """The wait of ``with Lock(…)`` or ``@locked`` has timed out.

    Args:
        message: what happened.
        name: the lock's name.
        holder: text that names the holder, or an empty string if unknown.
        expires_in: seconds left of the holder's lease, 0 if unknown.
        waits_for: see :class:`LockConflict`.
    """


class LockReentered(LockError):
    """The caller acquired a lock that it already holds, and would have waited for itself."""

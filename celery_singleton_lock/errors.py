"""Every error of the library, in one tree.

::

    SingletonLockError
    ├── ConfigurationError (also ValueError)      declared wrongly; says what to change
    │   └── LockNameError                         no lock name can be made of these arguments
    ├── BackendError                              the lock's Redis did not answer, or refused
    │   ├── BackendUnreachable                    no connection, time-out, still loading
    │   ├── BackendRefused                        scripts forbidden, no permission, wrong type, full
    │   └── SchemaMismatch                        its data is of another version of this library
    └── LockError                                 the lock's own answers
        ├── LockNotOwned                          released or extended by who does not hold it
        ├── LockLost                              held once, and lost before the end
        ├── LockConflict                          busy, and the conflict policy is "fail"
        ├── LockQueueFull                         busy, and its queue is full
        ├── MaxReturnsExceeded                    came back too often, and does not run again
        ├── LockWaitTimeout                       waited for as long as was allowed
        │   └── LockTimeout                       likewise in code: tells who holds it
        └── LockReentered                         taken again by its own holder

"Not ours" (:class:`LockNotOwned`, :class:`LockLost`) and "broken" (:class:`BackendError`) are two
facts and two types: the first is final, the second may be tried again.

Each class carries its facts as fields, and is rebuilt from them by pickle and by Celery's JSON
result backends, whatever the pool (an exception that does not unpickle ends a prefork worker).
Messages never carry a password: URLs are shown by :func:`celery_singleton_lock.config.redis_url.safe_url`.
"""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.message_text import printable


class SingletonLockError(Exception):
    """Root of the tree; catch it to catch everything that this library raises.

    Args:
        message: what happened, and what to change.
    """

    def __init__(self, message: str = "", *rest: Any) -> None:
        """Keep ``message`` and the class's further fields as ``args``, so that pickling works.

        The message may quote what a caller sent, and ends on terminals: it is made printable here,
        whoever shows it. The fields stay as they are.
        """
        super().__init__(printable(str(message)), *rest)

    @property
    def message(self) -> str:
        """The sentence to show."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        """Show the sentence alone; the fields are for programs."""
        return self.message


class ConfigurationError(SingletonLockError, ValueError):
    """An option or setting is wrong. Raised at declaration or at worker start."""


class LockNameError(ConfigurationError):
    """No lock name can be made of a task's arguments; the message names the argument."""


class BackendError(SingletonLockError):
    """The lock's Redis did not answer, or refused."""


class BackendUnreachable(BackendError):
    """No connection, a time-out, or a server that is still loading. May be tried again."""


class BackendRefused(BackendError):
    """The server answered with a refusal: no permission, scripts forbidden, wrong type, full."""


class SchemaMismatch(BackendError):
    """The data in this Redis was written by another schema of this library."""


class LockError(SingletonLockError):
    """A lock's own answer.

    Args:
        message: what happened.
        name: the lock's name.
    """

    def __init__(self, message: str = "", name: str = "", *rest: Any) -> None:
        """Keep the lock's name as a field."""
        super().__init__(message, name, *rest)

    @property
    def name(self) -> str:
        """The lock's name."""
        return str(self.args[1]) if len(self.args) > 1 else ""


class LockNotOwned(LockError):
    """Released or extended by a client that does not hold the lock (any more)."""


class LockLost(LockError):
    """The lock was held, and was lost before its holder was done."""


class LockConflict(LockError):
    """The lock is busy and the conflict policy is ``"fail"``.

    Args:
        message: what happened.
        name: the lock's name.
        holder: who holds it, as shown to people (task id, worker), or an empty string.
        expires_in: seconds left of the holder's lease, 0 if unknown.
    """

    def __init__(
        self, message: str = "", name: str = "", holder: str = "", expires_in: float = 0.0
    ) -> None:
        """Keep holder and lease as fields."""
        super().__init__(message, name, holder, expires_in)

    @property
    def holder(self) -> str:
        """Who holds the lock, as shown to people."""
        return str(self.args[2])

    @property
    def expires_in(self) -> float:
        """Seconds that were left of the holder's lease."""
        return float(self.args[3])


class LockQueueFull(LockError):
    """The lock is busy and as many wait for it as ``lock_max_waiting`` allows."""


class LockWaitTimeout(LockError):
    """Waited for the lock as long as was allowed (``lock_wait_timeout``, ``blocking_timeout``)."""


class MaxReturnsExceeded(LockError):
    """A parked task has come back too often (``singleton_lock_max_returns``)."""


class LockTimeout(LockWaitTimeout):
    """Code (``with Lock(…)``, ``@locked``) waited for the lock as long as was allowed.

    Args:
        message: what happened.
        name: the lock's name.
        holder: who holds it, as shown to people, or an empty string if nobody knows.
        expires_in: seconds left of the holder's lease, 0 if unknown.
    """

    def __init__(
        self, message: str = "", name: str = "", holder: str = "", expires_in: float = 0.0
    ) -> None:
        """Keep holder and lease as fields."""
        super().__init__(message, name, holder, expires_in)

    @property
    def holder(self) -> str:
        """Who holds the lock, as shown to people."""
        return str(self.args[2])

    @property
    def expires_in(self) -> float:
        """Seconds that were left of the holder's lease."""
        return float(self.args[3])


class LockReentered(LockError):
    """The holder asked for a lock that it holds already, and would have waited for itself."""

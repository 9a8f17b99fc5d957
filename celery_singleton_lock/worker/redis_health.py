"""Records whether the locks' Redis answers a worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendError, BackendUnreachable, LockUnusable
from celery_singleton_lock.events import BackendDown, BackendUp, Observers, log_keys

logger: Final = logging.getLogger(__name__)
_Item = TypeVar("_Item")


def for_each(items: Iterable[_Item], call: Callable[[_Item], object]) -> None:
    """Call a function with each item. If Redis refuses one lock, continue with the others.

    Args:
        items: the items; each belongs to one lock.
        call: the function, which uses Redis.

    Raises:
        LockUnusable: the first such error, after all calls.
        BackendError: any other error of Redis, at once.
    """
    refused: LockUnusable | None = None
    for item in items:
        try:
            call(item)
        except LockUnusable as error:
            refused = refused or error
    if refused is not None:
        raise refused


class RedisHealth:
    """Records when Redis stops answering, and when it answers again; reports each once.

    Threads of the pool call :meth:`task_not_answered`, the agent's thread :meth:`answered`. The two
    callbacks are called in that order, with the mutex held, and must not wait.

    Args:
        clock: source of monotonic seconds.
        address: address of the locks' Redis, without credentials.
        observers: receive the events.
        on_loss: called when Redis stops answering.
        on_return: called when it answers again.

    Attributes:
        down: whether Redis does not answer.
        errors: number of calls that failed.
        address: the argument.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        address: str,
        observers: Observers,
        on_loss: Callable[[], None],
        on_return: Callable[[], None],
    ) -> None:
        self.down: bool = False
        self.errors: int = 0
        self._clock = clock
        self.address = address
        self._observers = observers
        self._on_loss = on_loss
        self._on_return = on_return
        self._down_since = 0.0
        self._mutex = threading.RLock()  # reentrant for a cold shutdown; see RecentEnds

    def failed(self, error: BackendError) -> None:
        """Count a failed call. If Redis did not answer, call :meth:`not_answered`."""
        self.errors += 1
        if isinstance(error, BackendUnreachable):
            self.not_answered()

    def task_not_answered(self) -> None:
        """Count the call of a task that Redis has not answered, and note that it does not answer.

        If Redis always answers too late for tasks, and in time for the agent, only this counts it.
        """
        self.errors += 1
        self.not_answered()

    def not_answered(self) -> None:
        """Note that Redis does not answer."""
        with self._mutex:
            if self.down:
                return
            self.down = True
            self._down_since = self._clock.monotonic()
            self._on_loss()
        self._observers.notify(BackendDown(self.address))

    def answered(self) -> None:
        """Note that Redis answers."""
        with self._mutex:
            if not self.down:
                return
            self.down = False
            event = BackendUp(self.address, self._clock.monotonic() - self._down_since)
            self._on_return()
        self._observers.notify(event)
        logger.warning(
            "celery-singleton-lock: the locks' Redis answers again.", extra=log_keys(event)
        )

    def down_for(self) -> float:
        """Return the seconds for which Redis has not answered; 0 if it answers."""
        return round(self._clock.monotonic() - self._down_since, 1) if self.down else 0.0

"""Whether the locks' Redis answers a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.events import BackendDown, BackendUp, Observers, log_keys

logger = logging.getLogger(__name__)


class Contact:
    """Notes when Redis stops answering, and when it answers again; tells each once.

    Args:
        clock: source of monotonic seconds.
        address: of the lock's Redis, without credentials.
        observers: who is told.
        on_loss: called when it is lost.
        on_return: called when it is back.

    Attributes:
        down: whether Redis does not answer.
        errors: how many calls have failed.
        address: of the lock's Redis, without credentials.
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
        """Take it that Redis is there."""
        self.down = False
        self.errors = 0
        self._clock = clock
        self.address = address
        self._observers = observers
        self._on_loss = on_loss
        self._on_return = on_return
        self._down_since = 0.0

    def failed(self, error: BackendError) -> None:
        """Note that a call has failed: Redis is lost if it did not answer."""
        self.errors += 1
        if isinstance(error, BackendUnreachable):
            self.lost()

    def lost(self) -> None:
        """Note that Redis does not answer."""
        if not self.down:
            self.down = True
            self._down_since = self._clock.monotonic()
            self._observers.notify(BackendDown(self.address))
            self._on_loss()

    def regained(self) -> None:
        """Note that Redis answers."""
        if self.down:
            self.down = False
            down_for = self._clock.monotonic() - self._down_since
            event = BackendUp(self.address, down_for)
            self._observers.notify(event)
            logger.warning(
                "celery-singleton-lock: the lock's Redis answers again.", extra=log_keys(event)
            )
            self._on_return()

    def down_for(self) -> float:
        """Return the seconds for which Redis has not answered; 0 if it does."""
        return round(self._clock.monotonic() - self._down_since, 1) if self.down else 0.0

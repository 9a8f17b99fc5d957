"""The orders that wait for a worker's agent: in their order, or for their time."""

from __future__ import annotations

import math
import queue
from contextlib import suppress
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.worker.agent_commands import Later, Order

RETRY: Final = 0.5
"""Seconds before an order that Redis did not answer is tried again."""

REFUSED_RETRY: Final = 5.0
"""Seconds before an order that Redis refused is tried again: somebody must change something."""

BATCH: Final = 100
"""Most orders that one round takes."""


class Tray:
    """Takes orders from any thread, and gives them to the agent's.

    Args:
        clock: source of monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        """Begin with no order."""
        self._clock = clock
        self._arrived: queue.SimpleQueue[Order | Later | None] = queue.SimpleQueue()
        self._later: list[Later] = []

    def put(self, order: Order) -> None:
        """Have an order carried out in its turn. Does not wait."""
        self._arrived.put(order)

    def put_off(self, order: Order, delay: float) -> None:
        """Have an order carried out, not before ``delay`` seconds. Does not wait."""
        self._arrived.put(Later(self._clock.monotonic() + delay, order))

    def try_again(self, order: Order, error: BackendError) -> None:
        """Have an order carried out once more, after it failed."""
        self.put_off(order, delay_after(error))

    def wake(self) -> None:
        """End the pause of whoever takes orders now."""
        self._arrived.put(None)

    def take(self, pause: float) -> list[Order]:
        """Return the orders whose time has come, and those that have arrived.

        Args:
            pause: most seconds to wait for one that arrives.
        """
        arrived = self._take_arrived(pause)
        return [*self._due(), *arrived]

    def _take_arrived(self, pause: float) -> list[Order]:
        """Return a batch of what has arrived; lay aside what is to wait."""
        orders: list[Order] = []
        with suppress(queue.Empty):
            each = self._arrived.get(timeout=pause) if pause > 0 else self._arrived.get_nowait()
            while True:
                if isinstance(each, Later):
                    self._later.append(each)
                elif each is not None:
                    orders.append(each)
                if len(orders) == BATCH:
                    break
                each = self._arrived.get_nowait()
        return orders

    def _due(self) -> list[Order]:
        now = self._clock.monotonic()
        due = [each.order for each in self._later if each.at <= now]
        self._later = [each for each in self._later if each.at > now]
        return due

    def next_at(self) -> float:
        """Return the monotonic time at which the next order is due that waits; ``inf`` if none."""
        return min((each.at for each in self._later), default=math.inf)


def delay_after(error: BackendError) -> float:
    """Return the seconds after which to try again."""
    return RETRY if isinstance(error, BackendUnreachable) else REFUSED_RETRY

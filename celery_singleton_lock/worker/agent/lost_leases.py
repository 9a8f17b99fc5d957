"""Locks that were lost while their tasks ran: each is reported, once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.events import Event, LeaseLost, log_keys
from celery_singleton_lock.worker.dispatch.in_flight import Flights
from celery_singleton_lock.worker.agent_commands import Lost
from celery_singleton_lock.worker.lock_header import Stamp, task_id_of
from celery_singleton_lock.worker.agent_queue import Tray

logger = logging.getLogger(__name__)

LANDING: Final = 1.0
"""Seconds that a task's end may need from its pool to the main loop, after its release."""


class Losses:
    """Reports the losses of which a worker hears, from its watchdog and from its tasks' ends.

    Args:
        clock: source of monotonic seconds.
        orders: the agent's.
        flights: who is in the worker's hands.
        abort: has the task interrupted that holds a token, if it wants that.
        tell: tells whoever wants to know.
        in_turn: makes a call after what the main loop has still to hear of tasks that have ended.

    Attributes:
        lost: how many were reported.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        orders: Tray,
        flights: Flights,
        abort: Callable[[str], None],
        tell: Callable[[Event], None],
        in_turn: Callable[..., None],
    ) -> None:
        """Have reported none."""
        self.lost = 0
        self._clock = clock
        self._orders = orders
        self._flights = flights
        self._abort = abort
        self._tell = tell
        self._in_turn = in_turn
        self._reported: deque[str] = deque(maxlen=1000)

    def noticed(self, name: str, token: str) -> None:
        """Interrupt a task whose lease is lost, and report it. From the watchdog; does not wait.

        While the main loop looks for its broker it hears of no end of a task in a child process.
        What has been released meanwhile is not lost.
        """
        self._in_turn(self._heard, name, token)

    def _heard(self, name: str, token: str) -> None:
        self._abort(token)
        self._orders.put(Lost(name, token, self._clock.monotonic() + LANDING))

    def ended(self, stamp: Stamp, ended: str) -> None:
        """Report the loss of a task that has ended, unless that was done. Does not wait.

        Args:
            stamp: of the task.
            ended: what became of it, in a sentence.
        """
        task_id = task_id_of(stamp.attempt)
        self._orders.put(Lost(stamp.name, stamp.token, 0.0, ended, stamp.task, task_id))

    def report(self, loss: Lost) -> None:
        """Carry out an order."""
        if loss.token in self._reported or not (loss.ended or self._flights.has(loss.token)):
            return
        if self._clock.monotonic() < loss.until:
            self._orders.put_off(loss, LANDING / 4)
            return
        if not (loss.ended or self._flights.has_begun(loss.token)):
            return  # a grant that lapsed, or was taken away, in the queue of the pool
        self._reported.append(loss.token)
        self.lost += 1
        whose = (loss.task, loss.task_id) if loss.ended else self._flights.who(loss.token)
        event = LeaseLost(loss.name, *whose, reason="lapsed or taken away")
        self._tell(event)
        logger.error(
            "The lock %r was lost while its task ran: its lease ended or it was taken away. %s",
            loss.name,
            loss.ended or "The task goes on; only its fencing token protects its writes.",
            extra=log_keys(event),
        )

"""Reports each lock that is lost while its task runs, once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.events import Event, LeaseLost, log_keys
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.worker.agent_commands import ReportLoss
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.in_flight import InFlight

logger: Final = logging.getLogger(__name__)

END_REPORT_DELAY: Final = 1.0
"""Seconds within which the pool reports the end of a task after its lock was released."""


class LostLeases:
    """Reports the losses that the watchdog notices, or that a task reports as it ends.

    Args:
        clock: source of monotonic seconds.
        commands: the queue of the agent.
        in_flight: the messages that are in flight.
        abort: interrupts the task that holds a token, if its options say so.
        tell: reports an event.
        in_turn: makes a call after the main loop has handled the tasks that have ended so far.

    Attributes:
        lost: number of reported losses.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        commands: AgentQueue,
        in_flight: InFlight,
        abort: Callable[[str], None],
        tell: Callable[[Event], None],
        in_turn: Callable[..., None],
    ) -> None:
        self.lost: int = 0
        self._clock = clock
        self._commands = commands
        self._in_flight = in_flight
        self._abort = abort
        self._tell = tell
        self._in_turn = in_turn
        self._reported: deque[str] = deque(maxlen=1000)

    def noticed(self, name: str, token: str) -> None:
        """Interrupt a task whose lease is lost, and report it. The watchdog calls this.

        It does not wait. While the main loop reconnects to its broker, it receives no results of
        child processes. A lock that a child has released meanwhile is not lost.
        """
        self._in_turn(self._report_later, name, token)

    def _report_later(self, name: str, token: str) -> None:
        self._abort(token)
        self._commands.put(ReportLoss(name, token, self._clock.monotonic() + END_REPORT_DELAY))

    def report(self, loss: ReportLoss) -> None:
        """Report a loss, unless it was reported already or the task ended before it."""
        if loss.token in self._reported or not (loss.ended or self._in_flight.has(loss.token)):
            return
        if self._clock.monotonic() < loss.not_before:
            self._commands.put_off(loss, END_REPORT_DELAY / 4)
            return
        if not (loss.ended or self._in_flight.has_begun(loss.token)):
            return  # the grant was lost before its task began
        self._reported.append(loss.token)
        self._in_flight.note_lost(loss.token)
        self.lost += 1
        whose = (loss.task, loss.task_id) if loss.ended else self._in_flight.who(loss.token)
        event = LeaseLost(loss.name, *whose, reason="lapsed or taken away")
        self._tell(event)
        logger.error(
            "The lock %r was lost while its task %s[%s] ran: its lease ended or it was taken away. "
            "%s",
            loss.name,
            event.task,
            printable(event.task_id),
            loss.ended or "The task continues; only its fencing token protects its writes.",
            extra=log_keys(event),
        )

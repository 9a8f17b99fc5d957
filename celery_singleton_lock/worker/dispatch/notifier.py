"""Tells observers, and whoever listens to Celery's events, what becomes of a worker's tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from celery import signals

from celery_singleton_lock.core.clock import SystemClock, wall_time
from celery_singleton_lock.errors import (
    LockConflict,
    LockError,
    LockQueueFull,
    LockWaitTimeout,
    MaxReturnsExceeded,
)
from celery_singleton_lock.events import (
    Event,
    LockAcquired,
    LockRefused,
    LockReleased,
    Observers,
    TaskBlocked,
    TaskDelivered,
    TaskEvent,
    TaskReplaced,
    celery_event,
    log_keys,
)
from celery_singleton_lock.worker.loop_channel import LATER
from celery_singleton_lock.core.model import Delivery
from celery_singleton_lock.worker.request import LockedRequest, about
from celery_singleton_lock.worker.lock_header import task_id_of
from celery_singleton_lock.message_text import nth, printable

logger = logging.getLogger(__name__)
_clock = SystemClock()

FRESH: Final = LATER
"""Seconds within which it is told that a message waits; later it is looked at again.

Who is delivered a message tells of it as much later, hence after whoever has seen it waiting.
"""

REFUSALS: Final[dict[type[LockError], str]] = {
    LockConflict: "fail",
    LockQueueFull: "full",
    LockWaitTimeout: "timeout",
    MaxReturnsExceeded: "returned",
}
"""How a task ends that did not get its lock, and what that is called."""


def _unheard(name: str, /, **fields: Any) -> None:
    """Stand in for a dispatcher."""


def _deaf() -> bool:
    """Stand in for a worker that sends no events."""
    return False


class Herald:
    """Tells what becomes of each task; no task is lost by those who listen.

    Args:
        observers: who is told what happens.
        send_event: sends a Celery event.
        sends_events: whether anybody listens to events of tasks.
        later: makes a call :data:`FRESH` seconds later; None where the main loop runs the tasks.
    """

    def __init__(
        self,
        observers: Observers,
        send_event: Callable[..., None] = _unheard,
        sends_events: Callable[[], bool] = _deaf,
        later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Keep all of them."""
        self.observers = observers
        self.sends_events = sends_events
        self.send_event = send_event
        self.later = later

    def tell(self, request: LockedRequest, event: TaskEvent) -> None:
        """Tell observers, and whoever listens to Celery's events."""
        self.observers.notify(event)
        self.send(request, event)

    def send(self, request: LockedRequest, event: TaskEvent) -> None:
        """Tell whoever listens to Celery's events, in the turn of what is told of this request."""
        sent = celery_event(event)
        if sent is not None and request.task.send_events:
            sent[1]["timestamp"] = wall_time()
            request.say(partial(self._send, request, *sent))

    def _send(self, request: LockedRequest, name: str, fields: dict[str, Any]) -> None:
        try:
            self.send_event(name, **fields)
        except Exception:
            logger.exception("celery-singleton-lock: %s of %s could not be sent", name, request)

    def announce(self, event: Event) -> None:
        """Tell whoever listens to Celery's events of what is no task's here: a loss, an order."""
        sent = celery_event(event)
        if sent is not None:
            name, fields = sent
            self.send_event(name, **fields)

    # -- of a lock --------------------------------------------------------------------------------

    def acquired(self, request: LockedRequest) -> None:
        """Tell that a task has its lock. Of two who tell, the first is heard.

        If nobody listens then, nobody is told that it was given back, either.
        """
        if request.acquired_at is not None or request.stamp.error is not None:
            return
        if self.observers.any or self.sends_events():
            request.acquired_at = _clock.monotonic()
            waited = request.acquired_at - request.stamp.stamped_at
            self.tell(request, LockAcquired(*about(request), waited=waited))

    def released(self, request: LockedRequest) -> None:
        """Tell that a task's lock was given back, if it had it."""
        began, request.acquired_at = request.acquired_at, None  # it may be sent to the pool again
        if began is not None and (self.observers.any or self.sends_events()):
            held = _clock.monotonic() - began if request.ran_for is None else request.ran_for
            self.tell(request, LockReleased(*about(request), held=held))

    def refused(self, request: LockedRequest, error: LockError) -> None:
        """Tell that a task has ended with an error since it did not get its lock."""
        policy = next(p for kind, p in REFUSALS.items() if isinstance(error, kind))
        self.tell(request, LockRefused(*about(request), policy=policy))

    def skipped(self, request: LockedRequest, reason: str, policy: str) -> None:
        """Tell that a task has ended without having run, as if it were revoked."""
        request.send_event("task-revoked", terminated=False, signum=None, expired=False)
        signals.task_revoked.send(
            request.task,
            request=request._context,  # noqa: SLF001  # what Celery itself sends
            terminated=False,
            signum=None,
            expired=False,
        )
        event = LockRefused(*about(request), policy=policy)
        self.tell(request, event)
        logger.info("Task %s was skipped: %s", request, reason, extra=log_keys(event))

    # -- of a message -----------------------------------------------------------------------------

    def parked(self, request: LockedRequest, event: TaskBlocked) -> None:
        """Tell observers, and the log, that a message is kept until its turn comes.

        The log only if it listens: this runs in the main loop, once for each parked message.
        """
        self.observers.notify(event)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "Task %s is parked%s for %r%s; `locks why %s` tells more",
                request,
                f": {nth(event.rank)}" if event.rank else "",
                event.lock,
                f" behind {event.holder}" if event.holder else "",
                printable(request.id),
                extra=log_keys(event),
            )

    def delivered(self, request: LockedRequest, delivery: Delivery) -> None:
        """Tell that the turn of a parked message has come."""
        if delivery.verdict == "replaced":
            by = task_id_of(delivery.by)
            self.tell(request, TaskReplaced(*about(request), by=by, waited=delivery.waited))
        else:
            verdict, waited = delivery.verdict, delivery.waited
            self.tell(request, TaskDelivered(*about(request), verdict=verdict, waited=waited))

    def hush(self, request: LockedRequest) -> None:
        """Let whoever parked the message tell of that first; see :data:`FRESH`."""
        if self.later is not None and self.sends_events():
            request.hush()
            self.later(request.speak)

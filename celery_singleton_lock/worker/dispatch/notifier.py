"""Calls observers and sends Celery events about the tasks of a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from celery import signals

from celery_singleton_lock.core.clock import SystemClock, wall_time
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.errors import (
    LockError,
)
from celery_singleton_lock.events import (
    Event,
    LockAcquired,
    LockClosed,
    LockRefused,
    LockReleased,
    Observers,
    TaskBlocked,
    TaskDelivered,
    TaskEvent,
    TaskFollowed,
    TaskPreempted,
    TaskReplaced,
    celery_event,
    log_keys,
)
from celery_singleton_lock.message_text import nth, printable
from celery_singleton_lock.worker.lock_header import task_id_of
from celery_singleton_lock.worker.loop_channel import LATER
from celery_singleton_lock.worker.not_started import REFUSALS, NotStarted
from celery_singleton_lock.worker.request import LockedRequest, about

logger: Final = logging.getLogger(__name__)
_clock = SystemClock()

FRESH: Final = LATER
"""Seconds after a reply of Redis within which the event of a blocked message is sent.

After that, Redis is asked again. A worker that gets a parked message delays its own events by this
time, so that they follow those of the worker that parked the message.
"""

_BESIDES: Final = {
    WaitsFor.RATE.value: ", which has reached its rate",
    WaitsFor.SETTLING.value: ", and settles until no later call has come for its lock_debounce",
    WaitsFor.FOLLOWING.value: ", and waits for the result of the call that was sent before it",
    WaitsFor.GROUP.value: ", and its group holds as many permits as it may",
    WaitsFor.PAUSE.value: ", which is paused, or closed for a time",
    WaitsFor.REDIS.value: ", which a new Redis server does not grant yet",
    WaitsFor.WORKER.value: ", and no live worker takes it",
}
"""Log texts for what a parked task waits for, other than a holder."""


def _send_nothing(name: str, /, **fields: Any) -> None:
    """Send no event."""


def _sends_no_events() -> bool:
    """Return that the worker sends no events."""
    return False


class Notifier:
    """Reports what happens to each task. An error of an observer affects no task.

    Args:
        observers: called with each event.
        send_event: sends a Celery event.
        sends_events: returns whether the worker sends events of tasks.
        later: makes a call :data:`FRESH` seconds later; None if the main loop runs the tasks.
    """

    def __init__(
        self,
        observers: Observers,
        send_event: Callable[..., None] = _send_nothing,
        sends_events: Callable[[], bool] = _sends_no_events,
        later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.observers = observers
        self.sends_events = sends_events
        self.send_event = send_event
        self.later = later
        self._warned: set[str] = set()

    def tell(self, request: LockedRequest, event: TaskEvent) -> None:
        """Call the observers, and send the Celery event."""
        self.observers.notify(event)
        self.send(request, event)

    def send(self, request: LockedRequest, event: TaskEvent) -> None:
        """Send the Celery event, after the earlier events of the same request."""
        sent = celery_event(event)
        if sent is not None and request.task.send_events:
            sent[1]["timestamp"] = wall_time()
            request.call_in_order(partial(self._send, request, *sent))

    def _send(self, request: LockedRequest, name: str, fields: dict[str, Any]) -> None:
        try:
            self.send_event(name, **fields)
        except Exception:
            logger.exception("celery-singleton-lock: %s of %s could not be sent", name, request)

    def announce(self, event: Event) -> None:
        """Send the Celery event of an occurrence that has no request here."""
        sent = celery_event(event)
        if sent is not None:
            name, fields = sent
            self.send_event(name, **fields)

    # -- of a lock --------------------------------------------------------------------------------

    def acquired(self, request: LockedRequest) -> None:
        """Report that a task has acquired its lock. Further calls for the same request do nothing.

        If there is no observer and no monitor, neither this nor the release is reported.
        """
        if request.acquired_at is not None or request.lock_header.error is not None:
            return
        if self.observers.any or self.sends_events():
            request.acquired_at = _clock.monotonic()
            waited = request.acquired_at - request.lock_header.created_at
            self.tell(request, LockAcquired(*about(request), waited=waited))

    def released(self, request: LockedRequest) -> None:
        """Report that a task's lock was released, if its acquisition was reported."""
        began, request.acquired_at = request.acquired_at, None  # it may be sent to the pool again
        if began is not None and (self.observers.any or self.sends_events()):
            held = _clock.monotonic() - began if request.ran_for is None else request.ran_for
            self.tell(request, LockReleased(*about(request), held=held))

    def refused(self, request: LockedRequest, error: LockError) -> None:
        """Report that a task has ended with an error since it did not get its lock."""
        policy = next(p for kind, p in REFUSALS.items() if isinstance(error, kind))
        event = LockRefused(*about(request), policy=policy, waits_for=error.waits_for)
        self.tell(request, event)

    def skipped(self, request: LockedRequest, not_started: NotStarted, policy: str) -> None:
        """Report that a task was skipped."""
        self._revoked(request)
        event = LockRefused(*about(request), policy=policy, waits_for=not_started.waits_for)
        self.tell(request, event)
        logger.info("Task %s was skipped: %s", request, not_started.reason, extra=log_keys(event))

    @staticmethod
    def _revoked(request: LockedRequest) -> None:
        """Report the end of a task as Celery reports a revoked task."""
        request.send_event("task-revoked", terminated=False, signum=None, expired=False)
        signals.task_revoked.send(
            request.task,
            request=request._context,  # noqa: SLF001  # what Celery itself sends
            terminated=False,
            signum=None,
            expired=False,
        )

    def preempted(self, request: LockedRequest) -> None:
        """Report that a task must end, since a newer call waits for its lock."""
        event = TaskPreempted(*about(request), by=task_id_of(request.preempted_by))
        self.tell(request, event)
        logger.info(
            "Task %s must end: task %s is newer and waits for the lock %r",
            request,
            printable(event.by),
            event.lock,
            extra=log_keys(event),
        )

    def ended_for_newer(self, request: LockedRequest, reason: str) -> None:
        """Report the end of a task that a newer call has preempted."""
        self._revoked(request)
        logger.info("Task %s was preempted: %s", request, reason)

    def debounced(self, request: LockedRequest) -> None:
        """Warn once for each task that a replaced call was a member of a canvas."""
        canvas = next(
            (key for key in ("chord", "chain", "callbacks") if request.request_dict.get(key)), ""
        )
        if canvas and request.task.name not in self._warned:
            self._warned.add(request.task.name)
            logger.warning(
                "Task %s has %s, and was replaced before it had settled: what follows it is not "
                "called. Leave lock_debounce out, or send the task outside of a canvas. This is "
                "logged once for each task.",
                request,
                {"chord": "a chord", "chain": "a chain behind it", "callbacks": "links"}[canvas],
            )

    def closed(self, request: LockedRequest, not_started: NotStarted) -> None:
        """Report that a task has closed its lock for a time, and runs again later."""
        event = LockClosed(
            not_started.lock,
            request.task.name,
            request.id,
            seconds=not_started.closed_for,
            why=not_started.reason,
        )
        self.tell(request, event)
        logger.info(
            "Task %s runs again later: it has closed the lock %r for %g s%s",
            request,
            event.lock,
            event.seconds,
            f": {printable(event.why)}" if event.why else "",
            extra=log_keys(event),
        )

    def closed_by_running(self, event: LockClosed) -> None:
        """Report that a task has closed a lock for a time, and goes on (``self.lock.pause``)."""
        self.observers.notify(event)
        self.announce(event)

    # -- of a message -----------------------------------------------------------------------------

    def parked(self, request: LockedRequest, event: TaskBlocked) -> None:
        """Call the observers, and log that a message is parked.

        The level is checked first: this runs in the main loop, once for each parked message.
        """
        self.observers.notify(event)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "Task %s is parked%s for %r%s%s; `locks why %s` shows more",
                request,
                f": {nth(event.rank)}" if event.rank else "",
                event.lock,
                f" behind {event.holder}" if event.holder else "",
                _BESIDES.get(event.waits_for, ""),
                printable(request.id),
                extra=log_keys(event),
            )

    def delivered(self, request: LockedRequest, delivery: Delivery) -> None:
        """Report that a parked message was delivered, or that a later one has replaced it."""
        if not (self.observers.any or self.sends_events()):
            return
        if delivery.verdict == "replaced":
            by = task_id_of(delivery.by)
            self.tell(request, TaskReplaced(*about(request), by=by, waited=delivery.waited))
        else:
            verdict, waited = delivery.verdict, delivery.waited
            self.tell(request, TaskDelivered(*about(request), verdict=verdict, waited=waited))

    def followed(self, request: LockedRequest, first: str) -> None:
        """Report that a duplicate has ended with the result of the first task."""
        event = TaskFollowed(*about(request), of=first)
        self.tell(request, event)
        told = "Task %s has ended with the result of task %s, and did not run (lock_on_duplicate)"
        logger.info(told, request, printable(first), extra=log_keys(event))

    @staticmethod
    def runs_itself(request: LockedRequest) -> None:
        """Report that the first task of a duplicate has ended without a result."""
        error = request.lock_header.error
        first = printable(getattr(error, "reason", ""))
        logger.info(
            "Task %s queues to run itself, or follows the duplicate that does: task %s has no "
            "stored result (lock_on_duplicate)",
            request,
            first,
        )

    def delay_events(self, request: LockedRequest) -> None:
        """Delay the events of a request, so that those of the worker that parked it are first.

        See :data:`FRESH`.
        """
        if self.later is not None and self.sends_events():
            request.delay_events()
            self.later(request.send_delayed_events)

"""One call of Celery's tracer, and the ways in which Celery ends a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from billiard.einfo import ExceptionInfo
from celery import states
from celery.app.task import Context
from celery.app.trace import TraceInfo, report_internal_error, task_has_custom, trace_ok_t
from celery.exceptions import Ignore, Reject

from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.core.clock import SystemClock, seconds_until
from celery_singleton_lock.core.model import Ending, Reservation
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.worker.lock_header import (
    HEADER_KEY,
    LockHeader,
    attempt_of,
)
from celery_singleton_lock.worker.preempted import LockPreempted
from celery_singleton_lock.worker.retry_later import RetryLater

logger: Final = logging.getLogger(__name__)
_clock: Final = SystemClock()


class Run(NamedTuple):
    """One call of Celery's tracer."""

    task: Any
    tracer: Callable[..., Any]
    uuid: str
    args: Any
    kwargs: Any
    request: dict[str, Any]

    def go(self) -> Any:
        """Run the task as Celery does."""
        return self.tracer(self.uuid, self.args, self.kwargs, self.request)

    def context(self) -> Context:
        """Return the request as the task's methods and the result backend expect it."""
        return Context(self.request, args=self.args, kwargs=self.kwargs, called_directly=False)


def reservation_for(request: Mapping[str, Any], retry: Any, lease: float) -> Reservation:
    """Return the reservation for the next attempt of a task: until its ETA plus one lease.

    Args:
        request: request of the attempt that has ended.
        retry: Celery's exception ``Retry``.
        lease: the lease in seconds.
    """
    when = retry.when or 0.0
    if isinstance(when, datetime):
        when = seconds_until(when)
    following = {**request, "retries": (request.get("retries") or 0) + 1}
    seconds = min(max(when, 0.0) + lease, MAX_WAIT)
    return Reservation(attempt_of(following), seconds, _clock.monotonic())


def later_in(outcome: Any) -> RetryLater | None:
    """Return the exception of a task that is to run again later, else None."""
    info = outcome.info
    if info is None or info.state != states.IGNORED:
        return None
    return info.retval if isinstance(info.retval, RetryLater) else None


def preempted_in(outcome: Any) -> LockPreempted | None:
    """Return the exception of a task that a newer call has preempted, else None."""
    error = bare(getattr(outcome.retval, "exception", None))
    if isinstance(error, Reject):
        error = error.reason  # Celery's retry() turns each error of its publish into a Reject
    return error if isinstance(error, LockPreempted) else None


def bare(error: Any) -> Any:
    """Return an exception without its traceback, which billiard may have wrapped around it."""
    return getattr(error, "exc", error)


def run_again(run: Run, later: RetryLater, outcome: Any) -> Any:
    """Send a task again whose message cannot be parked, since it ran without its lock.

    Returns:
        ``outcome``, or that of a failed task if the broker did not take the message.
    """
    try:
        _send_again(run, later)
    except Exception as error:  # noqa: BLE001  # the task would be lost silently
        return fail(run, error)
    logger.info(
        "Task %s[%s] is sent again, to run in %g s%s. No other task waits meanwhile: its lock was "
        "not taken, or cannot be closed.",
        run.task.name,
        printable(run.uuid),
        later.seconds,
        f" ({printable(later.why)})" if later.why else "",
    )
    return outcome


def _send_again(run: Run, later: RetryLater) -> None:
    """Send a task again, with the same id and number of retries."""
    context = run.context()
    run.task.request_stack.push(context)
    try:
        run.task.signature_from_request(
            context, run.args, run.kwargs, countdown=later.seconds, retries=context.retries
        ).apply_async()
    finally:
        run.task.request_stack.pop()


def has_ended(outcome: Any) -> bool:
    """Return whether a task has ended: neither it nor its message runs again."""
    info = outcome.info
    if info is None or info.state == states.FAILURE:
        return True
    if info.state == states.REJECTED:
        return not info.retval.requeue
    return info.state != states.RETRY and later_in(outcome) is None


def ending_of(outcome: Any, task: Any, header: LockHeader) -> Ending:
    """Return the ending of a traced task, from what Celery does with its message."""
    info = outcome.info
    if info is None:
        return Ending.FINAL
    if info.state == states.REJECTED:
        return ending_of_reject(info.retval, header)
    if info.state == states.FAILURE and not header.acks_early and not _acks_failures(task):
        return Ending.REJECT
    return Ending.FINAL


def ending_of_reject(reject: Reject, header: LockHeader) -> Ending:
    """Return the ending of a task that raised Reject."""
    if reject.requeue:
        return Ending.AGAIN
    return Ending.FINAL if header.acks_early else Ending.REJECT


def _acks_failures(task: Any) -> bool:
    """Return whether Celery acknowledges the message of a late-acknowledged task that failed."""
    acks = getattr(task, "acks_on_failure", None)  # since Celery 5.7
    return acks if acks is not None else task.acks_on_failure_or_timeout is not False


def ignored(error: Ignore) -> Any:
    """Return what Celery's tracer returns for a task that raised ``error``."""
    try:
        raise error
    except Ignore:
        return trace_ok_t(ExceptionInfo(internal=True), TraceInfo(states.IGNORED, error), 0.0, None)


def mark_skipped(run: Run, reason: str) -> None:
    """Store REVOKED with the reason, which also ends the chord of the task."""
    context, task = run.context(), run.task
    ignored = task.ignore_result if context.ignore_result is None else context.ignore_result
    keep = not ignored or task.store_errors_even_if_ignored
    task.backend.mark_as_revoked(run.uuid, reason, request=context, store_result=keep)


def fail(run: Run, error: Exception) -> Any:
    """End the task as Celery ends a failed task: result, errbacks, chord, hooks and signal."""
    context = run.context()
    run.task.request_stack.push(context)
    try:
        raise error
    except type(error):
        info = TraceInfo(states.FAILURE, error)
        einfo = info.handle_error_state(run.task, context)
        if task_has_custom(run.task, "after_return"):
            run.task.after_return(states.FAILURE, error, run.uuid, run.args, run.kwargs, None)
        return trace_ok_t(einfo, info, 0.0, None)
    finally:
        run.task.request_stack.pop()


def escaped(task: Any, error: Exception) -> Any:
    """Return what Celery's tracer returns for an error that it, or a hook of the task, has raised.

    Call it while the error is handled.
    """
    if isinstance(error, Reject):
        return trace_ok_t(
            ExceptionInfo(internal=True), TraceInfo(states.REJECTED, error), 0.0, None
        )
    einfo = report_internal_error(task, error)
    return trace_ok_t(einfo, TraceInfo(states.FAILURE, error), 0.0, None)


def take_header(request: dict[str, Any]) -> LockHeader | None:
    """Remove the lock header from a request, before the task can see it."""
    header = take_out(request, HEADER_KEY)
    return None if header is None else LockHeader(*header)


def take_out(request: dict[str, Any], key: str) -> Any:
    """Remove a key from a request and its headers; return its value, or None."""
    found = request.pop(key, None)
    headers = request.get("headers")
    if isinstance(headers, Mapping) and key in headers:
        request["headers"] = {k: v for k, v in headers.items() if k != key}
    return found

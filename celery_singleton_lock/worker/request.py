"""The request of a locked task: Celery's request, with calls to the dispatcher."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import (
    SoftTimeLimitExceeded,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from billiard.pool import MaybeEncodingError
from celery.exceptions import TaskRevokedError
from celery.worker.request import Request

from celery_singleton_lock.core.clock import SystemClock, wall_time
from celery_singleton_lock.core.model import Ending, Preempted
from celery_singleton_lock.errors import (
    BackendError,
    LockConflict,
    LockCostError,
    LockError,
    LockLost,
    LockQueueFull,
    LockWaitTimeout,
    MaxReturnsExceeded,
)
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.worker.lock_header import HEADER_KEY, NO_HEADER, LockHeader
from celery_singleton_lock.worker.loop_channel import guarded
from celery_singleton_lock.worker.message_stage import (
    ACK_MOVES,
    FIRST_ARRIVAL,
    STAGE_MOVES,
    UNANNOUNCED,
    AckState,
    Arrival,
    Stage,
    illegal_moves,
    mutex,
)
from celery_singleton_lock.worker.not_started import NotStarted
from celery_singleton_lock.worker.preempted import LockPreempted, preempted_at
from celery_singleton_lock.worker.turn_at_broker import TurnAtBroker

if TYPE_CHECKING:
    from celery_singleton_lock.config.call_options import Call
    from celery_singleton_lock.config.settings import LockOptions
    from celery_singleton_lock.core.unique import UniqueCall

logger: Final = logging.getLogger(__name__)
_clock = SystemClock()

_PROCESS_GONE: Final = (
    WorkerLostError,
    Terminated,
    TimeLimitExceeded,
    SystemExit,
    KeyboardInterrupt,
)


_REFUSED: Final = (
    LockConflict,
    LockCostError,
    LockQueueFull,
    LockWaitTimeout,
    MaxReturnsExceeded,
)

_MAY_NOT_HAVE_RUN: Final = (
    *_PROCESS_GONE,  # it may have run
    NotStarted,
    BackendError,
    *_REFUSED,
)
"""Errors that do not prove that the task has run."""

_LEFT_TO_CELERY: Final = frozenset({AckState.LEFT_TO_CELERY})
_HELD_BACK: Final = frozenset({AckState.HELD_BACK})
_WITHHELD: Final = _HELD_BACK | {AckState.DUE}
_UNDONE: Final = _LEFT_TO_CELERY | _WITHHELD

_ENDINGS: Final = {
    AckState.ACKNOWLEDGED: Ending.FINAL,
    AckState.REJECTED: Ending.REJECT,
}

_STATE_OF: Final = {
    "task-started": "STARTED",
    "task-revoked": "REVOKED",
    "task-retried": "RETRY",
    "task-rejected": "REJECTED",
}


class DispatcherCallbacks(Protocol):
    """The calls that a request makes to the dispatcher of its worker."""

    def on_accepted(self, request: LockedRequest) -> None:
        """Note that the pool has accepted the task."""
        ...

    def on_not_begun(self, request: LockedRequest) -> None:
        """Note that the acceptance of the task has failed. A thread or greenlet does not run it."""
        ...

    def on_ran(self, request: LockedRequest) -> None:
        """Note that the task ran, so that it had its lock."""
        ...

    def on_not_started(self, request: LockedRequest, not_started: NotStarted) -> bool:
        """Handle a task that was not run, since it did not get its lock.

        Returns:
            False if Celery is to acknowledge its message.
        """
        ...

    def on_retried(self, request: LockedRequest, retry: BaseException) -> None:
        """Note that the task will be retried."""
        ...

    def on_revoked(self, request: LockedRequest) -> None:
        """Note that the task was revoked before it ran."""
        ...

    def on_refused(self, request: LockedRequest, error: LockError) -> None:
        """Note that the task ended without its lock."""
        ...

    def on_lost(self, request: LockedRequest) -> None:
        """Note that the task lost its lock while it ran."""
        ...

    def on_preempted(self, request: LockedRequest, error: LockPreempted) -> None:
        """Note that the task has ended, since a newer call replaces it."""
        ...

    def on_interrupted(self, request: LockedRequest) -> None:
        """Note that the task has ended, and that its process may not have released its lock."""
        ...

    def on_ended(self, request: LockedRequest, *, gone: bool) -> None:
        """Note that the task has ended.

        Args:
            request: its request.
            gone: whether its process has died, so that it cannot release its locks.
        """
        ...


class LockedRequest(Request):  # type: ignore[misc]  # celery is untyped
    """A request that calls its dispatcher. Without a dispatcher it behaves like Celery's request.

    Celery derives a class for each task, which overrides ``execute_using_pool`` and ``on_success``
    without calling ``super()`` (celery issue 4526). So :meth:`__init_subclass__` wraps these two.
    """

    dispatcher: DispatcherCallbacks | None = None
    lock_header: LockHeader = NO_HEADER
    arrival: Arrival = FIRST_ARRIVAL
    stage: Stage = Stage.RECEIVED
    """Where the message is in this process; use :meth:`move` to change it."""
    ack: AckState = AckState.LEFT_TO_CELERY
    """The acknowledgement of the message."""
    job: Any = None
    _on_ack: Callable[..., Any]
    execute_using_pool: Callable[..., Any]
    on_success: Callable[..., Any]
    own_options: LockOptions | None = None
    """Options of its task, overridden by those of this call; None if the call has none."""
    call: Call | None = None
    """Lock options of this call."""
    unique: UniqueCall | None = None
    """The unique call, as the header of the message describes it; None if it is not unique."""
    was_blocked = False
    """Whether monitors may show BLOCKED or DELIVERED, which only an explicit state replaces."""
    lock_refused = False
    """Whether it was reported that Redis refuses its lock, or one of its locks."""
    refused_lock = ""
    """The name of that lock, while the message is held for it."""
    lock_lost = False
    """Whether it was reported that its lock was lost while its task runs."""
    runs_later = False
    """Whether the task has run and raised ``RetryLater``, so that its message waits again."""
    preempted_by: str = ""
    """The newer attempt because of which its task must end; empty if it need not."""
    ran_for: float | None = None
    """Run time of the task in seconds, measured by its process."""
    acquired_at: float | None = None
    """Monotonic time at which its acquisition was reported; None if it was not."""
    cancelled: bool = False
    """Whether Celery cancels it: after a lost connection, or in a cold shutdown."""
    after_pool: Callable[[Callable[[], None]], None] | None = None
    """Makes a call after the pool has its next task. None: acknowledge a success at once."""
    turn_at_broker: ClassVar[TurnAtBroker | type[nullcontext[None]]] = nullcontext
    """Returns a context for an acknowledgement; greenlets wait there for those of others."""
    _delayed_calls: list[Callable[[], None]] | None = None

    def __init__(self, message: Any, **kwargs: Any) -> None:
        """Record the time of arrival: an ETA may be hours later."""
        super().__init__(message, **kwargs)
        self.received_at: float = _clock.monotonic()

    def __str__(self) -> str:
        """Return a text such as ``settle[3f…]``, printable also if the id is not."""
        return printable(super().__str__())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap the methods that Celery's derived class overrides."""
        super().__init_subclass__(**kwargs)
        if "execute_using_pool" in cls.__dict__:
            cls.execute_using_pool = _dispatching(cls.__dict__["execute_using_pool"])
        if "on_success" in cls.__dict__:
            cls.on_success = _ending(cls.__dict__["on_success"])

    task: Final = property(attrgetter("_task"))
    request_dict: Final = property(attrgetter("_request_dict"))
    args: Final = property(attrgetter("_args"))
    kwargs: Final = property(attrgetter("_kwargs"))
    delivery_info: Final = property(attrgetter("_delivery_info"))
    """Like Celery's properties, but faster: they are read about fifteen times per message."""

    def options(self, of_task: Callable[[Any], LockOptions]) -> LockOptions:
        """Return the lock options of this message.

        Args:
            of_task: task -> its options.
        """
        return self.own_options or of_task(self.task)

    def move(self, to: Stage) -> Stage:
        """Move to another stage. Safe from any thread.

        Returns:
            The former stage.
        """
        with mutex:
            was = self.stage
            self.stage = to
        if to not in STAGE_MOVES[was]:
            illegal_moves.report(self, was, to)
        return was

    def move_from(self, stages: frozenset[Stage], to: Stage) -> Stage | None:
        """Move to another stage if the message is in one of ``stages``. Safe from any thread.

        Returns:
            The former stage; None if it was in none of them.
        """
        with mutex:
            was = self.stage
            if was not in stages:
                return None
            self.stage = to
        if to not in STAGE_MOVES[was]:
            illegal_moves.report(self, was, to)
        return was

    @property
    def holds_lock(self) -> bool:
        """Whether its lock was announced, or was granted and is the only one that it needs."""
        if self.stage is Stage.RUNNING:
            return True
        return self.lock_header.granted and self.lock_header.lock_set is None

    @property
    def is_only_copy(self) -> bool:
        """Whether a claim without a reply may have deleted the stored message."""
        header = self.lock_header
        return header.granted and header.acks_early and header.copy

    @property
    def is_unanswered(self) -> bool:
        """Whether it may hold its lock, or has held it: then it is not run here, but parked again.

        Redis did not answer its claim, here or in a former worker; or it has raised ``RetryLater``.
        """
        return self.arrival.claim is not None or self.is_only_copy or self.runs_later

    @property
    def is_here_only(self) -> bool:
        """Whether it may be neither in Redis nor in the broker, while it waits for Redis."""
        alone = self.arrival.delivered or self.runs_later
        return bool(alone and self.lock_header.acks_early)

    def withhold_ack(self) -> None:
        """Hold the acknowledgement back until the lock is acquired, so that no message is lost."""
        self._move_ack(_LEFT_TO_CELERY, AckState.HELD_BACK)

    def spare_decoding(self) -> None:
        """Send the child the decoded arguments instead of the body of the message.

        Celery puts the arguments into the request anyway, so they are pickled only once. A body
        with a canvas is sent as it is, and the child decodes it.
        """
        if self._decoded:
            return
        payload = self._message.payload  # faster than Celery's property, which takes two mutexes
        canvas = payload[2]
        if not canvas or (isinstance(canvas, dict) and not any(canvas.values())):
            self._body, self._content_type, self._content_encoding = payload, None, None

    def announced(self) -> None:
        """Note that its process has acquired the lock, so the task runs."""
        start_due = self._start_is_due()
        self.move_from(UNANNOUNCED, Stage.RUNNING)
        self._decided(start_due=start_due)

    def decided(self) -> None:
        """Acknowledge, and send ``task-started``, if Celery has requested that meanwhile."""
        self._decided(start_due=self._start_is_due())

    def _decided(self, *, start_due: bool) -> None:
        if start_due:  # first: the acknowledgement may wait for the broker while the task ends
            self._send("task-started", timestamp=self.time_start)
        if self._stop_withholding():
            self.acknowledge()

    def _start_is_due(self) -> bool:
        """Return whether ``task-started`` was suppressed, since it was not known that it runs.

        True only once: the thread of a task and the main loop may both ask.
        """
        if not self._sends_events() or self.stage is not Stage.ACCEPTED or self._runs():
            return False
        asked = object()
        return self.__dict__.setdefault("_start_asked", asked) is asked

    def _sends_events(self) -> bool:
        return bool(self._eventer and self._eventer.enabled)

    def undecide(self) -> None:
        """Cancel a held back acknowledgement, since the task was not run."""
        self._stop_withholding()

    def _stop_withholding(self) -> bool:
        """Leave the acknowledgement to Celery. Return whether Celery has requested it."""
        if self.ack not in _WITHHELD:
            return False
        with mutex:
            was = self.ack
            if was in _WITHHELD:
                self.ack = AckState.LEFT_TO_CELERY
        return was is AckState.DUE

    def _move_ack(self, states: frozenset[AckState], to: AckState) -> bool:
        """Move to another state if the acknowledgement is in one of ``states``."""
        with mutex:
            was = self.ack
            if was not in states:
                return False
            self.ack = to
        if to not in ACK_MOVES[was]:
            illegal_moves.report(self, was, to)
        return True

    def mark_as_copy(self) -> None:
        """Mark it as a copy, since the broker redelivers its message.

        A pool of threads cannot be flushed, so the task runs although the connection was lost.
        """
        if HEADER_KEY in self.request_dict and not self.lock_header.granted:
            self.lock_header = self.lock_header._replace(copy=True)
            self.request_dict[HEADER_KEY] = tuple(self.lock_header)

    def acknowledge(self) -> None:
        """Acknowledge, or note that it is due if the acknowledgement is held back."""
        if self._move_ack(_HELD_BACK, AckState.DUE) or self.ack is AckState.DUE:
            return
        self._tell_broker(super().acknowledge)
        if self.acknowledged:
            self._move_ack(_LEFT_TO_CELERY, AckState.ACKNOWLEDGED)

    def acknowledge_after_pool(self) -> None:
        """Send the acknowledgement to the broker after the pool has its next task.

        With a Redis broker it takes a round trip. The slot of this task would be idle meanwhile.
        """
        if self.after_pool is not None:
            after_pool, on_ack = self.after_pool, self._on_ack
            self._on_ack = lambda *args: after_pool(partial(self._tell_broker, on_ack, *args))

    def _tell_broker(self, acknowledge: Callable[..., None], *args: Any) -> None:
        """Acknowledge or reject. What Celery does behind it may fail.

        After a lost connection it raises the prefetch count there. With eventlet and gevent that
        fails, since another greenlet reads from the connection; the main loop does it later.
        """
        try:
            with self.turn_at_broker():
                acknowledge(*args)
        except self._connection_errors as error:
            logger.warning("%s may be delivered again, it was not acknowledged: %r", self, error)
        except Exception as error:
            if not self._message.acknowledged:
                raise
            self.acknowledged = True
            logger.info(
                "%s is acknowledged, but what Celery does behind that failed: %r", self, error
            )

    def reject(self, requeue: bool = False) -> None:  # Celery's signature
        """Reject, and record whether the broker redelivers the message."""
        if not self.acknowledged:
            self._move_ack(_UNDONE, AckState.REQUEUED if requeue else AckState.REJECTED)
        self._tell_broker(super().reject, requeue)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  # Celery's signature
        """Send an event.

        ``task-started`` is delayed until it is known that the task runs: the pool accepts a task
        before it acquires its lock. Monitors that show BLOCKED change it only for an event with a
        state.
        """
        if not self._sends_events():
            return
        if type == "task-started" and self.dispatcher is not None and not self._runs():
            return  # decided() sends it
        self._send(type, **fields)

    def delay_events(self) -> None:
        """Delay the events of this request until :meth:`send_delayed_events`."""
        self._delayed_calls, self._delay_mutex = [], threading.RLock()

    def send_delayed_events(self) -> None:
        """Send the delayed events in order, and later ones at once."""
        with self._delay_mutex:
            for call in self._delayed_calls or ():
                guarded(call)
            self._delayed_calls = None

    def call_in_order(self, call: Callable[[], None]) -> None:
        """Make a call that sends an event, after the earlier ones. Safe from any thread."""
        if self._delayed_calls is not None:
            with self._delay_mutex:
                if self._delayed_calls is not None:
                    return self._delayed_calls.append(call)
        return call()

    def _send(self, name: str, **fields: Any) -> None:
        if self.was_blocked and name in _STATE_OF:
            fields.setdefault("state", _STATE_OF[name])
        if name == "task-started" and self.lock_header.name:
            fields["lock"] = self.lock_header.name
        fields.setdefault("timestamp", wall_time())
        self.call_in_order(partial(super().send_event, name, **fields))

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Call the dispatcher, which starts to renew the lease."""
        if self.job is not None:
            self.job = None  # the job refers to this request: without this, a reference cycle
        if self.dispatcher is not None:
            self.dispatcher.on_accepted(self)
        try:
            super().on_accepted(pid, time_accepted)
        except BaseException:
            if self.dispatcher is not None:
                self.dispatcher.on_not_begun(self)
            raise

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        """Handle each end other than a success, including a dead process."""
        error = bare(exc_info.exception)
        if self.dispatcher is None:
            super().on_failure(exc_info, *args, **kwargs)
        elif not (isinstance(error, NotStarted) and self.dispatcher.on_not_started(self, error)):
            if not isinstance(error, _MAY_NOT_HAVE_RUN):
                self.dispatcher.on_ran(self)
            elif isinstance(error, _REFUSED) and self.lock_header.concerns(error.name):
                self.dispatcher.on_refused(self, error)
            self.decided()
            try:
                if not self._ends_killed(error):
                    super().on_failure(exc_info, *args, **kwargs)
            finally:
                self._report_end(self.dispatcher, error)

    def _report_end(self, dispatcher: DispatcherCallbacks, error: BaseException) -> None:
        if isinstance(error, LockPreempted):
            dispatcher.on_preempted(self, error)
        if isinstance(error, LockLost) and self.lock_header.concerns(error.name):
            dispatcher.on_lost(self)
        gone = isinstance(error, _PROCESS_GONE)
        dispatcher.on_ended(self, gone=gone)
        if not gone and (isinstance(error, SoftTimeLimitExceeded) or _is_left_to_worker(error)):
            dispatcher.on_interrupted(self)

    def _ends_killed(self, error: BaseException) -> bool:
        """End a preempted task as REVOKED whose process has died, whatever its options say.

        Returns:
            Whether this is such a task.
        """
        died = self.preempted_by and isinstance(error, (WorkerLostError, Terminated))
        if not died or self.cancelled or self._already_revoked:
            return False
        ended = preempted_at(self.lock_header.name, Preempted(self.preempted_by))
        self._announce_revoked(ended.message, terminated=True, signum="SIGKILL", expired=False)
        logger.info("Task %s was preempted: %s", self, ended.message)
        return True

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        """Note it first: a killed greenlet reports its end before Celery's method returns."""
        self.cancelled = True
        super().cancel(*args, **kwargs)

    def on_retry(self, exc_info: Any) -> None:
        """Call the dispatcher, which tracks the reservation of the next attempt."""
        super().on_retry(exc_info)
        if self.dispatcher is not None:
            self.dispatcher.on_retried(self, bare(exc_info.exception))

    def on_timeout(self, soft: bool, timeout: float) -> None:  # Celery's signature
        """Handle the hard time limit. The process ends about 0.1 s later."""
        if not soft:
            self.decided()
        try:
            super().on_timeout(soft, timeout)
        finally:  # Celery stores the result and calls the task's hook, which may raise
            if not soft and self.dispatcher is not None:
                self.dispatcher.on_ended(self, gone=True)

    @cached_property
    def _context(self) -> Any:
        """Celery's context, without the lock header: Celery would copy that into a retry."""
        header = self._request_dict.pop(HEADER_KEY, None)
        try:
            context = super()._context
            if self.call:
                context.lock_call = self.call  # for a retry that this process sends
            return context
        finally:
            if header is not None:
                self._request_dict[HEADER_KEY] = header

    def _runs(self) -> bool:
        """Return whether it is known that the task runs or fails in its process."""
        if isinstance(self.lock_header.error, NotStarted):
            return False
        return self.holds_lock or not self.lock_header.name or self.lock_header.error is not None

    def withdraw_job(self) -> bool:
        """Return whether no child or thread has received it. Then none will.

        A closing pool discards such jobs. A thread may begin one before that, so it is cancelled.
        """
        future = getattr(self.job, "f", None)  # of a pool of threads
        if future is not None:
            return bool(future.cancel())
        return self.job is not None and getattr(self.job, "_write_to", self.job) is None

    def keep_job(self) -> None:
        """Let the pool report on the task although it was flushed, if a child has received it.

        Celery flushes its pool of processes after it has lost the connection. The pool then forgets
        each job whose acceptance it has not read, although the child may run the task.
        """
        job, self.job = self.job, None
        if getattr(job, "_write_to", None) is not None:
            job._cache.setdefault(job._job, job)  # noqa: SLF001  # undoes its discard()

    @property
    def first_place(self) -> int:
        """Server microseconds at which the message arrived first; 0 if it has no lock."""
        return self.arrival.first_place or self.lock_header.place

    def ending(self) -> Ending:
        """Return the ending with which its lock is released."""
        return _ENDINGS.get(self.ack, Ending.AGAIN)


def about(request: LockedRequest) -> tuple[str, str, str]:
    """Return the first fields of each event about a task: lock, task name, task id."""
    return request.lock_header.name, request.task.name, request.id


def bare(error: BaseException) -> BaseException:
    """Return the exception. A pool of threads wraps it with its traceback."""
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def _is_left_to_worker(error: BaseException) -> bool:
    """Return whether the process that ran the task has not released its lock.

    That is so for CancelledError, GeneratorExit and others that are no Exception: they may end the
    process, and then only the worker knows whether the message is acknowledged. If such an error
    cannot be pickled, billiard reports a MaybeEncodingError.
    """
    return isinstance(error, MaybeEncodingError) or not isinstance(error, Exception)


def throws_jobs_away(pool: Any) -> bool:
    """Return whether a closing pool discards jobs that no child or thread has received.

    That is so for prefork with an event loop, and for threads in Celery 5.7.
    """
    is_prefork = getattr(getattr(pool, "_pool", None), "threads", True) is False
    return is_prefork or hasattr(pool, "executor")


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``execute_using_pool``, which raises if the task was revoked."""

    def execute_using_pool(self: LockedRequest, pool: Any, **kwargs: Any) -> Any:
        if self.stage is Stage.WITHDRAWN:
            raise TaskRevokedError(self.id)  # Celery then only frees the slot
        if self.dispatcher is not None and self.stage is not Stage.GIVEN_BACK:
            self.move(Stage.IN_POOL)
        try:
            job = original(self, pool, **kwargs)
        except TaskRevokedError:
            self.decided()  # no process will acquire the lock, which would have caused this
            if self.dispatcher is not None:
                self.dispatcher.on_revoked(self)
                self.dispatcher.on_ended(self, gone=True)
            raise
        if self.stage is Stage.IN_POOL and throws_jobs_away(pool):
            self.job = job
        return job

    return execute_using_pool


def _ignore(*_: Any, **__: Any) -> None:
    """Leave a cancelled task unacknowledged. Celery would acknowledge it as a success."""


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``on_success``, which Celery calls whenever a pool process has reported an end."""

    def on_success(self: LockedRequest, result: Any, **kwargs: Any) -> Any:
        if self.dispatcher is None:
            return original(self, result, **kwargs)
        reported = isinstance(result, tuple) and result[2] is not None  # a killed greenlet has None
        failed = reported and result[0]
        if isinstance(result, tuple):
            self.ran_for = result[2]
        if reported and not failed:
            self.acknowledge_after_pool()
            self.dispatcher.on_ran(self)
        if not failed and self.stage is not Stage.RUNNING:
            self.decided()
        handle = _ignore if self.cancelled and not reported else original
        try:
            return handle(self, result, **kwargs)
        except BaseException:
            failed = False  # on_failure() was not called
            raise
        finally:
            if not failed:
                self.dispatcher.on_ended(self, gone=not reported)

    return on_success

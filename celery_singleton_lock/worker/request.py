"""A message in the worker's main process: Celery's request, which tells its desk how it goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.exceptions import TaskRevokedError
from celery.worker.request import Request

from celery_singleton_lock.core.clock import SystemClock, wall_time
from celery_singleton_lock.errors import (
    BackendError,
    LockConflict,
    LockLost,
    LockQueueFull,
    LockWaitTimeout,
    MaxReturnsExceeded,
)
from celery_singleton_lock.worker.execution.tracer import Turned
from celery_singleton_lock.worker.loop_channel import guarded
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.worker.lock_header import STAMP, UNSTAMPED, Stamp
from celery_singleton_lock.message_text import printable

if TYPE_CHECKING:
    from celery_singleton_lock.config.call_options import Call
    from celery_singleton_lock.worker.dispatch.dispatcher import Desk
    from celery_singleton_lock.config.settings import LockOptions

logger = logging.getLogger(__name__)
_clock = SystemClock()

_PROCESS_GONE: Final = (
    WorkerLostError,
    Terminated,
    TimeLimitExceeded,
    SystemExit,
    KeyboardInterrupt,
)


_REFUSED: Final = (LockConflict, LockQueueFull, LockWaitTimeout, MaxReturnsExceeded)

_NEVER_RAN: Final = (
    *_PROCESS_GONE,  # or nobody knows
    Turned,
    BackendError,
    *_REFUSED,
)
"""With these a task may end that had no lock."""

_STATE_OF: Final = {
    "task-started": "STARTED",
    "task-revoked": "REVOKED",
    "task-retried": "RETRY",
    "task-rejected": "REJECTED",
}


class LockedRequest(Request):  # type: ignore[misc]  # celery is untyped
    """A request that tells its desk how it goes on. Without a desk it is Celery's own.

    Celery derives a class per task that redefines ``execute_using_pool`` and ``on_success``
    without calling ours (celery issue 4526), so these two are wrapped when that class is made.
    """

    desk: Desk | None = None
    stamp: Stamp = UNSTAMPED
    delivered = False
    accepted = False
    dispatched = False
    landed = False
    withdrawn = False
    """Whether another worker has got its message, so that it does not run here."""
    parking = False
    requeued = False
    rejected = False
    took = False
    told = False
    at_clerk = False
    is_copy = False
    job: Any = None
    own_options: LockOptions | None = None
    """Options of its task, with those of this call; None if the call has none."""
    call: Call | None = None
    """Lock options of this call."""
    requeues: int = 0
    """How often it has gone back to the broker, since nobody gave it the lock."""
    returns: int = 0
    """How often it has come back, after it was parked and had begun."""
    first_place: int = 0
    """Server microseconds at which it arrived first."""
    was_blocked = False
    """Whether monitors may show a state that only an explicit one changes: BLOCKED, DELIVERED."""
    is_twin = False
    ran_for: float | None = None
    """Seconds for which the task ran, as its process measured them."""
    acquired_at: float | None = None
    """Monotonic time at which its lock was known to be taken."""
    _withheld = False
    _ack_due = False
    _start_due = False
    _unsaid: list[Callable[[], None]] | None = None

    def __init__(self, message: Any, **kwargs: Any) -> None:
        """Note when the message came: an ETA may keep it here for hours."""
        super().__init__(message, **kwargs)
        self.received_at = _clock.monotonic()

    def __str__(self) -> str:
        """``settle[3f…]``, as Celery shows it; printable, since callers choose ids."""
        return printable(super().__str__())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap what the derived class redefines."""
        super().__init_subclass__(**kwargs)
        if "execute_using_pool" in cls.__dict__:
            cls.execute_using_pool = _dispatching(cls.__dict__["execute_using_pool"])
        if "on_success" in cls.__dict__:
            cls.on_success = _landing(cls.__dict__["on_success"])

    task = property(attrgetter("_task"))
    request_dict = property(attrgetter("_request_dict"))
    args = property(attrgetter("_args"))
    kwargs = property(attrgetter("_kwargs"))
    delivery_info = property(attrgetter("_delivery_info"))
    """As Celery's, without a frame for each: they are read some fifteen times per message."""

    def options(self, of_task: Callable[[Any], LockOptions]) -> LockOptions:
        """Return the lock options that count for this message.

        Args:
            of_task: task -> what it declares.
        """
        return self.own_options or of_task(self.task)

    def withhold_ack(self) -> None:
        """Acknowledge only once the lock is taken: a task that is turned away is not lost."""
        self._withheld = True

    def spare_decoding(self) -> None:
        """Send the child the arguments as they were decoded here, instead of the message's body.

        They are in the request anyway (Celery puts them there), so that they are pickled once.
        What else a body may tell, of a canvas, is left to the child: Celery does not pickle that.
        """
        if self._decoded:
            return
        payload = self._message.payload  # Celery's property of this takes two mutexes
        canvas = payload[2]
        if not canvas or (isinstance(canvas, dict) and not any(canvas.values())):
            self._body, self._content_type, self._content_encoding = payload, None, None

    def decided(self) -> None:
        """Acknowledge, and say that it has started, if Celery wanted to meanwhile."""
        self._withheld = False
        if self._ack_due:
            self._ack_due = False
            self.acknowledge()
        # At once: under threads two may come here.
        if self._start_due and self.__dict__.pop("_start_due", False):
            self._send("task-started", timestamp=self.time_start)

    def undecide(self) -> None:
        """Forget what Celery wanted to say meanwhile: the task was turned away."""
        self._withheld = self._ack_due = self._start_due = False

    def doubt(self) -> None:
        """Count as one of two copies from now on: the broker delivers its message again.

        A pool of threads cannot be flushed, so it runs although its connection was lost.
        """
        if STAMP in self.request_dict and not self.stamp.granted:
            self.stamp = self.stamp._replace(copy=True)
            self.request_dict[STAMP] = tuple(self.stamp)

    def forget_start(self) -> None:
        """Do not say that it has started: it was skipped."""
        self._start_due = False

    def acknowledge(self) -> None:
        """Acknowledge, unless it is not known yet whether the task runs."""
        if self._withheld:
            self._ack_due = True
            return
        try:
            super().acknowledge()
        except self._connection_errors as error:  # raised by what Celery hangs on to it
            logger.warning("%s may be delivered again, it was not acknowledged: %r", self, error)

    def reject(self, requeue: bool = False) -> None:  # Celery's signature
        """Reject, and remember whether the message comes back."""
        if not self.acknowledged:
            self.requeued, self.rejected = self.requeued or requeue, not requeue
        super().reject(requeue=requeue)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  # Celery's signature
        """Send an event; after BLOCKED only an explicit state changes what monitors show.

        The pool accepts a task before its lock is asked for: that it has started is said after.
        """
        if not (self._eventer and self._eventer.enabled):
            return
        if type == "task-started" and self.desk is not None and not self._runs():
            self._start_due = not isinstance(self.stamp.error, Turned)
            return
        self._send(type, **fields)

    def hush(self) -> None:
        """Keep to itself what is to be told of it, until :meth:`speak`."""
        self._unsaid, self._saying = [], threading.RLock()

    def speak(self) -> None:
        """Tell what was kept, in its order, and all else at once from now on."""
        with self._saying:
            for say in self._unsaid or ():
                guarded(say)
            self._unsaid = None

    def say(self, say: Callable[[], None]) -> None:
        """Make a call that tells something of this request, in its turn. Safe from any thread."""
        if self._unsaid is not None:
            with self._saying:
                if self._unsaid is not None:
                    return self._unsaid.append(say)
        return say()

    def _send(self, name: str, **fields: Any) -> None:
        if self.was_blocked and name in _STATE_OF:
            fields.setdefault("state", _STATE_OF[name])
        if name == "task-started" and self.stamp.name:
            fields["lock"] = self.stamp.name
        fields.setdefault("timestamp", wall_time())
        self.say(partial(super().send_event, name, **fields))

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Watch the lease from here on."""
        self.accepted = True
        if self.job is not None:
            self.job = None  # it knows this request, and nothing breaks that circle
        if self.desk is not None:
            self.desk.on_accepted(self)
        super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        """Hear every end that is no success, a dead process among them."""
        error = bare(exc_info.exception)
        if self.desk is None:
            super().on_failure(exc_info, *args, **kwargs)
        elif not (isinstance(error, Turned) and self.desk.on_turned(self, error)):
            if not isinstance(error, _NEVER_RAN):
                self.desk.on_ran(self)
            elif isinstance(error, _REFUSED) and self.stamp.concerns(error.name):
                self.desk.on_refused(self, error)
            self.decided()
            try:
                super().on_failure(exc_info, *args, **kwargs)
            finally:
                if isinstance(error, LockLost) and self.stamp.concerns(error.name):
                    self.desk.on_lost(self)
                self.desk.on_landed(self, gone=isinstance(error, _PROCESS_GONE))

    def on_retry(self, exc_info: Any) -> None:
        """Mind the reservation of the next attempt, which a revoke must end."""
        super().on_retry(exc_info)
        if self.desk is not None:
            self.desk.on_retried(self, bare(exc_info.exception))

    def on_timeout(self, soft: bool, timeout: float) -> None:  # Celery's signature
        """Hear the hard time limit; its process lives on for about 0.1 s."""
        if not soft:
            self.decided()
        super().on_timeout(soft, timeout)
        if not soft and self.desk is not None:
            self.desk.on_landed(self, gone=True)

    @cached_property
    def _context(self) -> Any:
        """Celery's context, without the stamp: it would be carried into a retry as a header."""
        stamp = self._request_dict.pop(STAMP, None)
        try:
            context = super()._context
            if self.call:
                context.lock_call = self.call  # for a retry that this process sends
            return context
        finally:
            if stamp is not None:
                self._request_dict[STAMP] = stamp

    def _runs(self) -> bool:
        """Whether it is known that no busy lock can turn the task away, nor has."""
        if isinstance(self.stamp.error, Turned):
            return False
        return self.took or not self.stamp.name or self.stamp.error is not None

    def unsent(self) -> bool:
        """Whether no child has got it yet: a prefork pool that is closing throws such jobs away."""
        return self.job is not None and getattr(self.job, "_write_to", self.job) is None

    def ending(self) -> Ending:
        """Return what becomes of the message."""
        if self.requeued or not self.acknowledged:
            return Ending.AGAIN
        return Ending.REJECT if self.rejected else Ending.FINAL


def about(request: LockedRequest) -> tuple[str, str, str]:
    """Return what every event about a task tells: lock, task name, task id."""
    return request.stamp.name, request.task.name, request.id


def bare(error: BaseException) -> BaseException:
    """Return the exception itself: threads pass it wrapped with its traceback."""
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def throws_jobs_away(pool: Any) -> bool:
    """Return whether a closing pool forgets what no child has got yet: prefork with a loop."""
    return getattr(getattr(pool, "_pool", None), "threads", True) is False


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``execute_using_pool``: a task that is revoked or refused there ends its flight."""

    def execute_using_pool(self: LockedRequest, pool: Any, **kwargs: Any) -> Any:
        if self.withdrawn:
            raise TaskRevokedError(self.id)  # tells Celery to free the slot, and nothing else
        self.dispatched = True
        try:
            job = original(self, pool, **kwargs)
        except TaskRevokedError:
            self.decided()  # nobody will take the lock, of which the acknowledgement would tell
            if self.desk is not None:
                self.desk.on_revoked(self)
                self.desk.on_landed(self, gone=True)
            raise
        if self.delivered and not self.accepted and throws_jobs_away(pool):
            self.job = job
        return job

    return execute_using_pool


def _landing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``on_success``, which hears every end of which the pool child told."""

    def on_success(self: LockedRequest, result: Any, **kwargs: Any) -> Any:
        if self.desk is None:
            return original(self, result, **kwargs)
        told = isinstance(result, tuple) and result[2] is not None  # a killed greenlet has no time
        if isinstance(result, tuple):
            self.ran_for = result[2]
        if not (told and result[0]):
            if told:
                self.desk.on_ran(self)
            self.decided()
        try:
            return original(self, result, **kwargs)
        finally:
            if not self.parking:
                self.desk.on_landed(self, gone=not told)

    return on_success

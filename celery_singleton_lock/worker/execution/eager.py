"""The lock of a task that runs where it is called: ``apply()``, or ``task_always_eager``.

Only with ``singleton_lock_eager``. There is no worker that could keep a message meanwhile, so who
must wait waits in place, in the queue of the lock, as a :class:`~celery_singleton_lock.lock.sync.Lock`
does. The lock is taken around the body alone: Celery runs callbacks, the next link of a chain and
the next attempt of a retry inside of, or right after, the call that they follow, and with the same
key they would wait for the very task that is waiting for them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from celery import states
from celery.exceptions import TaskRevokedError
from celery.result import EagerResult

from celery_singleton_lock.core.lock_set import names_in
from celery_singleton_lock.config.call_options import current_call
from celery_singleton_lock.errors import (
    BackendError,
    LockConflict,
    LockQueueFull,
    LockReentered,
    LockWaitTimeout,
    SingletonLockError,
)
from celery_singleton_lock.worker.execution.tracer import Held, PlacedLock, Turned, current_locks, entered, in_place
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.core.model import LockView, why_busy
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind, Sent
from celery_singleton_lock.lock.multi_lock import Row
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.store.base import Store

logger = logging.getLogger(__name__)

_GUARD: Final = "_lock_eager_guard"


class Frame:
    """One eager run that holds its lock, below the one that is running.

    Args:
        task_id: of the run.
        name: of its lock; empty where it runs without.
        outer: names that were held around it.
    """

    __slots__ = ("lock", "name", "outer", "task_id")

    def __init__(self, task_id: str, name: str, outer: frozenset[str]) -> None:
        """Begin without the lock."""
        self.task_id, self.name, self.outer = task_id, name, outer
        self.lock: PlacedLock | Row | None = None

    def names(self) -> frozenset[str]:
        """Return the names that are held here."""
        return self.outer | names_in(self.name) if self.lock is not None else self.outer


_frame: ContextVar[Frame | None] = ContextVar("celery_singleton_lock_eager", default=None)


class EagerGate:
    """Takes and gives back the locks of tasks that run where they are called.

    Args:
        store: returns this process' store.
        name_of: task, args, kwargs -> lock name.
        rules: task -> its options.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        name_of: Callable[[Any, Any, Any, Sent], str],
        rules: Callable[[Any], LockOptions],
    ) -> None:
        """Hold nothing yet."""
        self._store = store
        self._name_of = name_of
        self._rules = rules
        self.noted: Callable[[Any, str], AbstractContextManager[None]] = lambda *_: nullcontext()
        """Called with a task and its lock's name around its body; for tests that watch runs."""

    def apply(self, task: Any, args: Any, kwargs: Any, go: Callable[[], Any]) -> Any:
        """Run a task by Celery's own ``apply``, with its body under the lock.

        Args:
            task: to run.
            args: its positional arguments.
            kwargs: its keyword arguments.
            go: calls Celery's ``apply``.

        Raises:
            LockReentered: the lock is held by a run that waits for this one.
        """
        self._refuse_nested(task, args or (), kwargs or {})
        self._guard(task)
        result = go()
        if isinstance(result, EagerResult) and isinstance(result.result, Turned):
            return skipped(task, result)
        return result

    def leave(self, task_id: str) -> None:
        """Give the lock of a run back before its end: another task takes its place now."""
        frame = _frame.get()
        if frame is not None and frame.task_id == task_id:
            self._release(frame)

    def _refuse_nested(self, task: Any, args: Any, kwargs: Any) -> None:
        """Refuse what would wait for its own caller."""
        if not waits(self._rules(task)):
            return
        try:
            sent = Sent(lambda: ("", {}), current_call())
            name = self._name_of(task, *as_sent(task, args, kwargs), sent)
        except Exception:  # noqa: BLE001  # the run itself comes to it, and fails with it
            return
        if names_in(name) & _held():
            msg = (
                f"{task.name} is called, to run at once, by a task that holds the same lock "
                f"{name!r}, and would wait for its own caller. Call the function itself "
                f"({task.__name__}(…) takes no lock), or give it another lock_key."
            )
            raise LockReentered(msg, name)

    def _guard(self, task: Any) -> None:
        """Have Celery's eager tracer call the body through :meth:`_run`. Twice is once.

        On the instance, as Celery itself does for ``autoretry_for``; and outside of that, so that
        a task that gets no lock is not tried again, like in a worker.
        """
        if _GUARD not in vars(task):
            setattr(task, _GUARD, True)
            task.run = self._guarded(task, task.run)

    def _guarded(self, task: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            request = task.request
            if not request.is_eager or request.called_directly or _is_inside(request.id):
                return run(*args, **kwargs)
            with self._holding(task, request):
                return run(*args, **kwargs)

        return guarded

    @contextmanager
    def _holding(self, task: Any, request: Any) -> Iterator[None]:
        """Hold the lock of an eager run."""
        name = self._name(task, request)
        frame = Frame(request.id, name, _held())
        token = _frame.set(frame)
        try:
            options = self._rules(task)
            frame.lock = self._take(name, options) if name else None
            hold = Held(options.hold_for, self._store().clock)
            with entered(frame.lock), self.noted(task, name):
                yield
            if frame.lock is not None:
                hold.put_on(frame.lock)
        finally:
            _frame.reset(token)
            self._release(frame)

    def _name(self, task: Any, request: Any) -> str:
        try:
            sent = as_sent(task, request.args or (), request.kwargs or {})
            return self._name_of(task, *sent, Sent(partial(_said, request), current_call()))
        except ArgumentsDoNotBind:
            return ""  # the call itself fails, and needs no lock

    def _take(self, name: str, options: LockOptions) -> PlacedLock | Row | None:
        """Return the lock, held; or None to run without.

        Raises:
            Turned: skipped.
            LockError: it was not to be had.
            BackendError: Redis does not answer, and nobody could keep the task until it does.
        """
        lock = in_place(self._store(), name, options)
        try:
            if lock.acquire(blocking=False) or self._wait(lock, options):
                return lock
        except BackendError as error:
            if options.on_backend_error != "run":
                raise
            logger.warning("the eager task runs without its lock %r: %s", name, error)
            return None
        waited = f"Waited {options.wait_timeout:g} s for the lock {name!r} (lock_wait_timeout)."
        raise LockWaitTimeout(waited, name)

    def _wait(self, lock: Lock | Row, options: LockOptions) -> bool:
        """Wait in place, unless the policy says something else."""
        view = self._store().inspect(lock.name, waiters=1)
        refusal = _refusal(view, options)
        if refusal is not None:
            raise refusal
        return lock.acquire(blocking_timeout=options.wait_timeout)

    def _release(self, frame: Frame) -> None:
        lock, frame.lock = frame.lock, None
        if lock is None:
            return
        try:
            lock.release()
        except SingletonLockError as error:
            logger.warning("the eager task could not release %r: %s", frame.name, error)


def as_sent(task: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments as a message would carry them: pydantic models as Celery dumps them."""
    dump = getattr(task, "_dump_pydantic_arguments", None)  # from Celery 5.7 on
    return dump(args, kwargs) if dump is not None else (args, kwargs)


def _said(request: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the queue to which a call was sent, if it was, and its headers."""
    return (request.delivery_info or {}).get("routing_key") or "", request.headers or {}


def waits(options: LockOptions) -> bool:
    """Return whether a blocked eager task waits in place."""
    return options.on_conflict not in {"skip", "fail"} and options.max_waiting != 0


def skipped(task: Any, result: EagerResult) -> EagerResult:
    """Return the result of a task that was left out, as a worker stores it: REVOKED."""
    reason = result.result.reason
    if task.store_eager_result and not task.ignore_result:
        task.backend.mark_as_revoked(result.id, reason)
    error = TaskRevokedError(reason)
    return EagerResult(result.id, error, states.REVOKED, name=result.name)


def _held() -> frozenset[str]:
    """Return the names of all locks that the running tasks hold, the innermost and those around."""
    frame = _frame.get()
    around = frame.names() if frame is not None else frozenset()
    return around | {
        lock.name for lock in current_locks() if lock.held or not isinstance(lock, Lock)
    }


def _is_inside(task_id: str) -> bool:
    """Return whether this is the run of that task: it called itself directly."""
    frame = _frame.get()
    return frame is not None and frame.task_id == task_id and frame.lock is not None


def _refusal(view: LockView, options: LockOptions) -> Exception | None:
    """Return how a blocked task ends that does not wait; None if it does."""
    first = view.holders[0] if view.holders else None
    reason = why_busy(view.name, first, view.paused)
    if options.on_conflict == "skip":
        return Turned("skipped", reason)
    if options.on_conflict == "fail":
        left = first.expires_in if first else 0.0
        return LockConflict(f"The {reason}.", view.name, str(first or ""), left)
    if options.max_waiting is None or view.waiting < options.max_waiting:
        return None
    full = f"{reason}, and as many wait as lock_max_waiting allows"
    if options.on_full == "skip":
        return Turned("skipped", full)
    return LockQueueFull(f"The {full}.", view.name)

"""The lock of a task that runs where it is called: ``apply()``, or ``task_always_eager``.

This needs ``singleton_lock_eager``. No worker could park the message, so a blocked call waits in
its thread, in the queue of the lock, as a :class:`~celery_singleton_lock.lock.sync.Lock` does.

The lock is held only while the body runs. Celery runs callbacks, the next task of a chain and the
next attempt of a retry in the same call, after the body. If the lock was still held, a task with
the same key would wait for its own caller.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from celery import states
from celery.exceptions import TaskRevokedError
from celery.result import EagerResult

from celery_singleton_lock.config.call_options import current_call
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import (
    Asker,
    Facts,
    Outcome,
    outcome_of,
    waits_if_blocked,
)
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind, Sent
from celery_singleton_lock.core.lock_set import names_in
from celery_singleton_lock.core.lock_view import LockView
from celery_singleton_lock.core.model import Reply, Verdict
from celery_singleton_lock.errors import BackendError, LockReentered
from celery_singleton_lock.lock.multi_lock import MultiLock
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.base import LockStore
from celery_singleton_lock.worker.execution.task_lock import (
    Held,
    PlacedLock,
    and_then,
    current_locks,
    entered,
    in_place,
    let_go,
)
from celery_singleton_lock.worker.not_started import NotStarted, refusal
from celery_singleton_lock.worker.retry_later import RetryLater

logger: Final = logging.getLogger(__name__)

_GUARD: Final = "_lock_eager_guard"

_WHO: Final = "the eager task"

BUSY: Final = Reply(Verdict.BLOCKED)
"""The reply for a lock that another owner holds, without the holder."""


class Frame:
    """One eager run. The eager runs that it calls are nested in it.

    Args:
        task_id: task id of the run.
        name: name of its lock; empty if it runs without a lock.
        outer: names of the locks that the outer runs hold.
        lock: its lock, not acquired yet; None if it runs without a lock.
    """

    __slots__ = ("is_holding", "lock", "name", "outer", "task_id")

    def __init__(
        self, task_id: str, name: str, outer: frozenset[str], lock: PlacedLock | MultiLock | None
    ) -> None:
        self.task_id: str = task_id
        self.name: str = name
        self.outer: frozenset[str] = outer
        self.lock: PlacedLock | MultiLock | None = lock
        self.is_holding: bool = False

    def names(self) -> frozenset[str]:
        """Return the names of the locks that this run and the outer runs hold."""
        return self.outer | names_in(self.name) if self.is_holding else self.outer


_frame: ContextVar[Frame | None] = ContextVar("celery_singleton_lock_eager", default=None)


class EagerTracer:
    """Acquires and releases the locks of tasks that run where they are called.

    Args:
        store: returns the store of this process.
        name_of: task, args, kwargs -> lock name.
        rules: task -> its options.
        computed: task, args, kwargs, options -> options without templates.
    """

    def __init__(
        self,
        store: Callable[[], LockStore],
        name_of: Callable[[Any, Any, Any, Sent], str],
        rules: Callable[[Any], LockOptions],
        computed: Callable[[Any, Any, Any, Sent, LockOptions], LockOptions],
    ) -> None:
        self._computed = computed
        self._store = store
        self._name_of = name_of
        self._rules = rules
        self.noted: Callable[[Any, str], AbstractContextManager[None]] = lambda *_: nullcontext()
        """Called with a task and its lock's name around its body; for tests that observe runs."""

    def apply(self, task: Any, args: Any, kwargs: Any, go: Callable[[], Any]) -> Any:
        """Run a task with Celery's ``apply``, and hold the lock while its body runs.

        Args:
            task: the task.
            args: its positional arguments.
            kwargs: its keyword arguments.
            go: calls Celery's ``apply``.

        Raises:
            LockReentered: an outer run, which waits for this one, holds the lock.
        """
        self._refuse_nested(task, args or (), kwargs or {})
        self._guard(task)
        result = go()
        if isinstance(result, EagerResult) and isinstance(result.result, NotStarted):
            return skipped(task, result)
        return as_failed_if_retry_later(result)

    def leave(self, task_id: str) -> None:
        """Release the lock of a run before its end, since another task replaces it."""
        frame = _frame.get()
        if frame is not None and frame.task_id == task_id and frame.lock is not None:
            frame.is_holding = False
            let_go(frame.lock, _WHO)

    def _refuse_nested(self, task: Any, args: Any, kwargs: Any) -> None:
        """Refuse a run that would wait for its own caller."""
        if not waits(self._rules(task)):
            return
        try:
            sent = Sent(lambda: ("", {}), current_call())
            name = self._name_of(task, *as_sent(task, args, kwargs), sent)
        except Exception:  # noqa: BLE001  # the run will fail with the same error
            return
        if names_in(name) & _held():
            msg = (
                f"{task.name} is called eagerly by a task that holds the same lock {name!r}, so it "
                f"would wait for its own caller. Call the function itself "
                f"({task.__name__}(…) takes no lock), or give it another lock_key."
            )
            raise LockReentered(msg, name)

    def _guard(self, task: Any) -> None:
        """Wrap ``run`` of a task, so that Celery's eager tracer calls it with the lock held.

        Celery wraps ``run`` of the instance for ``autoretry_for``. This wrapper is the outer one,
        so a task that gets no lock is not retried, as in a worker. A second call has no effect. A
        second wrapper, which another thread may add at the same time, has no effect either.
        """
        if _GUARD not in vars(task):
            task.run = self._guarded(task, task.run)
            setattr(task, _GUARD, True)  # last: other threads that see it run the body

    def _guarded(self, task: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            request = task.request
            if not request.is_eager or request.called_directly or _is_inside(request.id):
                return run(*args, **kwargs)
            return self._run(task, request, partial(run, *args, **kwargs))

        return guarded

    def _run(self, task: Any, request: Any, run: Callable[[], Any]) -> Any:
        """Run an eager task. Hold its lock meanwhile."""
        name, options = self._named(task, request)
        lock = in_place(self._store(), name, options) if name else None
        frame = Frame(request.id, name, _held(), lock)
        locked = partial(self._run_locked, task, frame, options, run)
        return locked() if lock is None else and_then(partial(let_go, lock, _WHO), locked)

    def _run_locked(
        self, task: Any, frame: Frame, options: LockOptions, run: Callable[[], Any]
    ) -> Any:
        """Acquire the lock, if there is one, and run the task. The caller releases the lock."""
        before = _frame.get()
        try:
            _frame.set(frame)
            return self._run_inside(task, frame, options, run)
        finally:
            _frame.set(before)

    def _run_inside(
        self, task: Any, frame: Frame, options: LockOptions, run: Callable[[], Any]
    ) -> Any:
        try:
            lock = self._take(frame, options)
            hold = Held(options.hold_for, self._store().clock)
            with entered(lock), self.noted(task, frame.name):
                result = _run_or_close(lock, run)
            if lock is not None and frame.is_holding:
                hold.put_on(lock)
            return result
        finally:
            frame.is_holding = False

    def _named(self, task: Any, request: Any) -> tuple[str, LockOptions]:
        options = self._rules(task)
        arguments = as_sent(task, request.args or (), request.kwargs or {})
        sent = Sent(partial(_queue_and_headers, request), current_call())
        try:
            name = self._name_of(task, *arguments, sent)
            return name, self._computed(task, *arguments, sent, options)
        except ArgumentsDoNotBind:
            return "", options  # the call itself fails, and needs no lock

    def _take(self, frame: Frame, options: LockOptions) -> PlacedLock | MultiLock | None:
        """Acquire and return the lock of a run; return None to run without it.

        Raises:
            NotStarted: the task is skipped.
            LockError: the lock was not acquired.
            BackendError: Redis did not answer, or refused the lock.
        """
        lock = frame.lock
        if lock is None:
            return None
        try:
            if not lock.acquire(blocking=False):
                self._wait(lock, options)
        except BackendError as error:
            if outcome_of(options, error, Facts(Asker.CALLER)) is not Outcome.RUN_UNLOCKED:
                raise
            logger.warning("the eager task runs without its lock %r: %s", frame.name, error)
            return None
        frame.is_holding = True
        return lock

    def _wait(self, lock: Lock | MultiLock, options: LockOptions) -> None:
        """Wait for the lock in this thread, if the policy says so.

        Raises:
            NotStarted: the task is skipped.
            LockError: the lock was not acquired.
        """
        view = self._store().inspect(lock.name, waiters=1)
        outcome = _outcome(view, options)
        if outcome is Outcome.WAIT:
            if lock.acquire(blocking_timeout=options.wait_timeout):
                return
            outcome = outcome_of(options, BUSY, Facts(Asker.CALLER, waited=True))
        raise refusal(outcome, view.name, options, view)


def _run_or_close(lock: PlacedLock | MultiLock | None, run: Callable[[], Any]) -> Any:
    """Run a task; close its lock if it raises ``RetryLater``."""
    try:
        return run()
    except RetryLater as later:
        if lock is not None:
            lock.pause(later.seconds, later.why, name=later.name)
        raise


def as_failed_if_retry_later(result: Any) -> Any:
    """Return a result that has failed if its task raised ``RetryLater``: it has no message.

    No worker could run it later, and its caller must not take it for a success.
    """
    if isinstance(result, EagerResult) and isinstance(result.result, RetryLater):
        return EagerResult(result.id, result.result, states.FAILURE, name=result.name)
    return result


def as_sent(task: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments as they are in a message: Celery dumps pydantic models."""
    dump = getattr(task, "_dump_pydantic_arguments", None)  # from Celery 5.7 on
    return dump(args, kwargs) if dump is not None else (args, kwargs)


def _queue_and_headers(request: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the queue to which a call was sent, or an empty text, and its headers."""
    return (request.delivery_info or {}).get("routing_key") or "", request.headers or {}


def waits(options: LockOptions) -> bool:
    """Return whether a blocked eager task waits."""
    return options.max_waiting != 0 and waits_if_blocked(options)


def skipped(task: Any, result: EagerResult[Any]) -> EagerResult[Any]:
    """Return the result of a skipped task, as a worker stores it: REVOKED."""
    reason = result.result.reason
    if task.store_eager_result and not task.ignore_result:
        task.backend.mark_as_revoked(result.id, reason)
    error = TaskRevokedError(reason)
    return EagerResult(result.id, error, states.REVOKED, name=result.name)


def _held() -> frozenset[str]:
    """Return the names of all locks that the running task and the outer ones hold."""
    frame = _frame.get()
    around = frame.names() if frame is not None else frozenset()
    return around | {
        lock.name for lock in current_locks() if lock.held or not isinstance(lock, PlacedLock)
    }


def _is_inside(task_id: str) -> bool:
    """Return whether the innermost run is that of this task, which then called itself directly."""
    frame = _frame.get()
    return frame is not None and frame.task_id == task_id and frame.is_holding


def _outcome(view: LockView, options: LockOptions) -> Outcome:
    """Return the outcome for a blocked task: it waits if ``max_waiting`` allows that."""
    outcome = outcome_of(options, BUSY, Facts(Asker.CALLER))
    if outcome is not Outcome.WAIT or options.max_waiting is None:
        return outcome
    if view.waiting < options.max_waiting:
        return outcome
    return outcome_of(options, Reply(Verdict.FULL), Facts(Asker.CALLER))

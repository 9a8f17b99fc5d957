"""Acquires the locks of tasks whose messages did not pass a dispatcher.

This happens with a user's own ``Request`` class, or with an unsupported version of Celery. The task
then waits for its lock in its pool slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any, Final

from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import Asker, Facts, Outcome, outcome_of
from celery_singleton_lock.core.lock_mode import OFF
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind
from celery_singleton_lock.core.lock_view import LockView
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reply, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.unique import HEADER as UNIQUE
from celery_singleton_lock.core.unique import UniqueCall, unpacked
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.lock.multi_lock import MultiLock
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.store.base import LockStore, Store
from celery_singleton_lock.worker.execution.celery_outcome import (
    Run,
    fail,
    has_ended,
    ignored,
    later_in,
    take_out,
)
from celery_singleton_lock.worker.execution.task_lock import (
    Held,
    PlacedLock,
    and_then,
    in_place,
    let_go,
    under,
)
from celery_singleton_lock.worker.execution.tracer import end_not_started
from celery_singleton_lock.worker.lock_header import (
    AFTER,
    COPY,
    MOVED,
    REQUEUED,
    UNANSWERED,
    LockHeader,
    attempt_of,
)
from celery_singleton_lock.worker.not_started import NotStarted, refusal
from celery_singleton_lock.worker.retry_later import RetryLater

logger: Final = logging.getLogger(__name__)

SLOT_RETRY: Final = 0.5
"""Seconds between two tries of a task that waits for Redis in its slot."""


Named = Callable[[], tuple[str, LockOptions]]
"""Names the lock of a run, and computes the options of its call."""


class UndispatchedTracer:
    """Acquires and releases the locks of tasks in their pool slots.

    Args:
        store: returns the store of this process.
        observe: runs a task without its lock, and records whether it would have been blocked.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        observe: Callable[[Run, LockHeader, LockOptions], Any],
    ) -> None:
        self._store = store
        self._observe = observe

    def trace(self, run: Run, named: Named, options: LockOptions) -> Any:
        """Run a task under its lock, for which it waits in the slot.

        Args:
            run: the run of the task.
            named: returns the name of its lock, and the options of its call.
            options: options of the task.

        Returns:
            The result of Celery's tracer.
        """
        unique = unpacked(take_out(run.request, UNIQUE))
        if unique is None:
            return self._trace(run, named, options, _nothing)
        end = partial(self._end_unique, run, unique)
        outcome = self._trace(run, named, options, end if unique.until_start else _nothing)
        if has_ended(outcome):
            end()
        return outcome

    def _end_unique(self, run: Run, unique: UniqueCall) -> None:
        """End the entry of a unique call, so that a call like it is sent."""
        try:
            retries = int(run.request.get("retries") or 0)
            self._store().withdraw(unique.lock, unique.key, run.uuid, retries, ended=True)
        except BackendError as error:
            logger.warning(
                "Redis did not store that the unique call %s[%s] is over. It counts for up to %g s "
                "more: %s",
                run.task.name,
                printable(run.uuid),
                unique.most,
                error,
            )

    def _trace(
        self, run: Run, named: Named, options: LockOptions, started: Callable[[], None]
    ) -> Any:
        try:
            name, options = named()
        except ArgumentsDoNotBind:
            return run.go()
        except Exception as error:  # noqa: BLE001  # the task fails with it
            return fail(run, error)
        lock = in_place(self._store(), name, options)
        locked = partial(self._run_locked, run, lock, options, started)
        return and_then(partial(let_go, lock, f"task {run.task.name}"), locked)

    def _run_locked(
        self,
        run: Run,
        lock: PlacedLock | MultiLock,
        options: LockOptions,
        started: Callable[[], None],
    ) -> Any:
        """Acquire the lock and run the task. The caller releases the lock."""
        try:
            self._refuse_copies(run, lock)
            held = self.take(lock, run.task.name, options)
        except NotStarted as not_started:
            return end_not_started(run, not_started)
        except Exception as error:  # noqa: BLE001  # an error of this package, or a time limit
            return fail(run, error)
        started()
        if not held:
            return run.go()
        hold = Held(options.hold_for, self._store().clock)
        outcome = under(lock, run)
        later = later_in(outcome)
        if outcome.info is None:
            hold.put_on(lock)
        elif later is not None:
            return _close(lock, run, later, outcome)
        return outcome

    def trace_relaxed(self, run: Run, named: Named, options: LockOptions) -> Any:
        """Run a task without its lock, since its mode is not ``enforce``.

        A copy of a parked message does not run, since the parked message will.
        """
        copy_of = _copy_of(run)
        if copy_of is not None and self._is_kept(run, options, *copy_of):
            logger.warning(
                "%s is a copy of a message that is parked for the lock %r. The copy does not run: "
                'the message stays parked, and runs in a worker whose lock_mode is not "off".',
                run.task.name,
                copy_of[0],
            )
            return ignored(NotStarted(Outcome.DONE, "the message itself is parked"))
        if options.mode == OFF:
            return run.go()
        attempt = attempt_of(run.request)
        try:
            name, options = named()
            header = LockHeader(
                "", new_token(), attempt, run.task.name, "", observed=name, flow=options.flow
            )
        except Exception as error:  # noqa: BLE001  # in mode enforce, the task would fail with it
            logger.warning("%s is not observed: %s", run.task.name, error)
            return run.go()
        return self._observe(run, header, options)

    def _is_kept(self, run: Run, options: LockOptions, name: str, token: str) -> bool:
        if options.mode == OFF:
            return True
        lock = Lock(self._store(), name, lease=options.lease, limit=options.limit)
        try:
            return self._is_elsewhere(run, lock, name, token)
        except BackendError:
            return True

    def _refuse_copies(self, run: Run, lock: Lock | MultiLock) -> None:
        """Refuse to run a copy of a message that is parked or has ended.

        Raises:
            NotStarted: it is such a copy.
        """
        copy_of = _copy_of(run)
        if copy_of is not None and self._is_elsewhere(run, lock, *copy_of):
            raise NotStarted(Outcome.DONE, reason="the message itself is parked, or has ended")

    def _is_elsewhere(self, run: Run, lock: Lock | MultiLock, name: str, token: str) -> bool:
        if self._store().body(name, token) is not None:
            return True
        owner = Owner(new_token(), attempt_of(run.request))
        first = getattr(lock, "locks", (lock,))[0]  # of several locks, it recognises copies
        claim = Claim(first.name, lock.lease, lock.limit, copy=True)
        give_back = partial(self._store().release, first.name, owner.token, Ending.AGAIN)
        reply = and_then(give_back, partial(self._store().acquire, owner, claim))
        return reply.verdict in {Verdict.DONE, Verdict.TWIN}

    def take(self, lock: Lock | MultiLock, task: str, options: LockOptions) -> bool:
        """Acquire a lock, waiting in the slot.

        Args:
            lock: the lock.
            task: name of the task.
            options: options of the task.

        Returns:
            Whether the lock is held; False only if the task may run without it.

        Raises:
            NotStarted: the task is skipped.
            LockError: the lock was not acquired.
            BackendError: Redis did not answer, and the task does not wait for it.
        """
        store = self._store()
        clock = store.clock
        until = clock.monotonic() + (
            MAX_WAIT if options.wait_timeout is None else options.wait_timeout
        )
        while True:
            try:
                patience = max(until - clock.monotonic(), 0.001)
                return _acquired(lock, options, patience, store)
            except BackendError as error:
                facts = Facts(Asker.SLOT, waited=clock.monotonic() >= until)
                outcome = outcome_of(options, error, facts)
                if outcome is Outcome.RUN_UNLOCKED:
                    logger.warning("%s runs without its lock %r: %s", task, lock.name, error)
                    return False
                if outcome is not Outcome.WAIT:
                    raise
                logger.warning("%s waits in its slot for the lock %r: %s", task, lock.name, error)
                Event().wait(SLOT_RETRY)


def _nothing() -> None: ...


def _close(lock: PlacedLock | MultiLock, run: Run, later: RetryLater, outcome: Any) -> Any:
    """Close a lock for a task that is to run again later. Its message is sent again.

    Returns:
        ``outcome``, or that of a failed task if the lock cannot be closed.
    """
    try:
        lock.pause(later.seconds, later.why, name=later.name)
    except Exception as error:  # noqa: BLE001  # a wrong name, or an error of Redis
        return fail(run, error)
    return outcome


def _copy_of(run: Run) -> Any:
    """Remove this package's headers from a request; return what ``COPY`` says, or None."""
    for header in (AFTER, REQUEUED, MOVED, UNANSWERED):
        take_out(run.request, header)
    return take_out(run.request, COPY)


def _acquired(
    lock: Lock | MultiLock, options: LockOptions, patience: float, store: LockStore
) -> bool:
    """Acquire the lock as the task's policy says, waiting at most ``patience`` seconds."""
    busy = Reply(Verdict.BLOCKED)
    outcome = outcome_of(options, busy, Facts(Asker.SLOT))
    if outcome is Outcome.WAIT:
        if lock.acquire(blocking_timeout=patience):
            return True
        outcome = outcome_of(options, busy, Facts(Asker.SLOT, waited=True))
    elif lock.acquire(blocking=False):
        return True
    raise refusal(outcome, lock.name, options, _view(lock.name, store))


def _view(name: str, store: LockStore) -> LockView | None:
    """Return the view of a lock that was refused; None if Redis does not answer."""
    try:
        return store.inspect(name, waiters=0)
    except BackendError:
        return None

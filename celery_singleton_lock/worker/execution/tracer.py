"""The executing context decides: one acquire before the task, one release after it.

This runs in a pool child, a pool thread, or the solo worker, around Celery's tracer. What is turned
away here has sent no signal and stored no state yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from billiard.einfo import ExceptionInfo
from celery import states
from celery.app.task import Context
from celery.app.trace import TraceInfo, task_has_custom, trace_ok_t
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.core.lock_set import Bundle
from celery_singleton_lock.core.clock import Clock, SystemClock, seconds_until
from celery_singleton_lock.errors import (
    BackendError,
    BackendUnreachable,
    LockConflict,
    LockLost,
    LockQueueFull,
    LockWaitTimeout,
    SingletonLockError,
)
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.worker.execution.observe_mode import Lookout
from celery_singleton_lock.core.model import (
    Claim,
    CurrentLock,
    Ending,
    Owner,
    Reply,
    Reservation,
    Verdict,
    new_token,
    why_busy,
)
from celery_singleton_lock.core.lock_mode import OFF
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind
from celery_singleton_lock.lock.multi_lock import Row
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.lock_header import (
    COPY,
    MOVED,
    REQUEUED,
    STAMP,
    Stamp,
    attempt_of,
    doubted,
    notice_of_end,
    notice_of_loss,
    singles,
)
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.lock.wait_for_turn import stand_in_line

if TYPE_CHECKING:
    from celery_singleton_lock.worker.execution.multi_lock_tracer import Gathering

logger = logging.getLogger(__name__)
_clock = SystemClock()
_HOST: Final = os.uname().nodename

ALONE_RETRY: Final = 0.5
"""Seconds between two tries of a task that waits for Redis in its slot."""

LEAST_HOLD: Final = 0.001
"""Seconds; the scripts count in milliseconds."""

_current: ContextVar[TaskLock | Lock | Row | None] = ContextVar(
    "celery_singleton_lock", default=None
)


class Turned(Ignore):  # type: ignore[misc]  # celery is untyped
    """The task was not run; the main process decides what becomes of its message.

    Args:
        verdict: ``blocked``, ``twin``, ``done``, ``gone``, ``again`` (one of the locks that it kept
            was lost), ``unavailable`` or ``skipped``.
        reason: for people.
        rank: place in the queue that it would have, 1 is next.
        bundle: of several locks, those that it has, and the one that is busy.
    """

    def __init__(
        self, verdict: str, reason: str = "", rank: int = 0, bundle: Bundle | None = None
    ) -> None:
        """Keep the fields as ``args``, so that the exception travels to the main process."""
        super().__init__(verdict, reason, rank, bundle)
        self.verdict, self.reason, self.rank, self.bundle = verdict, reason, rank, bundle


class TaskLock:
    """The lock of the running task, as the task sees it (``self.lock``, :func:`current_lock`).

    Args:
        store: where to ask.
        stamp: the delivery.
        reply: the grant.
        lease: seconds.
        valid_until: monotonic time up to which the grant is known to hold.
    """

    __slots__ = (
        "_asked_at",
        "_lease",
        "_lost",
        "_store",
        "_valid_until",
        "fencing_token",
        "name",
        "token",
    )

    def __init__(
        self, store: Store, stamp: Stamp, reply: Reply, lease: float, valid_until: float
    ) -> None:
        """Begin with what the grant said."""
        self.name = stamp.name
        self.fencing_token = reply.fencing_token
        self._store = store
        self.token = stamp.token
        self._lease = lease
        self._valid_until = valid_until
        self._asked_at = valid_until - lease
        self._lost = False

    @property
    def held(self) -> bool:
        """Whether the lock is held: an answer at most a third of a lease old."""
        if not self._lost and self._store.clock.monotonic() - self._asked_at > self._lease / 3:
            self._refresh()
        return not self._lost and self._store.clock.monotonic() < self._valid_until

    @property
    def lost(self) -> bool:
        """Whether the lock was lost while the task runs."""
        return not self.held

    @property
    def expires_in(self) -> float:
        """Seconds for which the lock is known to be held; the worker renews it meanwhile."""
        return (
            max(0.0, self._valid_until - self._store.clock.monotonic()) if not self._lost else 0.0
        )

    def ensure_held(self) -> None:
        """Ask Redis whether the lock is still held, and renew it.

        Raises:
            LockLost: it is not; stop writing.
            BackendError: Redis did not answer, so nobody knows.
        """
        if not self._extend():
            raise self.lose()

    def lose(self) -> LockLost:
        """Note that the lock was lost; return what to raise."""
        self._lost = True
        msg = f"The lock {self.name!r} was lost: its lease ended or it was taken away."
        return LockLost(msg, self.name)

    def _refresh(self) -> None:
        try:
            self._extend()
        except BackendError:
            self._asked_at = self._store.clock.monotonic() - self._lease / 4  # ask again soon

    def _extend(self) -> bool:
        if self._lost:
            return False
        asked = self._store.clock.monotonic()
        held = bool(self._store.extend([(self.name, self.token, self._lease)])[0])
        self.heard(asked, held=held)
        return held

    def heard(self, asked: float, *, held: bool) -> None:
        """Note what the store said when it was asked at ``asked``."""
        self._asked_at, self._lost = asked, not held
        if held:
            self._valid_until = asked + self._lease


class NoLock:
    """Stands for the lock in an unlocked run: a direct call, ``apply()``, or a plain task."""

    name = ""
    held = False
    lost = False
    fencing_token = 0
    expires_in = 0.0

    def ensure_held(self) -> None:
        """Do nothing: there is no lock that could be lost."""


def current_lock() -> CurrentLock:
    """Return the lock of the running task; an inert one where no lock is taken.

    Of a task with ``lock_keys`` it stands for all of its locks, and has the name and the fencing
    token of the first.
    """
    return _current.get() or NoLock()


def current_locks() -> tuple[CurrentLock, ...]:
    """Return all locks of the running task, in the order in which they were taken.

    Each has its own fencing token. Empty where no lock is taken; one where the task has one.
    """
    lock = _current.get()
    if lock is None:
        return ()
    several: tuple[CurrentLock, ...] = getattr(lock, "locks", ())
    return several or (lock,)


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
        """Return the request as the task's methods and the result backend want it."""
        return Context(self.request, args=self.args, kwargs=self.kwargs, called_directly=False)


class Gate:
    """Takes and gives back the locks of one process.

    Args:
        store: returns this process' store; called anew for each task, since a fork may lie between.
        announce: tells the main process that a token holds its lock, or that it was lost.
        done_for: seconds for which later copies of an ended attempt end quietly.
        name_of: task, args, kwargs -> lock name.
        listen: has the process hear of the loss of a lock, where it can.
    """

    gathering: Gathering
    """Takes the locks of tasks that have several; joined by who makes both."""

    def __init__(
        self,
        store: Callable[[], Store],
        announce: Callable[[str], None],
        done_for: float,
        name_of: Callable[[Any, Any, Any], str],
        listen: Callable[[], None],
    ) -> None:
        """Keep what joins this process to the rest."""
        self._store = store
        self._announce = announce
        self._done_for = done_for
        self._name_of = name_of
        self._listen = listen
        self._warned: set[str] = set()
        self._lookout = Lookout(store)

    def trace(self, run: Run, stamp: Stamp, options: LockOptions) -> Any:
        """Run a stamped task under its lock, or turn it away.

        Returns:
            What Celery's tracer returns.
        """
        if stamp.observed:
            return self._observed(run, stamp, options)
        if options.on_lost == "abort":
            self._listen()
        try:
            lock = self._enter(stamp, options)
        except Turned as turned:
            return self._turn_away(run, turned)
        except Exception as error:  # noqa: BLE001  # ours, a time limit, or a key callable's own
            return fail(run, error)
        if lock is None:
            return run.go()
        return self._run_locked(run, stamp, lock, options)

    def trace_alone(self, run: Run, name_of: Callable[[], str], options: LockOptions) -> Any:
        """Run a task whose message did not pass a desk: wait for the lock here, in the slot.

        That happens with a ``Request`` class of the user's own, or under an unknown Celery. The
        lock is then taken late and costs a slot, but it is never skipped.
        """
        try:
            name = name_of()
        except ArgumentsDoNotBind:
            return run.go()
        except Exception as error:  # noqa: BLE001  # the task fails with it
            return fail(run, error)
        lock = in_place(self._store(), name, options)
        try:
            self._refuse_copies(run, lock)
            held = self.take_alone(lock, run.task.name, options)
        except Turned as turned:
            return self._turn_away(run, turned)
        except Exception as error:  # noqa: BLE001  # ours, or a time limit
            return fail(run, error)
        return self._run_alone(run, lock, options) if held else run.go()

    def trace_relaxed(self, run: Run, name_of: Callable[[], str], options: LockOptions) -> Any:
        """Run a task whose message did not pass a desk, and that does not keep its lock.

        A copy of a message that was parked, before its lock was not kept any more, does not run:
        the message itself is kept.
        """
        take_out(run.request, REQUEUED)
        take_out(run.request, MOVED)
        copy_of = take_out(run.request, COPY)
        if copy_of is not None and self._is_kept(run, options, *copy_of):
            logger.warning(
                "%s is a copy of a message that is parked for the lock %r. It does not run: the "
                'message is kept, and runs in a worker whose lock_mode is not "off".',
                run.task.name,
                copy_of[0],
            )
            verdict = "done"
            return ignored(Turned(verdict, "the message itself is kept"))
        if options.mode == OFF:
            return run.go()
        attempt = attempt_of(run.request)
        try:
            stamp = Stamp("", new_token(), attempt, run.task.name, "", observed=name_of())
        except Exception as error:  # noqa: BLE001  # with its lock the task would fail
            logger.warning("%s is not observed: %s", run.task.name, error)
            return run.go()
        return self._observed(run, stamp, options)

    def _is_kept(self, run: Run, options: LockOptions, name: str, token: str) -> bool:
        if options.mode == OFF:
            return True
        lock = Lock(self._store(), name, lease=options.lease, limit=options.limit)
        try:
            return self._is_elsewhere(run, lock, name, token)
        except BackendError:
            return True

    def _observed(self, run: Run, stamp: Stamp, options: LockOptions) -> Any:
        """Run a task without its lock, and write down what that would have done."""
        waits, go = options.on_conflict not in {"skip", "fail"}, run.go
        for number, each in reversed(list(enumerate(singles(stamp)))):
            limit = options_of(stamp, number, options).limit
            claim = Claim(each.name or stamp.observed, options.lease, limit)
            go = partial(self._lookout.watch, owner_of(each), claim, go, waits=waits)
        try:
            return go()
        except SoftTimeLimitExceeded as error:  # while it was written down that the task begins
            return fail(run, error)

    def _run_alone(self, run: Run, lock: PlacedLock | Row, options: LockOptions) -> Any:
        hold = Held(options.hold_for, self._store().clock)
        try:
            outcome = under(lock, run)
            if outcome.info is None:
                hold.put_on(lock)
            return outcome
        finally:
            try:
                lock.release()
            except SingletonLockError as error:
                logger.warning("task %s: %s", run.task.name, error)

    def _refuse_copies(self, run: Run, lock: Lock | Row) -> None:
        """Turn away a copy of a message that is kept, or has ended: it would run a second time."""
        take_out(run.request, MOVED)
        copy_of = take_out(run.request, COPY)
        if copy_of is not None and self._is_elsewhere(run, lock, *copy_of):
            verdict = "done"
            raise Turned(verdict, "the message itself is kept, or has ended")

    def _is_elsewhere(self, run: Run, lock: Lock | Row, name: str, token: str) -> bool:
        if self._store().body(name, token) is not None:
            return True
        owner = Owner(new_token(), attempt_of(run.request))
        name = getattr(lock, "locks", (lock,))[0].name  # of several the first knows copies
        reply = self._store().acquire(owner, Claim(name, lock.lease, lock.limit, copy=True))
        self._store().release(name, owner.token, Ending.AGAIN)
        return reply.verdict in {Verdict.DONE, Verdict.TWIN}

    def take_alone(self, lock: Lock | Row, task: str, options: LockOptions) -> bool:
        """Take a lock here, waiting in the slot.

        Args:
            lock: to take.
            task: its task's name.
            options: the task's.

        Returns:
            Whether the lock is held; False only if the task may run without it.

        Raises:
            Turned: skipped.
            LockError: it was not to be had.
            BackendError: Redis does not answer, and the task does not wait for it.
        """
        store = self._store()
        clock = store.clock
        until = clock.monotonic() + (
            MAX_WAIT if options.wait_timeout is None else options.wait_timeout
        )
        while True:
            try:
                patience = max(until - clock.monotonic(), 0.001)
                return _acquired_alone(lock, options, patience, store)
            except BackendError as error:
                if options.on_backend_error == "run":
                    logger.warning("%s runs without its lock %r: %s", task, lock.name, error)
                    return False
                late = clock.monotonic() >= until
                patient = options.on_backend_error == "retry" and isinstance(
                    error, BackendUnreachable
                )
                if late or not patient:
                    raise
                logger.warning("%s waits in its slot for the lock %r: %s", task, lock.name, error)
                Event().wait(ALONE_RETRY)

    def _enter(self, stamp: Stamp, options: LockOptions) -> TaskLock | None:
        """Return the lock, or None to run without."""
        if stamp.error is not None:
            raise stamp.error
        if not stamp.name:
            return None
        if stamp.bundle is not None:
            return self.gathering.enter(stamp, options)
        return self._take(stamp, options)

    def _take(self, stamp: Stamp, options: LockOptions) -> TaskLock | None:
        """Return the one lock of a task, or None to run without."""
        store = self._store()
        asked = store.clock.monotonic()
        try:
            reply = ask(store, doubted(stamp, asked, self._done_for), options)
        except BackendError as error:
            return self.without_backend(stamp, options, error)
        except BaseException:
            self.leave(stamp, Ending.FINAL)  # interrupted between grant and bookkeeping
            raise
        if reply.verdict is not Verdict.GRANTED:
            raise self.refusal(stamp, options, reply)
        if stamp.announce:
            self._announce(stamp.token)
        if reply.limit != options.limit:
            self.warn_of_limit(stamp, options, reply)
        return TaskLock(store, stamp, reply, options.lease, asked + reply.lease)

    def warn_of_limit(self, stamp: Stamp, options: LockOptions, reply: Reply) -> None:
        """Say once per task that live declarations of a lock's limit differ."""
        if stamp.task not in self._warned:
            self._warned.add(stamp.task)
            logger.warning(
                "%s declares lock_limit=%d, but %d is in force for lock %r: another task that "
                "shares it declares less, and the lowest wins. Declare the same limit.",
                stamp.task,
                options.limit,
                reply.limit,
                stamp.name,
            )

    def without_backend(
        self, stamp: Stamp, options: LockOptions, error: BackendError
    ) -> TaskLock | None:
        """Return None to run without a lock, if the task may; else raise what becomes of it."""
        if options.on_backend_error == "fail":
            raise error
        if options.on_backend_error == "run":
            logger.warning("%s runs without its lock %r: %s", stamp.task, stamp.name, error)
            return None
        raise Turned(verdict="unavailable", reason=str(error)) from error

    def refusal(self, stamp: Stamp, options: LockOptions, reply: Reply) -> Exception:
        """Return how a task is turned away, or ends, that did not get its lock."""
        if reply.verdict in {Verdict.TWIN, Verdict.DONE}:
            return Turned(reply.verdict.value, "another copy of this attempt is here")
        if stamp.granted:
            return Turned("gone", "its grant lapsed; the message is delivered again")
        if options.on_conflict == "wait":
            return self._not_served(stamp, options, reply)
        reason = why_busy(stamp.name, reply.holder, reply.paused)
        if options.on_conflict == "skip":
            return Turned("skipped", reason)
        if options.on_conflict == "fail":
            holder = str(reply.holder or "")
            return LockConflict(f"The {reason}.", stamp.name, holder, reply.next_look)
        return Turned("blocked", reason, reply.rank)

    @staticmethod
    def _not_served(stamp: Stamp, options: LockOptions, reply: Reply) -> Exception:
        """Return how a task ends that stood in line, or found no room to."""
        if reply.verdict is Verdict.FULL:
            return cannot_wait(stamp, options, "as many wait as lock_max_waiting allows")
        waited = f"Waited {options.wait_timeout:g} s for the lock {stamp.name!r}"
        return LockWaitTimeout(f"{waited} (lock_wait_timeout).", stamp.name)

    def _turn_away(self, run: Run, turned: Turned) -> Any:
        if turned.verdict == "skipped":
            mark_skipped(run, turned.reason)
        return ignored(turned)

    def _run_locked(self, run: Run, stamp: Stamp, lock: TaskLock, options: LockOptions) -> Any:
        """Run the task and release, unless the process itself is ending.

        An exit of the process is told by the main process, which knows what became of the message.
        """
        ending, kept, began = Ending.FINAL, None, _clock.monotonic()
        hold = Held(options.hold_for, self._store().clock) if options.hold_for else None
        try:
            outcome = under(lock, run)
            if outcome.runtime is None:  # Celery measures successes alone
                outcome = outcome._replace(runtime=_clock.monotonic() - began)
            ending = ending_of(outcome, run.task, stamp)
            if hold and outcome.info is None:
                kept = hold.left()
                ending = Ending.HOLD if kept else ending
            elif options.on_retry == "keep":
                kept = self._reservation(run, stamp, outcome, options)
                ending = Ending.KEEP if kept else ending
        except Reject as reject:
            ending = _ending_of_reject(reject, stamp)
            self.leave(stamp, ending, lock)
            raise
        except Exception:
            self.leave(stamp, ending, lock)
            raise
        self.leave(stamp, ending, lock, kept)
        return outcome

    def _reservation(
        self, run: Run, stamp: Stamp, outcome: Any, options: LockOptions
    ) -> Reservation | None:
        """Return what a retry of the task is to find reserved, if it takes the same lock."""
        if outcome.info is None or outcome.info.state != states.RETRY:
            return None
        again = outcome.info.retval
        with suppress(Exception):  # no signature, since nothing was sent; or a lock name that fails
            sent = (tuple(again.sig.args), dict(again.sig.kwargs))
            same = sent == (tuple(run.args), dict(run.kwargs))
            if same or self._name_of(run.task, *sent) == stamp.name:
                return reservation_for(run.request, again, options.lease)
        return None

    def leave(
        self,
        stamp: Stamp,
        ending: Ending,
        lock: TaskLock | None = None,
        kept: Reservation | None = None,
    ) -> None:
        """Release; a soft time limit that strikes meanwhile only makes it start again.

        What the store did not hear the worker tells it, as soon as it answers: an outage of a
        second must not keep the lock for a lease, nor let a task run again that has ended.
        """
        if stamp.bundle is not None:
            return self.gathering.leave(stamp, ending, lock, kept)
        for _ in range(2):
            try:
                return self._release(stamp, ending, lock, kept)
            except SoftTimeLimitExceeded:
                continue
            except BackendError as error:
                logger.warning(
                    "%s could not release %r, its worker will try again: %s",
                    stamp.task,
                    stamp.name,
                    error,
                )
                hold = kept.seconds if kept else 0.0
                notice = notice_of_end(stamp, ending, hold)
                if notice and ending is not Ending.KEEP:  # it would not wait for the next attempt
                    self._announce(notice)
                return None
        return None

    def _release(
        self, stamp: Stamp, ending: Ending, lock: TaskLock | None, kept: Reservation | None
    ) -> None:
        age = _clock.monotonic() - stamp.stamped_at
        reply = self._store().release(
            stamp.name,
            stamp.token,
            ending,
            reserve=kept,
            worker=stamp.worker,
            done_for=self._done_for,
            mark=stamp.copy or age > self._done_for / 4,
        )
        absent = reply.verdict is Verdict.ABSENT and not reply.repeated
        if absent and lock is not None and not lock.expires_in:
            # Where tasks share the watchdog's interpreter it may have stood still meanwhile, and
            # then the task has ended before the watchdog could tell of the loss.
            logger.error(
                "The lock %r was not held any more when %s ended: its lease had ended, or it was "
                "taken away. Only its fencing token has protected its writes.",
                stamp.name,
                stamp.task,
            )
            self._announce(notice_of_loss(stamp))


def ask(store: Store, stamp: Stamp, options: LockOptions) -> Reply:
    """Take the lock for a stamped task, or claim it if it was handed over."""
    owner = owner_of(stamp)
    if stamp.granted:
        return store.claim(owner, stamp.name, options.lease, settle=stamp.settle)
    if options.on_conflict == "wait":
        return wait(store, owner, claim_of(stamp, options), options)
    return store.acquire(owner, claim_of(stamp, options))


def wait(store: Store, owner: Owner, claim: Claim, options: LockOptions) -> Reply:
    """Wait in the slot. The answer's lease counts from now, as if it had been asked for now."""
    began = store.clock.monotonic()
    timeout = options.wait_timeout or MAX_WAIT
    reply, asked = stand_in_line(store, store.clock, owner, claim, timeout)
    return reply._replace(lease=reply.lease + asked - began)


def _acquired_alone(lock: Lock | Row, options: LockOptions, patience: float, store: Store) -> bool:
    """Take the lock as the task's policy says, waiting in the slot for ``patience`` seconds."""
    if options.on_conflict not in {"skip", "fail"}:
        if lock.acquire(blocking_timeout=patience):
            return True
        msg = f"Waited {options.wait_timeout} s for the lock {lock.name!r} (lock_wait_timeout)."
        raise LockWaitTimeout(msg, lock.name)
    if lock.acquire(blocking=False):
        return True
    reason = _why_refused(lock.name, store)
    error = Turned("skipped", reason) if options.on_conflict == "skip" else None
    raise error or LockConflict(f"The {reason}.", lock.name)


def _why_refused(name: str, store: Store) -> str:
    """Return who holds a lock that was just refused; refused it stays, if Redis fails only now."""
    try:
        view = store.inspect(name, waiters=0)
    except BackendError:
        return why_busy(name, None, "")
    return why_busy(name, next(iter(view.holders), None), view.paused)


def owner_of(stamp: Stamp) -> Owner:
    """Return the owner that a stamp stands for, in this process."""
    return Owner(stamp.token, stamp.attempt, stamp.task, stamp.worker, _HOST, os.getpid())


def options_of(stamp: Stamp, number: int, options: LockOptions) -> LockOptions:
    """Return a task's options as they are for one of its locks, which may have its own limit."""
    limit = None if stamp.bundle is None else stamp.bundle.parts[number].limit
    return options if limit in {None, options.limit} else replace(options, limit=limit)


class PlacedLock(Lock):
    """The lock of a task that takes it where it runs."""

    kept: Reservation | None = None
    """How its permit is kept when it is given back."""

    def _release_in(self, store: Any, token: str) -> Any:
        ending = Ending.HOLD if self.kept else Ending.FINAL
        return store.release(self.name, token, ending, reserve=self.kept)


class Held:
    """For how long the locks of a run stay taken, if it succeeds. Made when the run begins.

    Args:
        hold_for: seconds from now; None for not at all.
        clock: source of monotonic seconds.
    """

    def __init__(self, hold_for: float | None, clock: Clock) -> None:
        """Count from now."""
        self._clock = clock
        self._until = clock.monotonic() + (hold_for or 0.0)

    def left(self) -> Reservation | None:
        """Return how a permit is kept from now on; None if the run has taken longer."""
        left = self._until - self._clock.monotonic()
        return Reservation("", left) if left >= LEAST_HOLD else None

    def put_on(self, lock: PlacedLock | Row) -> None:
        """Have locks kept when they are given back."""
        placed: tuple[Any, ...] = getattr(lock, "locks", (lock,))
        for each in placed:
            each.kept = self.left()


def in_place(store: Store, name: str, options: LockOptions) -> PlacedLock | Row:
    """Return what takes a task's lock, or all of several, where it runs."""
    keys = getattr(name, "keys", ((name, None),))
    locks = [
        PlacedLock(store, each, lease=options.lease, limit=limit or options.limit)
        for each, limit in keys
    ]
    return Row(locks, store.clock) if len(locks) > 1 else locks[0]


def claim_of(stamp: Stamp, options: LockOptions) -> Claim:
    """Return what a stamped task asks of its lock."""
    return Claim(
        stamp.name,
        options.lease,
        options.limit,
        stamp.place,
        options.max_waiting,
        stamp.copy,
        options.on_full == "replace",
    )


def under(lock: TaskLock | Lock | Row, run: Run) -> Any:
    """Run a task with ``lock`` as the current one."""
    entered = _current.set(lock)
    try:
        return run.go()
    finally:
        _current.reset(entered)


def reservation_for(request: Mapping[str, Any], retry: Any, lease: float) -> Reservation:
    """Return the reservation for the next attempt of a task: until its ETA plus one lease.

    Args:
        request: of the attempt that has ended.
        retry: Celery's exception.
        lease: seconds.
    """
    when = retry.when or 0.0
    if isinstance(when, datetime):
        when = seconds_until(when)
    following = {**request, "retries": (request.get("retries") or 0) + 1}
    return Reservation(attempt_of(following), min(max(when, 0.0) + lease, MAX_WAIT))


@contextmanager
def entered(lock: TaskLock | Lock | Row | None) -> Iterator[None]:
    """Make ``lock`` the current one; None in a run without. Not on the hot path: see ``under``."""
    token = _current.set(lock)
    try:
        yield
    finally:
        _current.reset(token)


def ending_of(outcome: Any, task: Any, stamp: Stamp) -> Ending:
    """Return what Celery does with the message of a traced task."""
    info = outcome.info
    if info is None:
        return Ending.FINAL
    if info.state == states.REJECTED:
        return _ending_of_reject(info.retval, stamp)
    if info.state == states.FAILURE and not stamp.settle and not _acks_failures(task):
        return Ending.REJECT
    return Ending.FINAL


def _ending_of_reject(reject: Reject, stamp: Stamp) -> Ending:
    if reject.requeue:
        return Ending.AGAIN
    return Ending.FINAL if stamp.settle else Ending.REJECT


def _acks_failures(task: Any) -> bool:
    """Return whether Celery acknowledges the message of a late-acknowledged task that failed."""
    acks = getattr(task, "acks_on_failure", None)  # since Celery 5.7
    return acks if acks is not None else task.acks_on_failure_or_timeout is not False


def ignored(turned: Turned) -> Any:
    """Return to Celery what a task that raised ``turned`` would."""
    try:
        raise turned
    except Turned:
        return trace_ok_t(
            ExceptionInfo(internal=True), TraceInfo(states.IGNORED, turned), 0.0, None
        )


def mark_skipped(run: Run, reason: str) -> None:
    """Store REVOKED with the reason, and tell the chord, if any."""
    context, task = run.context(), run.task
    ignored = task.ignore_result if context.ignore_result is None else context.ignore_result
    keep = not ignored or task.store_errors_even_if_ignored
    task.backend.mark_as_revoked(run.uuid, reason, request=context, store_result=keep)


def fail(run: Run, error: Exception) -> Any:
    """End the task by Celery's own failure path: result, errbacks, chord, hooks and signal."""
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


def take_stamp(request: dict[str, Any]) -> Stamp | None:
    """Take the stamp out of a request, before the task can see it."""
    stamp = take_out(request, STAMP)
    return None if stamp is None else Stamp(*stamp)


def take_out(request: dict[str, Any], key: str) -> Any:
    """Take what is ours out of a request, before the task can see it; None if it is not there."""
    found = request.pop(key, None)
    headers = request.get("headers")
    if isinstance(headers, Mapping) and key in headers:
        request["headers"] = {k: v for k, v in headers.items() if k != key}
    return found


def cannot_wait(stamp: Stamp, options: LockOptions, reason: str) -> Exception:
    """Return how a blocked task ends that cannot be parked.

    Args:
        stamp: the delivery.
        options: the task's; ``on_full`` says whether it is skipped or fails.
        reason: why, for people.
    """
    sentence = f"lock {stamp.name!r} is busy, and the task cannot wait for it: {reason}"
    if options.on_full == "skip":
        return Turned("skipped", sentence)
    return LockQueueFull(f"The {sentence}.", stamp.name)

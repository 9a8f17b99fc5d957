"""Acquires the lock of a task before its body, and releases it afterwards.

This runs in a pool child, a pool thread, or the solo worker, and calls Celery's tracer. If the lock
is refused, the tracer is not called, so the task sends no signal and stores no state.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from celery import states
from celery.exceptions import Reject, SoftTimeLimitExceeded

from celery_singleton_lock.config.limits import NO_LIMIT
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.config.timed_close import described, name_to_close
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.conflict_policy import (
    SKIPPED,
    Asker,
    Facts,
    Outcome,
    outcome_of,
    waits_if_blocked,
)
from celery_singleton_lock.core.model import (
    CLAIM_LEASE,
    Claim,
    Ending,
    Reply,
    Reservation,
    Verdict,
)
from celery_singleton_lock.core.rate import waiting_or_ending
from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.execution.celery_outcome import (
    Run,
    ending_of,
    ending_of_reject,
    fail,
    ignored,
    later_in,
    mark_skipped,
    preempted_in,
    reservation_for,
)
from celery_singleton_lock.worker.execution.follow import follow
from celery_singleton_lock.worker.execution.interrupt import Interrupts
from celery_singleton_lock.worker.execution.late_releases import LateReleases
from celery_singleton_lock.worker.execution.observe_mode import ObserveMode
from celery_singleton_lock.worker.execution.task_lock import (
    Held,
    TaskLock,
    ask,
    entered,
    owner_of,
    under,
)
from celery_singleton_lock.worker.lock_header import (
    LockHeader,
    doubted,
    in_order_of_release,
    may_be_copied,
    notice_of_end,
    notice_of_loss,
    notice_of_next_start,
    options_of,
    singles,
    task_id_of,
    whose,
)
from celery_singleton_lock.worker.not_started import NotStarted, refusal
from celery_singleton_lock.worker.preempted import LockPreempted
from celery_singleton_lock.worker.retry_later import RetryLater

logger: Final = logging.getLogger(__name__)
_clock = SystemClock()

MOST_LEFT: Final = 1000
"""Most released locks that are known; about as many tasks end while a main loop stands still."""

MOST_NOT_LOWERED: Final = 1000
"""Most locks that are known to keep a limit above that of the declaration."""

_DECLARED_LESS: Final = "a task has declared less since the lock was last free; the lowest wins"
_PARKED_BEFORE: Final = "the task was parked before its declaration was changed"


class LockSetTaker(Protocol):
    """Acquires and releases the locks of tasks with several locks."""

    def enter(self, header: LockHeader, options: LockOptions) -> TaskLock | None:
        """Acquire all locks, and return them as one; return None to run without them."""
        ...

    def leave(
        self,
        header: LockHeader,
        ending: Ending,
        lock: TaskLock | None,
        kept: Reservation | None = None,
    ) -> bool:
        """Release all locks that are held; return whether Redis has lost the parked message."""
        ...


class LockTracer:
    """Acquires and releases the locks of one process.

    Args:
        store: returns the store of this process. It is called for each task, since the process may
            have forked.
        announce: sends the main process a notice: a lock was acquired, was lost, or could not be
            released.
        done_for: seconds for which an ended attempt is remembered, so that its copies are dropped.
        name_of: task, args, kwargs -> lock name.
        interrupts: returns how the tasks of this process learn that they must end.
        may_defer: returns whether a release may be sent without waiting for its reply.
        keeps_messages: whether messages can be parked: not with a quorum of servers.
        again_after: seconds after which the broker delivers a message again.
    """

    multi_lock_tracer: LockSetTaker
    """The tracer of tasks with several locks. The code that creates both sets it."""

    def __init__(
        self,
        store: Callable[[], Store],
        announce: Callable[[str], None],
        done_for: float,
        name_of: Callable[[Any, Any, Any], str],
        interrupts: Callable[[], Interrupts],
        *,
        may_defer: Callable[[], bool] = lambda: False,
        keeps_messages: bool = True,
        again_after: float = 3600.0,
    ) -> None:
        self._store = store
        self._may_defer = may_defer
        self._late_releases = LateReleases(store, done_for, self._report)
        self._announce = announce
        self._done_for = done_for
        self._again_after = again_after
        self._name_of = name_of
        self._interrupts = interrupts
        self._keeps_messages = keeps_messages
        self._warned: set[str] = set()
        self._not_lowered: deque[str] = deque(maxlen=MOST_NOT_LOWERED)
        self._left: deque[str] = deque(maxlen=MOST_LEFT)
        self._observe_mode = ObserveMode(store)

    def trace(self, run: Run, header: LockHeader, options: LockOptions) -> Any:
        """Run a task that passed a dispatcher under its lock, or end the run without the lock.

        Returns:
            The result of Celery's tracer.
        """
        if header.observed:
            return self.observe(run, header, options)
        if options.on_lost == "abort" or options.preempts:
            self._interrupts().install()
        try:
            lock = self._enter(run, header, options)
        except NotStarted as not_started:
            if not_started.outcome is Outcome.FOLLOW:
                return follow(run, not_started)
            return end_not_started(run, not_started)
        except Exception as error:  # noqa: BLE001  # ours, a time limit, or a key callable's
            return fail(run, error)
        if lock is None:
            return run.go()
        return self._run_locked(run, header, lock, options)

    def observe(self, run: Run, header: LockHeader, options: LockOptions) -> Any:
        """Run a task without its lock, and record whether it would have been blocked."""
        waits, go = waits_if_blocked(options), run.go
        for number, each in reversed(list(enumerate(singles(header)))):
            own = options_of(header, number, options)
            name = each.name or header.observed
            flow = waiting_or_ending(each.flow or own.flow, own.on_rate)
            claim = Claim(name, own.lease, own.limit, flow=flow)
            go = partial(self._observe_mode.watch, owner_of(each), claim, go, waits=waits)
        try:
            return go()
        except SoftTimeLimitExceeded as error:  # raised while the start was recorded
            return fail(run, error)

    def _enter(self, run: Run, header: LockHeader, options: LockOptions) -> TaskLock | None:
        """Acquire and return the lock; return None to run without it."""
        if header.error is not None:
            if header.granted and self._has_ended(header):
                raise NotStarted(Outcome.DONE, "another process ends it")
            raise header.error
        if not header.name:
            return None
        if header.lock_set is not None:
            return self.multi_lock_tracer.enter(header, options)
        return self._take(run, header, options)

    def _has_ended(self, header: LockHeader) -> bool:
        """Return whether another process ends, or has ended, a parked message that may not run.

        Redis delivers it to another worker if this one had no slot for it in time, or has given it
        back. This claim makes sure that one process ends it.
        """
        try:
            reply = self._store().claim(owner_of(header), header.name, CLAIM_LEASE)
        except BackendError:
            return False
        return reply.verdict is Verdict.ABSENT and not reply.lost

    def _take(self, run: Run, header: LockHeader, options: LockOptions) -> TaskLock | None:
        """Acquire and return the only lock of a task; return None to run without it."""
        store = self._store()
        asked = store.clock.monotonic()
        try:
            reply = ask(store, doubted(header, asked, self._again_after), options)
            reply = self._limited(store, run, header, options, reply)
        except BackendError as error:
            return self.without_backend(header, options, error)
        except BaseException as error:
            self.interrupted(header, error)
            raise
        if reply.verdict is not Verdict.GRANTED:
            raise self.refusal(header, options, reply)
        if header.announce:
            self._announce(header.token)
        self.tell_next_start(header.name, reply)
        if reply.limit != options.limit == options.declared_limit:
            self.warn_of_limit(header, options, reply)
        valid_until = asked + reply.lease
        return TaskLock(
            store,
            header,
            reply,
            options.lease,
            valid_until,
            rates=options.rate,
            announce=self._announce,
            preempted_by=self._interrupts().preempted_by,
        )

    def _limited(  # the parts of one request
        self, store: Store, run: Run, header: LockHeader, options: LockOptions, reply: Reply
    ) -> Reply:
        """Lower the limit if the task declares less now than when its message was parked.

        A message that was parked under a former name of its lock does not lower the limit of that
        lock. A limit that stays higher was set by an operator, and the lock is not asked again.
        """
        lower = options.limit == options.declared_limit < reply.limit
        granted = header.granted and reply.verdict is Verdict.GRANTED
        if not (lower and granted) or header.name in self._not_lowered:
            return reply
        if self._is_lock_of(run, header.name):
            try:
                reply = ask(store, header, options, options.limit)
            except BackendError:
                return reply  # the task has its lock nevertheless
        if reply.limit > options.limit:
            self._not_lowered.append(header.name)
        return reply

    def _is_lock_of(self, run: Run, name: str) -> bool:
        """Return whether the call takes the lock of this name, as its task is declared now."""
        try:
            return self._name_of(run.task, run.args, run.kwargs) == name
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001  # a callable of the user may raise anything
            return False

    def interrupted(self, header: LockHeader, error: BaseException) -> None:
        """Release the lock if an interruption came after the grant and before it was recorded.

        If the process exits, a parked message is left to the main process, which knows whether the
        task runs again.
        """
        if isinstance(error, Exception):
            self.leave(header, Ending.FINAL)
        elif not header.granted:
            self.leave(header, Ending.AGAIN)

    def warn_of_limit(self, header: LockHeader, options: LockOptions, reply: Reply) -> None:
        """Log once per task that another limit of its lock is in force."""
        if header.task not in self._warned:
            self._warned.add(header.task)
            lower = reply.limit < options.limit
            logger.warning(
                "%s declares lock_limit=%s, but %s is in force for lock %r: an operator has set "
                "it, or %s. Declare the same limit in all tasks that share the lock; `locks limit` "
                "sets another one at once.",
                header.task,
                None if options.limit == NO_LIMIT else options.limit,
                "no limit" if reply.limit == NO_LIMIT else reply.limit,
                header.name,
                _DECLARED_LESS if lower else _PARKED_BEFORE,
            )

    def without_backend(
        self, header: LockHeader, options: LockOptions, error: BackendError
    ) -> TaskLock | None:
        """Return None if the task may run without its lock after an error of Redis.

        Raises:
            BackendError: the task fails with the error.
            NotStarted: the message waits until Redis answers, or accepts the lock.
        """
        outcome, name = self.outcome(header, options, error), getattr(error, "name", "")
        name = name or header.name
        if outcome is Outcome.RUN_UNLOCKED:
            logger.warning("%s runs without its lock %r: %s", header.task, name, error)
            return None
        if outcome is Outcome.FAIL_BACKEND:
            raise error
        raise NotStarted(outcome, str(error), lock=name) from error

    def outcome(
        self,
        header: LockHeader,
        options: LockOptions,
        answer: Reply | BackendError | None,
        *,
        further: bool = False,
    ) -> Outcome:
        """Return the outcome for a task that did not get its lock, after any wait for it."""
        facts = Facts(
            Asker.POOL,
            granted=header.granted,
            further=further,
            waited=True,
            keeps_messages=self._keeps_messages,
            sender_ends=isinstance(answer, Reply) and _is_held_by_sender(header, answer),
        )
        return outcome_of(options, answer, facts)

    def refusal(self, header: LockHeader, options: LockOptions, reply: Reply) -> Exception:
        """Return the exception that ends a run without its lock."""
        return refusal(self.outcome(header, options, reply), header.name, options, reply)

    def _run_locked(
        self, run: Run, header: LockHeader, lock: TaskLock, options: LockOptions
    ) -> Any:
        """Run the task, and release its lock unless the process exits.

        If it exits, the main process releases the lock, since it acknowledges or returns the
        message.
        """
        ending, kept, began = Ending.FINAL, None, _clock.monotonic()
        hold = Held(options.hold_for, self._store().clock) if options.hold_for else None
        try:
            outcome = self._run(run, lock, options)
            if outcome.runtime is None:  # Celery measures only successes
                outcome = outcome._replace(runtime=_clock.monotonic() - began)
            later = later_in(outcome)
            if later is not None:
                return self._run_later(run, header, lock, later)
            ending = ending_of(outcome, run.task, header)
            if hold and outcome.info is None:
                kept = hold.left()
                ending = Ending.HOLD if kept else ending
            elif options.on_retry == "keep":
                kept = self._reservation(run, header, outcome, options)
                ending = Ending.KEEP if kept else ending
        except Reject as reject:
            ending = ending_of_reject(reject, header)
            if self.leave(header, ending, lock):
                return _again()
            raise
        except Exception:
            self.leave(header, ending, lock)
            raise
        return _again() if self.leave(header, ending, lock, kept) else outcome

    def _run(self, run: Run, lock: TaskLock, options: LockOptions) -> Any:
        """Run the task. If a newer call preempts it, it ends as REVOKED."""
        if not options.preempts:
            return under(lock, run)
        outcome, preempted = None, None
        try:
            with self._interrupts().showing(lock.token), entered(lock):
                lock.end_if_preempted()  # a signal that came before found no current lock
                outcome = run.go()
        except LockPreempted as error:  # raised outside of the body
            preempted = error
        preempted = preempted or preempted_in(outcome)
        if preempted is None:
            return outcome
        mark_skipped(run, preempted.message)
        return ignored(preempted)

    def _run_later(self, run: Run, header: LockHeader, lock: TaskLock, later: RetryLater) -> Any:
        """Release the locks and close one. The main process parks the message, unless it is stored.

        Returns:
            What Celery's tracer returns. The exception itself, if no message can be parked.
        """
        each = in_order_of_release(header)
        try:
            name = name_to_close([one.name for one in each], later.name)
        except ConfigurationError as error:
            outcome = fail(run, error)
            self.leave(header, ending_of(outcome, run.task, header), lock)
            return outcome
        if not self._keeps_messages:
            self.leave(header, Ending.AGAIN, lock)
            return ignored(later)
        told, ended = described(whose(header), later.why), _clock.monotonic()
        close = Reservation(told, later.seconds, ended)
        locks, lost = {one.name: one for one in getattr(lock, "locks", (lock,))}, False
        for one in each:  # the last one is that of the parked message
            closes = close if one.name == name else None
            lost = self.leave(one, Ending.LATER, locks.get(one.name), closes)
        why, seconds = later.why, later.seconds
        return ignored(NotStarted(Outcome.LATER, why, closed_for=seconds, lock=name, lost=lost))

    def _reservation(
        self, run: Run, header: LockHeader, outcome: Any, options: LockOptions
    ) -> Reservation | None:
        """Return the reservation for the task's retry, or None if the retry uses another lock."""
        if outcome.info is None or outcome.info.state != states.RETRY:
            return None
        again = outcome.info.retval
        with suppress(Exception):  # no signature, since nothing was sent; or no valid lock name
            sent = (tuple(again.sig.args), dict(again.sig.kwargs))
            same = sent == (tuple(run.args), dict(run.kwargs))
            if same or self._name_of(run.task, *sent) == header.name:
                return reservation_for(run.request, again, options.lease)
        return None

    def leave(
        self,
        header: LockHeader,
        ending: Ending,
        lock: TaskLock | None = None,
        kept: Reservation | None = None,
    ) -> bool:
        """Release the lock. If a soft time limit expires meanwhile, try once more.

        If Redis does not answer, the worker's main process releases the lock as soon as it answers.
        Otherwise an outage of one second would hold the lock for a whole lease, or make a task run
        again that has ended.

        Returns:
            Whether the message was parked and must run again, and Redis has lost it.
        """
        if header.lock_set is not None:
            return self.multi_lock_tracer.leave(header, ending, lock, kept)
        for _ in range(2):
            try:
                return self._release(header, ending, lock, kept)
            except SoftTimeLimitExceeded:
                continue
            except BackendError as error:
                self._not_released(header, ending, kept, error)
                return False
        return False

    def has_left(self, token: str) -> bool:
        """Return whether a task of this process has run and has released a lock, or does so now.

        Its watchdog may find the lock free before the worker knows that the task has ended.
        """
        return token in self._left

    def _not_released(
        self, header: LockHeader, ending: Ending, kept: Reservation | None, error: BackendError
    ) -> None:
        logger.warning(
            "%s could not release %r, its worker will try again: %s",
            header.task,
            header.name,
            error,
        )
        notice = notice_of_end(header, ending, kept)
        if notice:
            self._announce(notice)

    def _release(
        self, header: LockHeader, ending: Ending, lock: TaskLock | None, kept: Reservation | None
    ) -> bool:
        if lock is not None:
            self._left.append(header.token)
        mark = may_be_copied(header, _clock.monotonic(), self._again_after)
        expired = lock is not None and not lock.expires_in
        # With a rate, the reply tells when the next waiter may start.
        has_rate = lock is not None and bool(lock.rates)
        waits = ending is not Ending.FINAL or kept or mark or has_rate or not self._may_defer()
        if not waits and self._late_releases.send(header, expired=expired):
            return False
        reply = self._store().release(
            header.name,
            header.token,
            ending,
            reserve=kept,
            worker=header.worker,
            done_for=self._done_for,
            mark=mark,
        )
        self._report(header, reply, expired=expired)
        return reply.lost and header.granted and not header.acks_early

    def tell_next_start(self, name: str, reply: Reply) -> None:
        """Report when the next waiter may start, if the rate, a pause or a close says so."""
        if reply.next_start:
            notice = notice_of_next_start(name, reply.next_start)
            if notice:
                self._announce(notice)

    def _report(self, header: LockHeader, outcome: Reply | BackendError, *, expired: bool) -> None:
        """Report a release that has failed, or a lock that was lost before its task ended."""
        if isinstance(outcome, BackendError):
            return self._not_released(header, Ending.FINAL, None, outcome)
        self.tell_next_start(header.name, outcome)
        if expired and outcome.verdict is Verdict.ABSENT and not outcome.repeated:
            # In a pool of threads, a task may keep the watchdog from running. Then the task ends
            # before the watchdog can report the loss.
            logger.error(
                "The lock %r was no longer held when %s ended: its lease had ended, or it was "
                "taken away. Only its fencing token has protected its writes.",
                header.name,
                header.task,
            )
            self._announce(notice_of_loss(header))
        return None


def _again() -> Any:
    """Return what Celery's tracer returns for a task whose message is parked again."""
    return ignored(NotStarted(Outcome.AGAIN, "Redis has lost its message"))


def _is_held_by_sender(header: LockHeader, reply: Reply) -> bool:
    """Return whether the attempt that has sent this one at its end holds the lock.

    Celery sends retries, replacements (``self.replace()``) and links before the attempt ends, so
    they may arrive before the lock is released.
    """
    holder = reply.holder.task_id if reply.holder is not None else ""
    is_first = header.attempt.endswith("/0/0")
    own = "" if is_first else task_id_of(header.attempt)
    return holder != "" and holder in {own, header.after}


def end_not_started(run: Run, not_started: NotStarted) -> Any:
    """End a run that did not get its lock.

    Returns:
        What Celery's tracer returns.
    """
    if not_started.outcome in SKIPPED:
        mark_skipped(run, not_started.reason)
    return ignored(not_started)

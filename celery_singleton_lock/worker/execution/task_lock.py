"""The lock of a running task, and the functions that acquire it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.config.timed_close import checked_close, described, name_to_close
from celery_singleton_lock.core.charge import charged_rates, checked_amount, checked_id, one_named
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_set import Key, Names
from celery_singleton_lock.core.model import (
    Claim,
    CurrentLock,
    Ending,
    Owner,
    Preempted,
    Reply,
    Reservation,
)
from celery_singleton_lock.core.rate import Rate, waiting_or_ending
from celery_singleton_lock.errors import (
    BackendError,
    BackendUnreachable,
    LockLost,
    SingletonLockError,
)
from celery_singleton_lock.lock.multi_lock import MemberLock, MultiLock
from celery_singleton_lock.lock.wait_for_turn import wait_in_slot
from celery_singleton_lock.store.base import LockStore
from celery_singleton_lock.worker.execution.celery_outcome import (
    Run,
)
from celery_singleton_lock.worker.lock_header import LockHeader, notice_of_close, whose
from celery_singleton_lock.worker.preempted import LockPreempted, preempted_at

T = TypeVar("T")

logger: Final = logging.getLogger(__name__)

_HOST: Final = os.uname().nodename


_current: ContextVar[TaskLock | PlacedLock | MultiLock | None] = ContextVar(
    "celery_singleton_lock", default=None
)


def _announce_nothing(_notice: str) -> None:
    """Send no notice, since no main process tracks the task."""


def _preempted_by_none(_token: str) -> str:
    """Return that no newer call preempts the task."""
    return ""


class TaskLock:
    """The lock of the running task, as the task sees it (``self.lock``, :func:`current_lock`).

    Args:
        store: the store that renews the lock.
        header: the lock header of the delivery.
        reply: the reply that granted the lock.
        lease: the lease in seconds.
        valid_until: monotonic time up to which the lock is known to be held.
        rates: those that its task declares.
        announce: sends a notice to the main process.
        preempted_by: token -> the attempt that preempts its task; empty if none is known.

    Attributes:
        interrupted: whether ``LockPreempted`` was raised in the task.
    """

    __slots__ = (
        "_announce",
        "_asked_at",
        "_by",
        "_charges",
        "_lease",
        "_lost",
        "_preempted",
        "_preempted_by",
        "_store",
        "_valid_until",
        "fencing_token",
        "interrupted",
        "name",
        "rates",
        "token",
    )

    def __init__(
        self,
        store: LockStore,
        header: LockHeader,
        reply: Reply,
        lease: float,
        valid_until: float,
        *,
        rates: tuple[Rate, ...] = (),
        announce: Callable[[str], None] = _announce_nothing,
        preempted_by: Callable[[str], str] = _preempted_by_none,
    ) -> None:
        self.interrupted: bool = False
        self._preempted: Preempted | None = None
        self._preempted_by = preempted_by
        self.rates: tuple[Rate, ...] = rates
        self._announce = announce
        self._charges = 0
        self.name: str = header.name
        self.fencing_token: int = reply.fencing_token
        self._store = store
        self._by = header
        self.token: str = header.token
        self._lease = lease
        self._valid_until = valid_until
        self._asked_at = valid_until - lease
        self._lost = False

    @property
    def held(self) -> bool:
        """Whether the lock is held, as Redis replied at most a third of a lease ago."""
        if not self._lost and self._renewal_is_old():
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

    @property
    def preempted(self) -> bool:
        """Whether a newer call replaces this run, so that it should end; it still holds the lock.

        The worker usually knows at once. If its notice was lost, the reply to the next renewal says
        so.
        """
        if self._preempted is None:
            by = self._preempted_by(self.token)
            if by:
                self._preempted = Preempted(by)
            elif not self._lost and self._renewal_is_old():
                self._refresh()
        return self._preempted is not None

    def must_end(self, by: Preempted) -> LockPreempted:
        """Note that a newer call replaces this run. Return the exception to raise."""
        self._preempted, self.interrupted = by, True
        return preempted_at(self.name, by)

    def ensure_held(self) -> None:
        """Renew the lock, and raise if it is no longer held, or if a newer call replaces this run.

        Raises:
            LockLost: the lock is lost. Stop writing.
            LockPreempted: a newer call replaces this run (``lock_on_conflict="preempt"``).
            BackendError: Redis did not answer, so it is not known whether the lock is held.
        """
        if not self._extend():
            raise self.lose()
        self.end_if_preempted()

    def end_if_preempted(self) -> None:
        """Raise if a newer call replaces this run.

        Raises:
            LockPreempted: one does.
        """
        if self.preempted and self._preempted is not None:
            raise self.must_end(self._preempted)

    def pause(self, seconds: float, why: str = "", *, name: str = "") -> float:
        """Close the lock for everybody for a time; see :meth:`Lock.pause`. The task continues.

        Args:
            seconds: for how long.
            why: the reason, for people.
            name: name of the lock. A task with several locks must give it.

        Returns:
            Seconds for which the lock is closed.

        Raises:
            ConfigurationError: an argument is invalid, or the locks are on a quorum.
            BackendError: Redis did not answer, or refused.
        """
        checked, told = checked_close(seconds, why)
        closing = name_to_close([lock.name for lock in self._each()], name)
        text = described(whose(self._by), told)
        closed = self._store.close_for(closing, checked, text)
        logger.info("Lock %r is closed for %.1f s, %s", closing, closed, text)
        notice = notice_of_close(self._by, closing, closed, told)
        if notice:
            self._announce(notice)
        return closed

    def _each(self) -> Sequence[TaskLock]:
        return (self,)

    def charge(
        self,
        amount: int,
        *,
        id: str | None = None,  # noqa: A002  # the word for it
        rate: str | Rate | None = None,
        name: str = "",
    ) -> None:
        """Correct what the start of the task has cost; see :meth:`CurrentLock.charge`."""
        more, given = checked_amount(amount), checked_id(id)
        keys = charged_rates(self.name, self.rates, rate)
        one_named(name, (self,))
        self._charges += 1
        own = given or f"{self.token} {self._charges}"
        store: Any = self._store  # it counts starts, since a quorum refuses rates
        try:
            store.charge(self.name, self.token, own, more, keys)
        except BackendUnreachable:
            store.charge(self.name, self.token, own, more, keys)

    def lose(self) -> LockLost:
        """Note that the lock was lost. Return the exception to raise."""
        self._lost = True
        msg = f"The lock {self.name!r} was lost: its lease ended or it was taken away."
        return LockLost(msg, self.name)

    def _renewal_is_old(self) -> bool:
        return self._store.clock.monotonic() - self._asked_at > self._lease / 3

    def _refresh(self) -> None:
        try:
            self._extend()
        except BackendError:
            self._asked_at = self._store.clock.monotonic() - self._lease / 4  # ask again soon

    def _extend(self) -> bool:
        if self._lost:
            return False
        asked = self._store.clock.monotonic()
        renewal = self._store.extend([(self.name, self.token, self._lease)])[0]
        if isinstance(renewal, Preempted):
            self._preempted = renewal
        self.note_renewal(asked, held=bool(renewal))
        return bool(renewal)

    def note_renewal(self, asked: float, *, held: bool) -> None:
        """Note the reply to a renewal that was sent at ``asked``."""
        self._asked_at, self._lost = asked, not held
        if held:
            self._valid_until = asked + self._lease


class NoLock:
    """Replaces the lock in a run without a lock: a direct call, ``apply()``, or a plain task."""

    name = ""
    held = False
    lost = False
    preempted = False
    fencing_token = 0
    expires_in: float = 0.0

    def ensure_held(self) -> None:
        """Do nothing: there is no lock that could be lost."""

    def pause(self, seconds: float, why: str = "", *, name: str = "") -> float:
        """Check the arguments and do nothing: there is no lock that could be closed."""
        del name
        checked_close(seconds, why)
        return 0.0

    def charge(
        self,
        amount: int,
        *,
        id: str | None = None,  # noqa: A002  # the word for it
        rate: str | Rate | None = None,
        name: str = "",
    ) -> None:
        """Do nothing: this run has no start that counts."""


def current_lock() -> CurrentLock:
    """Return the lock of the running task. If it has none, return an object that does nothing.

    For a task with ``lock_keys`` it represents all of its locks, and has the name and the fencing
    token of the first one.
    """
    return _current.get() or NoLock()


def current_locks() -> tuple[CurrentLock, ...]:
    """Return all locks of the running task, in the order in which they were acquired.

    Each has its own fencing token. Empty if the task takes no lock.
    """
    lock = _current.get()
    if lock is None:
        return ()
    several: tuple[CurrentLock, ...] = getattr(lock, "locks", ())
    return several or (lock,)


def ask(store: LockStore, header: LockHeader, options: LockOptions, limit: int = 0) -> Reply:
    """Acquire the lock of a delivery, or claim it if it was granted.

    Args:
        store: the store of the locks.
        header: the delivery.
        options: those of the lock.
        limit: of a claim: the limit to declare, if it is lower than the one in force; 0: none.
    """
    owner = owner_of(header)
    if header.granted:
        return store.claim(
            owner,
            header.name,
            options.lease,
            acks_early=header.acks_early,
            limit=limit,
        )
    if options.on_conflict == "wait":
        return wait(store, owner, claim_of(header, options), options)
    return store.acquire(owner, claim_of(header, options))


def wait(store: LockStore, owner: Owner, claim: Claim, options: LockOptions) -> Reply:
    """Acquire the lock, waiting in the pool slot.

    The lease in the reply counts from the call of this function.
    """
    began = store.clock.monotonic()
    timeout = options.wait_timeout or MAX_WAIT
    reply, asked = wait_in_slot(store, store.clock, owner, claim, timeout)
    return reply._replace(lease=reply.lease + asked - began)


def owner_of(header: LockHeader) -> Owner:
    """Return the owner for a delivery that runs in this process."""
    return Owner(header.token, header.attempt, header.task, header.worker, _HOST, os.getpid())


class PlacedLock(MemberLock):
    """The lock of a task that did not pass a dispatcher, and acquires it where it runs."""

    preempted = False
    """No worker watches it, so no newer call preempts it."""

    kept: Reservation | None = None
    """The reservation with which the permit stays held after the release; None for none."""

    def claims(self, options: LockOptions) -> None:
        """Claim the lock as these options of a call say, which may have been computed."""
        self._claim = self._claim._replace(limit=options.declared_limit, flow=options.flow)

    def in_group(self, options: LockOptions) -> PlacedLock:
        """Return this lock, acquired for the group of its task, if it has one."""
        if options.group:
            self._claim = self._claim._replace(flow=options.flow)
        return self

    def charge(
        self,
        amount: int,
        *,
        id: str | None = None,  # noqa: A002  # the word for it
        rate: str | Rate | None = None,
        name: str = "",
    ) -> None:
        """Correct what the start of the task has cost; see :meth:`CurrentLock.charge`."""
        one_named(name, (self,))
        super().charge(amount, id=id, rate=rate)

    def _release_in(self, store: Any, token: str) -> Any:
        ending = Ending.HOLD if self.kept else Ending.FINAL
        return store.release(self.name, token, ending, reserve=self.kept)

    def pause(self, seconds: float, why: str = "", *, name: str = "") -> float:
        """Close the lock for everybody for a time; see :meth:`TaskLock.pause`."""
        name_to_close([self.name], name)
        return super().pause(seconds, why)


class Held:
    """The time for which the locks of a run stay held if it succeeds. Create it at the start.

    Args:
        hold_for: ``lock_hold_for``, in seconds from now; None: the locks are released.
        clock: source of monotonic seconds.
    """

    def __init__(self, hold_for: float | None, clock: Clock) -> None:
        self._clock = clock
        self._hold = Reservation("", hold_for or 0.0, clock.monotonic())

    def left(self) -> Reservation | None:
        """Return the reservation for the rest of the time; None if nothing is left."""
        return self._hold.left(self._clock.monotonic())

    def put_on(self, lock: PlacedLock | MultiLock) -> None:
        """Set the reservation of locks, so that they stay held after their release."""
        placed: tuple[Any, ...] = getattr(lock, "locks", (lock,))
        for each in placed:
            each.kept = self.left()


def in_place(store: LockStore, name: str, options: LockOptions) -> PlacedLock | MultiLock:
    """Return the lock of a task, or all of its locks as one. It is not acquired yet."""
    keys = name.keys if isinstance(name, Names) else (Key(name, rate=options.rate),)
    locks = [
        PlacedLock(
            store,
            key.name,
            lease=options.lease,
            limit=key.limit or options.limit,
            rate=key.rate or None,
            priority=options.head_start / 1_000_000,
        ).in_group(options)
        for key in keys
    ]
    for lock in locks[:-1]:  # with the last one, all are held
        lock.later = bool(lock.rates)
    if options.computed is not None:
        locks[0].claims(options)  # a task with several locks computes none of its options
    return MultiLock(locks, store.clock) if len(locks) > 1 else locks[0]


def and_then(end: Callable[[], object], work: Callable[[], T]) -> T:
    """Call ``work``, and then ``end``, however ``work`` ends.

    A soft time limit may be raised at any line, also on the way to ``end``. So ``end`` is called
    once more after any exception; it must have no further effect then.
    """
    try:
        try:
            return work()
        finally:
            end()
    except BaseException:
        end()
        raise


def let_go(lock: PlacedLock | MultiLock, who: str) -> None:
    """Release a lock if it was acquired. Log why it could not be released."""
    if lock.token:
        try:
            lock.release()
        except SingletonLockError as error:
            logger.warning("%s could not release %r: %s", who, lock.name, error)


def claim_of(header: LockHeader, options: LockOptions) -> Claim:
    """Return the claim of a delivery on its lock."""
    flow = header.flow or options.flow
    return Claim(
        header.name,
        options.lease,
        options.declared_limit,
        header.place,
        options.max_waiting,
        header.copy and (header.first_place or 1),
        options.on_full == "replace",
        waiting_or_ending(flow, options.on_rate),
        header.later,
    )


def under(lock: TaskLock | PlacedLock | MultiLock, run: Run) -> Any:
    """Run a task with ``lock`` as its current lock."""
    before = _current.get()
    try:
        _current.set(lock)
        return run.go()
    finally:
        _current.set(before)


@contextmanager
def entered(lock: TaskLock | PlacedLock | MultiLock | None) -> Iterator[None]:
    """Make ``lock`` the current lock; None for a run without one. :func:`under` is faster."""
    before = _current.get()
    try:
        _current.set(lock)
        yield
    finally:
        _current.set(before)

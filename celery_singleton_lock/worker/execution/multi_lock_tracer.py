"""Acquires the locks of a task with several locks before its body, and releases them after it.

If one of them is busy, the task continues to hold those before it. Otherwise other tasks would get
these locks, and they would be busy when the task is granted the lock for which it waits. There is
no deadlock, since all tasks acquire their locks in the same order; see
:mod:`celery_singleton_lock.core.lock_set`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.core.charge import one_named
from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.lock_view import reason_in
from celery_singleton_lock.core.model import Ending, Reply, Verdict, why_busy
from celery_singleton_lock.core.rate import Rate, unpacked
from celery_singleton_lock.errors import BackendError, LockLost, LockUnusable
from celery_singleton_lock.worker.execution.task_lock import TaskLock, ask, owner_of
from celery_singleton_lock.worker.lock_header import (
    LockHeader,
    doubted,
    in_order_of_release,
    options_of,
    singles,
)
from celery_singleton_lock.worker.not_started import NotStarted, refusal

if TYPE_CHECKING:
    from celery_singleton_lock.config.settings import LockOptions
    from celery_singleton_lock.core.lock_set import LockSet
    from celery_singleton_lock.core.model import Reservation
    from celery_singleton_lock.store.base import LockStore
    from celery_singleton_lock.worker.execution.tracer import LockTracer


class Taken(NamedTuple):
    """The result of acquiring several locks.

    Args:
        locks: the locks that are held, in order. The granted lock of a delivery is added last.
        busy: index of the lock that was refused; -1 if all are held.
        reply: the reply that refused that lock; None if a held lock was lost.
    """

    locks: list[TaskLock]
    busy: int = -1
    reply: Reply | None = None


class MultiLockTracer:
    """Acquires and releases the locks of tasks with several locks.

    Args:
        tracer: the tracer for single locks of this process.
        store: returns the store of this process.
        announce: sends the main process the notice that a token holds its locks.
        again_after: seconds after which the broker delivers a message again.
    """

    def __init__(
        self,
        tracer: LockTracer,
        store: Callable[[], LockStore],
        announce: Callable[[str], None],
        again_after: float,
    ) -> None:
        self._tracer = tracer
        self._store = store
        self._announce = announce
        self._again_after = again_after

    def enter(self, header: LockHeader, options: LockOptions) -> TaskLock | None:
        """Acquire all locks, and return them as one; return None to run without them.

        Raises:
            NotStarted: the task does not run. The main process handles its message.
            LockError: the task fails by its policy. No lock is held.
        """
        store, each = self._store(), singles(header)
        if header.granted:  # it was parked, so it is parked again, even if the policy has changed
            options = replace(options, on_conflict="park")
        try:
            taken = self._take(store, header, each, options)
        except BackendError as error:
            if not header.granted:  # otherwise its message is in Redis, and waits there
                self._let_go(store, header, each, options, error)
            return self._tracer.without_backend(header, options, error)
        except BaseException as error:
            self._tracer.interrupted(header, error)
            raise
        if taken.busy >= 0:
            self._refuse(header, each, taken, options)
        if header.announce:
            self._announce(header.token)
        return TaskLocks(store, header, taken.locks, options.lease)

    def _let_go(
        self,
        store: LockStore,
        header: LockHeader,
        each: list[LockHeader],
        options: LockOptions,
        error: BackendError,
    ) -> None:
        """Release the locks of a task that runs or fails without Redis, or has a refused lock."""
        if options.on_backend_error != "retry":
            self._tracer.leave(header, Ending.FINAL)
        elif isinstance(error, LockUnusable):
            self._free(store, each)

    def leave(
        self,
        header: LockHeader,
        ending: Ending,
        lock: TaskLock | None,
        kept: Reservation | None = None,
    ) -> bool:
        """Release all locks that are held; return whether Redis has lost the parked message."""
        held, lost = {each.name: each for each in getattr(lock, "locks", ())}, False
        for each in in_order_of_release(header):  # the last one is that of the parked message
            lost = self._tracer.leave(each, ending, held.get(each.name), kept)
        return lost

    def _take(
        self, store: LockStore, header: LockHeader, each: list[LockHeader], options: LockOptions
    ) -> Taken:
        """Acquire the other locks, then claim the granted one, which ends the parked message."""
        locks = self._kept(store, header, each, options)
        if locks is None:
            return Taken([], 0)
        taken = self._rest(store, header, each, options, locks)
        if taken.busy < 0:
            taken = self._started(store, each, locks, options)
        if taken.busy >= 0 or not header.granted:
            return taken
        return self._claimed(store, each, locks, options)

    def _rest(  # the position of a delivery in its lock set
        self,
        store: LockStore,
        header: LockHeader,
        each: list[LockHeader],
        options: LockOptions,
        locks: list[TaskLock],
    ) -> Taken:
        """Acquire the locks that follow the granted one, or all, and add them to ``locks``."""
        lock_set = _lock_set_of(header)
        until = store.clock.monotonic() + (options.wait_timeout or MAX_WAIT)
        for number in range(lock_set.at, len(each)):
            if not each[number].granted:
                left = max(0.001, until - store.clock.monotonic())
                one = each[number]
                if not number:
                    one = doubted(one, store.clock.monotonic(), self._again_after)
                lock = self._ask(store, one, options_of(header, number, options), left)
                if isinstance(lock, Reply):
                    return Taken(locks, number, lock)
                locks.append(lock)
        return Taken(locks)

    def _started(
        self,
        store: LockStore,
        each: list[LockHeader],
        locks: list[TaskLock],
        options: LockOptions,
    ) -> Taken:
        """Count the start at the rates, since all locks are held.

        The granted lock counts its start when it is claimed, which is later.
        """
        for number, one in enumerate(each):
            if one.later and not one.granted:
                with _naming(one):
                    reply = store.claim(owner_of(one), one.name, options.lease)
                if reply.verdict is not Verdict.GRANTED:  # its lease ended meanwhile
                    self._give_back([other for other in each[number + 1 :] if not other.granted])
                    return Taken(locks, number, reply)
                self._tracer.tell_next_start(one.name, reply)
        return Taken(locks)

    def _claimed(
        self,
        store: LockStore,
        each: list[LockHeader],
        locks: list[TaskLock],
        options: LockOptions,
    ) -> Taken:
        """Claim the lock at which the message is parked. All others are held."""
        at = next(number for number, one in enumerate(each) if one.granted)
        claimed = self._ask(store, each[at], options, 0.0)
        if isinstance(claimed, Reply):
            return Taken(locks, at, claimed)
        if at and each[at].acks_early and not _ack_recorded(store, each[0], options):
            self._give_back(each[at + 1 :])
            return Taken([], 0)
        locks.insert(at, claimed)
        return Taken(locks)

    @staticmethod
    def _kept(
        store: LockStore, header: LockHeader, each: list[LockHeader], options: LockOptions
    ) -> list[TaskLock] | None:
        """Renew and return the locks that the task held while parked; None if one is lost."""
        lock_set = _lock_set_of(header)
        if not lock_set.at:
            return []
        asked = store.clock.monotonic()
        kept = each[: lock_set.at]
        with _naming(kept[0]):  # raised only if Redis refuses all of them
            answers = store.extend([(one.name, one.token, options.lease) for one in kept])
        if not all(answers):
            return None
        return [
            TaskLock(
                store,
                one,
                Reply(Verdict.GRANTED, fencing_token=part.fence),
                options.lease,
                asked + options.lease,
                rates=unpacked(part.flow),
            )
            for one, part in zip(kept, lock_set.parts, strict=False)
        ]

    def _ask(
        self, store: LockStore, one: LockHeader, options: LockOptions, left: float
    ) -> TaskLock | Reply:
        """Acquire or claim one lock, and return it; if it is refused, return the reply."""
        asked = store.clock.monotonic()
        if options.on_conflict == "wait":
            options = replace(options, wait_timeout=left)
        with _naming(one):
            reply = ask(store, one, options)
        if reply.verdict is not Verdict.GRANTED:
            return reply
        if reply.limit != options.limit and not one.granted:
            self._tracer.warn_of_limit(one, options, reply)
        self._tracer.tell_next_start(one.name, reply)
        valid_until = asked + reply.lease
        return TaskLock(
            store,
            one,
            reply,
            options.lease,
            valid_until,
            rates=options.rate,
            announce=self._announce,
        )

    def _refuse(
        self, header: LockHeader, each: list[LockHeader], taken: Taken, options: LockOptions
    ) -> NoReturn:
        """Raise the exception that ends a run without all of its locks.

        Raises:
            Exception: the exception, as :func:`refusal` returns it.
        """
        busy, reply = taken.busy, taken.reply
        name = each[busy].name
        outcome = self._tracer.outcome(each[busy], options, reply, further=busy > 0)
        if outcome is Outcome.PARK and reply is not None and busy:
            further = how_far(header, taken)
            reason, waits_for = why_busy(name, reply), reason_in(reply)
            raise NotStarted(outcome, reason, reply.rank, further, waits_for)
        has_lost_message = outcome is Outcome.AGAIN and reply is not None
        if outcome is Outcome.GONE or has_lost_message:
            self._give_back([one for one in each if not one.granted])
        elif outcome is not Outcome.AGAIN:
            self._give_back(each[:busy])
        raise refusal(outcome, name, options, reply)

    @staticmethod
    def _free(store: LockStore, each: Sequence[LockHeader]) -> None:
        """Release all locks if Redis refuses one of them, since other tasks wait for the others."""
        for one in reversed(each):
            with suppress(BackendError):
                store.release(one.name, one.token, Ending.AGAIN)

    def _give_back(self, held: Sequence[LockHeader]) -> None:
        """Release locks that the task cannot use, and grant them to their next waiters."""
        for one in reversed(held):
            self._tracer.leave(one, Ending.AGAIN)


class TaskLocks(TaskLock):
    """All locks of the running task as one lock. It is held as long as all of them are held.

    Args:
        store: the store that renews the locks.
        header: the lock header of the delivery.
        locks: the locks, in the order in which they were acquired.
        lease: the lease in seconds.
    """

    __slots__ = ("locks",)

    def __init__(
        self, store: LockStore, header: LockHeader, locks: list[TaskLock], lease: float
    ) -> None:
        first = locks[0]
        reply = Reply(Verdict.GRANTED, fencing_token=first.fencing_token)
        until = store.clock.monotonic() + min(lock.expires_in for lock in locks)
        super().__init__(store, header, reply, lease, until)
        self.name: str = first.name
        self.locks: Final = tuple(locks)

    def _each(self) -> Sequence[TaskLock]:
        return self.locks

    def charge(
        self,
        amount: int,
        *,
        id: str | None = None,  # noqa: A002  # the word for it
        rate: str | Rate | None = None,
        name: str = "",
    ) -> None:
        """Correct what the start at the lock ``name`` has cost; see :meth:`CurrentLock.charge`."""
        one_named(name, self.locks).charge(amount, id=id, rate=rate)

    def lose(self) -> LockLost:
        """Note that a lock was lost. Return the exception to raise."""
        self._lost = True
        lost = [lock.name for lock in self.locks if not lock.expires_in]
        lost = lost or [lock.name for lock in self.locks]
        names = ", ".join(map(repr, lost))
        msg = f"One of the task's locks was lost ({names}): its lease ended or it was taken away."
        return LockLost(msg, lost[0])

    def _extend(self) -> bool:
        if self._lost:
            return False
        asked = self._store.clock.monotonic()
        answers = self._store.extend([(lock.name, lock.token, self._lease) for lock in self.locks])
        for lock, held in zip(self.locks, answers, strict=True):
            lock.note_renewal(asked, held=bool(held))
        self.note_renewal(asked, held=all(answers))
        return all(answers)


@contextmanager
def _naming(one: LockHeader) -> Iterator[None]:
    """Name this lock in the error if Redis refuses it."""
    try:
        yield
    except LockUnusable as error:
        error.name = one.name
        raise


def _ack_recorded(store: LockStore, first: LockHeader, options: LockOptions) -> bool:
    """Record at the first lock, which recognises copies, that the message is acknowledged.

    Otherwise a copy that is parked there would run after this worker has died. Call it last: it
    deletes that copy, and the first lock stores no later one. If the message were still parked, it
    could not start again there.

    Returns:
        Whether the first lock is still held. Not if Redis refuses it: the message is no longer
        stored, so this worker must park it again.
    """
    owner = owner_of(first)
    try:
        reply = store.claim(owner, first.name, options.lease, acks_early=True)
    except LockUnusable:
        return False
    return reply.verdict is Verdict.GRANTED


def _lock_set_of(header: LockHeader) -> LockSet:
    """Return the lock set of a header that has one."""
    if header.lock_set is None:
        msg = "this delivery has one lock"
        raise ValueError(msg)
    return header.lock_set


def how_far(header: LockHeader, taken: Taken) -> LockSet:
    """Return the lock set of a delivery that must wait for its next lock."""
    lock_set = _lock_set_of(header)
    fences = {lock.name: lock.fencing_token for lock in taken.locks}
    parts = tuple(part._replace(fence=fences.get(part.name, part.fence)) for part in lock_set.parts)
    left = lock_set.here if header.granted else lock_set.left
    return lock_set._replace(parts=parts, at=taken.busy, left=left)

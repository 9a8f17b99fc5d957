"""Takes the several locks of a task in order, in the executing context, and gives them back.

A task that finds one of them busy keeps those before it: given back, they would be handed on, and
by the time it is granted the one it would have lost the other. Only in what order they are taken
makes that free of deadlocks; see :mod:`celery_singleton_lock.core.lock_set`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from celery_singleton_lock.worker.execution import tracer as gates
from celery_singleton_lock.config.limits import MAX_WAIT
from celery_singleton_lock.errors import BackendError, LockLost
from celery_singleton_lock.core.model import Ending, Reply, Verdict, why_busy
from celery_singleton_lock.worker.lock_header import Stamp, doubted, leaving, singles

if TYPE_CHECKING:
    from celery_singleton_lock.core.lock_set import Bundle
    from celery_singleton_lock.worker.execution.tracer import Gate, TaskLock
    from celery_singleton_lock.core.model import Reservation
    from celery_singleton_lock.config.settings import LockOptions
    from celery_singleton_lock.store.base import Store


class Taken(NamedTuple):
    """How far the locks could be taken.

    Args:
        locks: those that are held, in order; of a delivery the granted one is missing until the
            end.
        busy: index of the one that was not to be had.
        reply: what the store said of it; None if a kept one was lost.
    """

    locks: list[TaskLock]
    busy: int = -1
    reply: Reply | None = None


class Gathering:
    """Takes and gives back the locks of tasks that have several.

    Args:
        gate: of this process.
        store: returns this process' store.
        announce: tells the main process that a token holds its locks.
        done_for: seconds for which later copies of an ended attempt end quietly.
    """

    def __init__(
        self,
        gate: Gate,
        store: Callable[[], Store],
        announce: Callable[[str], None],
        done_for: float,
    ) -> None:
        """Hold nothing."""
        self._gate = gate
        self._store = store
        self._announce = announce
        self._done_for = done_for

    def enter(self, stamp: Stamp, options: LockOptions) -> TaskLock | None:
        """Return all locks as one, or None to run without.

        Raises:
            Turned: the main process decides what becomes of the message.
            LockError: as the task's policy says; nothing is held.
        """
        store, each = self._store(), singles(stamp)
        if stamp.granted:  # it was parked, and is parked again, whatever the policy is now
            options = replace(options, on_conflict="park")
        try:
            taken = self._take(store, stamp, each, options)
        except BackendError as error:
            if options.on_backend_error != "retry":
                self._gate.leave(stamp, Ending.FINAL)
            return self._gate.without_backend(stamp, options, error)
        except BaseException:
            self._gate.leave(stamp, Ending.FINAL)  # interrupted between grant and bookkeeping
            raise
        if taken.busy >= 0:
            self._refuse(stamp, each, taken, options)
        if stamp.announce:
            self._announce(stamp.token)
        return TaskLocks(store, stamp, taken.locks, options.lease)

    def leave(
        self, stamp: Stamp, ending: Ending, lock: TaskLock | None, kept: Reservation | None = None
    ) -> None:
        """Give all locks back, whichever of them are held."""
        held = {each.name: each for each in getattr(lock, "locks", ())}
        for each in leaving(stamp):
            self._gate.leave(each, ending, held.get(each.name), kept)

    def _take(self, store: Store, stamp: Stamp, each: list[Stamp], options: LockOptions) -> Taken:
        """Take what is not held yet. A grant is claimed last: then the message can be settled."""
        bundle = _bundle_of(stamp)
        locks = self._kept(store, stamp, each, options)
        if locks is None:
            return Taken([], 0)
        until = store.clock.monotonic() + (options.wait_timeout or MAX_WAIT)
        for number in range(bundle.at, len(each)):
            if not each[number].granted:
                left = max(0.001, until - store.clock.monotonic())
                one = each[number]
                if not number:
                    one = doubted(one, store.clock.monotonic(), self._done_for)
                lock = self._ask(store, one, gates.options_of(stamp, number, options), left)
                if isinstance(lock, Reply):
                    return Taken(locks, number, lock)
                locks.append(lock)
        if stamp.granted:
            claimed = self._ask(store, each[bundle.at], options, 0.0)
            if isinstance(claimed, Reply):
                return Taken(locks, bundle.at, claimed)
            locks.insert(bundle.at, claimed)
        return Taken(locks)

    @staticmethod
    def _kept(
        store: Store, stamp: Stamp, each: list[Stamp], options: LockOptions
    ) -> list[TaskLock] | None:
        """Return the locks that were kept for this delivery, renewed; None if one was lost."""
        bundle = _bundle_of(stamp)
        if not bundle.at:
            return []
        asked = store.clock.monotonic()
        kept = each[: bundle.at]
        answers = store.extend([(one.name, one.token, options.lease) for one in kept])
        if not all(answers) or (stamp.settle and not _settled(store, kept[0], options)):
            return None
        return [
            gates.TaskLock(
                store,
                one,
                Reply(Verdict.GRANTED, fencing_token=part.fence),
                options.lease,
                asked + options.lease,
            )
            for one, part in zip(kept, bundle.parts, strict=False)
        ]

    def _ask(self, store: Store, one: Stamp, options: LockOptions, left: float) -> TaskLock | Reply:
        """Return a lock, or why it was not to be had."""
        asked = store.clock.monotonic()
        if options.on_conflict == "wait":
            options = replace(options, wait_timeout=left)
        reply = gates.ask(store, one, options)
        if reply.verdict is not Verdict.GRANTED:
            return reply
        if reply.limit != options.limit and not one.granted:
            self._gate.warn_of_limit(one, options, reply)
        return gates.TaskLock(store, one, reply, options.lease, asked + reply.lease)

    def _refuse(
        self, stamp: Stamp, each: list[Stamp], taken: Taken, options: LockOptions
    ) -> NoReturn:
        """Turn a task away that did not get all of its locks, or raise how it ends."""
        bundle, busy, reply = _bundle_of(stamp), taken.busy, taken.reply
        if reply is None:
            raise gates.Turned(verdict="again", reason="a lock that it kept was lost")
        if stamp.granted and busy == bundle.at:
            self._give_back([one for one in each if not one.granted])
            raise gates.Turned(verdict="gone", reason="its grant lapsed; it is delivered again")
        refusal = self._gate.refusal(each[busy], options, reply)
        if options.on_conflict == "park" and busy:
            reason = why_busy(each[busy].name, reply.holder, reply.paused)
            further = how_far(stamp, taken)
            raise gates.Turned("blocked", reason, reply.rank, further)  # noqa: EM101  # a verdict
        self._give_back(each[:busy])
        raise refusal

    def _give_back(self, held: Sequence[Stamp]) -> None:
        """Give back what was taken in vain: a twin that waits there comes next."""
        for one in reversed(held):
            self._gate.leave(one, Ending.AGAIN)


class TaskLocks(gates.TaskLock):
    """All locks of the running task, as one: held as long as each of them is.

    Args:
        store: where to ask.
        stamp: the delivery.
        locks: in the order in which they were taken.
        lease: seconds.
    """

    __slots__ = ("locks",)

    def __init__(self, store: Store, stamp: Stamp, locks: list[TaskLock], lease: float) -> None:
        """Begin with what the grants said; the first one's fencing token is that of all."""
        first = locks[0]
        reply = Reply(Verdict.GRANTED, fencing_token=first.fencing_token)
        until = store.clock.monotonic() + min(lock.expires_in for lock in locks)
        super().__init__(store, stamp, reply, lease, until)
        self.name = first.name
        self.locks = tuple(locks)

    def lose(self) -> LockLost:
        """Note that a lock was lost; return what to raise."""
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
            lock.heard(asked, held=bool(held))
        self.heard(asked, held=all(answers))
        return all(answers)


def _settled(store: Store, first: Stamp, options: LockOptions) -> bool:
    """Note at the first lock, where copies are found, that the task counts as acknowledged.

    Else a copy that is kept there would run after the death of this worker.
    """
    owner = gates.owner_of(first)
    reply = store.claim(owner, first.name, options.lease, settle=True)
    return reply.verdict is Verdict.GRANTED


def _bundle_of(stamp: Stamp) -> Bundle:
    """Return the bundle of a stamp that has one."""
    if stamp.bundle is None:
        msg = "this delivery has one lock"
        raise ValueError(msg)
    return stamp.bundle


def how_far(stamp: Stamp, taken: Taken) -> Bundle:
    """Return how far a delivery has come that has to wait for another lock."""
    bundle = _bundle_of(stamp)
    fences = {lock.name: lock.fencing_token for lock in taken.locks}
    parts = tuple(part._replace(fence=fences.get(part.name, part.fence)) for part in bundle.parts)
    left = bundle.here if stamp.granted else bundle.left
    return bundle._replace(parts=parts, at=taken.busy, left=left)

"""Assertions about tasks and locks in memory."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any, Final, NoReturn, TypeVar

from celery import states

from celery_singleton_lock.admin.lock_views import waiting_in
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lock_view import SETTLING, Holder, LockView, WaitsFor
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.store.operator.base import Waiting
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.testing.event_log import EventLog, Run, id_of, state_of
from celery_singleton_lock.worker.extension import Extension

T = TypeVar("T")

PATIENCE: Final = 5.0
"""Default of the real seconds for which an assertion waits."""

ALL: Final = 100_000
"""Largest number of waiters that are read; no test has more."""

_LOOK: Final = 0.01


class LockAssertions:
    """The assertions of :class:`~celery_singleton_lock.testing.SingletonLocks`.

    Each waits up to ``timeout`` real seconds until it is true.
    """

    app: Any
    store: RedisStore
    _extension: Extension
    _event_log: EventLog

    def holders(self, name: str) -> tuple[Holder, ...]:
        """Return the holders of a lock."""
        return self._view(name).holders

    def waiting(self, name: str) -> tuple[Holder, ...]:
        """Return the clients and tasks (policy ``wait``) that wait for a lock, in order."""
        return tuple(each for each in self._view(name).waiters if each.state == "waiting")

    def parked(self, name: str) -> tuple[Holder, ...]:
        """Return the tasks that are parked for a lock, in order.

        Those that are out of its queue are the last ones: ``settling``, ``following``, ``delayed``.
        """
        queued = tuple(each for each in self._view(name).waiters if each.state != "waiting")
        return (*queued, *(_holder(each) for each in self._aside(name)))

    def _aside(self, name: str) -> list[Waiting]:
        """Return the tasks that are out of the queue of a lock for a time."""
        store = admin_of(self.store)
        found = waiting_in(store, name, parts=("overdue",))
        return [each for each in found if each.state in _ASIDE]

    def next_start(self, name: str) -> float:
        """Return the seconds until the rate of a lock, or its pause, allows the next start.

        If no task is in its queue: until the first settling one queues.

        Args:
            name: the lock's name.

        Returns:
            Seconds, for ``lock_time.advance``; 0 if no rate, no pause and no quiet period delays
            the next task.
        """
        view = self._view(name)
        settling = [each.settles_for for each in self._aside(name) if each.state == SETTLING]
        if settling and not view.waiters:
            return min(settling)
        by_time = view.waits_for in {WaitsFor.RATE, WaitsFor.PAUSE}
        return view.next_look if by_time else 0.0

    def _view(self, name: str) -> LockView:
        return self.store.inspect(name, waiters=ALL)

    def assert_parked(
        self,
        result: Any = None,
        *,
        lock: str | None = None,
        count: int | None = None,
        waits_for: str | None = None,
        timeout: float = PATIENCE,
    ) -> tuple[Holder, ...]:
        """Assert that a task is parked, or that tasks are parked for a lock.

        Args:
            result: what ``delay`` returned, or a task's id.
            lock: the lock's name; with or without ``result``.
            count: number of tasks parked for ``lock``; None: one or more.
            waits_for: what the next task of the lock waits for: ``"holder"``, ``"rate"``,
                ``"pause"``, ``"group"``, ``"worker"`` or ``"redis"``; ``"settling"``: a later call
                may replace the task; ``"following"``: it follows another one; None: for anything.
            timeout: real seconds to wait until it is true.

        Returns:
            The parked task, or all tasks parked for the lock.

        Raises:
            AssertionError: it is not true in time. The message says what was found.
            TypeError: neither ``result`` nor ``lock`` is given.
            ValueError: no task waits for such a thing.
        """
        __tracebackhide__ = True
        if result is None and lock is None:
            msg = "assert_parked() needs a result, a task's id, or lock=…"
            raise TypeError(msg)
        reasons = {each.value: each for each in WaitsFor}
        if waits_for is not None and waits_for not in reasons:
            msg = f"waits_for is {waits_for!r}; give one of {', '.join(map(repr, reasons))}"
            raise ValueError(msg)
        reason = None if waits_for is None else reasons[waits_for]
        found = _await(lambda: self._parked(result, lock, count, reason), timeout)
        if found is not None:
            return found
        why = f", or the next one does not wait for {waits_for!r}" if waits_for else ""
        if result is not None:
            where = f" for the lock {lock!r}" if lock else ""
            self._fail(result, f"is not parked{where}{why}", lock)
        name = str(lock)
        wanted = "no task is" if count is None else f"not {count}, but {len(self.parked(name))} are"
        msg = f"{wanted} parked for the lock {name!r}{why}. {self._facts(name)}"
        raise AssertionError(msg)

    def _parked(
        self, result: Any, lock: str | None, count: int | None, reason: WaitsFor | None
    ) -> tuple[Holder, ...] | None:
        if result is None:
            found = self.parked(str(lock))
            right = bool(found) if count is None else len(found) == count
            return found if right and self._waits_for(str(lock), found, reason) else None
        for name, token in self.store.locate_tasks([id_of(result)]):
            for each in self.parked(name):
                if base_of(each.token) == base_of(token) and lock in {None, name}:
                    return (each,) if self._waits_for(name, (each,), reason) else None
        return None

    def _waits_for(self, name: str, found: tuple[Holder, ...], reason: WaitsFor | None) -> bool:
        if reason is None or not found:
            return reason is None
        state = found[0].state
        return reason.value == state if state in _ASIDE else reason is self._view(name).waits_for

    def assert_skipped(self, result: Any, *, timeout: float = PATIENCE) -> None:
        """Assert that a task was skipped: it did not get its lock, did not run, ended as REVOKED.

        Args:
            result: what ``delay`` or ``apply`` returned, or a task's id.
            timeout: real seconds to wait until it is true.

        Raises:
            AssertionError: it is not true in time. The message says what was found.
        """
        __tracebackhide__ = True
        if _await(lambda: self._skipped(result) or None, timeout) is None:
            self._fail(result, "was not skipped")

    def _skipped(self, result: Any) -> bool:
        if self._event_log.runs_of(id_of(result)):
            return False
        if getattr(result, "state", "") == states.REVOKED:
            return "lock" in str(result.result)  # not revoked for another reason
        return any(self._means_skipped(each) for each in self._event_log.refusals(id_of(result)))

    def _means_skipped(self, refusal: Any) -> bool:
        task = self.app.tasks.get(refusal.task)
        leaves_out = task is not None and self._extension.options(task).on_full == "skip"
        return bool(refusal.policy == "skip" or (refusal.policy == "full" and leaves_out))

    def assert_ran_alone(
        self, result: Any = None, *, lock: str | None = None, timeout: float = PATIENCE
    ) -> None:
        """Assert that a task held its lock from start to end, and that no other task overlapped it.

        Tasks of this process with the same lock count, even if they ran without the lock (by their
        mode, or eagerly without ``singleton_lock_eager``). With a higher ``lock_limit`` up to that
        many may overlap.

        Args:
            result: what ``delay`` or ``apply`` returned, or a task's id.
            lock: the lock's name. Without ``result``: check all tasks that should have held it, at
                least one. With ``result``: the lock that the task should have held.
            timeout: real seconds to wait until the tasks have ended.

        Raises:
            AssertionError: it is not true. The message says what was found.
            TypeError: neither ``result`` nor ``lock`` is given.
        """
        __tracebackhide__ = True
        if result is None and lock is None:
            msg = "assert_ran_alone() needs a result, a task's id, or lock=…"
            raise TypeError(msg)
        runs = _await(lambda: self._ended(result, lock), timeout)
        if runs is None and result is not None:
            self._fail(result, "has not ended")
        if runs is None:
            msg = f"no task with the lock {lock!r} has ended. {self._facts(str(lock))}"
            raise AssertionError(msg)
        for run in runs:
            self._check(run, lock)

    def _ended(self, result: Any, lock: str | None) -> list[Run] | None:
        runs = (
            self._event_log.runs_for(str(lock))
            if result is None
            else self._event_log.runs_of(id_of(result))
        )
        return runs if runs and all(run.ended for run in runs) else None

    def _check(self, run: Run, lock: str | None) -> None:
        __tracebackhide__ = True
        overlapping = self._event_log.overlapping(run)
        if lock is not None and run.lock != lock:
            held = f"the lock {run.lock!r}" if run.lock else "no lock: its base is not LockedTask"
            self._fail(run.task_id, f"should have held the lock {lock!r}; it has {held}")
        if not run.held and self._event_log.follows(run.task_id):
            self._fail(run.task_id, "did not run: it ended with the result of another task")
        if not run.held:
            why = f"the lock {run.lock!r}" if run.lock else "a lock: its base is not LockedTask"
            self._fail(run.task_id, f"ran without {why}")
        if run.lost:
            self._fail(run.task_id, f"lost the lock {run.lock!r} while it ran")
        if len(overlapping) >= run.limit:
            beside = ", ".join(map(str, overlapping))
            self._fail(run.task_id, f"did not run alone: it overlapped {beside}")

    def assert_free(self, name: str, *, timeout: float = PATIENCE) -> None:
        """Assert that a lock has no holder and no waiter.

        Args:
            name: the lock's name.
            timeout: real seconds to wait until it is true.

        Raises:
            AssertionError: it is not true in time. The message names the holders and waiters.
        """
        __tracebackhide__ = True
        if _await(lambda: self._is_free(name) or None, timeout) is None:
            msg = f"The lock is not free. {self._facts(name)}"
            raise AssertionError(msg)

    def _is_free(self, name: str) -> bool:
        view = self._view(name)
        return not view.holders and not view.waiters and not self._aside(name)

    # -- messages ---------------------------------------------------------------------------------

    def _fail(self, result: Any, what: str, lock: str | None = None) -> NoReturn:
        __tracebackhide__ = True
        task_id = id_of(result)
        names = [lock] if lock else [run.lock for run in self._event_log.runs_of(task_id)]
        names += [event.lock for event in self._event_log.events if event.task_id == task_id]
        facts = [self._facts(name) for name in dict.fromkeys(filter(None, names))]
        msg = (
            f"Task {task_id} {what}. What happened to it:\n{self._event_log.history(task_id)}\n"
            + "\n".join([f"Its state is {state_of(self.app, result).rstrip('.')}.", *facts])
        )
        raise AssertionError(msg)

    def _facts(self, name: str) -> str:
        """Return the holders and waiters of a lock as a sentence."""
        view = self._view(name)
        held = ", ".join(f"{each} (for {each.expires_in:.1f} s more)" for each in view.holders)
        waiters = (*view.waiters, *map(_holder, self._aside(name)))
        waits = ", ".join(f"{each} ({each.state})" for each in waiters)
        reason = f", for the {view.waits_for.value}" if waits and view.waits_for else ""
        return (
            f"The lock {name!r}: held by {held or 'nobody'}; waiting: {waits or 'nobody'}{reason}."
        )


_ASIDE: Final = frozenset({SETTLING, "following", "delayed"})
"""States of parked tasks that are out of the queue for a time."""


def _holder(waiting: Waiting) -> Holder:
    return Holder(waiting.token, waiting.task, waiting.task_id, state=waiting.state)


def _await(look: Callable[[], T | None], timeout: float) -> T | None:
    """Call ``look`` until it returns a value, for up to ``timeout`` seconds; else return None."""
    clock, never = SystemClock(), Event()
    until = clock.monotonic() + timeout
    while (found := look()) is None and clock.monotonic() < until:
        never.wait(_LOOK)
    return found

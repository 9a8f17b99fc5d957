"""The handle of a test: locks in memory, who holds and waits, and what may be asserted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from celery import states

from celery_singleton_lock.config.argument_checks import checked_limit
from celery_singleton_lock.config.limits import MAX_LEASE, PREFIX
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.worker.extension import install
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.model import Holder, LockView, base_of
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.testing.fake_holder import ANY, Hold
from celery_singleton_lock.testing.event_log import Journal, Run, id_of, state_of
from celery_singleton_lock.testing.clock_control import LockTime
from celery_singleton_lock.testing.worker import worker_in_thread

if TYPE_CHECKING:  # what needs the extra is imported by connect(), which names it
    from typing_extensions import Self

    from celery_singleton_lock.store.memory import MemoryServer

T = TypeVar("T")

PATIENCE: Final = 5.0
"""Real seconds for which an assertion waits until it is true, unless told otherwise."""

ALL: Final = 100_000
"""Waiters of a lock that are shown; more than any test has."""

_LOOK: Final = 0.01
_KEPT: Final = (":fleet:worker:", ":fleet:free:", ":fleet:route:", ":schema")
"""What stays between two tests: workers that run on, of a whole session."""
_SETTING: Final = f"{PREFIX}backend"
_URL: Final = "memory://"


class SingletonLocks:
    """The locks of an app in the memory of this process; a context manager.

    Within it the app's locks live in memory: in those of its ``singleton_lock_backend``, if that is
    a ``memory://…``, else in ``memory://``. It begins without any lock or parked message. Workers
    must run in threads of this process, see :meth:`worker`; or tasks run eagerly.

    All assertions wait until they are true, for ``timeout`` real seconds at most.

    Args:
        app: the Celery app.

    Attributes:
        app: the app.
        time: the time of the locks.

    Raises:
        ConfigurationError: the extra ``testing`` is not installed.
    """

    def __init__(self, app: Any) -> None:
        """Change nothing yet."""
        self.app = app
        self._extension = install(app)
        self._before: list[tuple[str, Any]] = []
        self._holds: list[Hold] = []

    def __enter__(self) -> Self:
        """Have the app's locks in memory, and begin without any."""
        try:
            self._go_to_memory()
            settings = self._extension.settings
            client: Any = connect(settings.address(), {}, patience=PATIENCE)
            self._server: MemoryServer = client.server
            self.store = RedisStore(client, Keyspace(settings.prefix))
            self.time = LockTime(self._server)
            self.reset()
            self._journal = Journal(self._extension)
        except BaseException:
            self._go_back()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave nothing behind, and give the app its own settings back."""
        self._journal.close()
        self.reset()
        self.store.close()
        self._go_back()

    def _go_to_memory(self) -> None:
        given = self.app.conf.get(_SETTING, None)
        if not str(given).startswith(_URL):
            self._before.append((_SETTING, given))
            self.app.conf[_SETTING] = _URL
        self._extension.forget()

    def _go_back(self) -> None:
        while self._before:
            name, value = self._before.pop()
            if value is None:
                self.app.conf.changes.pop(name, None)
            else:
                self.app.conf[name] = value
        self._extension.forget()

    def reset(self) -> None:
        """Forget all locks, all that is parked, and all that has happened; workers stay.

        Time goes on as usual.
        """
        self.time.unfreeze()
        with self._server.lock:
            for key in self.client.keys("*"):
                if not any(part in key.decode() for part in _KEPT):
                    self.client.delete(key)
        self._holds.clear()
        if hasattr(self, "_journal"):
            self._journal.forget()

    @property
    def client(self) -> Any:
        """A redis-py client for ``Lock(locks.client, "name")``."""
        return self.store.client

    # -- workers ----------------------------------------------------------------------------------

    def worker(self, **options: Any) -> AbstractContextManager[Any]:
        """Run a worker of the app in a thread; see :func:`worker_in_thread`."""
        return worker_in_thread(self.app, **options)

    # -- who holds, who waits ---------------------------------------------------------------------

    def holders(self, name: str) -> tuple[Holder, ...]:
        """Return who holds a lock."""
        return self._view(name).holders

    def waiting(self, name: str) -> tuple[Holder, ...]:
        """Return the threads and tasks that wait for a lock in place, in their order."""
        return tuple(each for each in self._view(name).waiters if each.state == "waiting")

    def parked(self, name: str) -> tuple[Holder, ...]:
        """Return the tasks that are parked for a lock, in their order."""
        return tuple(each for each in self._view(name).waiters if each.state != "waiting")

    def hold(self, name: str, *, lease: float = MAX_LEASE, limit: int | None = None) -> Hold:
        """Hold a lock as somebody else, who never renews it.

        Args:
            name: the lock's name.
            lease: seconds after which it ends.
            limit: permits of the lock, to hold several of them, each by a call; None: it is held
                once, whatever ``lock_limit`` its tasks declare.

        Returns:
            A context manager, with ``release()``.

        Raises:
            AssertionError: the lock is not free.
            ConfigurationError: the limit is none.
        """
        if limit is None and any(each.name == name and each.held for each in self._holds):
            msg = (
                f"hold({name!r}) found the lock busy: hold() of this test holds it already. "
                f"Release it first; or, for several holders of a lock with lock_limit=3, hold each "
                f"with hold({name!r}, limit=3)."
            )
            raise AssertionError(msg)
        held = Hold(self.store, name, lease, ANY if limit is None else checked_limit(limit))
        self._holds.append(held)
        return held

    def release(self, name: str) -> None:
        """Give back what :meth:`hold` took of a lock, and hand it to who is next.

        Raises:
            AssertionError: it was not held so.
        """
        holds = [hold for hold in self._holds if hold.name == name]
        self._holds = [hold for hold in self._holds if hold.name != name]
        held = [hold.release() for hold in holds]
        if not any(held):
            msg = f"release({name!r}): hold() does not hold it. {self._facts(name)}"
            raise AssertionError(msg)

    def take_away(self, name: str) -> int:
        """Take a lock from all its holders, as an operator would, and grant it to who is next.

        A running task hears that it has lost its lock when its lease is renewed the next time: at
        the latest when a third of it has passed (``lock_time.advance``).

        Args:
            name: the lock's name.

        Returns:
            How many held it.
        """
        return self.store.reset(name)

    def _view(self, name: str) -> LockView:
        return self.store.inspect(name, waiters=ALL)

    # -- assertions -------------------------------------------------------------------------------

    def assert_parked(
        self,
        result: Any = None,
        *,
        lock: str | None = None,
        count: int | None = None,
        timeout: float = PATIENCE,
    ) -> tuple[Holder, ...]:
        """Assert that a task is parked now; or that tasks are, for a lock.

        Args:
            result: what ``delay`` returned, or a task's id.
            lock: instead, or besides: the lock's name.
            count: how many are parked for ``lock``; None: one or more.
            timeout: real seconds within which it must be so.

        Returns:
            Those that are parked: the task, or all for the lock.

        Raises:
            AssertionError: it is not so; the message says what was found.
        """
        __tracebackhide__ = True
        if result is None and lock is None:
            msg = "assert_parked() needs a result, a task's id, or lock=…"
            raise TypeError(msg)
        found = _await(lambda: self._parked(result, lock, count), timeout)
        if found is not None:
            return found
        if result is not None:
            self._not_so(result, f"is not parked{f' for the lock {lock!r}' if lock else ''}", lock)
        name = str(lock)
        wanted = "no task is" if count is None else f"not {count}, but {len(self.parked(name))} are"
        msg = f"{wanted} parked for the lock {name!r}. {self._facts(name)}"
        raise AssertionError(msg)

    def _parked(
        self, result: Any, lock: str | None, count: int | None
    ) -> tuple[Holder, ...] | None:
        if result is None:
            found = self.parked(str(lock))
            return found if (found if count is None else len(found) == count) else None
        for name, token in self.store.find([id_of(result)]):
            for each in self.parked(name):
                if base_of(each.token) == base_of(token) and lock in {None, name}:
                    return (each,)
        return None

    def assert_skipped(self, result: Any, *, timeout: float = PATIENCE) -> None:
        """Assert that a task was left out since its lock was busy: it ended as REVOKED, unrun.

        Args:
            result: what ``delay`` or ``apply`` returned, or a task's id.
            timeout: real seconds within which it must be so.

        Raises:
            AssertionError: it is not so; the message says what was found.
        """
        __tracebackhide__ = True
        if _await(lambda: self._skipped(result) or None, timeout) is None:
            self._not_so(result, "was not skipped")

    def _skipped(self, result: Any) -> bool:
        if self._journal.runs_of(id_of(result)):
            return False
        if getattr(result, "state", "") == states.REVOKED:
            return "lock" in str(result.result)  # and not since somebody has revoked it
        return any(self._means_skipped(each) for each in self._journal.refusals(id_of(result)))

    def _means_skipped(self, refusal: Any) -> bool:
        task = self.app.tasks.get(refusal.task)
        leaves_out = task is not None and self._extension.options(task).on_full == "skip"
        return bool(refusal.policy == "skip" or (refusal.policy == "full" and leaves_out))

    def assert_ran_alone(
        self, result: Any = None, *, lock: str | None = None, timeout: float = PATIENCE
    ) -> None:
        """Assert that a task ran under its lock, from begin to end, with nobody beside it.

        Beside it are other tasks of this process for the same lock: also such as ran without it, by
        their mode or since they are not under ``singleton_lock_eager``. With ``lock_limit`` more
        may run at once, but not more than that.

        Args:
            result: what ``delay`` or ``apply`` returned, or a task's id.
            lock: instead, the lock's name: all tasks that should have held it, one or more; or
                besides, the lock that the task should have held.
            timeout: real seconds within which it must have ended.

        Raises:
            AssertionError: it is not so; the message says what was found.
        """
        __tracebackhide__ = True
        if result is None and lock is None:
            msg = "assert_ran_alone() needs a result, a task's id, or lock=…"
            raise TypeError(msg)
        runs = _await(lambda: self._ended(result, lock), timeout)
        if runs is None and result is not None:
            self._not_so(result, "has not run to its end")
        if runs is None:
            msg = f"no task has run for the lock {lock!r} to its end. {self._facts(str(lock))}"
            raise AssertionError(msg)
        for run in runs:
            self._check(run, lock)

    def _ended(self, result: Any, lock: str | None) -> list[Run] | None:
        runs = (
            self._journal.runs_for(str(lock))
            if result is None
            else self._journal.runs_of(id_of(result))
        )
        return runs if runs and all(run.ended for run in runs) else None

    def _check(self, run: Run, lock: str | None) -> None:
        __tracebackhide__ = True
        crowd = self._journal.crowd(run)
        if lock is not None and run.lock != lock:
            held = f"the lock {run.lock!r}" if run.lock else "no lock: its base is not LockedTask"
            self._not_so(run.task_id, f"should have run under the lock {lock!r}; it has {held}")
        if not run.held:
            why = f"the lock {run.lock!r}" if run.lock else "a lock: its base is not LockedTask"
            self._not_so(run.task_id, f"ran without {why}")
        if run.lost:
            self._not_so(run.task_id, f"lost the lock {run.lock!r} while it ran")
        if len(crowd) >= run.limit:
            beside = ", ".join(map(str, crowd))
            self._not_so(run.task_id, f"did not run alone: beside it ran {beside}")

    def assert_free(self, name: str, *, timeout: float = PATIENCE) -> None:
        """Assert that nobody holds a lock, or waits for it.

        Args:
            name: the lock's name.
            timeout: real seconds within which it must be so.

        Raises:
            AssertionError: it is not so; the message says who does.
        """
        __tracebackhide__ = True
        if _await(lambda: self._is_free(name) or None, timeout) is None:
            msg = f"The lock is not free. {self._facts(name)}"
            raise AssertionError(msg)

    def _is_free(self, name: str) -> bool:
        view = self._view(name)
        return not view.holders and not view.waiters

    # -- what is told -----------------------------------------------------------------------------

    def _not_so(self, result: Any, what: str, lock: str | None = None) -> NoReturn:
        __tracebackhide__ = True
        task_id = id_of(result)
        names = [lock] if lock else [run.lock for run in self._journal.runs_of(task_id)]
        names += [event.lock for event in self._journal.events if event.task_id == task_id]
        facts = [self._facts(name) for name in dict.fromkeys(filter(None, names))]
        msg = (
            f"Task {task_id} {what}. What happened to it:\n{self._journal.story(task_id)}\n"
            + "\n".join([f"Its state is {state_of(self.app, result)}.", *facts])
        )
        raise AssertionError(msg)

    def _facts(self, name: str) -> str:
        """Say how a lock stands."""
        view = self._view(name)
        held = ", ".join(f"{each} (for {each.expires_in:.1f} s more)" for each in view.holders)
        waits = ", ".join(f"{each} ({each.state})" for each in view.waiters)
        return f"The lock {name!r}: held by {held or 'nobody'}; {waits or 'nobody'} waits."


def _await(look: Callable[[], T | None], timeout: float) -> T | None:
    """Return what a look finds that is not None, within so many seconds; else None."""
    clock, never = SystemClock(), Event()
    until = clock.monotonic() + timeout
    while (found := look()) is None and clock.monotonic() < until:
        never.wait(_LOOK)
    return found

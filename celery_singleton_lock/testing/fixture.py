"""The object of the fixture ``singleton_locks``: an app's locks in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from celery_singleton_lock.config.argument_checks import checked_limit, checked_name
from celery_singleton_lock.config.limits import MAX_LEASE, PREFIX
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.testing.assertions import PATIENCE, LockAssertions
from celery_singleton_lock.testing.clock_control import LockTime
from celery_singleton_lock.testing.event_log import EventLog
from celery_singleton_lock.testing.fake_holder import ANY, Hold
from celery_singleton_lock.testing.worker import worker_in_thread
from celery_singleton_lock.worker.install import install

if TYPE_CHECKING:  # the module needs the extra "testing"; connect() imports it
    from typing_extensions import Self

    from celery_singleton_lock.store.memory import MemoryServer

_KEPT: Final = (":fleet:worker:", ":fleet:free:", ":fleet:route:", ":fleet:marker", ":schema")
"""Keys that are not deleted between two tests: those of workers that run for a whole session.

Without the marker these would report that the server has lost what the first test has parked.
"""
_SETTING: Final = f"{PREFIX}backend"
_URL: Final = "memory://"


class SingletonLocks(LockAssertions):
    """The locks of an app in the memory of this process; a context manager.

    Within the block the app's locks are in memory: at its ``singleton_lock_backend`` if that is a
    ``memory://…`` URL, else at ``memory://``. At the start there is no lock and no parked message.
    Workers must run in threads of this process (see :meth:`worker`), or tasks must run eagerly.

    Each assertion waits up to ``timeout`` real seconds until it is true.

    Args:
        app: the Celery app.

    Attributes:
        app: the app.
        time: the clock of the locks.

    Raises:
        ConfigurationError: the extra ``testing`` is not installed.
    """

    def __init__(self, app: Any) -> None:
        """Create the object. The app's settings change when the block is entered."""
        self.app = app
        self._extension = install(app)
        self._before: list[tuple[str, Any]] = []
        self._holds: list[Hold] = []

    def __enter__(self) -> Self:
        """Move the app's locks to memory, and delete what is there."""
        try:
            self._go_to_memory()
            settings = self._extension.settings
            client: Any = connect(settings.address(), {}, patience=PATIENCE)
            self._server: MemoryServer = client.server
            self.store: RedisStore = RedisStore(client, Keyspace(settings.prefix))
            self.time: LockTime = LockTime(self._server)
            self.reset()
            self._event_log = EventLog(self._extension)
        except BaseException:
            self._go_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Delete all locks, and restore the app's settings."""
        self._event_log.close()
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
        """Delete all locks, parked messages and recorded runs. Workers keep running.

        A frozen clock runs again.
        """
        self.time.unfreeze()
        with self._server.lock:
            for key in self.client.keys("*"):
                before_name = key.decode().partition(":{b")[0]  # what follows is of a lock
                if not any(part in before_name for part in _KEPT):
                    self.client.delete(key)
        self._holds.clear()
        if hasattr(self, "_event_log"):
            self._event_log.forget()

    @property
    def client(self) -> Any:
        """A redis-py client for ``Lock(locks.client, "name")``."""
        return self.store.client

    # -- workers ----------------------------------------------------------------------------------

    def worker(self, **options: Any) -> AbstractContextManager[Any]:
        """Run a worker of the app in a thread; see :func:`worker_in_thread`."""
        return worker_in_thread(self.app, **options)

    # -- holders -----------------------------------------------------------------------------------

    def hold(self, name: str, *, lease: float = MAX_LEASE, limit: int | None = None) -> Hold:
        """Hold a lock as another client, which never renews it.

        Args:
            name: the lock's name.
            lease: seconds until it expires.
            limit: number of permits of the lock, if the test holds several of them with one call
                each; None: one call holds the lock, whatever ``lock_limit`` its tasks declare.

        Returns:
            A context manager with the method ``release()``.

        Raises:
            AssertionError: the lock is not free.
            ConfigurationError: ``name`` or ``limit`` is invalid.
        """
        checked_name(name)
        if limit is None and any(each.name == name and each.held for each in self._holds):
            msg = (
                f"hold({name!r}) could not acquire the lock: an earlier hold() of this test holds "
                f"it. Release it first. To hold several permits of a lock with lock_limit=3, call "
                f"hold({name!r}, limit=3) for each."
            )
            raise AssertionError(msg)
        held = Hold(self.store, name, lease, ANY if limit is None else checked_limit(limit))
        self._holds.append(held)
        return held

    def release(self, name: str) -> None:
        """Release all permits of a lock that :meth:`hold` holds, and grant it to the next waiters.

        Args:
            name: the lock's name.

        Raises:
            AssertionError: :meth:`hold` does not hold the lock.
        """
        holds = [hold for hold in self._holds if hold.name == name]
        self._holds = [hold for hold in self._holds if hold.name != name]
        held = [hold.release() for hold in holds]
        if not any(held):
            msg = f"release({name!r}): hold() does not hold it. {self._facts(name)}"
            raise AssertionError(msg)

    def take_away(self, name: str) -> int:
        """Take a lock from all its holders, as an operator can, and grant it to the next waiter.

        A running task notices the loss at the next renewal, at the latest after a third of its
        lease (``lock_time.advance``).

        Args:
            name: the lock's name.

        Returns:
            The number of holders.
        """
        return self.store.reset(name)

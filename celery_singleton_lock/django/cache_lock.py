"""``CacheLock``: a lock on any cache of a Django project. On Redis it is this library's lock.

The parameters mean the same on every cache, but the guarantees differ: see docs/django.md and
:mod:`celery_singleton_lock.django.generic_cache_lock`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from django.core.cache import caches

from celery_singleton_lock.config.argument_checks import (
    BARE_KEY,
    checked_name,
    checked_seconds,
    finished,
    goes_on_after_its_call,
    warn_of_bare_name,
)
from celery_singleton_lock.config.limits import MAX_LEASE, MAX_WAIT, MIN_LEASE
from celery_singleton_lock.core.lock_name_template import (
    OF_FUNCTION,
    ArgumentsDoNotBind,
    compile_name,
)
from celery_singleton_lock.core.shared_attribute import SharedAttribute
from celery_singleton_lock.django.cache_backend import key_of, store_of
from celery_singleton_lock.django.generic_cache_lock import GenericCacheLock
from celery_singleton_lock.errors import ConfigurationError, LockTimeout, SingletonLockError
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.redis.sync import RedisStore

logger: Final = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class _RedisCacheLock(Lock):
    """A lock whose error texts have the name and the options of the :class:`CacheLock`."""

    _apart_by = ""
    _warns_of_long_lease = False  # on other caches the lease must be longer than the work

    def __init__(self, store: RedisStore, shown: str, name: str, lease: float) -> None:
        super().__init__(store, shown, lease=lease, blocking=False)
        self._called = name

    def abandon(self) -> None:
        """Release the lock if this thread holds it, as after an interruption."""
        self._undo_all()


class CacheLock:
    """A lock on a cache: ``with CacheLock("nightly", lease=600): …``.

    On a Redis cache it is a :class:`~celery_singleton_lock.Lock`: the lease is renewed while the
    lock is held, waiters are granted it in the order of arrival, each grant has a fencing token,
    and a release checks the owner token in one script.

    On any other cache a random value is added to it, and compared before it is deleted. The lease
    must be longer than the work, waiters poll and have no order, and a holder that was stopped for
    its whole lease may delete the key of the next holder. If the cache evicts the key or is
    cleared, the lock is free.

    Threads may share an object. Each thread acquires the lock for itself.

    Args:
        name: name of the lock.
        lease: seconds after which the lock is free if it is not renewed; at least 1.
        wait_timeout: longest wait for the lock, in seconds; 0: try once.
        cache: alias in ``CACHES``. It is checked at first use.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(
        self,
        name: str,
        *,
        lease: float = 60.0,
        wait_timeout: float = 0.0,
        cache: str = "default",
    ) -> None:
        """Check the arguments. Sends nothing."""
        self.name: Final = checked_name(name)
        self.lease: Final = checked_seconds("lease", lease, MIN_LEASE, MAX_LEASE)
        self.wait_timeout: Final = checked_seconds("wait_timeout", wait_timeout, 0.0, MAX_WAIT)
        self.cache: Final = cache

    def acquire(self, wait_timeout: float | None = None) -> bool:
        """Acquire the lock.

        Args:
            wait_timeout: longest wait in seconds; None: ``wait_timeout`` of the object.

        Returns:
            Whether the lock was acquired.

        Raises:
            ConfigurationError: no cache has that alias, or the cache cannot hold a lock.
            LockReentered: this thread already holds the lock through this object.
            BackendError: the cache's Redis did not answer, or refused the command. Other caches
                raise errors of their own.
        """
        seconds = self.wait_timeout
        if wait_timeout is not None:
            seconds = checked_seconds("wait_timeout", wait_timeout, 0.0, MAX_WAIT)
        lock = self._lock
        if isinstance(lock, GenericCacheLock):
            return lock.acquire(seconds)
        return lock.acquire(blocking=True, blocking_timeout=seconds) if seconds else lock.acquire()

    def release(self) -> None:
        """Release the lock. After an error of the cache it may be called again.

        Raises:
            LockNotOwned: this thread does not hold the lock, or no longer holds it.
            BackendError: see :meth:`acquire`.
        """
        self._lock.release()

    @property
    def held(self) -> bool:
        """Whether this thread certainly holds the lock, by its own clock."""
        return self.expires_in > 0

    @property
    def expires_in(self) -> float:
        """Seconds for which this thread certainly holds the lock if it is not renewed."""
        return self._lock.expires_in

    @property
    def fencing_token(self) -> int:
        """A number that grows with each grant. 0 if not held, or not on Redis."""
        return self._lock.fencing_token

    @property
    def atomic(self) -> bool:
        """Whether a release compares and deletes in one step, as on Redis."""
        return isinstance(self._lock, Lock)

    def __enter__(self) -> CacheLock:  # noqa: PYI034  # not meant to be subclassed
        """Acquire the lock.

        Raises:
            LockTimeout: the lock was not free within ``wait_timeout``.
        """
        before = self.held
        try:
            if self.acquire():
                return self
        except BaseException:
            if not before:  # else this thread holds the lock by an outer block
                self._lock.abandon()
            raise
        holder, expires_in = self._holder()
        waited = f" and was not released in {self.wait_timeout:g} s" if self.wait_timeout else ""
        by = f" by {holder}" if holder else ""
        msg = f"{self.name!r} is held{by}{waited}: try again later."
        raise LockTimeout(msg, self.name, holder, expires_in)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock. If the body raised an error, an error of the release is only logged."""
        lock = self._lock
        if isinstance(lock, Lock):
            lock.__exit__(exc_type, exc, traceback)
            return
        try:
            lock.release()
        except BaseException as error:
            lock.abandon()
            if exc_type is None or not isinstance(error, Exception):
                raise
            logger.warning("lock %r was not released after an error: %s", self.name, error)

    def __repr__(self) -> str:
        return f"<CacheLock {self.name!r} on {self.cache!r}>"

    @SharedAttribute
    def _lock(self) -> _RedisCacheLock | GenericCacheLock:
        """The lock for the kind of the cache."""
        store = store_of(self.cache)
        key = key_of(self.cache, self.name)
        if store is None:
            return GenericCacheLock(self.cache, key, self.name, self.lease)
        # With the cache's prefix: projects that share a Redis have different locks.
        shown = caches[self.cache].make_key(self.name)
        return _RedisCacheLock(store, shown, self.name, self.lease)

    def _holder(self) -> tuple[str, float]:
        """Return the display text of the holder, and the seconds that its lease has left."""
        lock = self._lock
        if isinstance(lock, GenericCacheLock):
            return lock.holder()
        store = store_of(self.cache)
        try:
            view = store.inspect(lock.name, waiters=1) if store else None
        except SingletonLockError:
            view = None
        holders = view.holders if view else ()
        return (str(holders[0]), holders[0].expires_in) if holders else ("", 0.0)


def cache_locked(
    key: str | Callable[..., str],
    *,
    lease: float = 60.0,
    wait_timeout: float = 0.0,
    cache: str = "default",
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Run a function under a :class:`CacheLock` whose name is computed from its arguments.

    Args:
        key: template over the arguments (``"report:{month}"``), or a callable with the function's
            signature. The rules are those of ``lock_key``: see
            :mod:`~celery_singleton_lock.core.lock_name_template`.
        lease: see :class:`CacheLock`.
        wait_timeout: see :class:`CacheLock`.
        cache: see :class:`CacheLock`.

    Returns:
        A decorator. The decorated function raises the errors of :class:`CacheLock`, and
        :class:`~celery_singleton_lock.LockNameError` if its arguments give no valid name.

    Raises:
        ConfigurationError: an argument is invalid, or the function is a coroutine function or a
            generator function.
    """
    lock = functools.partial(CacheLock, lease=lease, wait_timeout=wait_timeout, cache=cache)
    lock("checked")

    def decorate(*given: Callable[P, T], **named: object) -> Callable[P, T]:
        _refuse_bare(key, given, named)
        (function,) = given
        _refuse_coroutines_and_generators(function)
        where = f"{function.__module__}.{function.__qualname__}"
        namer = compile_name(where, function, lock_key=key, wording=OF_FUNCTION)
        warn_of_bare_name(f"{where}: the key", key, function, BARE_KEY, depth=2)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                name = namer.name(args, kwargs)
            except ArgumentsDoNotBind:
                return function(*args, **kwargs)  # raises Python's own TypeError
            with lock(name):
                return finished(function(*args, **kwargs), where)

        return locked

    return decorate


def _refuse_bare(key: object, given: tuple[object, ...], named: Mapping[str, object]) -> None:
    """Refuse ``@cache_locked`` without arguments, where the function is passed as the key."""
    if callable(key) and (named or len(given) != 1 or not callable(given[0])):
        name = getattr(key, "__name__", "the function")
        msg = (
            f"@cache_locked above {name} has no lock name: write @cache_locked("
            f'"{name}"), or a template over its arguments, such as "report:{{month}}".'
        )
        raise ConfigurationError(msg)


def _refuse_coroutines_and_generators(function: Callable[..., Any]) -> None:
    """Refuse functions whose body runs after the call has returned and the lock is released."""
    if inspect.iscoroutinefunction(function) or goes_on_after_its_call(function):
        msg = (
            f"{function.__qualname__} is a coroutine function or a generator function: its body "
            "runs after the call has returned, without the lock. Put `with CacheLock(...)` around "
            "the code that uses it, but not in an event loop, which it would block."
        )
        raise ConfigurationError(msg)

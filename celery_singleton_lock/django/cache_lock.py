"""``CacheLock``: a lock on whatever cache a Django project has; on Redis, this library's own.

``wait_timeout`` and ``LockTimeout`` mean the same on every cache, the promises do not: see
:mod:`celery_singleton_lock.django.generic_cache_lock`, and docs/django.md.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.base import InvalidCacheBackendError
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache
from django.core.cache.backends.locmem import LocMemCache

from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.config.argument_checks import (
    checked_name,
    checked_seconds,
    finished,
    goes_on_after_its_call,
)
from celery_singleton_lock.config.limits import MAX_LEASE, MAX_WAIT, MIN_LEASE
from celery_singleton_lock.config.django_cache_alias import SCHEME, found_by_alias, is_redis_cache
from celery_singleton_lock.django.generic_cache_lock import AddedLock
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    LockTimeout,
    SingletonLockError,
)
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.core.lock_name_template import OF_FUNCTION, ArgumentsDoNotBind, compile_name
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.redis.sync import RedisStore

logger = logging.getLogger(__name__)

PATIENCE: Final = 2.0
"""Seconds within which the cache's Redis must answer."""

LONGEST_KEY: Final = 240
"""Bytes of a key as the cache stores it; memcached takes 250."""

PLAIN: Final = re.compile(r"[!-~]+")
"""What memcached takes in a key: no spaces, no control characters, ASCII."""

P = ParamSpec("P")
T = TypeVar("T")


class _OfCache(Lock):
    """A lock of which errors speak as of a :class:`CacheLock`, of its name and its options."""

    _apart_by = ""
    _warns_of_long_lease = False  # on another cache the same lease must be longer than the work

    def __init__(self, store: RedisStore, shown: str, name: str, lease: float) -> None:
        super().__init__(store, shown, lease=lease, blocking=False)
        self._called = name


class CacheLock:
    """A lock by the alias of a cache: ``with CacheLock("nightly", lease=600): …``.

    On a cache of Redis it is a :class:`~celery_singleton_lock.Lock`: renewed while it is held,
    handed over in the order of arrival, with a fencing token, released by token in one script. On
    any other cache a random value is added, and looked at before it is deleted: the lease must be
    longer than the work, waiters try again now and then in no order, and a holder that is stopped
    for a whole lease may delete its successor's key. The cache must keep what is added: one that
    evicts or is cleared frees the lock.

    An object may be shared by threads: each holds for itself.

    Args:
        name: what must not overlap.
        lease: seconds of ownership, at least 1.
        wait_timeout: most seconds to wait for it; 0 tries once.
        cache: alias in ``CACHES``.

    Raises:
        ConfigurationError: an argument cannot be used. What the cache is, is seen when it is used.
    """

    def __init__(
        self,
        name: str,
        *,
        lease: float = 60.0,
        wait_timeout: float = 0.0,
        cache: str = "default",
    ) -> None:
        """Describe a lock; nothing is sent yet."""
        self.name: Final = checked_name(name)
        self.lease: Final = checked_seconds("lease", lease, MIN_LEASE, MAX_LEASE)
        self.wait_timeout: Final = checked_seconds("wait_timeout", wait_timeout, 0.0, MAX_WAIT)
        self.cache: Final = cache

    def acquire(self, wait_timeout: float | None = None) -> bool:
        """Take the lock.

        Args:
            wait_timeout: most seconds to wait; None: as the lock was made.

        Returns:
            Whether it is held.

        Raises:
            ConfigurationError: there is no such cache, or it cannot keep a lock.
            LockReentered: this thread holds it already, by this object.
            BackendError: the cache's Redis did not answer, or refused. Other caches raise errors
                of their own.
        """
        seconds = self.wait_timeout
        if wait_timeout is not None:
            seconds = checked_seconds("wait_timeout", wait_timeout, 0.0, MAX_WAIT)
        lock = self._lock
        if isinstance(lock, AddedLock):
            return lock.acquire(seconds)
        return lock.acquire(blocking=True, blocking_timeout=seconds) if seconds else lock.acquire()

    def release(self) -> None:
        """Give the lock back. After an error of the cache it may be called again.

        Raises:
            LockNotOwned: this thread does not hold it (any more).
            BackendError: as :meth:`acquire`.
        """
        self._lock.release()

    @property
    def held(self) -> bool:
        """Whether this thread certainly holds the lock, as far as it knows without asking."""
        return self.expires_in > 0

    @property
    def expires_in(self) -> float:
        """Seconds for which this thread certainly holds the lock, if it is not renewed."""
        return self._lock.expires_in

    @property
    def fencing_token(self) -> int:
        """Number of the grant, which grows; 0 if it is not held, and on caches other than Redis."""
        return self._lock.fencing_token

    @property
    def atomic(self) -> bool:
        """Whether a release compares and deletes in one step: on Redis."""
        return isinstance(self._lock, Lock)

    def __enter__(self) -> CacheLock:  # noqa: PYI034  # not meant to be subclassed
        """Take the lock.

        Raises:
            LockTimeout: it was not to be had in the time allowed.
        """
        if self.acquire():
            return self
        holder, expires_in = self._holder()
        waited = f" and was waited for {self.wait_timeout:g} s in vain" if self.wait_timeout else ""
        by = f" by {holder}" if holder else ""
        msg = f"{self.name!r} is held{by}{waited}: try again later."
        raise LockTimeout(msg, self.name, holder, expires_in)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the lock back. An error of the body is not replaced by one of the release."""
        lock = self._lock
        if isinstance(lock, Lock):
            lock.__exit__(exc_type, exc, traceback)
            return
        try:
            lock.release()
        except Exception as error:
            if exc_type is None:
                raise
            logger.warning("lock %r was not released after an error: %s", self.name, error)

    def __repr__(self) -> str:
        return f"<CacheLock {self.name!r} on {self.cache!r}>"

    @property
    def _lock(self) -> Lock | AddedLock:
        """The lock that the cache can keep; made at its first use, and one for all threads.

        Not cached_property: from Python 3.12 on two threads at once would get a lock each.
        """
        made: Lock | AddedLock | None = self.__dict__.get("_made")
        return made or self.__dict__.setdefault("_made", self._new_lock())

    def _new_lock(self) -> Lock | AddedLock:
        store = _store_of(self.cache)
        key = _key(self.cache, self.name)
        if store is None:
            return AddedLock(self.cache, key, self.name, self.lease)
        shown = caches[self.cache].make_key(self.name)  # projects that share a Redis stay apart
        return _OfCache(store, shown, self.name, self.lease)

    def _holder(self) -> tuple[str, float]:
        """Return who holds the lock, as shown to people, and seconds left of the lease."""
        lock = self._lock
        if isinstance(lock, AddedLock):
            return lock.holder()
        store = _store_of(self.cache)
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
    """Run a function under a :class:`CacheLock`, of which the name is made of its arguments.

    Args:
        key: template over the arguments (``"report:{month}"``), or a callable with the function's
            signature, by the rules of ``lock_key``: see :func:`~celery_singleton_lock.core.lock_name_template`.
        lease: as :class:`CacheLock`.
        wait_timeout: as :class:`CacheLock`.
        cache: as :class:`CacheLock`.

    Returns:
        A decorator. The function it makes raises what :class:`CacheLock` raises, and
        :class:`~celery_singleton_lock.LockNameError` for arguments that make no name.

    Raises:
        ConfigurationError: an argument cannot be used, or the function is not a plain one.
    """
    lock = functools.partial(CacheLock, lease=lease, wait_timeout=wait_timeout, cache=cache)
    lock("checked")

    def decorate(*given: Callable[P, T], **named: object) -> Callable[P, T]:
        _refuse_bare(key, given, named)
        (function,) = given
        _refuse_what_goes_on(function)
        where = f"{function.__module__}.{function.__qualname__}"
        namer = compile_name(where, function, lock_key=key, wording=OF_FUNCTION)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                name = namer.name(args, kwargs)
            except ArgumentsDoNotBind:
                return function(*args, **kwargs)  # Python's own error says it best
            with lock(name):
                return finished(function(*args, **kwargs), where)

        return locked

    return decorate


def _refuse_bare(key: object, given: tuple[object, ...], named: Mapping[str, object]) -> None:
    """Refuse a call that was meant for the function: it stands in the place of the key."""
    if callable(key) and (named or len(given) != 1 or not callable(given[0])):
        name = getattr(key, "__name__", "the function")
        msg = (
            f"@cache_locked stands above {name} without the name of the lock: write "
            f'@cache_locked("{name}"), or with its arguments, such as "report:{{month}}".'
        )
        raise ConfigurationError(msg)


def _refuse_what_goes_on(function: Callable[..., Any]) -> None:
    """Refuse a function that only begins when it is called: its lock would be released by then."""
    if inspect.iscoroutinefunction(function) or goes_on_after_its_call(function):
        msg = (
            f"{function.__qualname__} is a coroutine function or a generator: its body runs after "
            "the call has returned, and the lock would be released before. Put "
            "`with CacheLock(...)` around what uses it; it blocks, so not in an event loop."
        )
        raise ConfigurationError(msg)


def _key(alias: str, name: str) -> str:
    """Return the key of a lock, such as every cache takes it: a digest of a name that is too long.

    Raises:
        ConfigurationError: the cache makes it too long even so.
    """
    key = f"lock:{name}"
    if _fits(alias, key):
        return key
    key = f"lock:sha256-{hashlib.sha256(name.encode()).hexdigest()}"
    if _fits(alias, key):
        return key
    msg = f"The KEY_PREFIX of CACHES[{alias!r}] leaves no room for the key of a lock: shorten it."
    raise ConfigurationError(msg)


def _fits(alias: str, key: str) -> bool:
    made = str(caches[alias].make_key(key))
    return len(made) <= LONGEST_KEY and PLAIN.fullmatch(made) is not None


# A module global, as Django's caches are: one connection pool and one watchdog for all locks of a
# cache in this process. An entry goes when the settings of its cache have changed.
_stores: dict[str, tuple[Any, RedisStore | None]] = {}


def _store_of(alias: str) -> RedisStore | None:
    """Return the store of a cache that lives in Redis; None for any other that can keep a lock.

    Raises:
        ConfigurationError: there is no such cache, or it cannot keep one.
    """
    params = dict(settings.CACHES.get(alias, {}))
    known = _stores.get(alias)
    if known is None or known[0] != params:
        known = _stores[alias] = (params, _new_store(alias, params))
    return known[1]


def _new_store(alias: str, params: dict[str, Any]) -> RedisStore | None:
    try:
        cache = caches[alias]
    except InvalidCacheBackendError:
        there = ", ".join(settings.CACHES)
        msg = f"CACHES has no {alias!r}, or its BACKEND cannot be imported. There are: {there}."
        raise ConfigurationError(msg) from None
    if is_redis_cache(str(params["BACKEND"])):
        url, source, options = found_by_alias(f"{SCHEME}://{alias}", "CacheLock")
        client = connect(parse_backend_url(url, source), options, patience=PATIENCE)
        prefix = getattr(settings, "CELERY_SINGLETON_LOCK_PREFIX", "csl")
        store = RedisStore(client, Keyspace(prefix))
        _tell_of_eviction(alias, store)
        return store
    _refuse_what_keeps_no_lock(alias, cache)
    return None


def _tell_of_eviction(alias: str, store: RedisStore) -> None:
    """Say that locks may be evicted: caches are often set up to."""
    try:
        policy = store.describe()["eviction"]
    except BackendError:
        return  # who asks for the lock hears of it
    if policy not in {"noeviction", "unknown"}:
        logger.warning(
            "celery-singleton-lock: the Redis of the cache %r evicts keys when it is full "
            "(maxmemory-policy %s), and a CacheLock with them. Give locks a Redis with noeviction.",
            alias,
            policy,
        )


def _refuse_what_keeps_no_lock(alias: str, cache: Any) -> None:
    """Refuse caches of which ``add`` is no answer; say where it is one in this process alone."""
    if isinstance(cache, DummyCache):
        msg = f"CACHES[{alias!r}] is a DummyCache, which keeps nothing: all would hold the lock."
        raise ConfigurationError(msg)
    if isinstance(cache, FileBasedCache):
        msg = (
            f"CACHES[{alias!r}] is a FileBasedCache, of which add() looks first and writes then: "
            "two processes would hold the lock. Use Redis, a database or memcached."
        )
        raise ConfigurationError(msg)
    if isinstance(cache, LocMemCache) and not settings.DEBUG:
        logger.warning(
            "celery-singleton-lock: the cache %r is local memory, so a CacheLock on it excludes "
            "the threads of one process, and no other process.",
            alias,
        )

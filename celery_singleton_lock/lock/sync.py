"""The lock for threads, with the method names of redis-py's ``Lock``.

::

    with Lock(client, "account:42", lease=30) as lock:
        ledger.write(..., fence=lock.fencing_token)

Waiting is in :mod:`celery_singleton_lock.lock.wait_for_turn`, the requests to a store in
:mod:`celery_singleton_lock.lock.base`, checks of arguments in
:mod:`celery_singleton_lock.config.argument_checks`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import redis

from celery_singleton_lock.config.argument_checks import checked_name, is_pipeline, refuse_unknown
from celery_singleton_lock.config.url_text import safe_url
from celery_singleton_lock.core.lock_steps import Plan, carry_out
from celery_singleton_lock.core.lock_view import Holder
from celery_singleton_lock.core.rate import Rate, RateOption
from celery_singleton_lock.errors import BackendError, ConfigurationError, SingletonLockError
from celery_singleton_lock.lock.backends import keyspace_for, quorum_for, watchdog_for
from celery_singleton_lock.lock.base import Hold, LockBase
from celery_singleton_lock.lock.lease import OnLost
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.lock.wait_for_turn import Request, in_thread, twice
from celery_singleton_lock.message_text import a_kind, named
from celery_singleton_lock.store.base import LockStore
from celery_singleton_lock.store.factory import store_on
from celery_singleton_lock.store.quorum.sync import QuorumStore
from celery_singleton_lock.store.redis.valkey import ValkeyClient, is_valkey

if TYPE_CHECKING:
    from typing_extensions import Never

T = TypeVar("T")

Backend: TypeAlias = (
    redis.Redis | redis.RedisCluster | ValkeyClient | LockStore | Sequence[str | redis.Redis]
)
"""Backends of a Lock."""


class Lock(LockBase):
    """A lock, or with ``limit`` a semaphore, for threads of any process.

    Threads may share an object: each thread holds the lock for itself. A thread that holds the lock
    and acquires it again with the same object gets :class:`LockReentered`. A forked child holds
    nothing.

    Args:
        backend: client of redis-py (for a server or a Cluster) or of valkey-py, or a store. For a
            quorum a list of URLs or of redis-py clients, one for each independent server
            (:class:`QuorumStore`, docs/quorum.md).
        name: name of the lock.
        lease: seconds for which the lock is held without a renewal. It is renewed while held, so
            it need not exceed the run time.
        limit: permits; the lowest limit that a caller has declared since the lock was last free
            is in force. None, for a lock with a rate: any number.
        rate: how many may start in a period: ``"100/m"``, a :class:`Rate`, or a list of these. It
            counts the starts of all callers, also of those that declare none. A caller above the
            rate waits for the time at which it may start.
        priority: seconds of head start: a waiter counts as having arrived this long before it did,
            or after it, if below 0. From -86400 to 86400.
        blocking: whether :meth:`acquire` waits.
        blocking_timeout: longest wait in seconds; None for no limit.
        renew: whether the lease is renewed. Otherwise it ends unless :meth:`extend` is called.
        prefix: first part of the keys; "csl" by default. A store has its own.
        thread_local: False if one thread acquires and another releases; then all threads that use
            the object hold the lock together.
        on_lost: called with name and token, from another thread, when a held lock is lost; only
            with ``renew``.
        raise_on_release_error: whether the end of a ``with`` block raises LockNotOwned if the lock
            was lost meanwhile; False: it logs a warning. An error of the block itself is always
            raised instead.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    _who = "thread (or process)"
    _apart_by = "thread_local"
    _stood_still = "this process was paused"

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        lease: float = 30.0,
        limit: int | None = 1,
        rate: RateOption = None,
        priority: float = 0.0,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        renew: bool = True,
        prefix: str | None = None,
        thread_local: bool = True,
        on_lost: OnLost | None = None,
        raise_on_release_error: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self), unknown)
        self._watchdog: Final = _watchdog_for(backend, prefix)
        super().__init__(
            self._watchdog,
            checked_name(name),
            lease=lease,
            limit=limit,
            rate=rate,
            priority=priority,
            blocking=blocking,
            blocking_timeout=blocking_timeout,
            renew=renew,
            on_lost=on_lost,
            apart=thread_local,
            raise_on_release_error=raise_on_release_error,
        )
        self._store: Final[Any] = self._watchdog.store
        self._mine: Any = threading.local() if thread_local else SimpleNamespace()

    # -- redis-py's interface ----------------------------------------------------------------------

    def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | None = None,
    ) -> bool:
        """Acquire the lock.

        Args:
            blocking: whether to wait; None: as the object was created.
            blocking_timeout: longest wait in seconds; None: as the object was created.
            token: owner token, from :func:`celery_singleton_lock.new_token`; None: a new one.
                After an attempt without an answer it is safe to use its token again.

        Returns:
            Whether the lock is held.

        Raises:
            LockReentered: this thread already holds it, with this object.
            BackendError: Redis did not answer two attempts, or refused.
        """
        wait = self._new_wait(blocking, blocking_timeout, token)
        try:
            return self._do(self._taking(wait))
        except BaseException:
            # Including an asynchronous one (soft time limit, Ctrl-C) between grant and return.
            self._undo(wait.token)
            raise

    def release(self) -> None:
        """Release the lock and grant it to the next waiter.

        It may be called again after a BackendError.

        Raises:
            LockNotOwned: this thread does not hold the lock, or its lease has ended meanwhile.
            BackendError: Redis did not answer, or refused. The lease is no longer renewed.
        """
        hold = self._owned("release")
        self._watchdog.forget(hold.lease.token)
        was_ours = self._do(twice(lambda: self._letting_go(hold)))
        self._unnote(hold)
        self._watchdog.end_if_idle()
        if not was_ours:
            raise self._not_owned(self._why_gone(hold), what="release")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Extend the lease. A lease is never shortened, and one that has ended is not renewed.

        Args:
            additional_time: seconds to add to the rest of the lease, at least 0.001.
            replace_ttl: whether to count them from now instead.

        Returns:
            True.

        Raises:
            LockNotOwned: this thread does not hold the lock, or has lost it.
            BackendError: Redis did not answer, or refused.
        """
        return self._do(self._extending(additional_time, replace_ttl=replace_ttl))

    def reacquire(self) -> bool:
        """Extend the lease to its full length from now; see :meth:`extend`."""
        return self.extend(self.lease, replace_ttl=True)

    def locked(self) -> bool:
        """Ask Redis whether all permits are taken.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        return self._do(self._asking_whether_locked())

    def owned(self) -> bool:
        """Ask Redis whether this thread holds the lock.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        return self._do(self._asking_whether_owned())

    def owner(self) -> Holder | None:
        """Ask Redis for a holder of the lock; None if nobody holds it.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        return self._do(self._asking_who())

    def ensure_held(self) -> None:
        """Ask Redis whether this thread still holds the lock, and renew the lease.

        Raises:
            LockNotOwned: this thread did not acquire it.
            LockLost: it was lost.
            BackendError: Redis did not answer, or refused.
        """
        self._do(self._ensuring())

    def charge(
        self,
        amount: int,
        *,
        id: str | None = None,  # noqa: A002  # the word for it
        rate: str | Rate | None = None,
    ) -> None:
        """Correct what the start has cost, by what was used since.

        Args:
            amount: how much more was used; it counts from now on, also above the rate. Below 0: how
                much less. At most the cost of the start is given back, as far as it still counts.
            id: a second charge with the same id changes nothing. None: every charge counts.
            rate: the rate to correct, as ``"1000/m"``; None: all rates that have a cost.

        Raises:
            LockNotOwned: this thread does not hold the lock.
            ConfigurationError: no such rate has a cost, or the amount is not a whole number.
            BackendError: Redis did not answer two attempts, or refused.
        """
        self._do(self._charging(amount, id, rate))

    def reset(self) -> int:
        """Take the lock from all of its holders, and grant it to the next waiters.

        The holders lose the lock; fencing tokens let a resource refuse their writes.

        Returns:
            How many held it.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        return self._do(self._resetting())

    def pause(self, seconds: float, why: str = "") -> float:
        """Close the lock for everybody for a time, whether the caller holds it or not.

        Holders keep it. Nobody is granted it meanwhile; waiters stay in the queue. Of two such
        times the longer one is in force. An operator can end it: ``locks reopen``.

        Args:
            seconds: for how long, up to 366 days.
            why: the reason, which ``why`` and other commands show.

        Returns:
            The seconds for which the lock is closed, which may be more than ``seconds``.

        Raises:
            ConfigurationError: ``seconds`` is not a number from 0.001 to 366 days, or the backend
                is a quorum.
            BackendError: Redis did not answer, or refused.
        """
        return self._do(self._closing(seconds, why))

    if not TYPE_CHECKING:  # so that a type checker reports the error

        def __call__(self, *_arguments: object, **_named: object) -> Never:
            """Refuse a lock as a decorator."""
            msg = "A Lock is not a decorator. Use @locked(name, client) in its place."
            raise TypeError(msg)

        async def __aenter__(self) -> Never:
            """Refuse ``async with``: it would block the event loop."""
            msg = "A Lock needs `with`. In a coroutine use `async with AsyncLock(…)`."
            raise TypeError(msg)

        async def __aexit__(self, *error: object) -> None:
            """Exists so that Python calls ``__aenter__``, which raises a better error."""

    def __enter__(self) -> Lock:  # noqa: PYI034  # not meant to be subclassed
        """Acquire the lock.

        Raises:
            LockTimeout: the lock is busy, or was busy for the whole wait.
        """
        wait = self._new_wait(None, None, None)
        try:
            if self._do(self._taking(wait)):
                return self
        except BaseException:
            self._undo(wait.token)
            raise
        raise self._do(self._refusal())

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock. An error of the release does not replace one of the block."""
        try:
            self.release()
        except SingletonLockError as error:
            if self._not_released(error, exc):
                raise
        except BaseException:  # an asynchronous one, in the middle of the release
            self._undo_all()
            raise

    # -- how it is done ----------------------------------------------------------------------------

    def _do(self, plan: Plan[Request, T]) -> T:
        return carry_out(plan, in_thread(self._store))

    def _noted(self) -> Hold | None:
        hold: Hold | None = getattr(self._mine, "hold", None)
        return hold

    def _note(self, hold: Hold) -> None:
        self._mine.hold = hold

    def _unnote(self, hold: Hold) -> None:
        if self._noted() is hold:
            self._mine.hold = None

    def _undo(self, token: str) -> None:
        """Remove a token from the lock, as holder or waiter."""
        hold = self._hold
        if hold is not None and hold.lease.token == token:
            self._unnote(hold)
        self._watchdog.forget(token)
        with suppress(BackendError):
            self._do(self._giving_back(token))

    def _undo_all(self) -> None:
        """Remove the token of this thread from the lock, if it holds it."""
        hold = self._hold
        if hold is not None:
            self._undo(hold.lease.token)


def _watchdog_for(backend: Backend, prefix: str | None) -> Watchdog:
    """Return the watchdog of this client or store in this process; its ``store`` is the store."""
    if isinstance(backend, (list, tuple)):
        backend, prefix = quorum_for(QuorumStore, backend, prefix), None
    found: Watchdog = watchdog_for(
        Watchdog, backend, prefix, lambda: Watchdog(_store_of(backend, prefix))
    )
    return found


def _store_of(backend: Backend, prefix: str | None) -> Any:
    client = isinstance(backend, (redis.Redis, redis.RedisCluster)) or is_valkey(backend)
    store = isinstance(backend, QuorumStore) or hasattr(backend, "take_due_locks")
    if is_pipeline(backend) or not (client or store):
        raise ConfigurationError(_unfit(backend))
    keyspace = keyspace_for(prefix, client=client)
    return store_on(backend, keyspace) if client else backend  # type: ignore[arg-type]  # it is one


def _unfit(backend: object) -> str:
    """Return why a backend is not usable for a Lock."""
    if isinstance(backend, str) and "://" not in backend:
        shown = repr(safe_url(backend))
        return f"{shown} is not a client. Use Lock(client, name)."
    of_asyncio = named(type(backend)).startswith(("redis.asyncio.", "valkey.asyncio."))
    hint = ". For asyncio use AsyncLock" if of_asyncio else ""
    return (
        "A Lock needs a client (redis.Redis.from_url(URL) or valkey.Valkey; redis.RedisCluster for "
        "a Cluster, Sentinel(…).master_for(…) for Sentinels), a store, or a list of the URLs of "
        f"three or more servers, not {a_kind(backend)}{hint}."
    )

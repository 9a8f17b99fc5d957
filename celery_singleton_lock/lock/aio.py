"""The lock for asyncio, with the method names of redis-py's ``redis.asyncio.lock.Lock``.

::

    async with AsyncLock(client, "account:42", lease=30) as lock:
        await ledger.write(..., fence=lock.fencing_token)

The decisions are plans (see :mod:`celery_singleton_lock.core.lock_steps`), the same as those of
:class:`~celery_singleton_lock.lock.sync.Lock`. This module runs them in asyncio tasks, which may be
cancelled at any ``await``.

A request that Redis may have received runs to its end, even if its task is cancelled. Otherwise a
release on another connection could overtake it, and nobody would own the lock that it grants. The
cancellation is raised after the lock was released.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import redis.asyncio

from celery_singleton_lock.config.argument_checks import (
    checked_bool,
    checked_name,
    is_pipeline,
    refuse_unknown,
)
from celery_singleton_lock.config.url_text import safe_url
from celery_singleton_lock.core.clock import MovableClock, clock_for
from celery_singleton_lock.core.lock_steps import Plan, carry_out_async
from celery_singleton_lock.core.lock_view import Holder
from celery_singleton_lock.core.rate import Rate, RateOption
from celery_singleton_lock.errors import BackendError, ConfigurationError, SingletonLockError
from celery_singleton_lock.lock.async_lease_watchdog import AsyncWatchdog
from celery_singleton_lock.lock.backends import keyspace_for, quorum_for, watchdog_for
from celery_singleton_lock.lock.base import Hold, LockBase
from celery_singleton_lock.lock.lease import OnLost
from celery_singleton_lock.lock.uncancelled_calls import UncancelledCalls
from celery_singleton_lock.lock.wait_for_turn import Do, Request, twice
from celery_singleton_lock.message_text import a_kind
from celery_singleton_lock.store.cluster.aio import AsyncClusterStore
from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.redis.valkey import (
    AsyncValkeyClient,
    AsyncValkeyStore,
    is_valkey,
)

if TYPE_CHECKING:
    from typing_extensions import Never

T = TypeVar("T")

Store: TypeAlias = AsyncRedisStore | AsyncClusterStore | AsyncQuorumStore
Backend: TypeAlias = (
    redis.asyncio.Redis
    | redis.asyncio.RedisCluster
    | AsyncValkeyClient
    | Store
    | Sequence[redis.asyncio.Redis]
)


class AsyncLock(LockBase):
    """A lock, or with ``limit`` a semaphore, for asyncio tasks of any process.

    Tasks may share an object: each task holds the lock for itself. A task that holds the lock and
    acquires it again with the same object gets :class:`LockReentered`. If ``acquire`` runs in a
    task of its own, as in ``wait_for(lock.acquire(), 5)`` before Python 3.12, the next task that
    uses the object holds the lock.

    A cancelled acquire leaves neither a holder nor a waiter, and a cancelled release still
    releases. Both end when Redis has answered, or after a second without an answer.

    Args:
        backend: asyncio client of redis-py (for a server or a Cluster) or of valkey-py, or a store
            on one. For a quorum an :class:`AsyncQuorumStore`, or a list of asyncio clients of
            redis-py, one for each independent server (docs/quorum.md).
        name: name of the lock. A :class:`Lock` with this name is the same lock.
        lease: seconds for which the lock is held without a renewal. It is renewed while held, so
            it need not exceed the run time. It must exceed any time for which the event loop is
            blocked.
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
        task_local: False if one task acquires and another releases; then all tasks that use the
            object hold the lock together.
        on_lost: called in the event loop with name and token when a held lock is lost; only with
            ``renew``. For example ``lambda *_: task.cancel()``.
        raise_on_release_error: whether the end of a ``with`` block raises LockNotOwned if the lock
            was lost meanwhile; False: it logs a warning. An error of the block itself is always
            raised instead.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    _who = "task"
    _apart_by = "task_local"
    _stood_still = "the event loop was blocked"

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
        task_local: bool = True,
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
            apart=task_local,
            raise_on_release_error=raise_on_release_error,
        )
        self._store: Final[Store] = self._watchdog.store
        self._task_local: Final = checked_bool("task_local", task_local)
        self._holds: Final = weakref.WeakKeyDictionary[asyncio.Task[Any], Hold]()
        self._shared: Hold | None = None

    # -- redis-py's interface ----------------------------------------------------------------------

    async def acquire(
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
            LockReentered: this task already holds it, with this object.
            BackendError: Redis did not answer two attempts, or refused.
        """
        wait, calls = self._new_wait(blocking, blocking_timeout, token), UncancelledCalls()
        try:
            return await self._do(self._taking(wait), calls)
        except BaseException as error:
            await self._undo(wait.token, calls, error)
            raise

    async def release(self) -> None:
        """Release the lock and grant it to the next waiter, also if cancelled meanwhile.

        It may be called again after a BackendError.

        Raises:
            LockNotOwned: this task does not hold the lock, or its lease has ended meanwhile.
            BackendError: Redis did not answer, or refused. The lease is no longer renewed.
        """
        hold = self._owned("release")
        await UncancelledCalls().run(self._release(hold))

    async def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Extend the lease. A lease is never shortened, and one that has ended is not renewed.

        Args:
            additional_time: seconds to add to the rest of the lease, at least 0.001.
            replace_ttl: whether to count them from now instead.

        Returns:
            True.

        Raises:
            LockNotOwned: this task does not hold the lock, or has lost it.
            BackendError: Redis did not answer, or refused.
        """
        return await self._do(self._extending(additional_time, replace_ttl=replace_ttl))

    async def reacquire(self) -> bool:
        """Extend the lease to its full length from now; see :meth:`extend`."""
        return await self.extend(self.lease, replace_ttl=True)

    async def locked(self) -> bool:
        """Ask Redis whether all permits are taken.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        return await self._do(self._asking_whether_locked())

    async def owned(self) -> bool:
        """Ask Redis whether this task holds the lock.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        return await self._do(self._asking_whether_owned())

    async def owner(self) -> Holder | None:
        """Ask Redis for a holder of the lock; None if nobody holds it.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        return await self._do(self._asking_who())

    async def ensure_held(self) -> None:
        """Ask Redis whether this task still holds the lock, and renew the lease.

        Raises:
            LockNotOwned: this task did not acquire it.
            LockLost: it was lost.
            BackendError: Redis did not answer, or refused.
        """
        await self._do(self._ensuring())

    async def charge(
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
            LockNotOwned: this task does not hold the lock.
            ConfigurationError: no such rate has a cost, or the amount is not a whole number.
            BackendError: Redis did not answer two attempts, or refused.
        """
        await self._do(self._charging(amount, id, rate))

    async def reset(self) -> int:
        """Take the lock from all of its holders, and grant it to the next waiters.

        The holders lose the lock; fencing tokens let a resource refuse their writes.

        Returns:
            How many held it.

        Raises:
            BackendError: Redis did not answer, or refused.
        """
        return await self._do(self._resetting())

    async def pause(self, seconds: float, why: str = "") -> float:
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
        return await self._do(self._closing(seconds, why))

    if not TYPE_CHECKING:  # so that a type checker reports the error

        def __call__(self, *_arguments: object, **_named: object) -> Never:
            """Refuse a lock as a decorator."""
            msg = "An AsyncLock is not a decorator. Use @locked(name, client) in its place."
            raise TypeError(msg)

        def __enter__(self) -> Never:
            """Refuse ``with``, which cannot await."""
            msg = "An AsyncLock needs `async with`, in a coroutine. For threads use a Lock."
            raise TypeError(msg)

        def __exit__(self, *error: object) -> None:
            """Exists so that Python calls ``__enter__``, which raises a better error."""

    async def __aenter__(self) -> AsyncLock:  # noqa: PYI034  # not meant to be subclassed
        """Acquire the lock.

        Raises:
            LockTimeout: the lock is busy, or was busy for the whole wait.
        """
        if await self.acquire():
            return self
        raise await self._do(self._refusal())

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock. An error of the release does not replace one of the block."""
        try:
            await self.release()
        except SingletonLockError as error:
            if self._not_released(error, exc):
                raise

    # -- how it is done ----------------------------------------------------------------------------

    async def _do(self, plan: Plan[Request, T], calls: UncancelledCalls | None = None) -> T:
        """Run a plan. A request that Redis may have received runs to its end."""
        calls = calls or UncancelledCalls()

        async def do(request: Request) -> Any:
            if isinstance(request, Do):
                return await calls.run(request.call(self._store))
            if request.call is None:
                return await asyncio.sleep(request.seconds)
            return await calls.run_cancellable(request.call(self._store))

        return await carry_out_async(plan, do)

    async def _release(self, hold: Hold) -> None:
        await self._watchdog.forget(hold.lease.token)
        was_ours = await self._do(twice(lambda: self._letting_go(hold)))
        self._unnote(hold)
        if not was_ours:
            raise self._not_owned(self._why_gone(hold), what="release")

    async def _undo(self, token: str, calls: UncancelledCalls, error: BaseException) -> None:
        """Remove a token from the lock, as holder or waiter."""
        hold = self._hold
        if hold is not None and hold.lease.token == token:
            self._unnote(hold)
        if not isinstance(error, GeneratorExit):  # no loop runs then, so nothing can be awaited
            await UncancelledCalls().finish(self._give_back(token, calls))

    async def _give_back(self, token: str, calls: UncancelledCalls) -> None:
        await calls.join()
        await self._watchdog.forget(token)
        with suppress(BackendError):
            await self._do(self._giving_back(token))

    # -- the holder --------------------------------------------------------------------------------

    def _noted(self) -> Hold | None:
        task = _current_task()
        return self._shared if task is None else self._holds.get(task, self._shared)

    def _note(self, hold: Hold) -> None:
        task = _current_task()
        if task is None or not self._task_local or _only_acquires(task):
            self._shared = hold
        else:
            self._holds[task] = hold
            hold.lease.ended = partial(_has_ended, weakref.ref(task))

    def _unnote(self, hold: Hold) -> None:
        if self._shared is hold:
            self._shared = None
        for task in [task for task, held in self._holds.items() if held is hold]:
            del self._holds[task]


def _current_task() -> asyncio.Task[Any] | None:
    """Return the running task; None without a running loop."""
    with suppress(RuntimeError):
        return asyncio.current_task()
    return None


def _has_ended(task: weakref.ref[asyncio.Task[Any]]) -> str:
    """Return why the lock can no longer be released if the task has ended; else empty."""
    holder = task()
    if holder is None or not holder.done():
        return ""
    return f"task {holder.get_name()!r} has acquired it, and has ended without release()"


def _only_acquires(task: asyncio.Task[Any]) -> bool:
    """Return whether a task runs only the call of ``acquire()``."""
    return getattr(task.get_coro(), "cr_code", None) is AsyncLock.acquire.__code__


def _watchdog_for(backend: Backend, prefix: str | None) -> AsyncWatchdog:
    """Return the watchdog of this client or store in this process; its ``store`` is the store."""
    if isinstance(backend, (list, tuple)):
        _refuse_urls(backend)
        backend, prefix = quorum_for(AsyncQuorumStore, backend, prefix), None
    found: AsyncWatchdog = watchdog_for(
        AsyncWatchdog, backend, prefix, lambda: AsyncWatchdog(_store_of(backend, prefix))
    )
    return found


def _refuse_urls(servers: Sequence[Any]) -> None:
    """Refuse URLs: no code would close their connections when the loop ends.

    Raises:
        ConfigurationError: there is one.
    """
    if any(isinstance(server, str) for server in servers):
        msg = (
            "An AsyncLock takes a list of redis.asyncio clients. For URLs create the store, which "
            "closes its connections: `async with AsyncQuorumStore([url, …]) as store`."
        )
        raise ConfigurationError(msg)


def _store_of(backend: Any, prefix: str | None) -> Store:
    client = isinstance(backend, (redis.asyncio.Redis, redis.asyncio.RedisCluster))
    if is_pipeline(backend):
        raise ConfigurationError(_unfit(backend))
    if is_valkey(backend, asyncio=True):
        return AsyncValkeyStore(backend, keyspace_for(prefix, client=True))
    if not client and not inspect.iscoroutinefunction(getattr(backend, "extend", None)):
        raise ConfigurationError(_unfit(backend))
    keyspace = keyspace_for(prefix, client=client)
    if isinstance(backend, redis.asyncio.RedisCluster):
        return AsyncClusterStore(backend, keyspace)
    store: Store = AsyncRedisStore(backend, keyspace) if client else backend
    return store


def _unfit(backend: object) -> str:
    """Return why a backend is not usable for an AsyncLock."""
    if isinstance(getattr(backend, "clock", clock_for(backend)), MovableClock):
        return (
            "Locks in memory (memory://) are only for threads. For an AsyncLock use a "
            "redis.asyncio.Redis client in tests, too."
        )
    if isinstance(backend, str) and "://" not in backend:
        shown = repr(safe_url(backend))
        return f"{shown} is not a client. Use AsyncLock(client, name)."
    of_threads = isinstance(backend, (redis.Redis, redis.RedisCluster)) or is_valkey(backend)
    hint = ". For threads use Lock" if of_threads else ""
    return (
        "An AsyncLock needs a redis.asyncio.Redis client (redis.asyncio.Redis.from_url(URL) makes "
        "one), an AsyncRedisStore, or a list of clients of three or more servers, not "
        f"{a_kind(backend)}{hint}."
    )

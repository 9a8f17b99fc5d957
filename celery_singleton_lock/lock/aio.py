"""The lock for asyncio, with the method names of redis-py's ``redis.asyncio.lock.Lock``.

::

    async with AsyncLock(client, "account:42", lease=30) as lock:
        await ledger.write(..., fence=lock.fencing_token)

It decides nothing of its own: the way to a lock, what it asks of a store and what is due for
renewal are the plans that :class:`~celery_singleton_lock.lock.sync.Lock` carries out in threads. What is
here is how tasks carry them out: cancelled at any await, a task must leave nothing behind.

A request that the server may have in its hands is therefore heard to its end, also by a cancelled
task: a "release" on another connection could overtake it, and what it then grants would belong to
nobody. Only then, and after giving back what was granted, the cancellation goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import redis.asyncio

from celery_singleton_lock.config.redis_url import safe_url
from celery_singleton_lock.config.argument_checks import checked_bool, checked_name, refuse_unknown
from celery_singleton_lock.core.clock import MovableClock, clock_for
from celery_singleton_lock.errors import BackendError, ConfigurationError, SingletonLockError
from celery_singleton_lock.lock.base import (
    Hold,
    Holding,
    keyspace_for,
    quorum_for,
    watchdog_for,
)
from celery_singleton_lock.core.model import Holder
from celery_singleton_lock.core.lock_steps import Plan, carry_out_async
from celery_singleton_lock.store.cluster.aio import AsyncClusterStore
from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
from celery_singleton_lock.store.redis.aio import AsyncRedisStore
from celery_singleton_lock.store.redis.valkey import (
    AsyncValkeyClient,
    AsyncValkeyStore,
    is_valkey,
)
from celery_singleton_lock.lock.wait_for_turn import Do, Wish, twice
from celery_singleton_lock.lock.renewals import PATIENCE, Lease, OnLost, Renewals
from celery_singleton_lock.message_text import a_kind

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

logger = logging.getLogger(__name__)


# --- to the end, also when cancelled --------------------------------------------------------------

_errands: set[asyncio.Task[Any]] = set()
"""What goes on although nobody waits for it any more; a loop itself holds its tasks weakly."""


_ends: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
"""What ends the errands of a loop with it. It knows its loop, so no weak reference would do."""


async def _until_the_loop_ends() -> AsyncGenerator[None, None]:
    """Stay open until the loop ends, and end the errands of that loop then.

    ``asyncio.run`` cancels the tasks that it finds, and those that clean up for them come later. If
    the server is silent they would stay, pending, with an open connection. Of all that, a loop
    tells only its asynchronous generators that it ends.
    """
    try:
        yield
    finally:
        loop = asyncio.get_running_loop()
        _ends.pop(loop, None)
        mine = {task for task in _errands if task.get_loop() is loop}
        for task in mine:
            task.cancel()
        if mine:
            await asyncio.wait(mine, timeout=PATIENCE)


def _end_with(loop: asyncio.AbstractEventLoop) -> None:
    """Have the errands of a running loop end with it."""
    if loop not in _ends:
        for closed in [each for each in _ends if each.is_closed()]:
            del _ends[closed]
        _ends[loop] = generator = _until_the_loop_ends()
        with suppress(StopIteration):  # it has reached its yield, and the loop knows it
            generator.__anext__().send(None)


AGAIN: Final = 0.05
"""Seconds after which a call that has not heard of its cancellation is cancelled again."""


class Errand:
    """Calls, one after another, each of which is heard to its end although its caller is cancelled.

    A server that does not answer cannot hold a cancelled task for ever: after :data:`PATIENCE` it
    goes, and the call goes on by itself.

    What only waits, or looks, is no such call, and ends with its caller: see :meth:`try_for`.
    """

    def __init__(self) -> None:
        """Nothing is on its way."""
        self._task: asyncio.Task[Any] | None = None

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what the call returns.

        Raises:
            CancelledError: the caller was cancelled. The call has ended, or outlasts its patience.
        """
        task = self._send(call)
        cancelled = await _await_end(task, None)
        if cancelled is None:
            return task.result()
        _log_failure(task)
        raise cancelled

    async def try_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what the call returns; it is given up if its caller is cancelled.

        Before Python 3.12, ``asyncio.wait_for`` loses a cancellation that meets the end of what it
        waits for (https://github.com/python/cpython/issues/86296). redis-py sends with it: who was
        cancelled then waited on, for the lock. So the call is cancelled until it has ended.

        Raises:
            CancelledError: the caller was cancelled.
        """
        task, clock = self._send(call), asyncio.get_running_loop().time
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            while not task.done():
                task.cancel()
                await _await_end(task, clock() + AGAIN)
            raise
        return task.result()

    async def see_off(self, call: Coroutine[Any, Any, T]) -> None:
        """Wait for the end of a call that its caller can do without, but not for long.

        Raises:
            CancelledError: the caller was cancelled.
        """
        task = self._send(call)
        cancelled = await _await_end(task, asyncio.get_running_loop().time() + PATIENCE)
        _log_failure(task)
        if cancelled is not None:
            raise cancelled

    async def come_home(self) -> None:
        """Wait for the call that outlasted its caller's patience."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _send(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        loop = asyncio.get_running_loop()
        _end_with(loop)
        task = loop.create_task(call)
        self._task = task
        _errands.add(task)
        task.add_done_callback(_ended)
        return task


async def _await_end(task: asyncio.Task[Any], until: float | None) -> asyncio.CancelledError | None:
    """Wait for the end of a task; return the cancellation that came meanwhile.

    Args:
        task: for which to wait.
        until: the loop's time until which to wait; None: until the end, or :data:`PATIENCE` after
            a cancellation.
    """
    cancelled, clock = None, asyncio.get_running_loop().time
    while not task.done() and (until is None or clock() < until):
        try:
            await asyncio.wait({task}, timeout=None if until is None else until - clock())
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            until = clock() + PATIENCE if until is None else until
    return cancelled


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Tell of the error of a call of which the caller does not hear."""
    if task.done() and not task.cancelled() and task.exception() is not None:
        logger.warning("what a cancelled task had asked for failed: %s", task.exception())


def _ended(task: asyncio.Task[Any]) -> None:
    """Look at the error, if there was one: asyncio would log that nobody did."""
    _errands.discard(task)
    if not task.cancelled():
        task.exception()


# --- renewal --------------------------------------------------------------------------------------


class AsyncWatchdog(Renewals):
    """Renews in the loop of the locks: a timer, and for each round a task of its own.

    Between two rounds there is no task. One would be cancelled with all others when a loop ends,
    while locks are still held; and a loop that is closed without that would leave it pending.

    Args:
        store: where the leases are; its verbs are coroutines.
    """

    def _begin(self) -> None:
        super()._begin()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def forget(self, token: str) -> None:
        """Renew a lease no more. After this has returned no renewal for it is sent.

        A renewal that is on its way is waited for, but not for ever: that a late one arrives behind
        the release does no harm. With the last lease, the timer ends.
        """
        self.drop(token)
        if self._loop is not asyncio.get_running_loop():
            return
        self._set_alarm()
        if token in self._aloft:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._landed.wait(), PATIENCE)

    def _start(self) -> None:
        """Renew in the running loop. Only the loops of one thread come here, in turn."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._alarm, self._task = loop, None, None
            self._landed = asyncio.Event()

    def _hurry(self, lease: Lease) -> None:  # noqa: ARG002  # all leases are looked at
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Have the timer ring when something is due; a round that is under way sets it itself."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._loop is None or not self._leases or self._task is not None:
            return
        self._alarm = self._loop.call_later(max(0.0, self._next_pause()), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._task = asyncio.get_running_loop().create_task(self._run_safely(), name="csl-watchdog")
        self._task.add_done_callback(self._rang)

    def _rang(self, task: asyncio.Task[None]) -> None:
        """The round has ended, or was cancelled: the leases that are left are renewed all the same.

        A loop that ends cancels all tasks, and lets those clean up that hold locks.
        """
        if self._task is task:
            self._task = None
            if task.cancelled():
                self._back_off()
            self._set_alarm()

    async def _run_safely(self) -> None:
        """Look once; whatever goes wrong, the renewal goes on (L12)."""
        try:
            self._count(await carry_out_async(self.round(), self._ask))
        except Exception as error:  # noqa: BLE001  # logged
            self._complain("the watchdog goes on after an error", error=error)
            self._back_off()

    async def _ask(self, leases: Sequence[Lease]) -> Sequence[bool | None]:
        """Return the store's answers."""
        self._landed.clear()
        answers: Sequence[bool | None] = await self.store.extend([each.asked for each in leases])
        return answers

    def _land(self, batch: Iterable[tuple[Lease, bool]]) -> None:
        super()._land(batch)
        self._landed.set()


# --- the lock -------------------------------------------------------------------------------------


class AsyncLock(Holding):
    """A lock, or with ``limit`` a semaphore, for the tasks of an event loop, of any process.

    An object may be shared by tasks: each holds for itself. A task that holds the lock and asks
    this object again gets :class:`LockReentered`. What is acquired in a task of its own, as by
    ``wait_for(lock.acquire(), 5)`` before Python 3.12, is held by whoever uses the object next.

    A cancelled acquire leaves neither a holder nor a waiter behind, and a cancelled release
    releases: each is cancelled once Redis has answered, or after a second without an answer.

    Args:
        backend: redis-py client for asyncio, of a server or a Cluster, a client of valkey-py for
            asyncio, or a store on one. Or a list of redis-py's clients of independent servers, or
            an :class:`AsyncQuorumStore`: then a majority decides (docs/quorum.md).
        name: what must not overlap. Threads that use :class:`Lock` contend for the same names.
        lease: seconds of ownership; renewed while held, so it need not exceed the run time. A loop
            that is blocked for longer renews nothing.
        limit: permits; the lowest limit that a holder or waiter declares is in force.
        blocking: whether :meth:`acquire` waits.
        blocking_timeout: most seconds that it waits; None for as long as it takes.
        renew: renew the lease while held. Otherwise it ends unless :meth:`extend` is called.
        prefix: first part of the keys, "csl" unless given; a store has its own.
        task_local: False if one task acquires and another releases: then the object holds, for
            whichever task asks.
        on_lost: called in the loop with name and token when a held lock is lost; only with
            ``renew``. For example ``lambda *_: task.cancel()``.

        raise_on_release_error: whether the end of a ``with`` block raises LockNotOwned if the lock
            was lost meanwhile; False: a warning is logged instead. An error of the block itself
            comes first in any case.

    Raises:
        ConfigurationError: an argument is not usable.
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
        limit: int = 1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        renew: bool = True,
        prefix: str | None = None,
        task_local: bool = True,
        on_lost: OnLost | None = None,
        raise_on_release_error: bool = True,
        **unknown: Never,
    ) -> None:
        """Describe a lock; nothing is sent yet, and no loop need run."""
        refuse_unknown(type(self), unknown)
        if inspect.iscoroutinefunction(on_lost):
            msg = "on_lost must be a plain function: it is called, and nobody would await it."
            raise ConfigurationError(msg)
        self._watchdog: Final = _watchdog_for(backend, prefix)
        super().__init__(
            self._watchdog,
            checked_name(name),
            lease=lease,
            limit=limit,
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
        """Take the lock.

        Args:
            blocking: whether to wait; None: as the lock was made.
            blocking_timeout: most seconds to wait; None: as the lock was made.
            token: owner token, from :func:`celery_singleton_lock.new_token`; None: a new one.
                Asking again with the token of an attempt of which the answer was lost is safe.

        Returns:
            Whether the lock is held.

        Raises:
            LockReentered: this task holds it already, by this object.
            BackendError: the store did not answer (nor did it when asked once more), or refused.
        """
        turn, errand = self._turn(blocking, blocking_timeout, token), Errand()
        try:
            return await self._do(self._taking(turn), errand)
        except BaseException as error:
            await self._undo(turn.token, errand, error)
            raise

    async def release(self) -> None:
        """Give the lock back, and hand it to who is next; also if cancelled meanwhile.

        After a BackendError it may be called again: the token is kept until the store has answered.

        Raises:
            LockNotOwned: this task does not hold the lock, or its lease has ended meanwhile.
            BackendError: no answer, or refused. The lease is not renewed any more, and ends.
        """
        hold = self._owned("release")
        await Errand().run(self._release(hold))

    async def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Hold the lock for longer. A lease is never shortened, nor a lapsed one revived.

        Args:
            additional_time: seconds to add to what is left, at least 1 ms.
            replace_ttl: seconds from now instead.

        Returns:
            True.

        Raises:
            LockNotOwned: this task does not hold the lock (any more).
            BackendError: no answer, or refused.
        """
        return await self._do(self._extending(additional_time, replace_ttl=replace_ttl))

    async def reacquire(self) -> bool:
        """Hold the lock for a full lease from now; see :meth:`extend`."""
        return await self.extend(self.lease, replace_ttl=True)

    async def locked(self) -> bool:
        """Return whether all permits are taken, by whomever. Asks the store.

        Raises:
            BackendError: no answer, or refused.
        """
        return await self._do(self._asking_whether_locked())

    async def owned(self) -> bool:
        """Return whether this task holds the lock. Asks the store.

        Raises:
            BackendError: no answer, or refused.
        """
        return await self._do(self._asking_whether_owned())

    async def owner(self) -> Holder | None:
        """Return who holds the lock (one of them, if several do); None if nobody does. Asks.

        Raises:
            BackendError: no answer, or refused.
        """
        return await self._do(self._asking_who())

    async def ensure_held(self) -> None:
        """Ask the store whether the lock is still ours, and hold it for a lease from now.

        Raises:
            LockNotOwned: this task did not acquire it.
            LockLost: it was lost.
            BackendError: no answer, or refused.
        """
        await self._do(self._ensuring())

    async def reset(self) -> int:
        """Take the lock from all its holders, whoever they are, and hand it to who is next.

        They hear of it as of any loss; a fence refuses what they still write.

        Returns:
            How many held it.

        Raises:
            BackendError: no answer, or refused.
        """
        return await self._do(self._resetting())

    if not TYPE_CHECKING:  # else a type checker would not see the slip

        def __enter__(self) -> Never:
            """Refuse a plain ``with``, which cannot wait."""
            msg = "An AsyncLock is taken with `async with`, in a coroutine. For threads use a Lock."
            raise TypeError(msg)

        def __exit__(self, *error: object) -> None:
            """Without it Python's own error comes first."""

    async def __aenter__(self) -> AsyncLock:  # noqa: PYI034  # not meant to be subclassed
        """Take the lock.

        Raises:
            LockTimeout: it was not to be had in the time allowed.
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
        """Give the lock back. An error of the body is not replaced by one of the release."""
        try:
            await self.release()
        except SingletonLockError as error:
            if self._not_released(error, exc):
                raise

    # -- how it is done ----------------------------------------------------------------------------

    async def _do(self, plan: Plan[Wish, T], errand: Errand | None = None) -> T:
        """Carry out a plan; what the server may have in its hands is heard to its end."""
        errand = errand or Errand()

        async def do(wish: Wish) -> Any:
            if isinstance(wish, Do):
                return await errand.run(wish.call(self._store))
            if wish.call is None:
                return await asyncio.sleep(wish.seconds)
            return await errand.try_for(wish.call(self._store))

        return await carry_out_async(plan, do)

    async def _release(self, hold: Hold) -> None:
        await self._watchdog.forget(hold.lease.token)
        was_ours = await self._do(twice(lambda: self._letting_go(hold)))
        self._unnote(hold)
        if not was_ours:
            raise self._not_owned(self._why_gone(hold), what="release")

    async def _undo(self, token: str, errand: Errand, error: BaseException) -> None:
        """Leave nothing of a token behind: neither a grant nor a place in the queue."""
        hold = self._hold
        if hold is not None and hold.lease.token == token:
            self._unnote(hold)
        if not isinstance(error, GeneratorExit):  # then there is no loop to await anything in
            await Errand().see_off(self._give_back(token, errand))

    async def _give_back(self, token: str, errand: Errand) -> None:
        await errand.come_home()
        await self._watchdog.forget(token)
        with suppress(BackendError):
            await self._do(self._giving_back(token))

    # -- who holds ---------------------------------------------------------------------------------

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
    """Return who asks; None where no loop runs."""
    with suppress(RuntimeError):
        return asyncio.current_task()
    return None


def _has_ended(task: weakref.ref[asyncio.Task[Any]]) -> str:
    """Return what is told of a task that has ended with its lock; nothing if it goes on."""
    holder = task()
    if holder is None or not holder.done():
        return ""
    return f"task {holder.get_name()!r} has acquired it, and has ended without release()"


def _only_acquires(task: asyncio.Task[Any]) -> bool:
    """Return whether a task was made for the call of ``acquire()``, and ends with it."""
    return getattr(task.get_coro(), "cr_code", None) is AsyncLock.acquire.__code__


def _watchdog_for(backend: Backend, prefix: str | None) -> AsyncWatchdog:
    """Return the watchdog of this client or store in this process, with its store."""
    if isinstance(backend, (list, tuple)):
        _refuse_urls(backend)
        backend, prefix = quorum_for(AsyncQuorumStore, backend, prefix), None
    found: AsyncWatchdog = watchdog_for(
        AsyncWatchdog, backend, prefix, lambda: AsyncWatchdog(_store_of(backend, prefix))
    )
    return found


def _refuse_urls(servers: Sequence[Any]) -> None:
    """Refuse URLs: connections that are nobody's would stay open when the loop ends.

    Raises:
        ConfigurationError: there is one.
    """
    if any(isinstance(server, str) for server in servers):
        msg = (
            "An AsyncLock takes a list of redis.asyncio clients. For URLs, make the store, which "
            "closes what it has opened: `async with AsyncQuorumStore([url, …]) as store`."
        )
        raise ConfigurationError(msg)


def _store_of(backend: Any, prefix: str | None) -> Store:
    client = isinstance(backend, (redis.asyncio.Redis, redis.asyncio.RedisCluster))
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
    """Return why an AsyncLock cannot live there."""
    if isinstance(getattr(backend, "clock", clock_for(backend)), MovableClock):
        return (
            "Locks in memory (memory://) are for threads alone: no AsyncLock can live there. Give "
            "it a Redis in tests, too: a redis.asyncio.Redis client."
        )
    if isinstance(backend, str) and "://" not in backend:
        shown = repr(safe_url(backend))
        return f"An AsyncLock is made as AsyncLock(client, name): {shown} is no client."
    of_threads = isinstance(backend, (redis.Redis, redis.RedisCluster)) or is_valkey(backend)
    hint = "; threads have Lock" if of_threads else ""
    return (
        "An AsyncLock needs a redis.asyncio.Redis client (redis.asyncio.Redis.from_url(URL) makes "
        "one), an AsyncRedisStore, or a list of clients of three or more servers of which a "
        f"majority decides, not {a_kind(backend)}{hint}."
    )

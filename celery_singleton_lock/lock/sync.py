"""The lock for threads, with the method names of redis-py's ``Lock``.

::

    with Lock(client, "account:42", lease=30) as lock:
        ledger.write(..., fence=lock.fencing_token)

Waiting is in :mod:`celery_singleton_lock.lock.wait_for_turn`, what is asked of a store in
:mod:`celery_singleton_lock.lock.base`, the checks of what is passed in
:mod:`celery_singleton_lock.config.argument_checks`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import redis

from celery_singleton_lock.config.redis_url import safe_url
from celery_singleton_lock.config.argument_checks import checked_name, refuse_unknown
from celery_singleton_lock.errors import BackendError, ConfigurationError, SingletonLockError
from celery_singleton_lock.lock.base import (
    Hold,
    Holding,
    keyspace_for,
    quorum_for,
    watchdog_for,
)
from celery_singleton_lock.core.model import Holder
from celery_singleton_lock.core.lock_steps import Plan, carry_out
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.factory import store_on
from celery_singleton_lock.store.quorum.sync import QuorumStore
from celery_singleton_lock.store.redis.valkey import ValkeyClient, is_valkey
from celery_singleton_lock.lock.wait_for_turn import Wish, in_thread, twice
from celery_singleton_lock.lock.renewals import OnLost, Watchdog
from celery_singleton_lock.message_text import a_kind, named

if TYPE_CHECKING:
    from typing_extensions import Never

T = TypeVar("T")

Backend: TypeAlias = (
    redis.Redis
    | redis.RedisCluster
    | ValkeyClient
    | Store
    | QuorumStore
    | Sequence[str | redis.Redis]
)
"""What holds locks, for threads."""


class Lock(Holding):
    """A lock, or with ``limit`` a semaphore, for threads of any process.

    An object may be shared by threads: each holds for itself. A thread that holds the lock and asks
    this object again gets :class:`LockReentered`. A forked child holds nothing.

    Args:
        backend: redis-py client, of a server or a Cluster, a client of valkey-py, or a store; or a
            list of URLs or redis-py's clients of independent servers, of which a majority decides
            (:class:`QuorumStore`, docs/quorum.md).
        name: what must not overlap.
        lease: seconds of ownership; renewed while held, so it need not exceed the run time.
        limit: permits; the lowest limit that a holder or waiter declares is in force.
        blocking: whether :meth:`acquire` waits.
        blocking_timeout: most seconds that it waits; None for as long as it takes.
        renew: renew the lease while held. Otherwise it ends unless :meth:`extend` is called.
        prefix: first part of the keys, "csl" unless given; a store has its own.
        thread_local: False if one thread acquires and another releases: then the object holds, for
            whichever thread asks.
        on_lost: called with name and token, from another thread, when a held lock is lost; only
            with ``renew``.

        raise_on_release_error: whether the end of a ``with`` block raises LockNotOwned if the lock
            was lost meanwhile; False: a warning is logged instead. An error of the block itself
            comes first in any case.

    Raises:
        ConfigurationError: an argument is not usable.
    """

    _who = "thread (or process)"
    _apart_by = "thread_local"
    _stood_still = "this process stood still"

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
        thread_local: bool = True,
        on_lost: OnLost | None = None,
        raise_on_release_error: bool = True,
        **unknown: Never,
    ) -> None:
        """Describe a lock; nothing is sent yet."""
        refuse_unknown(type(self), unknown)
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
        """Take the lock.

        Args:
            blocking: whether to wait; None: as the lock was made.
            blocking_timeout: most seconds to wait; None: as the lock was made.
            token: owner token, from :func:`celery_singleton_lock.new_token`; None: a new one.
                Asking again with the token of an attempt of which the answer was lost is safe.

        Returns:
            Whether the lock is held.

        Raises:
            LockReentered: this thread holds it already, by this object.
            BackendError: the store did not answer (nor did it when asked once more), or refused.
        """
        turn = self._turn(blocking, blocking_timeout, token)
        try:
            return self._do(self._taking(turn))
        except BaseException:
            # Also an asynchronous one (soft time limit, Ctrl-C) anywhere between grant and return.
            self._undo(turn.token)
            raise

    def release(self) -> None:
        """Give the lock back, and hand it to who is next.

        After a BackendError it may be called again: the token is kept until the store has answered.

        Raises:
            LockNotOwned: this thread does not hold the lock, or its lease has ended meanwhile.
            BackendError: no answer, or refused. The lease is not renewed any more, and ends.
        """
        hold = self._owned("release")
        self._watchdog.forget(hold.lease.token)
        was_ours = self._do(twice(lambda: self._letting_go(hold)))
        self._unnote(hold)
        self._watchdog.end_if_idle()
        if not was_ours:
            raise self._not_owned(self._why_gone(hold), what="release")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Hold the lock for longer. A lease is never shortened, nor a lapsed one revived.

        Args:
            additional_time: seconds to add to what is left, at least 1 ms.
            replace_ttl: seconds from now instead.

        Returns:
            True.

        Raises:
            LockNotOwned: this thread does not hold the lock (any more).
            BackendError: no answer, or refused.
        """
        return self._do(self._extending(additional_time, replace_ttl=replace_ttl))

    def reacquire(self) -> bool:
        """Hold the lock for a full lease from now; see :meth:`extend`."""
        return self.extend(self.lease, replace_ttl=True)

    def locked(self) -> bool:
        """Return whether all permits are taken, by whomever. Asks the store.

        Raises:
            BackendError: no answer, or refused.
        """
        return self._do(self._asking_whether_locked())

    def owned(self) -> bool:
        """Return whether this thread holds the lock. Asks the store.

        Raises:
            BackendError: no answer, or refused.
        """
        return self._do(self._asking_whether_owned())

    def owner(self) -> Holder | None:
        """Return who holds the lock (one of them, if several do); None if nobody does. Asks.

        Raises:
            BackendError: no answer, or refused.
        """
        return self._do(self._asking_who())

    def ensure_held(self) -> None:
        """Ask the store whether the lock is still ours, and hold it for a lease from now.

        Raises:
            LockNotOwned: this thread did not acquire it.
            LockLost: it was lost.
            BackendError: no answer, or refused.
        """
        self._do(self._ensuring())

    def reset(self) -> int:
        """Take the lock from all its holders, whoever they are, and hand it to who is next.

        They hear of it as of any loss; a fence refuses what they still write.

        Returns:
            How many held it.

        Raises:
            BackendError: no answer, or refused.
        """
        return self._do(self._resetting())

    if not TYPE_CHECKING:  # else a type checker would not see the slip

        async def __aenter__(self) -> Never:
            """Refuse ``async with``: it would block the event loop."""
            msg = "A Lock is taken with `with`. In a coroutine use `async with AsyncLock(…)`."
            raise TypeError(msg)

        async def __aexit__(self, *error: object) -> None:
            """Without it Python's own error comes first."""

    def __enter__(self) -> Lock:  # noqa: PYI034  # not meant to be subclassed
        """Take the lock.

        Raises:
            LockTimeout: it was not to be had in the time allowed.
        """
        turn = self._turn(None, None, None)
        try:
            if self._do(self._taking(turn)):
                return self
        except BaseException:
            self._undo(turn.token)
            raise
        raise self._do(self._refusal())

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the lock back. An error of the body is not replaced by one of the release."""
        try:
            self.release()
        except SingletonLockError as error:
            if self._not_released(error, exc):
                raise
        except BaseException:  # an asynchronous one, in the middle of the release
            self._undo_all()
            raise

    # -- how it is done ----------------------------------------------------------------------------

    def _do(self, plan: Plan[Wish, T]) -> T:
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
        """Leave nothing of a token behind: neither a grant nor a place in the queue."""
        hold = self._hold
        if hold is not None and hold.lease.token == token:
            self._unnote(hold)
        self._watchdog.forget(token)
        with suppress(BackendError):
            self._do(self._giving_back(token))

    def _undo_all(self) -> None:
        """Leave nothing behind of what this thread holds."""
        hold = self._hold
        if hold is not None:
            self._undo(hold.lease.token)


def _watchdog_for(backend: Backend, prefix: str | None) -> Watchdog:
    """Return the watchdog of this client or store in this process, with its store."""
    if isinstance(backend, (list, tuple)):
        backend, prefix = quorum_for(QuorumStore, backend, prefix), None
    found: Watchdog = watchdog_for(
        Watchdog, backend, prefix, lambda: Watchdog(_store_of(backend, prefix))
    )
    return found


def _store_of(backend: Backend, prefix: str | None) -> Any:
    client = isinstance(backend, (redis.Redis, redis.RedisCluster)) or is_valkey(backend)
    if not client and not isinstance(backend, QuorumStore) and not hasattr(backend, "take_due"):
        raise ConfigurationError(_unfit(backend))
    keyspace = keyspace_for(prefix, client=client)
    return store_on(backend, keyspace) if client else backend  # type: ignore[arg-type]  # it is one


def _unfit(backend: object) -> str:
    """Return why a Lock cannot live there."""
    if isinstance(backend, str) and "://" not in backend:
        shown = repr(safe_url(backend))
        return f"A Lock is made as Lock(client, name): {shown} is no client."
    of_asyncio = named(type(backend)).startswith(("redis.asyncio.", "valkey.asyncio."))
    hint = "; asyncio has AsyncLock" if of_asyncio else ""
    return (
        "A Lock needs a client (redis.Redis.from_url(URL) makes one, and so does valkey.Valkey; "
        "redis.RedisCluster for a "
        "Cluster, Sentinel(…).master_for(…) for Sentinels), a store, or a list of the URLs of "
        f"three or more servers of which a majority decides, not {a_kind(backend)}{hint}."
    )

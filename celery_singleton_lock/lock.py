"""The lock for threads, with the method names of redis-py's ``Lock``.

::

    with Lock(client, "account:42", lease=30) as lock:
        ledger.write(..., fence=lock.fencing_token)

Waiting is in :mod:`celery_singleton_lock.turn`, the checks of what is passed are in
:mod:`celery_singleton_lock.arguments`.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Final

import redis

from celery_singleton_lock.arguments import (
    SHORTEST_LEASE,
    checked_bool,
    checked_limit,
    checked_name,
    checked_seconds,
    checked_timeout,
    checked_token,
)
from celery_singleton_lock.bounds import MAX_LEASE
from celery_singleton_lock.clock import Clock
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    LockLost,
    LockNotOwned,
    LockReentered,
    LockWaitTimeout,
    SingletonLockError,
)
from celery_singleton_lock.keys import Keyspace
from celery_singleton_lock.model import Claim, Ending, Owner, Reply, Verdict, new_token
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.redis import RedisStore
from celery_singleton_lock.turn import Step, Turn, await_wake, go, twice
from celery_singleton_lock.watchdog import Lease, OnLost, Watchdog

logger = logging.getLogger(__name__)

_NOT_OWNED: Final = (
    "Cannot {what} lock {name!r}: this thread (or process) does not hold it, or not any more. "
    "Work that outlasts its lease needs renew=True or extend()."
)


class _Hold:
    """A lock as held by one thread; when it is gone (thread or Lock ended), renewal ends too."""

    __slots__ = ("__weakref__", "fencing_token", "lease", "leaving", "on_lost", "pid")

    def __init__(self, lock: Lock, turn: Turn, reply: Reply, on_lost: OnLost | None) -> None:
        self.on_lost = on_lost
        self.fencing_token = reply.fencing_token
        self.pid = os.getpid()
        self.leaving = False
        self.lease = Lease(
            lock.name,
            turn.token,
            lock.lease,
            valid_until=turn.asked + reply.lease,
            on_lost=self.lose,
        )

    def lose(self, name: str, token: str) -> None:
        """Pass on what the watchdog says."""
        if self.on_lost is not None:
            self.on_lost(name, token)

    def left(self, clock: Clock) -> float:
        """Return seconds for which it is certainly held; 0 if lost."""
        return 0.0 if self.lease.lost else max(0.0, self.lease.valid_until - clock.monotonic())


class Lock:
    """A lock, or with ``limit`` a semaphore, for threads of any process.

    An object may be shared by threads: each holds for itself. A thread that holds the lock and asks
    this object again gets :class:`LockReentered`. A forked child holds nothing.

    Args:
        backend: redis-py client, or a store.
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

    Raises:
        ConfigurationError: an argument is not usable.
    """

    def __init__(
        self,
        backend: redis.Redis | Store,
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
    ) -> None:
        """Describe a lock; nothing is sent yet."""
        self.name: Final = checked_name(name)
        self.lease: Final = checked_seconds("lease", lease, SHORTEST_LEASE, MAX_LEASE)
        self.limit: Final = checked_limit(limit)
        self.blocking: Final = checked_bool("blocking", blocking)
        self.blocking_timeout: Final = checked_timeout(blocking_timeout)
        self.renew: Final = checked_bool("renew", renew)
        self._on_lost: Final = on_lost
        self._watchdog: Final = _watchdog_for(backend, prefix)
        self._store: Final = self._watchdog.store
        self._clock: Final = self._watchdog.clock
        self._claim: Final = Claim(self.name, lease=self.lease, limit=self.limit)
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
            token: owner token, from :func:`celery_singleton_lock.model.new_token`; None: a new one.
                Asking again with the token of an attempt of which the answer was lost is safe.

        Returns:
            Whether the lock is held.

        Raises:
            LockReentered: this thread holds it already, by this object.
            BackendError: the store did not answer (nor did it when asked once more), or refused.
        """
        turn = self._turn(blocking, blocking_timeout, token)
        try:
            return self._take(turn)
        except BaseException:
            # Also an asynchronous one (soft time limit, Ctrl-C) anywhere between grant and return.
            self._undo(turn.token)
            raise

    def release(self) -> None:
        """Give the lock back, and hand it to who is next.

        After a BackendError it may be called again: the token is kept until the store has answered.

        Raises:
            LockNotOwned: this thread does not hold the lock (any more).
            BackendError: no answer, or refused. The lease is not renewed any more, and ends.
        """
        hold = self._owned("release")
        self._watchdog.forget(hold.lease.token)
        was_ours = twice(lambda: self._let_go(hold))
        self._mine.hold = None
        if not was_ours:
            raise LockNotOwned(_NOT_OWNED.format(what="release", name=self.name), self.name)

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
        more = checked_seconds("additional_time", additional_time, 0.001, MAX_LEASE)
        hold = self._owned("extend")
        seconds = more if replace_ttl else more + hold.left(self._clock)
        if not self._prolong(hold, seconds):
            raise LockNotOwned(_NOT_OWNED.format(what="extend", name=self.name), self.name)
        return True

    def reacquire(self) -> bool:
        """Hold the lock for a full lease from now; see :meth:`extend`."""
        return self.extend(self.lease, replace_ttl=True)

    def locked(self) -> bool:
        """Return whether all permits are taken, by whomever. Asks the store.

        Raises:
            BackendError: no answer, or refused.
        """
        view = twice(lambda: self._store.inspect(self.name, waiters=1))
        return len(view.holders) >= max(1, view.limit)

    def owned(self) -> bool:
        """Return whether this thread holds the lock. Asks the store.

        Raises:
            BackendError: no answer, or refused.
        """
        hold = self._hold
        if hold is None:
            return False
        view = twice(lambda: self._store.inspect(self.name, waiters=1))
        return hold.lease.token in {holder.token for holder in view.holders}

    def __enter__(self) -> Lock:  # noqa: PYI034  # not meant to be subclassed
        """Take the lock.

        Raises:
            LockWaitTimeout: it was not to be had in the time allowed.
        """
        turn = self._turn(None, None, None)
        try:
            if self._take(turn):
                return self
        except BaseException:
            self._undo(turn.token)
            raise
        raise LockWaitTimeout(self._busy(), self.name)

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
            if exc_type is None:
                raise
            logger.warning("lock %r was not released after an error: %s", self.name, error)
        except BaseException:  # an asynchronous one, in the middle of the release
            self._undo_all()
            raise

    # -- what this thread holds --------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether this thread certainly holds the lock now, as far as it knows without asking."""
        return self.expires_in > 0

    @property
    def lost(self) -> bool:
        """Whether this thread held the lock, lost it, and did not release it yet."""
        hold = self._hold
        return hold is not None and not hold.leaving and hold.left(self._clock) <= 0

    @property
    def fencing_token(self) -> int:
        """Number of the grant, growing with each; 0 if not held. A resource refuses lower ones."""
        hold = self._hold
        return 0 if hold is None else hold.fencing_token

    @property
    def expires_in(self) -> float:
        """Seconds for which the lock is certainly held, if it is not renewed; 0 if not held.

        Counted from before the request was sent: the server holds it for at least as long.
        """
        hold = self._hold
        return 0.0 if hold is None or hold.leaving else hold.left(self._clock)

    def ensure_held(self) -> None:
        """Ask the store whether the lock is still ours, and hold it for a lease from now.

        Raises:
            LockNotOwned: this thread did not acquire it.
            LockLost: it was lost.
            BackendError: no answer, or refused.
        """
        hold = self._owned("ensure_held")
        if not self._prolong(hold, self.lease):
            msg = f"Lock {self.name!r} was lost: its lease ended, or it was reset. Stop writing."
            raise LockLost(msg, self.name)

    def __repr__(self) -> str:
        state = "held" if self.held else "lost" if self.lost else "not held"
        return f"<Lock {self.name!r}, {state}>"

    # -- the way to the lock -----------------------------------------------------------------------

    def _turn(self, blocking: bool | None, timeout: float | None, token: str | None) -> Turn:
        """Check the arguments, and begin to take the lock."""
        if self.held:
            msg = (
                f"Lock {self.name!r} is held already by who asks, and would be waited for in vain."
            )
            raise LockReentered(msg, self.name)
        return Turn(
            self._clock,
            new_token() if token is None else checked_token(token),
            blocking=self.blocking if blocking is None else checked_bool("blocking", blocking),
            timeout=self.blocking_timeout if timeout is None else checked_timeout(timeout),
        )

    def _take(self, turn: Turn) -> bool:
        """Go the way to its end; return whether the lock is held."""
        step, reply = go(turn, self._do, partial(await_wake, self._store, self.name))
        if step is Step.HAVE:
            self._remember(_Hold(self, turn, reply, self._on_lost))
        return step is Step.HAVE

    def _do(self, step: Step, turn: Turn) -> Reply:
        """Ask the store. The clock is read before: we never believe in more than it keeps (I2)."""
        turn.asked = self._clock.monotonic()
        if step is Step.CANCEL:
            return self._store.release(self.name, turn.token, Ending.CANCEL)
        owner = Owner(turn.token, host=platform.node(), pid=os.getpid())
        if step is Step.CLAIM:
            return self._store.claim(owner, self.name, self.lease)
        return self._store.acquire(owner, self._claim, wait=turn.liveness)

    def _remember(self, hold: _Hold) -> None:
        """Note what this thread holds, and have it renewed."""
        self._mine.hold = hold
        if self.renew:
            self._watchdog.keep(hold.lease)

    def _undo(self, token: str) -> None:
        """Leave nothing of a token behind: neither a grant nor a place in the queue."""
        hold = self._hold
        if hold is not None and hold.lease.token == token:
            self._mine.hold = None
        self._watchdog.forget(token)
        with suppress(BackendError):
            self._store.release(self.name, token, Ending.FINAL)

    # -- the way back ------------------------------------------------------------------------------

    @property
    def _hold(self) -> _Hold | None:
        """What this thread holds; a forked child holds nothing of its parent's."""
        hold: _Hold | None = getattr(self._mine, "hold", None)
        return hold if hold is not None and hold.pid == os.getpid() else None

    def _owned(self, what: str) -> _Hold:
        """Return what this thread holds.

        Raises:
            LockNotOwned: nothing.
        """
        hold = self._hold
        if hold is None:
            raise LockNotOwned(_NOT_OWNED.format(what=what, name=self.name), self.name)
        return hold

    def _let_go(self, hold: _Hold) -> bool:
        """Release; return whether it was ours.

        If an earlier release got no answer, and was sent while the lock was certainly ours, then
        the store may have done it: that the token is gone is then what was asked for.
        """
        repeated = hold.leaving
        hold.leaving = repeated or hold.left(self._clock) > 0
        reply = self._store.release(self.name, hold.lease.token, Ending.FINAL)
        return repeated or reply.verdict is not Verdict.ABSENT

    def _undo_all(self) -> None:
        """Leave nothing behind of what this thread holds."""
        hold = self._hold
        if hold is not None:
            self._undo(hold.lease.token)

    def _prolong(self, hold: _Hold, seconds: float) -> bool:
        """Extend; return whether it is held. What was reported lost, or let go, stays so."""
        lease = hold.lease
        if lease.lost or hold.leaving:
            return False
        asked = self._clock.monotonic()
        held = bool(twice(lambda: self._store.extend([(lease.name, lease.token, seconds)]))[0])
        if held:
            lease.confirm(asked + seconds)
        else:
            lease.lost = True
            self._watchdog.forget(lease.token)
        return held

    def _busy(self) -> str:
        """Say that the lock was not to be had."""
        waited = f" for {self.blocking_timeout:g} s" if self.blocking_timeout else ""
        return f"Lock {self.name!r} is busy, and was waited for{waited} in vain."


# A module global, but not one that two apps share: an entry belongs to the client object in its key
# and goes when neither a Lock nor the watchdog's thread (which lingers when idle) needs it. So that
# `with Lock(client, name)` in a loop starts one thread, not one per turn. A key's id() cannot be
# used again while its entry lives, for the watchdog's store holds the client.
_watchdogs: weakref.WeakValueDictionary[tuple[int, str], Watchdog] = weakref.WeakValueDictionary()


def _watchdog_for(backend: redis.Redis | Store, prefix: str | None) -> Watchdog:
    """Return the watchdog of this client or store in this process, with its store."""
    key = (id(backend), prefix or "")
    found = _watchdogs.get(key)
    return found or _watchdogs.setdefault(key, Watchdog(_store_of(backend, prefix)))


def _store_of(backend: redis.Redis | Store, prefix: str | None) -> Store:
    if isinstance(backend, redis.Redis):
        return RedisStore(backend, Keyspace() if prefix is None else Keyspace(prefix))
    if not hasattr(backend, "take_due"):
        kind = type(backend).__name__
        msg = f"A Lock needs a redis.Redis client or a store, not {kind}; asyncio has its own lock."
        raise ConfigurationError(msg)
    if prefix is not None:
        msg = "prefix goes with a redis client; a store has its keyspace already."
        raise ConfigurationError(msg)
    return backend

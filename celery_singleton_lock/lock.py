"""The lock for threads, with the method names of redis-py's ``Lock``.

::

    with Lock(client, "account:42", lease=30) as lock:
        ledger.write(..., fence=lock.fencing_token)

A caller who finds the lock busy stands in its queue and blocks on a list of its own until the
releaser's script has written it in as holder: a hand-over, not a signal. (python-redis-lock
signals: the woken client tries again, and whoever is quicker has the lock.) So the order of arrival
holds, nobody polls, and what is popped from the list decides nothing.

:class:`Turn` says what to do next on the way to a lock and does nothing itself, so that threads and
coroutines share the decisions. :class:`Lock` does it.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import platform
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Final, TypeVar

import redis

from celery_singleton_lock.clock import Clock
from celery_singleton_lock.errors import (
    BackendError,
    BackendUnreachable,
    ConfigurationError,
    LockLost,
    LockNameError,
    LockNotOwned,
    LockReentered,
    LockWaitTimeout,
    SingletonLockError,
)
from celery_singleton_lock.keys import Keyspace
from celery_singleton_lock.model import Claim, Ending, Owner, Reply, Verdict, new_token
from celery_singleton_lock.settings import MAX_COUNT, MAX_LEASE, MAX_WAIT
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.redis import RedisStore
from celery_singleton_lock.watchdog import Lease, OnLost, Watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_OWNED: Final = (
    "Cannot {what} lock {name!r}: this thread (or process) does not hold it, or not any more. "
    "Work that outlasts its lease needs renew=True or extend()."
)

_TOKEN: Final = re.compile(r"[\w-]{16,128}\.\d{1,9}", re.ASCII)

SHORTEST_LEASE: Final = 0.1
"""Seconds; a shorter lease ends between two looks of the watchdog."""

LIVENESS: Final = 10.0
"""Seconds for which a waiter counts as alive after it has asked."""

HEARTBEAT: Final = LIVENESS / 3
"""Seconds after which a waiter asks again: below CLAIM_LEASE, so that no grant is slept through."""

AFTER_LEASE: Final = 0.01
"""Seconds behind the end of a holder's lease at which the first waiter looks."""

STAGGER: Final = 0.05
"""Seconds by which each further waiter looks later (invariant I12), so that one of them sweeps."""

NAP: Final = 0.25
"""Seconds between two questions while the connection to wait on cannot be had."""


class Step(enum.Enum):
    """What to do next on the way to a lock."""

    ASK = "ask"
    """Take the lock, or queue for it; or stay in the queue."""
    WAIT = "wait"
    """Block on the wake list, for :attr:`Turn.pause` seconds at most."""
    CLAIM = "claim"
    """Begin to use a grant."""
    CANCEL = "cancel"
    """Leave the queue, for the time allowed is up."""
    HAVE = "have"
    """Held. The end."""
    STOP = "stop"
    """Not to be had. The end."""


class Turn:
    """One caller's way to a lock: what to do next.

    Args:
        clock: source of monotonic seconds.
        token: owner token; replaced if the store has given us up for dead.
        blocking: whether to queue.
        timeout: most seconds to wait; None for as long as it takes.
        rename: returns the token under which to ask anew after the store has given us up for dead.
    """

    def __init__(
        self,
        clock: Clock,
        token: str,
        *,
        blocking: bool,
        timeout: float | None,
        rename: Callable[[], str] = new_token,
    ) -> None:
        """Stand before the lock; nothing was asked yet."""
        self._clock = clock
        self.token = token
        self.blocking = blocking
        self.deadline = math.inf if timeout is None else clock.monotonic() + timeout
        self.pause = 0.0
        self.asked = -math.inf
        self._queued = False
        self._rename = rename

    @property
    def liveness(self) -> float | None:
        """Seconds for which the store keeps our place without a word; None: do not queue."""
        left = self.deadline - self._clock.monotonic()
        return min(LIVENESS, max(left, 0.0) + 1.0) if self.blocking else None

    def answered(self, step: Step, reply: Reply) -> Step:
        """Return what to do after the store's reply to ``step``."""
        match reply.verdict:
            case Verdict.GRANTED:
                return self._granted(step)
            case Verdict.WAITING:
                return self._stay(reply)
            case Verdict.ABSENT:
                return self._begin_again()
            case Verdict.BLOCKED | Verdict.FULL | Verdict.RELEASED | Verdict.TWIN | Verdict.DONE:
                return Step.STOP

    def waited(self, *, woken: bool) -> Step:
        """Return what to do after a wait: claim the grant, or see what became of the holder."""
        if woken:
            return Step.CLAIM
        return Step.CANCEL if self._out_of_time() else Step.ASK

    def _granted(self, step: Step) -> Step:
        """A newcomer has its full lease at once; who has queued must claim it."""
        granted_by_another = step is Step.CANCEL or (step is Step.ASK and self._queued)
        return Step.CLAIM if granted_by_another else Step.HAVE

    def _stay(self, reply: Reply) -> Step:
        """Wait until the earliest of own deadline, next lease end, heartbeat."""
        self._queued = True
        left = self.deadline - self._clock.monotonic()
        self.pause = max(0.01, min(left, HEARTBEAT, _look_after(reply)))
        return Step.CANCEL if left <= 0 else Step.WAIT

    def _begin_again(self) -> Step:
        """We were silent for so long that our place, or our grant, was given away."""
        if self._out_of_time():
            return Step.STOP
        self.token = self._rename()
        self._queued = False
        return Step.ASK

    def _out_of_time(self) -> bool:
        return self._clock.monotonic() >= self.deadline


def _look_after(reply: Reply) -> float:
    """Return seconds until a waiter of this rank looks whether a holder's lease has ended."""
    if reply.next_look <= 0:
        return HEARTBEAT
    return reply.next_look + AFTER_LEASE + STAGGER * max(0, reply.rank - 1)


Ask = Callable[[Step, Turn], Reply]
"""Asks the store what a step of a turn says."""


def go(turn: Turn, ask: Ask, wait: Callable[[Turn], bool]) -> tuple[Step, Reply]:
    """Go the way to a lock to its end.

    Args:
        turn: the way.
        ask: carries out a step, and notes in ``turn.asked`` when.
        wait: blocks until woken, for ``turn.pause`` seconds at most; returns whether it was.

    Returns:
        HAVE or STOP, and the store's last reply.

    Raises:
        BackendError: the store did not answer (nor did it when asked once more), or refused.
    """
    step = Step.ASK
    while True:
        if step is Step.WAIT:
            step = turn.waited(woken=wait(turn))
            continue
        reply = _twice(partial(ask, step, turn))
        step = turn.answered(step, reply)
        if step in {Step.HAVE, Step.STOP}:
            return step, reply


def stand_in_line(
    store: Store, clock: Clock, owner: Owner, claim: Claim, timeout: float
) -> tuple[Reply, float]:
    """Wait for a lock as a task does in its slot: in the queue, at the place of its arrival.

    The token stays the same, since others know the task by it.

    Args:
        store: where the lock is.
        clock: source of monotonic seconds.
        owner: who asks.
        claim: what is asked.
        timeout: most seconds to wait.

    Returns:
        The last reply (GRANTED, or why not; RELEASED or ABSENT after ``timeout``), and the
        monotonic time at which was asked for it.

    Raises:
        BackendError: the store did not answer, or refused.
    """

    def ask(step: Step, turn: Turn) -> Reply:
        turn.asked = clock.monotonic()
        if step is Step.CANCEL:
            return store.release(claim.name, owner.token, Ending.CANCEL)
        if step is Step.CLAIM:
            return store.claim(owner, claim.name, claim.lease)
        return store.acquire(owner, claim, wait=turn.liveness)

    turn = Turn(clock, owner.token, blocking=True, timeout=timeout, rename=lambda: owner.token)
    _, reply = go(turn, ask, lambda turn: _await_wake(store, claim.name, turn))
    return reply, turn.asked


def _await_wake(store: Store, name: str, turn: Turn) -> bool:
    """Block until woken or the pause is over; without a connection, nap and ask."""
    try:
        return store.wait(name, turn.token, turn.pause)
    except BackendUnreachable:
        threading.Event().wait(min(turn.pause, NAP))
        return False


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
        was_ours = _twice(lambda: self._let_go(hold))
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
        view = _twice(lambda: self._store.inspect(self.name, waiters=1))
        return len(view.holders) >= max(1, view.limit)

    def owned(self) -> bool:
        """Return whether this thread holds the lock. Asks the store.

        Raises:
            BackendError: no answer, or refused.
        """
        hold = self._hold
        if hold is None:
            return False
        view = _twice(lambda: self._store.inspect(self.name, waiters=1))
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
        step, reply = go(turn, self._do, partial(_await_wake, self._store, self.name))
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
        held = bool(_twice(lambda: self._store.extend([(lease.name, lease.token, seconds)]))[0])
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


def _twice(call: Callable[[], T]) -> T:
    """Call, and once more if no answer came: every verb is idempotent per token (I10)."""
    try:
        return call()
    except BackendUnreachable:
        return call()


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


def checked_name(name: object) -> str:
    """Return a lock's name.

    Raises:
        LockNameError: it is no text, or empty, or cannot be encoded.
    """
    if not isinstance(name, str) or not name:
        msg = f"A lock's name must be a str that is not empty, not {name!r}."
        raise LockNameError(msg)
    try:
        name.encode()
    except UnicodeEncodeError:
        msg = f"A lock's name must be valid Unicode, not {name!r}."
        raise LockNameError(msg) from None
    return name


def checked_seconds(what: str, value: object, least: float, most: float) -> float:
    """Return a number of seconds.

    A backend would read 0, a negative number or None as "no expiry" or "at once" (trap L24).

    Raises:
        ConfigurationError: it is no number between ``least`` and ``most``.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most:  # type: ignore[operator]
        msg = f"{what} must be a number of seconds from {least:g} to {most:g}, not {value!r}."
        raise ConfigurationError(msg)
    return float(value)  # type: ignore[arg-type]


def checked_timeout(value: object) -> float | None:
    """Return the longest wait, seconds; None is for ever.

    Raises:
        ConfigurationError: it is no number over 0, or beyond :data:`MAX_WAIT`.
    """
    if value is None:
        return None
    if value == 0 and not isinstance(value, bool):
        msg = "blocking_timeout must be over 0; to try without waiting, pass blocking=False."
        raise ConfigurationError(msg)
    return checked_seconds("blocking_timeout", value, 0.001, MAX_WAIT)


def checked_limit(value: object) -> int:
    """Return a number of permits.

    Raises:
        ConfigurationError: it is no whole number between 1 and :data:`MAX_COUNT`.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= MAX_COUNT:  # type: ignore[operator]
        msg = f"limit must be a whole number from 1 to {MAX_COUNT}, not {value!r}."
        raise ConfigurationError(msg)
    return value  # type: ignore[return-value]


def checked_bool(what: str, value: object) -> bool:
    """Return a bool.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, bool):
        msg = f"{what} must be True or False, not {value!r}."
        raise ConfigurationError(msg)
    return value


def checked_token(value: object) -> str:
    """Return an owner token.

    Raises:
        ConfigurationError: it was not made by :func:`celery_singleton_lock.model.new_token`.
    """
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        msg = f"token must come from new_token(), for others can be guessed or shared: {value!r}."
        raise ConfigurationError(msg)
    return value

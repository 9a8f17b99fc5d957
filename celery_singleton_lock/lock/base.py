"""What the locks for threads and for asyncio have in common: all but waiting and sending.

What has to be asked of a store is written here as plans; :class:`~celery_singleton_lock.lock.sync.Lock`
carries them out in a thread, :class:`~celery_singleton_lock.lock.aio.AsyncLock` in a task.
"""

from __future__ import annotations

import logging
import os
import platform
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeVar

from celery_singleton_lock.config.argument_checks import (
    SHORTEST_LEASE,
    checked_bool,
    checked_limit,
    checked_seconds,
    checked_timeout,
    checked_token,
    warn_of_long_lease,
)
from celery_singleton_lock.config.limits import MAX_LEASE
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    LockLost,
    LockNotOwned,
    LockReentered,
    LockTimeout,
    SingletonLockError,
)
from celery_singleton_lock.core.redis_keys import Keyspace, keyspace_with
from celery_singleton_lock.core.model import (
    Claim,
    Ending,
    Holder,
    LockView,
    Owner,
    Reply,
    Verdict,
    new_token,
)
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.store.redis.valkey import is_valkey
from celery_singleton_lock.lock.wait_for_turn import Do, Step, Turn, Wish, twice, way
from celery_singleton_lock.lock.renewals import Lease, OnLost, Renewals
from celery_singleton_lock.message_text import named

T = TypeVar("T")

logger = logging.getLogger(__name__)

_TAKEN: Final = "an operator has released or reset it, or its Redis has lost data"
"""Why a lock is gone before its lease has ended."""


class Hold:
    """A lock as held by one; when it is gone (its thread, task or lock ended), renewal ends too.

    Args:
        name: the lock's name.
        seconds: length of its lease.
        turn: how it was taken.
        reply: the grant.
        on_lost: called if it is lost.
    """

    __slots__ = ("__weakref__", "fencing_token", "lease", "leaving", "on_lost", "pid")

    def __init__(
        self, name: str, seconds: float, turn: Turn, reply: Reply, on_lost: OnLost | None
    ) -> None:
        """Begin to hold."""
        self.on_lost = on_lost
        self.fencing_token = reply.fencing_token
        self.pid = os.getpid()
        self.leaving = False
        self.lease = Lease(
            name,
            turn.token,
            seconds,
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


class Holding:
    """A lock that asks nobody: its description, what is held by it, and the plans.

    Args:
        dog: who renews.
        name: what must not overlap.
        lease: seconds of ownership.
        limit: permits.
        blocking: whether to wait.
        blocking_timeout: most seconds to wait.
        renew: renew the lease while held.
        on_lost: called when it is lost.
        apart: each thread, or task, holds for itself.
        raise_on_release_error: whether the end of a ``with`` block raises LockNotOwned.

    Raises:
        ConfigurationError: an argument is not usable.
    """

    _who: ClassVar[str]
    """Who holds: a thread, a task."""
    _apart_by: ClassVar[str]
    """The option by which each of these holds for itself; empty if there is none."""
    _stood_still: ClassVar[str]
    """Why a lease may not have been renewed although Redis answers."""
    _warns_of_long_lease: ClassVar[bool] = True
    """Whether a long lease is probably a slip."""

    def __init__(
        self,
        dog: Renewals,
        name: str,
        *,
        lease: float,
        limit: int,
        blocking: bool,
        blocking_timeout: float | None,
        renew: bool,
        on_lost: OnLost | None,
        apart: bool,
        raise_on_release_error: bool = True,
    ) -> None:
        """Describe a lock; nothing is sent yet."""
        self._apart: Final = apart
        self.name: Final = name
        self._called = name  # in errors
        self.lease: Final = checked_seconds("lease", lease, SHORTEST_LEASE, MAX_LEASE)
        self.limit: Final = checked_limit(limit)
        self.blocking: Final = checked_bool("blocking", blocking)
        self.blocking_timeout: Final = checked_timeout(blocking_timeout)
        self.renew: Final = checked_bool("renew", renew)
        if renew and self._warns_of_long_lease:
            warn_of_long_lease(self.lease)
        self._on_lost: Final = on_lost
        self._raises: Final = checked_bool("raise_on_release_error", raise_on_release_error)
        self._dog: Final = dog
        self._clock: Final = dog.clock
        self._claim: Final = Claim(name, lease=self.lease, limit=self.limit)

    # -- who holds ---------------------------------------------------------------------------------

    def _noted(self) -> Hold | None:
        """Return what was noted for who asks."""
        raise NotImplementedError

    def _note(self, hold: Hold) -> None:
        """Note what is held by who asks."""
        raise NotImplementedError

    def _unnote(self, hold: Hold) -> None:
        """Forget what is held."""
        raise NotImplementedError

    @property
    def _hold(self) -> Hold | None:
        """What is held by who asks; a forked child holds nothing of its parent's."""
        hold = self._noted()
        return hold if hold is not None and hold.pid == os.getpid() else None

    def _owned(self, what: str) -> Hold:
        """Return what is held.

        Raises:
            LockNotOwned: nothing.
        """
        hold = self._hold
        if hold is None:
            raise self._not_owned(self._why_not_held(), what=what)
        return hold

    def _not_owned(self, why: str, *, what: str) -> LockNotOwned:
        msg = f"Cannot {what} lock {self._called!r}: this {self._who} does not hold it{why}."
        return LockNotOwned(msg, self._called)

    def _not_released(self, error: SingletonLockError, of_body: BaseException | None) -> bool:
        """Tell of a release at the end of a block that failed.

        The error of the body counts. It gets a note that the lock was not released.

        Args:
            error: of the release.
            of_body: what the block raised.

        Returns:
            Whether the error of the release is to be raised.
        """
        if of_body is not None:
            logger.warning("lock %r was not released after an error: %s", self._called, error)
            if hasattr(of_body, "add_note"):  # from Python 3.11 on
                of_body.add_note(f"The lock was not released: {error}")
            return False
        if isinstance(error, LockNotOwned) and not self._raises:
            logger.warning("lock %r was lost before the end of its block: %s", self._called, error)
            return False
        return True

    def _why_not_held(self) -> str:
        """Return why nothing is noted for who asks."""
        why = ": it was not acquired, or is released already"
        if not self._apart:
            return why
        if not self._apart_by:
            return f"{why}, or by another: each holds for itself"
        kind = self._who.partition(" ")[0]
        return (
            f"{why}, or another {kind} has acquired it: each holds for itself, unless the lock has "
            f"{self._apart_by}=False"
        )

    def _why_gone(self, hold: Hold) -> str:
        """Return why the store does not know what was held; as far as can be told from here."""
        left = hold.lease.valid_until - self._clock.monotonic()
        if left > 0:
            return f" any more. Its lease had {left:.1f} s left, so {_TAKEN}"
        if not self.renew:
            return " any more. Its lease has ended: renew=False, so extend() it, or leave that out"
        return (
            " any more. Its lease has ended: it could not be renewed for as long, since Redis did "
            f"not answer or {self._stood_still}; or {_TAKEN}"
        )

    @property
    def held(self) -> bool:
        """Whether who asks certainly holds the lock now, as far as is known without asking."""
        return self.expires_in > 0

    @property
    def lost(self) -> bool:
        """Whether who asks held the lock, lost it, and did not release it yet."""
        hold = self._hold
        return hold is not None and not hold.leaving and hold.left(self._clock) <= 0

    @property
    def token(self) -> str:
        """Owner token under which who asks holds the lock; empty if not held."""
        hold = self._hold
        return "" if hold is None else hold.lease.token

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

    def __repr__(self) -> str:
        state = "held" if self.held else "lost" if self.lost else "not held"
        return f"<{type(self).__name__} {self.name!r}, {state}>"

    # -- the way to the lock -----------------------------------------------------------------------

    def _turn(self, blocking: bool | None, timeout: float | None, token: str | None) -> Turn:
        """Check the arguments, and begin to take the lock.

        Raises:
            LockReentered: it is held already.
            ConfigurationError: an argument is not usable.
        """
        self._refuse_second()
        return Turn(
            self._clock,
            new_token() if token is None else checked_token(token),
            blocking=self.blocking if blocking is None else checked_bool("blocking", blocking),
            timeout=self.blocking_timeout if timeout is None else checked_timeout(timeout),
        )

    def _refuse_second(self) -> None:
        """Hold once.

        Raises:
            LockReentered: it is held already.
        """
        if self.held:
            msg = (
                f"Lock {self._called!r} is held already by who asks, and would be waited for in "
                "vain."
            )
            raise LockReentered(msg, self._called)

    def _taking(self, turn: Turn) -> Plan[Wish, bool]:
        """Go the way to its end; return whether the lock is held."""
        me = Owner(turn.token, host=platform.node(), pid=os.getpid())
        step, reply = yield from way(turn, me, self._claim)
        if step is Step.HAVE:
            self._refuse_second()  # where one object holds for several, another was quicker
            hold = Hold(self.name, self.lease, turn, reply, self._on_lost)
            self._note(hold)
            if self.renew:
                self._dog.keep(hold.lease)
        return step is Step.HAVE

    def _refusal(self) -> Plan[Wish, LockTimeout]:
        """Say that the lock was not to be had, and who has it, if that can be learnt."""
        msg = f"Lock {self.name!r} is busy{self._waited()}."
        try:
            holder = yield from self._asking_who()
        except BackendError:
            return LockTimeout(msg, self.name)
        if holder is None:
            msg += (
                " Nobody holds it now: it has just been given back, or its Redis grants nothing "
                "for a while after a restart (quarantine, quorum)."
            )
            return LockTimeout(msg, self.name)
        msg += f" It is held by {holder}, whose lease has {holder.expires_in:.1f} s left."
        return LockTimeout(msg, self.name, str(holder), holder.expires_in)

    def _waited(self) -> str:
        if not self.blocking:
            return ""
        seconds = f" {self.blocking_timeout:g} s" if self.blocking_timeout else ""
        return f", and was waited for{seconds} in vain"

    # -- the way back, and questions ---------------------------------------------------------------

    def _giving_back(self, token: str) -> Plan[Wish, None]:
        """Leave nothing of a token behind: neither a grant nor a place in the queue."""
        yield Do(lambda store: store.release(self.name, token, Ending.FINAL))

    def _release_in(self, store: Any, token: str) -> Any:
        """Return what a store answers to the release of a token, or an awaitable of that."""
        return store.release(self.name, token, Ending.FINAL)

    def _letting_go(self, hold: Hold) -> Plan[Wish, bool]:
        """Release; return whether it was ours for all that time.

        A lease that has ended is a lock that was lost, also if nobody else has taken it: the store
        may have kept the token beyond its lease, and another client may have come and gone.

        If an earlier release got no answer, and was sent while the lock was certainly ours, then
        the store may have done it: that the token is gone is then what was asked for. That earlier
        one may also be the client's own first attempt (``reply.repeated``).
        """
        repeated = hold.leaving
        hold.leaving = repeated or hold.left(self._clock) > 0
        token = hold.lease.token
        reply = yield Do(lambda store: self._release_in(store, token))
        there = repeated or reply.repeated or reply.verdict is not Verdict.ABSENT
        return hold.leaving and there

    def _extending(self, additional_time: float, *, replace_ttl: bool) -> Plan[Wish, bool]:
        """Hold the lock for longer.

        Raises:
            LockNotOwned: it is not held (any more).
        """
        more = checked_seconds("additional_time", additional_time, 0.001, MAX_LEASE)
        hold = self._owned("extend")
        seconds = more if replace_ttl else more + hold.left(self._clock)
        if not (yield from self._prolonging(hold, seconds)):
            left = " any more: a release was sent, and not answered"
            raise self._not_owned(left if hold.leaving else self._why_gone(hold), what="extend")
        return True

    def _ensuring(self) -> Plan[Wish, None]:
        """Ask whether the lock is still ours, and hold it for a lease from now.

        Raises:
            LockLost: it was lost.
        """
        hold = self._owned("ensure_held")
        if not (yield from self._prolonging(hold, self.lease)):
            msg = f"Lock {self._called!r} was lost: its lease ended, or it was reset. Stop writing."
            raise LockLost(msg, self._called)

    def _prolonging(self, hold: Hold, seconds: float) -> Plan[Wish, bool]:
        """Extend; return whether it is held. What was reported lost, or let go, stays so."""
        lease = hold.lease
        if lease.lost or hold.leaving:
            return False
        asked = self._clock.monotonic()
        wanted = [(lease.name, lease.token, seconds)]
        answers = yield from twice(lambda: _done(lambda store: store.extend(wanted)))
        if answers[0]:
            lease.confirm(asked + seconds)
            return True
        lease.lost = True
        self._dog.drop(lease.token)
        return False

    def _looking(self) -> Plan[Wish, LockView]:
        view: LockView = yield from twice(
            lambda: _done(lambda store: store.inspect(self.name, waiters=1))
        )
        return view

    def _asking_who(self) -> Plan[Wish, Holder | None]:
        """Return one of those who hold the lock; None if nobody does."""
        view = yield from self._looking()
        return next(iter(view.holders), None)

    def _asking_whether_locked(self) -> Plan[Wish, bool]:
        """Return whether all permits are taken."""
        view = yield from self._looking()
        return len(view.holders) >= max(1, view.limit)

    def _asking_whether_owned(self) -> Plan[Wish, bool]:
        """Return whether who asks holds the lock."""
        hold = self._hold
        if hold is None:
            return False
        view = yield from self._looking()
        return hold.lease.token in {holder.token for holder in view.holders}

    def _resetting(self) -> Plan[Wish, int]:
        """Take the lock from all its holders."""
        held: int = yield from twice(lambda: _done(lambda store: store.reset(self.name)))
        return held


def _done(call: Callable[[Any], Any]) -> Plan[Wish, Any]:
    return (yield Do(call))


# A module global, but not one that two apps share: an entry belongs to the client object in its key
# and goes when neither a lock nor the watchdog's thread (which lingers when idle) needs it. So that
# `with Lock(client, name)` in a loop starts one thread, not one per turn. A key's id() cannot be
# used again while its entry lives, for the watchdog's store holds the client.
_watchdogs: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


def watchdog_for(
    kind: type[Any], backend: object, prefix: str | None, make: Callable[[], Any]
) -> Any:
    """Return the watchdog of this client or store in this process, with its store.

    Args:
        kind: of the watchdog: a client that threads use is none for asyncio.
        backend: the client, or the store.
        prefix: of the keys.
        make: makes one, or raises what is wrong with the backend.
    """
    key = (kind, id(backend), prefix or "")
    found = _watchdogs.get(key)
    return found or _watchdogs.setdefault(key, make())


def checked_client(caller: str, client: object, *kinds: type[Any]) -> None:
    """Refuse what is no client of these kinds, before it fails in its own way.

    Args:
        caller: what it was given to.
        client: whatever it is.
        kinds: redis-py's; valkey-py's client for one server is as good as the first.

    Raises:
        ConfigurationError: it is of none of them.
    """
    asyncio = "asyncio" in kinds[0].__module__
    if not isinstance(client, kinds) and not is_valkey(client, asyncio=asyncio):
        msg = f"{caller} needs a {named(kinds[0])} client, not {named(type(client))}."
        raise ConfigurationError(msg)


def keyspace_for(prefix: str | None, *, client: bool) -> Keyspace | None:
    """Return where a client's keys are; None for a store, which knows it.

    Raises:
        ConfigurationError: a store was given a prefix, or the prefix is not usable.
    """
    if client:
        return keyspace_with(None, prefix)
    if prefix is not None:
        msg = "prefix goes with a redis client; a store has its keyspace already."
        raise ConfigurationError(msg)
    return None


# Likewise: the same servers are one store, with one watchdog, however often they are listed.
_quorums: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


def quorum_for(make: Callable[..., Any], servers: Sequence[Any], prefix: str | None) -> Any:
    """Return the store on several servers, of which one is kept for each list of them.

    Args:
        make: the class of the store.
        servers: URLs or clients.
        prefix: first part of the keys; None for the usual one.

    Raises:
        ConfigurationError: they cannot make a quorum, or the prefix is not usable.
    """
    each = tuple(server if isinstance(server, str) else id(server) for server in servers)
    key = (make, prefix or "", *each)
    found = _quorums.get(key)
    return found or _quorums.setdefault(key, make(servers, prefix=prefix))

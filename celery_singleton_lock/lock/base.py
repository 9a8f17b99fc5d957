"""The common part of the locks for threads and for asyncio, which does no I/O.

Requests to a store are plans (see :mod:`celery_singleton_lock.core.lock_steps`).
:class:`~celery_singleton_lock.lock.sync.Lock` runs them in a thread,
:class:`~celery_singleton_lock.lock.aio.AsyncLock` in an asyncio task.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

from celery_singleton_lock.config.argument_checks import (
    SHORTEST_LEASE,
    checked_bool,
    checked_head_start,
    checked_limit,
    checked_on_lost,
    checked_seconds,
    checked_timeout,
    checked_token,
    warn_of_long_lease,
)
from celery_singleton_lock.config.limits import MAX_LEASE
from celery_singleton_lock.config.timed_close import checked_close, described
from celery_singleton_lock.core.charge import charged_rates, checked_amount, checked_id
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.core.lock_view import Holder, LockView, WaitsFor, reason_in
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reply, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.priority import microseconds
from celery_singleton_lock.core.rate import Rate, RateOption, packed, rates_of, why_never
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    LockCostError,
    LockLost,
    LockNotOwned,
    LockReentered,
    LockTimeout,
    SingletonLockError,
)
from celery_singleton_lock.lock.lease import Lease, OnLost
from celery_singleton_lock.lock.renewals import Renewals
from celery_singleton_lock.lock.wait_for_turn import (
    Do,
    LockWait,
    Request,
    Step,
    acquire_plan,
    twice,
)

T = TypeVar("T")

logger: Final = logging.getLogger(__name__)

_TAKEN: Final = "an operator has released or reset it, or its Redis has lost data"
"""Why a lock may be lost before its lease has ended."""


class Hold:
    """A held lock. It is garbage-collected with its thread, task or lock, which ends its renewal.

    Args:
        name: the lock's name.
        seconds: length of its lease.
        wait: how it was acquired.
        reply: the grant.
        on_lost: called if it is lost.
    """

    __slots__ = ("__weakref__", "charges", "fencing_token", "lease", "leaving", "on_lost", "pid")

    def __init__(
        self, name: str, seconds: float, wait: LockWait, reply: Reply, on_lost: OnLost | None
    ) -> None:
        self.on_lost: Final = on_lost
        self.fencing_token: int = reply.fencing_token
        self.pid: int = os.getpid()
        self.leaving: bool = False
        self.charges: int = 0
        self.lease: Lease = Lease(
            name,
            wait.token,
            seconds,
            valid_until=wait.asked + reply.lease,
            on_lost=self.lose,
        )

    def lose(self, name: str, token: str) -> None:
        """Call ``on_lost``."""
        if self.on_lost is not None:
            self.on_lost(name, token)

    def left(self, clock: Clock) -> float:
        """Return the seconds for which the lock is certainly held; 0 if lost."""
        return 0.0 if self.lease.lost else max(0.0, self.lease.valid_until - clock.monotonic())


class LockBase:
    """A lock without I/O: its options, what it holds, and its plans.

    Args:
        renewals: renews the lease.
        name: the lock's name.
        lease: seconds for which the lock is held without a renewal.
        limit: permits; None for no limit.
        rate: how many may start in a period; None for no rate.
        priority: seconds of head start.
        blocking: whether to wait.
        blocking_timeout: longest wait in seconds.
        renew: whether to renew the lease.
        on_lost: called if the lock is lost.
        apart: whether each thread, or task, holds the lock for itself.
        raise_on_release_error: whether the end of a ``with`` block raises LockNotOwned.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    _who: ClassVar[str]
    """The kind of caller, for errors: a thread or a task."""
    _apart_by: ClassVar[str]
    """The option for ``apart``; empty if there is none."""
    _stood_still: ClassVar[str]
    """Why a lease may not have been renewed although Redis answers, for errors."""
    _warns_of_long_lease: ClassVar[bool] = True
    """Whether a long lease is probably a mistake."""

    def __init__(
        self,
        renewals: Renewals,
        name: str,
        *,
        lease: float,
        limit: int | None,
        rate: RateOption,
        priority: float,
        blocking: bool,
        blocking_timeout: float | None,
        renew: bool,
        on_lost: OnLost | None,
        apart: bool,
        raise_on_release_error: bool = True,
    ) -> None:
        self._apart: Final = apart
        self.name: Final = name
        self._called = name  # in errors
        self.lease: Final = checked_seconds("lease", lease, SHORTEST_LEASE, MAX_LEASE)
        self.rates: Final = rates_of(rate)
        _refuse_computed_costs(self.rates)
        self.limit: Final = checked_limit(limit, has_rate=bool(self.rates))
        self.priority: Final = checked_head_start(priority)
        self.blocking: Final = checked_bool("blocking", blocking)
        self.blocking_timeout: Final = checked_timeout(blocking_timeout)
        self.renew: Final = checked_bool("renew", renew)
        if renew and self._warns_of_long_lease:
            warn_of_long_lease(self.lease)
        self._on_lost: Final[OnLost | None] = checked_on_lost(on_lost)
        self._raises: Final = checked_bool("raise_on_release_error", raise_on_release_error)
        self._renewals: Final = renewals
        self._clock: Final = renewals.clock
        if self.rates and not getattr(renewals.store, "has_rates", False):
            raise ConfigurationError(_without_rates(type(renewals.store), self.rates))
        if self.priority and not getattr(renewals.store, "has_rates", False):
            raise ConfigurationError(_without_queue(type(renewals.store), self.priority))
        flow = packed(self.rates, microseconds(self.priority))
        self._claim = Claim(name, lease=self.lease, limit=self.limit, flow=flow)

    @property
    def _request(self) -> Claim:
        """The request for the lock."""
        return self._claim

    # -- the holder --------------------------------------------------------------------------------

    def _noted(self) -> Hold | None:
        """Return the hold of the caller; in a forked child it may be that of the parent."""
        raise NotImplementedError

    def _note(self, hold: Hold) -> None:
        """Store the hold of the caller."""
        raise NotImplementedError

    def _unnote(self, hold: Hold) -> None:
        """Remove the hold of the caller."""
        raise NotImplementedError

    @property
    def _hold(self) -> Hold | None:
        """The hold of the caller; None in a forked child whose parent holds the lock."""
        hold = self._noted()
        return hold if hold is not None and hold.pid == os.getpid() else None

    def _owned(self, what: str) -> Hold:
        """Return the hold of the caller.

        Raises:
            LockNotOwned: it holds nothing.
        """
        hold = self._hold
        if hold is None:
            raise self._not_owned(self._why_not_held(), what=what)
        return hold

    def _not_owned(self, why: str, *, what: str) -> LockNotOwned:
        msg = f"Cannot {what} lock {self._called!r}: this {self._who} does not hold it{why}."
        return LockNotOwned(msg, self._called)

    def _not_released(self, error: SingletonLockError, of_body: BaseException | None) -> bool:
        """Report that the release at the end of a block failed.

        An error of the block is raised instead, with a note that the lock was not released.

        Args:
            error: the error of the release.
            of_body: the error of the block.

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
        """Return why the caller holds nothing, as a part of an error."""
        why = ": it was not acquired, or was released"
        if not self._apart:
            return why
        if not self._apart_by:
            return f"{why}, or another has acquired it: each holds it for itself"
        kind = self._who.partition(" ")[0]
        return (
            f"{why}, or another {kind} has acquired it: each holds it for itself. To share it use "
            f"{self._apart_by}=False"
        )

    def _why_gone(self, hold: Hold) -> str:
        """Return why the lock is no longer held, as a part of an error."""
        left = hold.lease.valid_until - self._clock.monotonic()
        if left > 0:
            return f" any more. Its lease had {left:.1f} s left, so {_TAKEN}"
        if not self.renew:
            return (
                " any more. Its lease has ended: with renew=False call extend(), or leave that out"
            )
        return (
            " any more. Its lease has ended: it was not renewed, since Redis did not answer or "
            f"{self._stood_still}; or {_TAKEN}"
        )

    @property
    def held(self) -> bool:
        """Whether the caller certainly holds the lock, as far as is known without asking Redis."""
        return self.expires_in > 0

    @property
    def lost(self) -> bool:
        """Whether the caller held the lock, lost it, and has not released it yet."""
        hold = self._hold
        return hold is not None and not hold.leaving and hold.left(self._clock) <= 0

    @property
    def token(self) -> str:
        """Owner token of the caller; empty if it does not hold the lock."""
        hold = self._hold
        return "" if hold is None else hold.lease.token

    @property
    def fencing_token(self) -> int:
        """Number of the grant, which grows with each grant; 0 if not held."""
        hold = self._hold
        return 0 if hold is None else hold.fencing_token

    @property
    def expires_in(self) -> float:
        """Seconds for which the lock is certainly held without a renewal; 0 if not held.

        Counted from before the request was sent, so the lease in Redis does not end earlier.
        """
        hold = self._hold
        return 0.0 if hold is None or hold.leaving else hold.left(self._clock)

    def __repr__(self) -> str:
        state = "held" if self.held else "lost" if self.lost else "not held"
        return f"<{type(self).__name__} {self.name!r}, {state}>"

    # -- acquire -----------------------------------------------------------------------

    def _new_wait(
        self, blocking: bool | None, timeout: float | None, token: str | None
    ) -> LockWait:
        """Check the arguments of ``acquire``.

        Raises:
            LockReentered: the caller holds the lock.
            ConfigurationError: an argument is invalid.
        """
        self._refuse_second()
        return LockWait(
            self._clock,
            new_token() if token is None else checked_token(token),
            blocking=self.blocking if blocking is None else checked_bool("blocking", blocking),
            timeout=self.blocking_timeout if timeout is None else checked_timeout(timeout),
        )

    def _refuse_second(self) -> None:
        """Refuse to acquire the lock twice.

        Raises:
            LockReentered: the caller holds the lock.
        """
        if self.held:
            msg = (
                f"This {self._who} already holds lock {self._called!r} with this object, and would "
                "wait for itself."
            )
            raise LockReentered(msg, self._called)

    def _taking(self, wait: LockWait) -> Plan[Request, bool]:
        """Acquire the lock; return whether it is held."""
        me = Owner(wait.token, host=platform.node(), pid=os.getpid())
        step, reply = yield from acquire_plan(wait, me, self._request)
        if reply.verdict is Verdict.TOO_COSTLY:
            msg = f"Cannot acquire lock {self._called!r}: {why_never(reply.excess)}."
            raise LockCostError(msg, self._called)
        if step is Step.HAVE:
            self._refuse_second()  # another thread or task with this object may have been faster
            hold = Hold(self.name, self.lease, wait, reply, self._on_lost)
            self._note(hold)
            if self.renew:
                self._renewals.keep(hold.lease)
        return step is Step.HAVE

    def _refusal(self) -> Plan[Request, LockTimeout]:
        """Return the error for a busy lock, with its holder, if Redis answers."""
        msg = f"Lock {self.name!r} is busy{self._waited()}."
        try:
            view = yield from self._looking()
        except BackendError:
            return LockTimeout(msg, self.name)
        holder, waits_for = next(iter(view.holders), None), reason_in(view)
        if view.paused:
            msg += f" It is paused ({view.paused}) until an operator resumes it."
        if view.closed:
            msg += f" It is closed for another {view.closed_for:.1f} s, {view.closed}."
        if holder is not None:
            msg += f" It is held by {holder}, whose lease has {holder.expires_in:.1f} s left."
            return LockTimeout(msg, self.name, str(holder), holder.expires_in, waits_for)
        if view.waits_for is WaitsFor.RATE:
            rates = ", ".join(map(str, view.rates))
            later = f" in {view.next_look:.1f} s" if view.next_look else " later"
            msg += f" It has reached its rate ({rates}): the next one may start{later}."
        elif not view.paused and not view.closed:
            msg += (
                " Nobody holds it now: it has just been released, or its Redis was restarted and "
                "grants nothing for a while (quarantine, quorum)."
            )
        return LockTimeout(msg, self.name, waits_for=waits_for)

    def _waited(self) -> str:
        if not self.blocking:
            return ""
        seconds = f" {self.blocking_timeout:g} s" if self.blocking_timeout else ""
        return f" after a wait{seconds and f' of{seconds}'}"

    # -- release, and queries ---------------------------------------------------------------

    def _giving_back(self, token: str) -> Plan[Request, None]:
        """Remove a token from the lock, as holder or waiter."""
        yield Do(lambda store: store.release(self.name, token, Ending.FINAL))

    def _release_in(self, store: Any, token: str) -> Any:
        """Release a token in a store; return the reply, or an awaitable of it."""
        return store.release(self.name, token, Ending.FINAL)

    def _letting_go(self, hold: Hold) -> Plan[Request, bool]:
        """Release the lock; return whether it was held until now.

        A lease that has ended is a lost lock, even if Redis still has the token: another client may
        have held the lock meanwhile.

        A release may have got no answer and yet have released the lock. If it is then repeated, by
        the caller or by the Redis client (``reply.repeated``), an unknown token does not mean that
        the lock was lost.
        """
        repeated = hold.leaving
        hold.leaving = repeated or hold.left(self._clock) > 0
        token = hold.lease.token
        reply = yield Do(lambda store: self._release_in(store, token))
        there = repeated or reply.repeated or reply.verdict is not Verdict.ABSENT
        return hold.leaving and there

    def _extending(self, additional_time: float, *, replace_ttl: bool) -> Plan[Request, bool]:
        """Extend the lease.

        Raises:
            LockNotOwned: the lock is not held, or was lost.
        """
        more = checked_seconds("additional_time", additional_time, 0.001, MAX_LEASE)
        hold = self._owned("extend")
        seconds = more if replace_ttl else more + hold.left(self._clock)
        if not (yield from self._prolonging(hold, seconds)):
            left = ": a release was sent, and got no answer"
            raise self._not_owned(left if hold.leaving else self._why_gone(hold), what="extend")
        return True

    def _charging(
        self, amount: int, charge_id: str | None, rate: str | Rate | None
    ) -> Plan[Request, None]:
        """Correct what the start has cost.

        Raises:
            LockNotOwned: the caller does not hold the lock.
            ConfigurationError: an argument is invalid, or no rate has a cost.
        """
        more, given = checked_amount(amount), checked_id(charge_id)
        keys = charged_rates(self._called, self.rates, rate)
        hold = self._owned("charge")
        hold.charges += 1
        token = hold.lease.token
        own = given or f"{token} {hold.charges}"
        yield from twice(
            lambda: _done(lambda store: store.charge(self.name, token, own, more, keys))
        )

    def _ensuring(self) -> Plan[Request, None]:
        """Check that the lock is still held, and renew the lease.

        Raises:
            LockLost: the lock was lost.
        """
        hold = self._owned("ensure_held")
        if not (yield from self._prolonging(hold, self.lease)):
            msg = f"Lock {self._called!r} was lost: its lease ended, or it was reset. Stop writing."
            raise LockLost(msg, self._called)

    def _prolonging(self, hold: Hold, seconds: float) -> Plan[Request, bool]:
        """Extend; return whether the lock is held. A lost or released one is not extended."""
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
        self._renewals.drop(lease.token)
        return False

    def _looking(self) -> Plan[Request, LockView]:
        view: LockView = yield from twice(
            lambda: _done(lambda store: store.inspect(self.name, waiters=1))
        )
        return view

    def _asking_who(self) -> Plan[Request, Holder | None]:
        """Return a holder of the lock; None if nobody holds it."""
        view = yield from self._looking()
        return next(iter(view.holders), None)

    def _asking_whether_locked(self) -> Plan[Request, bool]:
        """Return whether all permits are taken."""
        view = yield from self._looking()
        return len(view.holders) >= max(1, view.limit)

    def _asking_whether_owned(self) -> Plan[Request, bool]:
        """Return whether the caller holds the lock."""
        hold = self._hold
        if hold is None:
            return False
        view = yield from self._looking()
        return hold.lease.token in {holder.token for holder in view.holders}

    def _closing(self, seconds: float, why: str) -> Plan[Request, float]:
        """Stop granting the lock for a time; return for how long it is closed."""
        checked, told = checked_close(seconds, why)
        text = described(f"pid {os.getpid()} on {platform.node()}", told)
        closed: float = yield from twice(
            lambda: _done(lambda store: store.close_for(self.name, checked, text))
        )
        return closed

    def _resetting(self) -> Plan[Request, int]:
        call = new_token()  # one id for both attempts
        held: int = yield from twice(lambda: _done(lambda store: store.reset(self.name, call=call)))
        return held


def _refuse_computed_costs(rates: tuple[Rate, ...]) -> None:
    for rate in rates:
        if rate.is_computed:
            msg = (
                f"cost of rate {str(rate)!r} is {rate.cost!r}, and a Lock has no arguments from "
                "which to compute it. Give a number, or use @locked."
            )
            raise ConfigurationError(msg)


def _without_rates(store: type, rates: tuple[Rate, ...]) -> str:
    return (
        f"rate is {', '.join(map(str, rates))}, and {store.__name__} counts no starts: a quorum of "
        "servers, for example, has no common log of them. Use one Redis, or a Cluster, for it."
    )


def _without_queue(store: type, priority: float) -> str:
    return (
        f"priority is {priority:g}, and {store.__name__} has no queue: on a quorum of servers, for "
        "example, the waiters try in no order. Leave it out, or use one Redis or a Cluster."
    )


def _done(call: Callable[[Any], Any]) -> Plan[Request, Any]:
    return (yield Do(call))

"""Decides which leases of a process are due for renewal, and which are lost.

Threads and asyncio share these rules; the loops that apply them are in
:mod:`celery_singleton_lock.lock.lease_watchdog` and
:mod:`celery_singleton_lock.lock.async_lease_watchdog`.

A lease is **lost** if Redis no longer knows its token after it was held, or if it has ended by the
local monotonic clock (counted from before the last confirmed request was sent). If Redis answers
that the token does not hold the lock, that is final. If it does not answer, the renewal is repeated
until the lease has ended. An error does not end the renewals. (In redisson an error ended the
watchdog permanently: its issues 3194 and 3712.)
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_steps import Plan
from celery_singleton_lock.core.model import Preempted, Renewal
from celery_singleton_lock.errors import BackendError, BackendRefused
from celery_singleton_lock.lock.lease import SLOW_RETRY, Lease, OnLost
from celery_singleton_lock.message_text import number_of

logger: Final = logging.getLogger(__name__)

QUICK_RETRY: Final = 0.1
"""Seconds after which a failed call is repeated; they double with each failure in a row."""


def run_here(call: Callable[..., None], *args: Any) -> None:
    """Call a function in this thread: the default of ``tell``."""
    call(*args)


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round.

    Args:
        renewed: number of leases that were renewed.
        unknown: number of tokens that do not hold the lock, and never had a confirmed lease.
        lost: number of leases that were lost.
        failed: number of leases that were due when Redis did not answer.
    """

    renewed: int = 0
    unknown: int = 0
    lost: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Seen:
    """The answers to one renewal, counted."""

    renewed: int = 0
    unknown: int = 0
    failed: int = 0
    gone: list[Lease] = field(default_factory=list)
    preempted: list[tuple[str, str]] = field(default_factory=list)

    def note(self, lease: Lease, asked: float, *, held: Renewal, was_held: bool) -> None:
        """Count one answer. An unknown token is a loss only if it was held before the request."""
        if held is None:
            self.failed += 1
        elif held:
            lease.renewed(asked)
            self.renewed += 1
            if isinstance(held, Preempted):
                self.preempted.append((lease.token, held.by))
        elif was_held:
            self.gone.append(lease)
        else:
            lease.unknown(asked)
            self.unknown += 1


class Renewals:
    """The leases of a process: which are due, and which are lost. A subclass runs the rounds.

    Args:
        store: the store of the leases. Its calls must time out well within the shortest lease:
            a loss without an answer is reported when they return.
        clock: source of monotonic seconds; the store's by default.
        threads: module with ``RLock`` and ``Condition``.
        tell: runs a call that logs, or reports a loss.

    Attributes:
        renewed: number of renewals so far.
        failed: number of leases that were due when Redis did not answer, so far.
        on_preempted: called with a token, and the attempt for which its holder must end, with each
            renewal that says so.
    """

    def __init__(
        self,
        store: Any,
        clock: Clock | None = None,
        *,
        threads: ModuleType = threading,
        tell: Callable[..., None] = run_here,
    ) -> None:
        self.store: Final = store
        self.clock: Final = clock or store.clock
        self._threads: Final = threads
        self._tell: Final = tell
        self.renewed: int = 0
        self.failed: int = 0
        self.on_preempted: Callable[[str, str], None] = _ignore
        self._begin()
        _instances.add(self)

    def _begin(self) -> None:
        """Start without leases; also in a forked child, whose threads and locks are invalid."""
        # `with` blocks use this RLock, not the Condition: Condition.__enter__ is Python code, which
        # an asynchronous exception (soft time limit) can interrupt after it has acquired the mutex.
        # The RLock is reentrant: a signal handler may release a lock while its thread is in here.
        self._mutex = self._threads.RLock()
        self._changed = self._threads.Condition(self._mutex)
        self._leases: dict[str, Lease] = {}
        self._noted: dict[str, tuple[str, str, float, bool, float, OnLost]] = {}
        self._in_flight: set[str] = set()
        self._retry_at = 0.0
        self._failures = 0
        self._unanswered = False
        self._warned = False
        self._wakes_at = 0.0
        self._stopping = False

    def _start(self) -> None:
        """Ensure that rounds run."""
        raise NotImplementedError

    def _wake_for(self, lease: Lease) -> None:
        """Ensure that a round runs before this lease is due."""
        raise NotImplementedError

    def watch(
        self,
        name: str,
        token: str,
        lease: float,
        *,
        held: bool = True,
        valid_until: float | None = None,
        on_lost: OnLost | None = None,
    ) -> Lease:
        """Renew a lease from now on.

        Args:
            name: the lock's name.
            token: owner token.
            lease: seconds.
            held: False if the lock may not be acquired yet, because its task is on its way to a
                pool slot. Then a token that Redis does not know is not a lost lock. After the first
                successful renewal the lock counts as held.
            valid_until: monotonic time until which it is held; None: one lease from now.
            on_lost: called once with name and token, from the watchdog's thread, if it is lost; a
                bound method is referenced weakly (see :class:`Lease`).

        Returns:
            The lease, which is updated while it is watched.

        Raises:
            RuntimeError: no thread can be started.
        """
        until = self.clock.monotonic() + lease if valid_until is None else valid_until
        watched = Lease(name, token, lease, valid_until=until, held=held, on_lost=on_lost)
        self.keep(watched)
        return watched

    def keep(self, lease: Lease) -> None:
        """Renew an existing lease from now on; see :meth:`watch`."""
        with self._mutex:
            self._leases[lease.token] = lease
            self._stopping = False
            self._start()
            self._wake_for(lease)

    def drop(self, token: str) -> None:
        """Stop renewing a lease; a renewal of it may be in flight."""
        if self._noted.pop(token, None) is None:
            with self._mutex:
                self._leases.pop(token, None)

    def confirm(self, token: str, valid_until: float | None = None) -> None:
        """Note that a reply to a request other than a renewal has confirmed a lease.

        Args:
            token: owner token; an unknown one is ignored.
            valid_until: monotonic time until which it is held; None: one lease from now.
        """
        with self._mutex:
            self._read_notes()
            lease = self._leases.get(token)
            if lease is not None:
                until = self.clock.monotonic() + lease.seconds
                lease.held = True
                lease.confirm(until if valid_until is None else valid_until)
                self._wake_for(lease)

    def valid_until(self, token: str) -> float | None:
        """Return the monotonic time until which a lease is certainly valid; None if unknown.

        Args:
            token: owner token.
        """
        with self._mutex:
            self._read_notes()
            lease = self._leases.get(token)
            return None if lease is None else lease.valid_until

    def watching(self) -> tuple[str, ...]:
        """Return the tokens whose leases are renewed."""
        with self._mutex:
            self._read_notes()
            return tuple(self._leases)

    def leases(self) -> tuple[Lease, ...]:
        """Return the leases that are renewed."""
        with self._mutex:
            self._read_notes()
            return tuple(self._leases.values())

    def round(self) -> Plan[Sequence[Lease], Round]:
        """Renew the leases that are due, and report the lost ones. Yields leases to renew."""
        asked = self.clock.monotonic()
        batch = self._collect_due(asked)
        try:
            answers = yield from self._extend([lease for lease, _ in batch])
            seen = self._apply_answers(batch, answers, asked)
        finally:
            self._end_renewals(batch)
        lost = self._lapsed() + seen.gone
        for lease in lost:
            self._tell(lease.report)
        for token, by in seen.preempted:
            self._tell(self.on_preempted, token, by)
        return Round(seen.renewed, seen.unknown, len(lost), seen.failed)

    def _collect_due(self, now: float) -> list[tuple[Lease, bool]]:
        """Return the leases to renew, each with whether it was held before the request.

        Shorter leases are renewed together with those that are due: a store waits for a silent
        master for a part of the shortest lease in the request, and nothing else is renewed
        meanwhile.
        """
        with self._mutex:
            self._read_notes()
            self._drop_abandoned()
            idle = [lease for lease in self._leases.values() if lease.token not in self._in_flight]
            if now < self._retry_at or not any(lease.renew_at <= now for lease in idle):
                return []
            shortest = min(lease.seconds for lease in idle if lease.may_join(now))
            batch = [
                (lease, lease.held)
                for lease in idle
                if lease.may_join(now) or lease.seconds < shortest
            ]
            self._in_flight.update(lease.token for lease, _ in batch)
            return batch

    def _read_notes(self) -> None:
        """Turn notes into leases.

        ``forget`` removes notes without the mutex, so a note may disappear after the test for it.
        """
        with suppress(KeyError):
            while self._noted:
                _, (name, token, seconds, held, until, on_lost) = self._noted.popitem()
                self._leases[token] = Lease(
                    name, token, seconds, valid_until=until, held=held, on_lost=on_lost
                )

    def _drop_abandoned(self) -> None:
        """Stop renewing the leases of locks that nobody is left to release."""
        for lease in [lease for lease in self._leases.values() if lease.abandoned()]:
            del self._leases[lease.token]
            why = lease.ended()
            if why:
                left = lease.valid_until - self.clock.monotonic()
                self._warn(
                    "lock %r is no longer renewed: %s. It is free in %.1f s",
                    lease.name,
                    why,
                    left,
                )

    def _extend(self, leases: Sequence[Lease]) -> Plan[Sequence[Lease], Sequence[Renewal]]:
        """Return the answer for each lease; None if there was none."""
        try:
            answers = (yield leases) if leases else ()
            return _one_each(leases, answers)
        except BackendRefused as error:
            if len(leases) > 1:  # perhaps one lock's keys are refused: renew each by itself
                apart: list[Renewal] = []
                for lease in leases:
                    apart += yield from self._extend([lease])
                return apart
            if not leases[0].warned:
                self._warn("lock %r could not be renewed, trying again: %s", leases[0].name, error)
            leases[0].warned = True
        except BackendError as error:
            if not self._warned:
                number = number_of(len(leases), "lease")
                self._warn("%s could not be renewed, trying again: %s", number, error)
            self._warned = self._unanswered = True
        except Exception as error:  # noqa: BLE001  # logged, where that can be done
            self._complain("renewing %d leases failed, trying again", len(leases), error=error)
            self._unanswered = True
        return [None] * len(leases)

    def _warn(self, sentence: str, *args: object) -> None:
        self._tell(logger.warning, sentence, *args)

    def _complain(self, sentence: str, *args: object, error: BaseException) -> None:
        """Log an error with its traceback."""
        self._tell(partial(logger.error, sentence, *args, exc_info=error))

    def _apply_answers(
        self, batch: Sequence[tuple[Lease, bool]], answers: Sequence[Renewal], asked: float
    ) -> _Seen:
        """Apply the answers; ignore those for leases that are no longer watched."""
        seen = _Seen()
        with self._mutex:
            for (lease, was_held), held in zip(batch, answers, strict=True):
                if self._leases.get(lease.token) is lease:
                    seen.note(lease, asked, held=held, was_held=was_held)
            self._lose(seen.gone)
            self._schedule(
                [lease for (lease, _), held in zip(batch, answers, strict=True) if held is None],
                answered=bool(batch),
            )
        return seen

    def _schedule(self, failed: list[Lease], *, answered: bool) -> None:
        """Schedule the next attempt for failed leases, or for all if Redis did not answer.

        A lock that is refused, or whose master does not answer, does not delay the other leases.
        """
        if self._unanswered:
            self._unanswered = False
            self._back_off()
            return
        for lease in failed:
            lease.not_answered(self.clock.monotonic())
        if answered:
            self._failures, self._retry_at, self._warned = 0, 0.0, False

    def _back_off(self) -> None:
        """Send nothing for a pause that grows with each failure in a row."""
        pause = min(SLOW_RETRY, QUICK_RETRY * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        self._retry_at = self.clock.monotonic() + pause

    def _lapsed(self) -> list[Lease]:
        """Return the leases that have ended by the local clock, and are lost."""
        now = self.clock.monotonic()
        with self._mutex:
            return self._lose([lease for lease in self._leases.values() if lease.overdue(now)])

    def _lose(self, leases: list[Lease]) -> list[Lease]:
        """Mark leases as lost, stop renewing them, and return them."""
        for lease in leases:
            lease.lost = True
            del self._leases[lease.token]
        return leases

    def _end_renewals(self, batch: Iterable[tuple[Lease, bool]]) -> None:
        """Wake callers that wait for the end of these renewals."""
        with self._mutex:
            self._in_flight.difference_update(lease.token for lease, _ in batch)
            self._changed.notify_all()

    def _count(self, done: Round) -> None:
        self.renewed += done.renewed
        self.failed += done.failed

    def _next_pause(self, idle_until: float = math.inf) -> float:
        """Return the seconds until the next lease is due."""
        looks = [lease.next_look(self._retry_at) for lease in self._leases.values()]
        self._wakes_at = min(looks, default=idle_until)
        return self._wakes_at - self.clock.monotonic()


def _ignore(_token: str, _by: str) -> None:
    """Do nothing: only workers end a holder that is preempted."""


def _one_each(leases: Sequence[Lease], answers: Sequence[Renewal]) -> Sequence[Renewal]:
    """Return the answers.

    Raises:
        ValueError: there is not one for each lease.
    """
    if len(answers) != len(leases):
        msg = f"{len(leases)} leases asked for, {len(answers)} answers"
        raise ValueError(msg)
    return answers


# A module global, because os.register_at_fork cannot be undone: one hook serves all instances. It
# changes forked children only, so apps share no state.
_instances: weakref.WeakSet[Renewals] = weakref.WeakSet()


def instances() -> list[Renewals]:
    """Return all instances of this process."""
    return list(_instances)


def _begin_in_child() -> None:
    """Make a forked child own none of its parent's leases (docs/traps.md, L21)."""
    for each in _instances:
        each._begin()  # noqa: SLF001  # the hook is a part of the class


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)

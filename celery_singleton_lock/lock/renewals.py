"""Renew all leases of a process in one call; report a loss.

One thread renews every lease once it is older than a third of itself, so that a lease need not
exceed the run time of the work. What is due soon goes along in the same call, whatever the number
of locks.

A lease is **lost** when the store says so after it was seen held, or when its local validity, by
the monotonic clock and counted from just before the request was sent, has passed without a
confirmed renewal. "Not ours" ends the watch at once; "the store did not answer" is tried again
until the local deadline (two facts, two types: the habit of bsm/redislock's ``Refresh``). No error
ends the thread: that is how redisson's watchdog died for good (its issues 3194 and 3712).

Decisions are in :class:`Renewals`, for threads and for asyncio; the loops have nothing in them (the
habit of riverqueue's maintenance services).
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MethodType, ModuleType
from typing import Any, Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendError, BackendRefused
from celery_singleton_lock.core.lock_steps import Plan, carry_out

logger = logging.getLogger(__name__)

RENEW_AT: Final = 1 / 3
"""Age, as a part of the lease, at which a lease is renewed."""

GOES_ALONG_AT: Final = 1 / 6
"""Age, as a part of the lease, at which it is renewed together with another that is due."""

QUICK_RETRY: Final = 0.1
"""Seconds after which a failed call is tried again, doubled with each failure in a row."""

SLOW_RETRY: Final = 0.5
"""Most seconds between two tries of a failed call."""

LINGER: Final = 1.0
"""Seconds for which the thread stays when nothing is left to watch."""

STARTS: Final = 20
"""Threads started within :data:`LINGER` from which on an idle one is kept for the next lease."""

LONG: Final = 10.0
"""Seconds; :meth:`Watchdog.watch_later` only notes a lease that is at least as long."""

NOTES_READ: Final = 1.0
"""Most seconds for which a lease is only noted: well before a tenth of it has passed."""

PATIENCE: Final = 1.0
"""Most seconds for which :meth:`Watchdog.forget` waits for a renewal that is on its way."""

FAREWELL: Final = 0.1
"""Most seconds for which :meth:`Watchdog.end_if_idle` waits for the end of the thread."""

OnLost = Callable[[str, str], None]
"""Called with the lock's name and the token that lost it."""


def _here(call: Callable[..., None], *args: Any) -> None:
    call(*args)


@dataclass(frozen=True, slots=True)
class Round:
    """What one look did.

    Args:
        renewed: leases that the store confirmed.
        unknown: tokens that the store does not know, and that were not seen held before.
        lost: leases that were lost.
        failed: leases that were due when the store did not answer.
    """

    renewed: int = 0
    unknown: int = 0
    lost: int = 0
    failed: int = 0


class Lease:
    """What this process knows of one lease.

    Args:
        name: the lock's name.
        token: owner token.
        seconds: length of the lease.
        valid_until: monotonic time up to which the store certainly keeps it for us.
        held: whether it was seen held.
        on_lost: called once if it is lost. A bound method is kept weakly: when its object is gone
            nobody is left who could release the lock, and it is not renewed any more.

    Attributes:
        ended: returns why nobody is left who could release the lock; nothing if somebody is.
    """

    __slots__ = (
        "_listener",
        "ended",
        "held",
        "lost",
        "name",
        "renew_at",
        "seconds",
        "token",
        "valid_until",
    )

    def __init__(
        self,
        name: str,
        token: str,
        seconds: float,
        *,
        valid_until: float,
        held: bool = True,
        on_lost: OnLost | None = None,
    ) -> None:
        """Begin to know a lease."""
        self.name = name
        self.token = token
        self.seconds = seconds
        self.held = held
        self.lost = False
        self.valid_until = valid_until
        self.ended: Callable[[], str] = str
        self._listener = _listener(on_lost)
        self.confirm(valid_until)

    @property
    def asked(self) -> tuple[str, str, float]:
        """What a renewal asks a store for."""
        return self.name, self.token, self.seconds

    def confirm(self, valid_until: float) -> None:
        """Note up to when the store keeps the lease; the next renewal follows from that.

        No store shortens a lease, so of two answers the later end counts.
        """
        self.valid_until = max(self.valid_until, valid_until)
        self.renew_at = self.valid_until - self.seconds * (1 - RENEW_AT)

    def renewed(self, asked: float) -> None:
        """Note that a renewal sent at ``asked`` was confirmed."""
        self.held = True
        self.confirm(asked + self.seconds)

    def not_yet(self, asked: float) -> None:
        """Note that the store did not know the token at ``asked``; look again in a third."""
        self.renew_at = asked + self.seconds * RENEW_AT

    def goes_along(self, now: float) -> bool:
        """Whether the lease is old enough to be renewed together with another."""
        return self.renew_at - self.seconds * (RENEW_AT - GOES_ALONG_AT) <= now

    def overdue(self, now: float) -> bool:
        """Whether the lease was held, and its local validity has passed."""
        return self.held and now >= self.valid_until

    def next_look(self, retry_at: float) -> float:
        """Return when to look at this lease, if no renewal is sent before ``retry_at``."""
        renewal = max(self.renew_at, retry_at)
        return min(renewal, self.valid_until) if self.held else renewal

    def abandoned(self) -> bool:
        """Whether nobody is left who would release the lock."""
        return self._listener() is None or bool(self.ended())

    def report(self) -> None:
        """Tell who holds the lock that it is lost. Never raises."""
        listener = self._listener()
        try:
            if listener is not None:
                listener(self.name, self.token)
        except Exception:
            logger.exception("on_lost of lock %r raised", self.name)


def _listener(on_lost: OnLost | None) -> Callable[[], OnLost | None]:
    """Return a reference to ``on_lost``: weak for a bound method."""
    if isinstance(on_lost, MethodType):
        return weakref.WeakMethod(on_lost)
    kept = on_lost or _nobody
    return lambda: kept


def _nobody(_name: str, _token: str) -> None:
    """Hear of a loss that nobody asked to hear of."""


@dataclass(slots=True)
class _Seen:
    """What the store's answers to one renewal came to."""

    renewed: int = 0
    unknown: int = 0
    failed: int = 0
    gone: list[Lease] = field(default_factory=list)

    def note(self, lease: Lease, asked: float, *, held: bool | None, was_held: bool) -> None:
        """Count one answer. Not held is a loss only for what was seen held before the question."""
        if held is None:
            self.failed += 1
        elif held:
            lease.renewed(asked)
            self.renewed += 1
        elif was_held:
            self.gone.append(lease)
        else:
            lease.not_yet(asked)
            self.unknown += 1


class Renewals:
    """The leases of a process: what is due, and what is lost. Renews nothing by itself.

    Args:
        store: where the leases are. Its calls should time out well within the shortest lease, or
            a loss by silence is reported as late as they return.
        clock: source of monotonic seconds; the store's by default.
        threads: where ``RLock`` and ``Condition`` come from.
        tell: runs a call that logs, or reports a loss.

    Attributes:
        renewed: leases that were renewed so far.
        failed: leases that were due when the store did not answer.
    """

    def __init__(
        self,
        store: Any,
        clock: Clock | None = None,
        *,
        threads: ModuleType = threading,
        tell: Callable[..., None] = _here,
    ) -> None:
        """Watch nothing yet."""
        self.store: Final = store
        self.clock: Final = clock or store.clock
        self._threads: Final = threads
        self._tell: Final = tell
        self.renewed = 0
        self.failed = 0
        self._begin()
        _dogs.add(self)

    def _begin(self) -> None:
        """Own nothing: at first, and in a forked child, where threads and locks are stale."""
        # "with" on the bare RLock: an asynchronous exception (soft time limit) cannot land between
        # its acquire and the block, as it can in Condition.__enter__, which is Python code. And a
        # signal handler may release a lock while its thread is in here: reentrant.
        self._mutex = self._threads.RLock()
        self._changed = self._threads.Condition(self._mutex)
        self._leases: dict[str, Lease] = {}
        self._noted: dict[str, tuple[str, str, float, bool, float, OnLost]] = {}
        self._aloft: set[str] = set()
        self._retry_at = 0.0
        self._failures = 0
        self._wakes_at = 0.0
        self._stopping = False

    def _start(self) -> None:
        """See to it that somebody looks."""
        raise NotImplementedError

    def _hurry(self, lease: Lease) -> None:
        """See to it that somebody looks before this lease wants it."""
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
            held: False if the lock may not be taken yet (handed to a pool): that the store does
                not know the token is then no loss; it counts as held from its first renewal.
            valid_until: monotonic time up to which it is held; None: one lease from now.
            on_lost: called once with name and token, from the watchdog's thread, if it is lost; a
                bound method is kept weakly (see :class:`Lease`).

        Returns:
            What is known of the lease; kept up to date while it is watched.

        Raises:
            RuntimeError: no thread can be started.
        """
        until = self.clock.monotonic() + lease if valid_until is None else valid_until
        watched = Lease(name, token, lease, valid_until=until, held=held, on_lost=on_lost)
        self.keep(watched)
        return watched

    def keep(self, lease: Lease) -> None:
        """Renew a lease that is known already; see :meth:`watch`."""
        with self._mutex:
            self._leases[lease.token] = lease
            self._stopping = False
            self._start()
            self._hurry(lease)

    def drop(self, token: str) -> None:
        """Renew a lease no more; a renewal for it may be on its way."""
        if self._noted.pop(token, None) is None:
            with self._mutex:
                self._leases.pop(token, None)

    def confirm(self, token: str, valid_until: float | None = None) -> None:
        """Note that ``token`` was seen held by other means than a renewal.

        Args:
            token: owner token; unknown ones are ignored.
            valid_until: monotonic time up to which it is held; None: one lease from now.
        """
        with self._mutex:
            self._read_notes()
            lease = self._leases.get(token)
            if lease is not None:
                until = self.clock.monotonic() + lease.seconds
                lease.held = True
                lease.confirm(until if valid_until is None else valid_until)
                self._hurry(lease)

    def valid_until(self, token: str) -> float | None:
        """Return the monotonic time up to which the store certainly keeps a lease, if it is known.

        Args:
            token: owner token.
        """
        with self._mutex:
            self._read_notes()
            lease = self._leases.get(token)
            return None if lease is None else lease.valid_until

    def watching(self) -> tuple[str, ...]:
        """Return the tokens that are renewed."""
        with self._mutex:
            self._read_notes()
            return tuple(self._leases)

    def leases(self) -> tuple[Lease, ...]:
        """Return what is renewed."""
        with self._mutex:
            self._read_notes()
            return tuple(self._leases.values())

    def round(self) -> Plan[Sequence[Lease], Round]:
        """Renew what is due, and report what is lost; wishes for leases to be renewed."""
        asked = self.clock.monotonic()
        batch = self._collect(asked)
        try:
            answers = yield from self._extend([lease for lease, _ in batch])
            seen = self._settle(batch, answers, asked)
        finally:
            self._land(batch)
        lost = self._lapsed() + seen.gone
        for lease in lost:
            self._tell(lease.report)
        return Round(seen.renewed, seen.unknown, len(lost), seen.failed)

    def _collect(self, now: float) -> list[tuple[Lease, bool]]:
        """Return what is to be renewed, each with whether it was seen held before the call."""
        with self._mutex:
            self._read_notes()
            self._drop_abandoned()
            idle = [lease for lease in self._leases.values() if lease.token not in self._aloft]
            if now < self._retry_at or not any(lease.renew_at <= now for lease in idle):
                return []
            batch = [(lease, lease.held) for lease in idle if lease.goes_along(now)]
            self._aloft.update(lease.token for lease, _ in batch)
            return batch

    def _read_notes(self) -> None:
        """Watch what was only noted. Who forgets meanwhile finds it in one place or the other.

        ``forget`` takes no lock: between a test for a note and its removal the note may be gone.
        """
        with suppress(KeyError):
            while self._noted:
                _, (name, token, seconds, held, until, on_lost) = self._noted.popitem()
                self._leases[token] = Lease(
                    name, token, seconds, valid_until=until, held=held, on_lost=on_lost
                )

    def _drop_abandoned(self) -> None:
        """Forget the leases whose owner is gone: nobody would ever release them."""
        for lease in [lease for lease in self._leases.values() if lease.abandoned()]:
            del self._leases[lease.token]
            why = lease.ended()
            if why:
                left = lease.valid_until - self.clock.monotonic()
                self._warn(
                    "lock %r is not renewed any more: %s. It is free in %.1f s",
                    lease.name,
                    why,
                    left,
                )

    def _extend(self, leases: Sequence[Lease]) -> Plan[Sequence[Lease], Sequence[bool | None]]:
        """Ask the store; None for what it did not answer."""
        try:
            answers = (yield leases) if leases else ()
            return _one_each(leases, answers)
        except BackendRefused as error:
            if len(leases) > 1:  # one lock's keys may be refused: the others go on
                apart: list[bool | None] = []
                for lease in leases:
                    apart += yield from self._extend([lease])
                return apart
            self._warn("lock %r could not be renewed, trying again: %s", leases[0].name, error)
        except BackendError as error:
            self._warn("%d leases could not be renewed, trying again: %s", len(leases), error)
        except Exception as error:  # noqa: BLE001  # logged, where that can be done
            self._complain("renewing %d leases failed, trying again", len(leases), error=error)
        return [None] * len(leases)

    def _warn(self, sentence: str, *args: object) -> None:
        self._tell(logger.warning, sentence, *args)

    def _complain(self, sentence: str, *args: object, error: BaseException) -> None:
        """Log an error with its traceback, wherever that is done."""
        self._tell(partial(logger.error, sentence, *args, exc_info=error))

    def _settle(
        self, batch: Sequence[tuple[Lease, bool]], answers: Sequence[bool | None], asked: float
    ) -> _Seen:
        """Note the answers; those for leases that were forgotten meanwhile do not count."""
        seen = _Seen()
        with self._mutex:
            for (lease, was_held), held in zip(batch, answers, strict=True):
                if self._leases.get(lease.token) is lease:
                    seen.note(lease, asked, held=held, was_held=was_held)
            self._lose(seen.gone)
            self._schedule(failed=None in answers, answered=bool(batch))
        return seen

    def _schedule(self, *, failed: bool, answered: bool) -> None:
        """After a failure try again soon, and less often the longer it lasts."""
        if failed:
            self._back_off()
        elif answered:
            self._failures, self._retry_at = 0, 0.0

    def _back_off(self) -> None:
        """Send nothing for a moment."""
        pause = min(SLOW_RETRY, QUICK_RETRY * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        self._retry_at = self.clock.monotonic() + pause

    def _lapsed(self) -> list[Lease]:
        """Return what is lost because its local validity has passed."""
        now = self.clock.monotonic()
        with self._mutex:
            return self._lose([lease for lease in self._leases.values() if lease.overdue(now)])

    def _lose(self, leases: list[Lease]) -> list[Lease]:
        """Forget leases as lost, and return them."""
        for lease in leases:
            lease.lost = True
            del self._leases[lease.token]
        return leases

    def _land(self, batch: Iterable[tuple[Lease, bool]]) -> None:
        """Let those go on who wait for the end of this renewal."""
        with self._mutex:
            self._aloft.difference_update(lease.token for lease, _ in batch)
            self._changed.notify_all()

    def _count(self, done: Round) -> None:
        """Add up."""
        self.renewed += done.renewed
        self.failed += done.failed

    def _next_pause(self, idle_until: float = math.inf) -> float:
        """Return seconds until something is due, and remember when that is."""
        looks = [lease.next_look(self._retry_at) for lease in self._leases.values()]
        self._wakes_at = min(looks, default=idle_until)
        return self._wakes_at - self.clock.monotonic()


def _one_each(leases: Sequence[Lease], answers: Sequence[bool | None]) -> Sequence[bool | None]:
    """Return the answers, one for each lease.

    Raises:
        ValueError: there are more, or less.
    """
    if len(answers) != len(leases):
        msg = f"{len(leases)} leases asked for, {len(answers)} answers"
        raise ValueError(msg)
    return answers


class Watchdog(Renewals):
    """The thread that renews. It starts with the first watch, and ends when idle for a while.

    Safe to use from many threads; in a forked child it watches nothing and starts anew.

    Args:
        store: where the leases are. Its calls should time out well within the shortest lease, or
            a loss by silence is reported as late as they return.
        clock: source of monotonic seconds.
        threads: where ``RLock``, ``Condition`` and ``Thread`` come from; the module ``native``
            gives the system's own where gevent or eventlet has replaced them.
        tell: runs a call that logs, or reports a loss; where threads are native and all else is
            green, it has to make the call where the greenlets live.
    """

    def _begin(self) -> None:
        super()._begin()
        self._thread: Any = None
        self._started: deque[float] = deque(maxlen=STARTS)
        self._last_round = 0.0
        self.restarts = 0

    def watch_later(
        self, name: str, token: str, lease: float, *, held: bool, on_lost: OnLost
    ) -> None:
        """Like :meth:`watch`, for what has mostly ended before its first renewal.

        A long lease is noted, without a lock or a call to the thread, which reads the notes once a
        second. To forget it before that takes as little.
        """
        if lease < LONG:
            self.watch(name, token, lease, held=held, on_lost=on_lost)
            return
        until = self.clock.monotonic() + lease
        self._noted[token] = (name, token, lease, held, until, on_lost)
        # Asked behind the note, since a thread that ends looks for notes after it has said so.
        thread = self._thread
        if thread is None or self._stopping or not thread.is_alive():
            with self._mutex:
                self._stopping = False
                self._start()

    def forget(self, token: str, patience: float = PATIENCE) -> None:
        """Renew a lease no more. After this has returned no renewal for it is sent.

        If a renewal for it is on its way, this waits for the answer, so that it cannot overtake
        the caller's release; but not for ever, since a release must not hang on a store that does
        not answer. A renewal that is later still does no harm: ``extend`` neither creates nor
        revives a lease, and no token is used twice.

        Args:
            token: owner token; unknown ones are ignored.
            patience: most seconds to wait; 0 for a caller that must not wait (an event loop).
        """
        if self._noted.pop(token, None) is not None:
            return
        with self._mutex:
            self._leases.pop(token, None)
            if patience > 0:
                self._changed.wait_for(lambda: token not in self._aloft, patience)

    def stop(self, *, flush: bool = False, timeout: float = 2.0) -> None:
        """End the thread; a later watch starts it again.

        Args:
            flush: renew everything once more, for holders that outlive the watchdog.
            timeout: most seconds to wait for the thread.
        """
        thread = self._dismiss()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        if flush:
            self._make_all_due()
            self.run_once()

    def end_if_idle(self, *, for_good: bool = False) -> None:
        """End the thread now if nothing is left to watch, unless leases follow in quick succession.

        Without this, an idle thread ends after :data:`LINGER`.

        Args:
            for_good: no lease follows.
        """
        with self._mutex:
            thread = self._thread
            if thread is None or self._leases or self._noted:
                return
            if self._in_quick_succession() and not for_good:
                return
            self._dismiss()
            if thread is threading.current_thread():
                return
            # Not join alone: with a lease that comes meanwhile the thread goes on.
            self._changed.wait_for(
                lambda: self._thread is not thread or not self._stopping, FAREWELL
            )
            ends = self._thread is not thread
        if ends:
            thread.join(FAREWELL)

    def _in_quick_succession(self) -> bool:
        """Return whether a thread per lease would mean many threads."""
        started = self._started
        return len(started) == STARTS and self.clock.monotonic() - started[0] < LINGER

    def last_round(self) -> float | None:
        """Return the seconds since the thread's last round; None if there is nothing to watch.

        With leases to watch there is a round at least once a second. A larger number means that
        the thread hangs, or that it has died.
        """
        with self._mutex:
            idle = not self._leases and not self._noted
        return None if idle else self.clock.monotonic() - self._last_round

    def look_after(self) -> None:
        """Start the thread again if it has died although there are leases to watch."""
        with self._mutex:
            if self._leases or self._noted:
                self._start()

    def run_once(self) -> Round:
        """Renew what is due, and report what is lost."""
        return carry_out(self.round(), self._ask)

    def _ask(self, leases: Sequence[Lease]) -> Sequence[bool | None]:
        """Return the store's answers."""
        answers: Sequence[bool | None] = self.store.extend([each.asked for each in leases])
        return answers

    def _make_all_due(self) -> None:
        """Renew everything at the next look."""
        with self._mutex:
            self._read_notes()
            self._retry_at = 0.0
            for lease in self._leases.values():
                lease.renew_at = self.clock.monotonic()

    def _start(self) -> None:
        """Start the thread, unless it lives."""
        if self._thread is not None:
            if self._thread.is_alive():
                return
            self.restarts += 1
            self._tell(logger.error, "the watchdog's thread has died; a new one is started")
        self._wakes_at = 0.0
        self._last_round = self.clock.monotonic()
        self._started.append(self._last_round)
        self._thread = self._threads.Thread(target=self._run, name="csl-watchdog", daemon=True)
        self._thread.start()

    def _hurry(self, lease: Lease) -> None:
        """Wake the thread if the lease wants a look before it would wake by itself."""
        if lease.next_look(self._retry_at) < self._wakes_at:
            self._changed.notify_all()

    def _run(self) -> None:
        """Look whenever something is due, until there is nothing to watch."""
        while self._run_safely():
            pass

    def _run_safely(self) -> bool:
        """Wait and look once; whatever goes wrong, the thread lives (L12).

        Returns:
            Whether to go on.
        """
        try:
            if not self._rest():
                return False
            self._count(self.run_once())
        except (Exception, SystemExit) as error:  # noqa: BLE001  # logged, where that can be done
            self._after_error(error)
        return True

    def _after_error(self, error: BaseException) -> None:
        """Tell of an error, and pause, so that one that stays does not fill the log."""
        with suppress(Exception):
            self._complain("the watchdog goes on after an error", error=error)
        with suppress(Exception), self._mutex:
            self._back_off()
            self._changed.wait(QUICK_RETRY)

    def _rest(self) -> bool:
        """Wait until something is due; False when the thread is to end."""
        with self._mutex:
            idle_since = self.clock.monotonic()
            while not self._stopping:
                self._last_round = self.clock.monotonic()
                self._read_notes()
                pause = self._next_pause(idle_since + LINGER)
                if pause <= 0 and self._leases:
                    return True
                if pause <= 0 and self._ends():
                    return False
                self._changed.wait(min(max(pause, 0.0), NOTES_READ))
            self._thread = None
            self._changed.notify_all()
            return False

    def _ends(self) -> bool:
        """Let the thread end, unless a lease is noted at this moment."""
        me, self._thread = self._thread, None
        if self._noted:
            self._thread = me
        return self._thread is None

    def _dismiss(self) -> Any:
        """Tell the thread to end, and return it."""
        with self._mutex:
            self._stopping = True
            self._changed.notify_all()
            return self._thread


# A module global, but nothing that two apps would share: os.register_at_fork cannot be undone, so
# there is one hook for all watchdogs that happen to live, and it changes forked children only.
_dogs: weakref.WeakSet[Renewals] = weakref.WeakSet()


def living() -> list[Watchdog]:
    """Return the watchdogs of this process that are threads."""
    return [dog for dog in list(_dogs) if isinstance(dog, Watchdog)]


def _begin_in_child() -> None:
    """Let no watchdog of a forked child believe that it owns its parent's leases (L21)."""
    for dog in _dogs:
        dog._begin()  # noqa: SLF001  # the hook is a part of the class


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)

"""The watchdog: a thread that renews all leases of one store in one call.

A lease is renewed after a third of its length, so it need not exceed the run time of the work.
Leases that are due soon are renewed in the same call.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.core.model import Renewal
from celery_singleton_lock.lock.lease import Lease, OnLost
from celery_singleton_lock.lock.renewals import QUICK_RETRY, Renewals, Round, instances, run_here

logger: Final = logging.getLogger(__name__)

LINGER: Final = 1.0
"""Seconds for which an idle thread stays."""

STARTS: Final = 20
"""If so many threads were started within :data:`LINGER`, an idle one waits for the next lease."""

LONG: Final = 10.0
"""Seconds; :meth:`Watchdog.watch_later` only notes leases that are at least this long."""

NOTES_READ: Final = 1.0
"""Longest time in seconds until the thread reads a noted lease: a tenth of :data:`LONG`."""

PATIENCE: Final = 1.0
"""Longest time in seconds for which :meth:`Watchdog.forget` waits for a renewal in flight."""

STOP_WAIT: Final = 0.1
"""Longest time in seconds for which :meth:`Watchdog.end_if_idle` waits for the thread's end."""


class Watchdog(Renewals):
    """Renews leases in a thread, which starts with the first lease and ends when it is idle.

    Thread-safe. In a forked child it has no leases.

    Args:
        store: the store of the leases. Its calls must time out well within the shortest lease:
            a loss without an answer is reported when they return.
        clock: source of monotonic seconds.
        threads: module with ``RLock``, ``Condition`` and ``Thread``;
            :mod:`celery_singleton_lock.core.native_threads` under gevent and eventlet.
        tell: runs a call that logs, or reports a loss. With native threads under gevent or
            eventlet it must run the call in the greenlets' event loop.
        linger: seconds for which an idle thread stays.
    """

    def __init__(
        self,
        store: Any,
        clock: Clock | None = None,
        *,
        threads: ModuleType = threading,
        tell: Callable[..., None] = run_here,
        linger: float = LINGER,
    ) -> None:
        super().__init__(store, clock, threads=threads, tell=tell)
        self._linger: Final = linger

    def _begin(self) -> None:
        super()._begin()
        self._thread: Any = None
        self._started: deque[float] = deque(maxlen=STARTS)
        self._last_round = 0.0
        self.restarts: int = 0

    def watch_later(
        self, name: str, token: str, lease: float, *, held: bool, on_lost: OnLost
    ) -> None:
        """Renew a lease that is usually released before its first renewal; see :meth:`watch`.

        A long lease is only noted: this takes no mutex and does not wake the thread, which reads
        the notes once a second. :meth:`forget` removes a note without the mutex, too.
        """
        if lease < LONG:
            self.watch(name, token, lease, held=held, on_lost=on_lost)
            return
        until = self.clock.monotonic() + lease
        self._noted[token] = (name, token, lease, held, until, on_lost)
        # Read _thread after writing the note: a thread that ends clears it, then looks for notes.
        thread = self._thread
        if thread is None or self._stopping or not thread.is_alive():
            with self._mutex:
                self._stopping = False
                self._start()

    def forget(self, token: str, patience: float = PATIENCE) -> None:
        """Stop renewing a lease. No renewal of it is sent after this returns.

        If a renewal is in flight, wait for its answer, so that the caller's release cannot
        overtake it. The wait is limited: a release must not hang if Redis does not answer. A later
        renewal has no effect, because ``extend`` neither creates nor revives a lease, and tokens
        are used once.

        Args:
            token: owner token; an unknown one is ignored.
            patience: longest wait in seconds; 0 for a caller that must not wait (an event loop).
        """
        if self._noted.pop(token, None) is not None and token not in self._leases:
            return  # a grant that waited for its slot had a shorter lease, which is not noted
        with self._mutex:
            self._leases.pop(token, None)
            if patience > 0:
                self._changed.wait_for(lambda: token not in self._in_flight, patience)

    def stop(self, *, flush: bool = False, timeout: float = 2.0) -> None:
        """End the thread; the next lease starts it again.

        Args:
            flush: renew all leases once more, for holders that outlive the watchdog.
            timeout: longest wait for the thread in seconds.
        """
        thread = self._request_stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        if flush:
            self._make_all_due()
            self.run_once()

    def end_if_idle(self, *, for_good: bool = False) -> None:
        """End the thread now if there are no leases, unless threads were started often just before.

        Without this call an idle thread ends after ``linger`` seconds.

        Args:
            for_good: no lease follows, so end the thread in any case.
        """
        with self._mutex:
            thread = self._thread
            if thread is None or self._leases or self._noted:
                return
            if self._restarts_often() and not for_good:
                return
            self._request_stop()
            if thread is threading.current_thread():
                return
            # join() alone could wait too long: with a new lease the thread does not end.
            self._changed.wait_for(
                lambda: self._thread is not thread or not self._stopping, STOP_WAIT
            )
            ends = self._thread is not thread
        if ends:
            thread.join(STOP_WAIT)

    def _restarts_often(self) -> bool:
        """Return whether ending the thread after each lease would start many threads."""
        started = self._started
        return len(started) == STARTS and self.clock.monotonic() - started[0] < LINGER

    def last_round(self) -> float | None:
        """Return the seconds since the thread's last round; None without leases.

        With leases there is a round at least once a second. A larger number means that the thread
        hangs or has died.
        """
        with self._mutex:
            idle = not self._leases and not self._noted
        return None if idle else self.clock.monotonic() - self._last_round

    def look_after(self) -> None:
        """Start the thread again if it has died while there are leases."""
        with self._mutex:
            if self._leases or self._noted:
                self._start()

    def run_once(self) -> Round:
        """Renew the leases that are due, and report the lost ones."""
        return carry_out(self.round(), self._ask)

    def _ask(self, leases: Sequence[Lease]) -> Sequence[Renewal]:
        answers: Sequence[Renewal] = self.store.extend([each.asked for each in leases])
        return answers

    def _make_all_due(self) -> None:
        with self._mutex:
            self._read_notes()
            self._retry_at = 0.0
            for lease in self._leases.values():
                lease.renew_at = self.clock.monotonic()

    def _start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is not None:
            if self._thread.is_alive():
                return
            self.restarts += 1
            self._tell(logger.error, "the watchdog's thread has died; a new one is started")
        self._wakes_at = 0.0
        self._last_round = self.clock.monotonic()
        self._started.append(self._last_round)
        thread = self._threads.Thread(target=self._run, name="csl-watchdog", daemon=True)
        thread.start()
        self._thread = thread

    def _wake_for(self, lease: Lease) -> None:
        """Wake the thread if the lease is due before the thread would wake by itself."""
        if lease.next_look(self._retry_at) < self._wakes_at:
            self._changed.notify_all()

    def _run(self) -> None:
        while self._run_safely():
            pass

    def _run_safely(self) -> bool:
        """Run one round. An error does not end the thread (docs/traps.md, L12).

        Returns:
            Whether to continue.
        """
        try:
            if not self._rest():
                return False
            self._count(self.run_once())
        except (Exception, SystemExit) as error:  # noqa: BLE001  # logged, where that can be done
            self._after_error(error)
        return True

    def _after_error(self, error: BaseException) -> None:
        """Log an error, and pause, so that a permanent one does not fill the log."""
        with suppress(Exception):
            self._complain("the watchdog continues after an error", error=error)
        with suppress(Exception), self._mutex:
            self._back_off()
            self._changed.wait(QUICK_RETRY)

    def _rest(self) -> bool:
        """Wait until a lease is due; return False if the thread must end."""
        with self._mutex:
            idle_since = self.clock.monotonic()
            while not self._stopping:
                self._last_round = self.clock.monotonic()
                self._read_notes()
                pause = self._next_pause(idle_since + self._linger)
                if pause <= 0 and self._leases:
                    return True
                if pause <= 0 and self._ends():
                    return False
                self._changed.wait(min(max(pause, 0.0), NOTES_READ))
            self._thread = None
            self._changed.notify_all()
            return False

    def _ends(self) -> bool:
        """Clear ``_thread`` and return True, unless a lease was noted meanwhile."""
        me, self._thread = self._thread, None
        if self._noted:
            self._thread = me
        return self._thread is None

    def _request_stop(self) -> Any:
        """Ask the thread to end, and return it."""
        with self._mutex:
            self._stopping = True
            self._changed.notify_all()
            return self._thread


def watchdogs() -> list[Watchdog]:
    """Return the watchdogs of this process."""
    return [each for each in instances() if isinstance(each, Watchdog)]

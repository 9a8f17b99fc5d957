"""Sweeps the locks that are due, and delivers parked tasks that no longer take a lock."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent.grant_inbox import GrantInbox
from celery_singleton_lock.worker.agent.rate_timers import RateTimers
from celery_singleton_lock.worker.agent.republish import Republisher
from celery_singleton_lock.worker.agent_commands import RecordPublished, SweepLock
from celery_singleton_lock.worker.dispatch.in_flight import InFlight
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets

logger: Final = logging.getLogger(__name__)

MOST: Final = 100
"""Most locks that one call sweeps, and that each worker of a large fleet sweeps in a tick."""

ALL: Final = 1000
"""Most locks that the workers of a small fleet sweep in a tick, all together."""

PER_SLOT: Final = 4
"""Number of granted messages that may wait here, for each slot of the pool."""

FEW: Final = 10
"""Most locks that one round sweeps while as many granted messages wait here as may."""

PATIENCE: Final = 5.0
"""Seconds without a consumer after which a parked message is republished. A worker that restarts
within this time gets the message from Redis."""

IDLE: Final = 5.0
"""Seconds to the next search for parked tasks that take no lock, if there were none."""

UNSWEPT: Final = 10.0
"""Seconds by which a sweep must be overdue to be reported."""

REPORT_EVERY: Final = 60.0
"""Seconds between two such reports."""

NAMED: Final = 5
"""Most locks that a report names."""


class Sweeper:
    """Sweeps the locks of all workers, but takes only as many grants as its pool can run soon.

    Args:
        store: the agent's store.
        worker: id of this worker.
        realm: hash of the broker's URL.
        inbox: receives the grants.
        in_flight: the messages that are in flight.
        republisher: sends messages that no live worker consumes to the broker.
        partial_lock_sets: renews the locks that parked messages hold.
        modes: which tasks take their locks now.
        capacity: number of tasks that the worker's pool runs at once.
        timers: sweep locks at the times at which their rates allow the next start.
        workers: returns the number of workers of the same queues.

    Attributes:
        behind: whether further locks may be due that this worker may sweep before the next tick.
        swept: number of locks that were swept.
        let_run: number of messages that were delivered to run without a lock.
    """

    def __init__(
        self,
        store: Store,
        *,
        worker: str,
        realm: str,
        inbox: GrantInbox,
        in_flight: InFlight,
        republisher: Republisher,
        partial_lock_sets: PartialLockSets,
        modes: Modes,
        capacity: int,
        timers: RateTimers,
        workers: Callable[[], int],
    ) -> None:
        self.behind: bool = False
        self.swept: int = 0
        self.let_run: int = 0
        self._store = store
        self._worker = worker
        self._realm = realm
        self._inbox = inbox
        self._in_flight = in_flight
        self._republisher = republisher
        self._partial_lock_sets = partial_lock_sets
        self._modes = modes
        self._capacity = capacity
        self._timers = timers
        self._workers = workers
        self._clock: Clock = store.clock
        self._left = 0
        self._full = False
        self._next_relaxed = 0.0
        self._next_report = math.inf

    def _room(self) -> int:
        """Return the number of further grants that the pool can soon run."""
        return PER_SLOT * self._capacity - self._in_flight.backlog() - self._inbox.arriving()

    def _room_for_sweep(self) -> int:
        """Return the room for the grants of a sweep.

        If the last sweep found as many locks as it asked for, the grants that wait in Redis count
        as waiting here. A grant that waits there for five seconds is void. If sweeps granted faster
        than this worker reads, all would be void when they are read.
        """
        room = self._room()
        return room - self._store.inbox_size(self._worker) if self._full and room > 0 else room

    # -- these methods raise BackendError if Redis does not answer --------------------------------

    def sweep(self) -> None:
        """Sweep locks that are due.

        Without room, only some, and their grants do not come here before others: all workers may be
        that busy for hours, and leases and waits must end nevertheless.
        """
        self.behind, self._left = False, max(MOST, ALL // max(1, self._workers()))
        if self._inbox.retired:
            return
        room = self._room_for_sweep()
        if room > 0:
            self._sweep_for(room)
        else:
            self._sweep_due(FEW, "")

    def sweep_on(self) -> None:
        """Sweep further locks of this tick, as the pool runs what was granted.

        A pool with few slots may run many short tasks in a second. If it swept four locks for each
        slot then, it would be idle while other locks are free and have waiters. And if many locks
        only have messages that no worker takes, those of dead holders would wait behind them.
        """
        self._sweep_for(self._room_for_sweep())

    def _sweep_for(self, room: int) -> None:
        most = min(room, self._left, MOST)
        if most > 0:
            self.behind = False  # if Redis does not answer, the next tick sweeps again
            found = self._sweep_due(most, self._inbox.taker())
            self._left -= found
            self._full = found >= most
            self.behind = self._full and self._left > 0

    def _sweep_due(self, most: int, taker: str) -> int:
        """Sweep at most so many locks that are due; return how many there were."""
        names = list(self._store.take_due_locks(most))
        self.swept += len(names)
        self.sweep_locks(names, taker)
        return len(names)

    def sweep_locks(self, names: list[str], taker: str | None = None) -> None:
        """Sweep locks, and grant each to its next waiter.

        Args:
            names: the locks.
            taker: the worker that takes their grants if no other one has a free slot; empty: any.
                None: this one.
        """
        worker = self._inbox.taker() if taker is None else taker
        messages = self._store.sweep_and_grant_many(
            names, worker=worker, realm=self._realm, patience=PATIENCE
        )
        for name, seconds in messages.next_starts.items():
            self._timers.restart(name, seconds)
        for _, group in groupby(messages, attrgetter("name")):
            self._republisher.send_on(list(group))

    def sweep_at_timer(self, command: SweepLock) -> None:
        """Sweep a lock whose rate allows the next start now."""
        if self._timers.is_due(command.name) and not self._inbox.retired:
            began = self._clock.monotonic()
            self.swept += 1
            self.sweep_locks([command.name])
            self._timers.forget(command.name, began)

    def record(self, command: RecordPublished) -> None:
        """Delete messages that the broker has, and sweep their lock; queue others again."""
        first = command.messages[0]
        tokens = [message.token for message in command.messages]
        self._store.record_publish_result(
            first.name, first.seal, tokens, sent=command.sent, worker=self._inbox.taker()
        )
        if not command.sent:
            return
        for message in command.messages:
            self._partial_lock_sets.give_back(message)
        self.sweep_locks([first.name])

    def relax(self) -> None:
        """Deliver parked tasks that no longer take a lock, as fast as the pool runs them.

        If no lock has a waiter, the next search is later.
        """
        tasks, room, now = self._modes.relaxed(), self._room(), self._clock.monotonic()
        if not tasks or room <= 0 or now < self._next_relaxed or self._inbox.retired:
            return
        names = list(self._store.waited_for())
        if not names:
            self._next_relaxed = now + IDLE
            return
        names = random.sample(names, min(len(names), room, MOST))
        most = max(1, room // len(names))
        self.let_run += self._store.deliver_unlocked(
            names, tasks, most, worker=self._worker, realm=self._realm
        )

    def report_unswept_locks(self) -> None:
        """Report locks with parked messages that no worker sweeps. For workers without grants."""
        if self._clock.monotonic() < self._next_report:
            return
        self._next_report = self._clock.monotonic() + REPORT_EVERY
        unswept = self._store.unswept_locks(UNSWEPT)
        names = [name for name in unswept if self._store.inspect(name).bodies]
        if names:
            logger.error(
                "celery-singleton-lock: messages are parked for the lock %s, and no worker has "
                "swept it for %d s. They stay parked and do not run: this worker has failed a "
                "check at its start (see its warning) and takes no grants. Start a worker that "
                "passes the check and consumes their queues.",
                ", ".join(map(repr, names[:NAMED])) + (" and others" if len(names) > NAMED else ""),
                UNSWEPT,
            )

    # -- called by the main loop ------------------------------------------------------------------

    def modes_changed(self) -> None:
        """Search in the next round for parked tasks that no longer take a lock."""
        self._next_relaxed = 0.0

    def start_reports(self) -> None:
        """Report from now on locks with parked messages that no worker sweeps."""
        self._next_report = 0.0

"""Turns for parked messages that nobody else gives them: their locks lapsed, or are not kept."""

from __future__ import annotations

import logging
import math
import random
from itertools import groupby
from operator import attrgetter
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.worker.agent.republish import Courier
from celery_singleton_lock.worker.dispatch.in_flight import Flights
from celery_singleton_lock.worker.agent.grant_inbox import Inbox
from celery_singleton_lock.worker.partial_lock_sets import Kept
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.worker.agent_commands import Left
from celery_singleton_lock.store.base import Store

logger = logging.getLogger(__name__)

MOST: Final = 100
"""Most locks that one round looks at."""

PER_SLOT: Final = 4
"""Granted messages that may wait here for each slot of the pool."""

PATIENCE: Final = 5.0
"""Seconds for which no worker must have taken a message before it is sent to the broker: one that
restarts meanwhile finds it where it was."""

IDLE: Final = 5.0
"""Seconds between two looks for parked tasks of which the locks are not kept, if there are none."""

NEGLECTED: Final = 10.0
"""Seconds after which a lock at which nobody has looked, though one should, is told of."""

TALE: Final = 60.0
"""Seconds between two times that it is told."""

NAMED: Final = 5
"""Most locks that are named then."""


class Sweeper:
    """Looks after the locks of all workers, and takes no more grants than its own can soon run.

    Args:
        store: the agent's.
        worker: id of this worker.
        realm: hash of the broker.
        inbox: where the grants arrive.
        flights: who is on the way already.
        courier: sends messages that no live worker takes to the broker.
        kept: what parked messages keep meanwhile.
        modes: which tasks keep their locks now.
        capacity: tasks that the worker's pool runs at once.

    Attributes:
        swept: how many locks were looked after.
        let_run: how many messages were given their turn though their locks are not kept.
    """

    def __init__(
        self,
        store: Store,
        *,
        worker: str,
        realm: str,
        inbox: Inbox,
        flights: Flights,
        courier: Courier,
        kept: Kept,
        modes: Modes,
        capacity: int,
    ) -> None:
        """Have looked at nothing yet."""
        self.swept = 0
        self.let_run = 0
        self._store = store
        self._worker = worker
        self._realm = realm
        self._inbox = inbox
        self._flights = flights
        self._courier = courier
        self._kept = kept
        self._modes = modes
        self._capacity = capacity
        self._clock: Clock = store.clock
        self._next_relaxed = 0.0
        self._next_tale = math.inf

    def _room(self) -> int:
        """Return how many more grants the pool can soon run."""
        return PER_SLOT * self._capacity - self._flights.backlog()

    # -- these ask Redis, and raise BackendError if it does not answer ----------------------------

    def sweep(self) -> None:
        """Look at locks that want it."""
        room = self._room()
        if room > 0 and not self._inbox.retired:
            names = list(self._store.take_due(min(room, MOST)))
            self.swept += len(names)
            self.kick(names)

    def kick(self, names: list[str]) -> None:
        """Have locks granted to who is next."""
        strays = self._store.kick_many(
            names, worker=self._inbox.taker(), realm=self._realm, patience=PATIENCE
        )
        for _, group in groupby(strays, attrgetter("name")):
            self._courier.send_on(list(group))

    def left(self, order: Left) -> None:
        """Forget messages that the broker has, or let them queue again; go on with the next."""
        first = order.strays[0]
        tokens = [stray.token for stray in order.strays]
        self._store.left(
            first.name, first.seal, tokens, sent=order.sent, worker=self._inbox.taker()
        )
        if not order.sent:
            return
        for stray in order.strays:
            self._kept.give_back(stray)
        self.kick([first.name])

    def relax(self) -> None:
        """Give parked tasks that do not keep their locks their turn, as fast as the pool runs them.

        Where nobody waits for a lock, look less often.
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
        self.let_run += self._store.let_run(
            names, tasks, most, worker=self._worker, realm=self._realm
        )

    def tell_of_neglected(self) -> None:
        """Where the worker runs no parked messages: tell if no other worker does it either."""
        if self._clock.monotonic() < self._next_tale:
            return
        self._next_tale = self._clock.monotonic() + TALE
        neglected = self._store.neglected(NEGLECTED)
        names = [name for name in neglected if self._store.inspect(name).bodies]
        if names:
            logger.error(
                "celery-singleton-lock: messages are parked for the lock %s, and no worker has "
                "looked after them for %d s. They are kept, and do not run: this worker does not "
                "pass its self-test (see its warning at start), and none that does is there. "
                "Start one that consumes their queues.",
                ", ".join(map(repr, names[:NAMED])) + (" and others" if len(names) > NAMED else ""),
                NEGLECTED,
            )

    # -- what changes its pace --------------------------------------------------------------------

    def modes_changed(self) -> None:
        """Look at once for messages that do not keep their locks any more."""
        self._next_relaxed = 0.0

    def stand_aside(self) -> None:
        """Tell of messages that nobody runs from now on."""
        self._next_tale = 0.0

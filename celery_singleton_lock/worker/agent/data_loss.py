"""Whether the locks' Redis has lost data, and which messages that this worker parked are gone."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Final

from celery_singleton_lock.core.clock import Clock, wall_time
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.events import Event, ParkedLost
from celery_singleton_lock.core.model import Ending, Identity, ParkedMessage, base_of
from celery_singleton_lock.worker.agent_commands import Errand
from celery_singleton_lock.worker.dispatch.recently_ended import RecentEnds
from celery_singleton_lock.worker.lock_header import leaving
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_queue import Tray
from celery_singleton_lock.message_text import printable

logger = logging.getLogger(__name__)

INTERVAL: Final = 3.0
"""Seconds between two looks at what is still parked, and at which Redis answers."""

SETTLE: Final = 5.0
"""Seconds in which the other workers may tell what they have in hand, before a loss is reported."""

MOST: Final = 10_000
"""Most messages that are tracked; the oldest are given up first."""

AT_ONCE: Final = 500
"""Most messages that one look asks for."""

NAMED: Final = 10
"""Most tasks that the log line names."""


class DataLoss:
    """Tracks the messages that this worker has parked, and reports those that Redis has lost.

    All but the counts is for the agent's thread.

    Args:
        store: the agent's.
        worker: id of this worker.
        ends: the tasks that have ended here lately.
        in_hand: returns the tokens of what is in this worker's hands.
        orders: the agent's.
        tell: tells whoever wants to know.

    Attributes:
        lost: how many messages were lost.
        untracked: how many were given up, since too many were parked.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        ends: RecentEnds,
        in_hand: Callable[[], Iterable[str]],
        orders: Tray,
        tell: Callable[[Event], None],
    ) -> None:
        """Track nothing yet."""
        self.lost = 0
        self.untracked = 0
        self._store = store
        self._worker = worker
        self._ends = ends
        self._in_hand = in_hand
        self._orders = orders
        self._tell = tell
        self._clock: Clock = store.clock
        self._tracked: OrderedDict[str, ParkedMessage] = OrderedDict()
        self._identity: Identity | None = None
        self._next_look = 0.0
        self._check: _Check | None = None

    def track(self, message: ParkedMessage) -> None:
        """Note a message that was parked."""
        self._tracked[message.token] = message
        if len(self._tracked) > MOST:
            self._tracked.popitem(last=False)
            self.untracked += 1

    def look_soon(self) -> None:
        """Look with the next round: Redis was away."""
        self._ends.doubt()
        self._next_look = 0.0

    def look(self) -> None:
        """Forget what is not parked any more; if Redis has lost data, find out what.

        Raises:
            BackendError: Redis did not answer.
        """
        now = self._clock.monotonic()
        if self._check is not None and now >= self._check.begins_at:
            self._go_on_with(self._check)
        elif self._check is None and now >= self._next_look:
            self._compare()
            self._next_look = now + INTERVAL

    def _compare(self) -> None:
        """Look at some of the messages, and only then whether it is the Redis that had them."""
        some = list(islice(self._tracked.values(), AT_ONCE))
        kept = self._store.kept(some)
        identity = self._store.identify()
        before, self._identity = self._identity, identity
        reason = "" if before is None else identity.differs(before)
        if reason:
            self._begin_check(reason)
            return
        for message, is_kept in zip(some, kept, strict=True):
            if is_kept:
                self._tracked.move_to_end(message.token)
            else:
                del self._tracked[message.token]

    def finish(self) -> None:
        """Look at once, and report what is lost: the worker ends.

        Raises:
            BackendError: Redis did not answer.
        """
        if self._check is None:
            self._compare()
        while self._check is not None:
            self._go_on_with(self._check)

    # -- after a loss -----------------------------------------------------------------------------

    def _begin_check(self, reason: str) -> None:
        """Tell Redis what it may not know; look what it has lost once all workers have done so."""
        self._ends.doubt()
        self._check = _Check(reason, list(self._tracked.values()), self._clock.monotonic() + SETTLE)
        ended = self._ends.stamps()
        known = {base_of(token) for token in self._in_hand()}
        known.update(base_of(stamp.token) for stamp in ended)
        for stamp in ended:
            for each in leaving(stamp):
                self._orders.put(Errand(partial(self._end_again, each.name, each.token)))
        self._orders.put(Errand(partial(self._vouch, sorted(known))))

    def _end_again(self, name: str, token: str) -> None:
        try:
            self._store.release(name, token, Ending.FINAL)
        except BackendError as error:
            logger.debug("celery-singleton-lock: the end of %s was not told again: %s", name, error)

    def _vouch(self, tokens: list[str]) -> None:
        try:
            self._store.vouch(tokens)
        except BackendError as error:
            logger.debug("celery-singleton-lock: not told what this worker has: %s", error)

    def _go_on_with(self, check: _Check) -> None:
        some = check.messages[:AT_ONCE]
        traced = self._store.traced(some)
        check.lost += [m for m, is_known in zip(some, traced, strict=True) if not is_known]
        del check.messages[:AT_ONCE]
        if not check.messages:
            self._check = None
            self._end_check(check)

    def _end_check(self, check: _Check) -> None:
        for message in check.lost:
            self._tracked.pop(message.token, None)
        if not check.lost:
            logger.info(
                "celery-singleton-lock: the locks' Redis may have lost data: %s. No message that "
                "this worker has parked is lost (%d had not ended).",
                check.reason,
                check.count,
            )
            return
        self.lost += len(check.lost)
        events = [ParkedLost(each.lock, each.task, each.task_id) for each in check.lost]
        for event in events:
            self._tell(event)
        self._log(check)
        at = wall_time()
        self._store.note_lost(
            {
                each.task_id: json.dumps(
                    {"lock": each.lock, "task": each.task, "worker": self._worker, "at": at}
                )
                for each in check.lost
            }
        )

    def _log(self, check: _Check) -> None:
        named = ", ".join(f"{each.task}[{each.task_id}]" for each in check.lost[:NAMED])
        more = len(check.lost) - NAMED
        logger.error(
            "celery-singleton-lock: the locks' Redis has lost data: %s. %d of the %d messages that "
            "this worker has parked are not there any more. They were acknowledged to the broker, "
            "so their tasks do not run unless they are sent again: %s%s. A task that a worker has "
            "ended within %d s before the loss may be among them. `locks doctor` and `locks why` "
            "tell of them.%s",
            check.reason,
            len(check.lost),
            check.count,
            printable(named),
            f" and {more} more" if more > 0 else "",
            INTERVAL,
            f" {self.untracked} older ones were not tracked." if self.untracked else "",
            extra={"lock_event": "lock-parked-lost", "lock_count": len(check.lost)},
        )


class _Check:
    """One search for what was lost.

    Args:
        reason: why it was begun.
        messages: what is to be looked for; shrinks.
        begins_at: monotonic time.
    """

    def __init__(self, reason: str, messages: list[ParkedMessage], begins_at: float) -> None:
        self.reason = reason
        self.messages = messages
        self.count = len(messages)
        self.begins_at = begins_at
        self.lost: list[ParkedMessage] = []

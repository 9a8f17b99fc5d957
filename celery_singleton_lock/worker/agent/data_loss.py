"""Detects that Redis has lost data, and finds the lost messages that this worker has parked."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Final

from celery_singleton_lock.core.clock import Clock, wall_time
from celery_singleton_lock.core.model import SCHEMA, SCHEMAS, Ending, Identity
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.core.parked_message import ParkedMessage
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.events import Event, ParkedLost
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.worker.agent_commands import Call, EndUnique
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.recently_ended import REMEMBERED, RecentEnds
from celery_singleton_lock.worker.lock_header import LockHeader, in_order_of_release

logger: Final = logging.getLogger(__name__)

INTERVAL: Final = 3.0
"""Seconds between two checks of the parked messages and of the server's identity."""

REPORT_AFTER: Final = 5.0
"""Seconds in which the other workers report their running tasks, before a loss is reported."""

MOST: Final = 10_000
"""Most messages that are tracked. With more, the oldest are no longer tracked."""

AT_ONCE: Final = 500
"""Most messages that one check asks for."""

NAMED: Final = 10
"""Most tasks that the log line names."""


class DataLoss:
    """Tracks the messages that this worker has parked, and reports those that Redis has lost.

    Use it only in the agent's thread, apart from the counts.

    Args:
        store: the agent's store.
        worker: id of this worker.
        ends: the deliveries that have ended here in the last minute.
        in_hand: returns the lock headers of the messages that this worker has.
        commands: the queue of the agent.
        tell: reports an event.
        schema: version of the data model that the tasks of this worker need.
        newer: called if a newer version of this package has raised the schema to one that is not
            known here.

    Attributes:
        lost: number of lost messages.
        untracked: number of messages that are not tracked, since too many were parked.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        ends: RecentEnds,
        in_hand: Callable[[], Iterable[LockHeader]],
        commands: AgentQueue,
        tell: Callable[[Event], None],
        schema: str = SCHEMA,
        newer: Callable[[], None] = lambda: None,
    ) -> None:
        self.lost: int = 0
        self.untracked: int = 0
        self._store = store
        self._worker = worker
        self._ends = ends
        self._in_hand = in_hand
        self._commands = commands
        self._tell = tell
        self._clock: Clock = store.clock
        self._tracked: OrderedDict[str, ParkedMessage] = OrderedDict()
        self._unique_ends: deque[tuple[float, EndUnique]] = deque(maxlen=MOST)
        self._identity: Identity | None = None
        self._schema, self._newer = schema, newer
        self._next_look = 0.0
        self._check: _Check | None = None

    def track(self, message: ParkedMessage) -> None:
        """Note a message that was parked."""
        self._tracked[message.token] = message
        if len(self._tracked) > MOST:
            self._tracked.popitem(last=False)
            self.untracked += 1

    def note_unique_end(self, end: EndUnique) -> None:
        """Note that Redis has heard of the end of a unique call."""
        self._unique_ends.append((self._clock.monotonic(), end))

    def look_soon(self) -> None:
        """Check in the next round, since Redis did not answer for a time."""
        self._ends.doubt()
        self._next_look = 0.0

    def look(self) -> None:
        """Stop tracking messages that are no longer parked, or find out which ones Redis has lost.

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
        """Check some of the messages, then whether Redis was replaced.

        In this order, a message that is missing because Redis was replaced does not count as ended.
        """
        some = list(islice(self._tracked.values(), AT_ONCE))
        kept = self._store.has_messages(some)
        identity, before = self._store.identify(), self._identity
        if before is not None:
            identity = identity.completed(before)
        self._identity = identity
        self._check_schema()
        reason = "" if before is None else identity.differs(before)
        if reason:
            self._begin_check(reason, is_certain=before is not None and identity.has_lost(before))
            return
        for message, is_kept in zip(some, kept, strict=True):
            if is_kept:
                self._tracked.move_to_end(message.token)
            else:
                del self._tracked[message.token]

    def _check_schema(self) -> None:
        """Check whether a newer version has raised the schema.

        If Redis has no schema, this writes it: the worker started without Redis, or Redis has lost
        data. A full Redis refuses the write. The check for lost messages continues nevertheless.
        """
        try:
            found = self._store.schema(self._schema)
        except BackendError as error:
            logger.debug("celery-singleton-lock: the schema was not written: %s", error)
            return
        if found not in SCHEMAS:
            self._newer()

    def finish(self) -> None:
        """Check at once, and report lost messages, since the worker stops.

        Raises:
            BackendError: Redis did not answer.
        """
        if self._check is None:
            self._compare()
        while self._check is not None:
            self._go_on_with(self._check)

    # -- after a loss -----------------------------------------------------------------------------

    def _begin_check(self, reason: str, *, is_certain: bool) -> None:
        """Send Redis the ends and tokens that it may have lost; check when all workers did."""
        self._ends.doubt()
        begins_at = self._clock.monotonic() + REPORT_AFTER
        self._check = _Check(reason, list(self._tracked.values()), begins_at, is_certain=is_certain)
        ended = self._ends.headers()
        ended_parts = _parts(ended)
        # A message with several locks was parked under the token of another one before.
        here = {base_of(each.token) for each in _parts(self._in_hand())}
        for each in ended_parts:
            if base_of(each.token) not in here:  # otherwise it runs again, since its end was lost
                self._commands.put(Call(partial(self._end_again, each.name, each.token)))
        self._end_unique_again()
        known = here.union(base_of(each.token) for each in ended_parts)
        self._commands.put(Call(partial(self._vouch, sorted(known))))

    def _end_unique_again(self) -> None:
        """End the entries of unique calls once more, since they may be back: nothing else does."""
        since = self._clock.monotonic() - REMEMBERED
        for at, end in self._unique_ends:
            if at > since:
                self._commands.put(end)
        self._unique_ends.clear()  # each is noted again when it is carried out

    def _end_again(self, name: str, token: str) -> None:
        try:
            self._store.release(name, token, Ending.REPEAT, worker=self._worker)
        except BackendError as error:
            logger.debug("celery-singleton-lock: %s was not released again: %s", name, error)

    def _vouch(self, tokens: list[str]) -> None:
        try:
            self._store.vouch(tokens)
        except BackendError as error:
            logger.debug("celery-singleton-lock: its tokens were not reported: %s", error)

    def _go_on_with(self, check: _Check) -> None:
        some = check.messages[:AT_ONCE]
        traced = self._store.has_traces(some)
        here = {base_of(each.token) for each in _parts(self._in_hand())}
        lost = [m for m, is_known in zip(some, traced, strict=True) if not is_known]
        # A former delivery may run here again: Redis has granted it once more.
        check.lost += [m for m in lost if not (m.former and base_of(m.token) in here)]
        del check.messages[:AT_ONCE]
        if not check.messages:
            self._check = None
            self._end_check(check)

    def _end_check(self, check: _Check) -> None:
        for message in check.lost:
            self._tracked.pop(message.token, None)
        if not check.lost:
            logger.log(
                logging.WARNING if check.is_certain else logging.INFO,
                "celery-singleton-lock: the locks' Redis %s lost data: %s. No message that this "
                "worker has parked is lost (%d had not ended). Messages of workers that ended "
                "before are not known here.",
                "has" if check.is_certain else "may have",
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
            "this worker has parked are lost. They were acknowledged to the broker, so these "
            "tasks do not run unless you send them again: %s%s. A task that has ended within %d s "
            "before the loss may be among them. `locks doctor` and `locks why` show them.%s",
            check.reason,
            len(check.lost),
            check.count,
            printable(named),
            f" and {more} more" if more > 0 else "",
            INTERVAL,
            f" {self.untracked} older ones were not tracked." if self.untracked else "",
            extra={"lock_event": "lock-parked-lost", "lock_count": len(check.lost)},
        )


def _parts(headers: Iterable[LockHeader]) -> list[LockHeader]:
    """Return a header for each lock of these deliveries."""
    return [each for header in headers for each in in_order_of_release(header)]


class _Check:
    """One search for lost messages.

    Args:
        reason: why Redis may have lost data.
        messages: the messages that are not checked yet.
        begins_at: monotonic time at which to begin.
        is_certain: whether it has certainly lost data.
    """

    def __init__(
        self, reason: str, messages: list[ParkedMessage], begins_at: float, *, is_certain: bool
    ) -> None:
        self.reason = reason
        self.is_certain = is_certain
        self.messages = messages
        self.count = len(messages)
        self.begins_at = begins_at
        self.lost: list[ParkedMessage] = []

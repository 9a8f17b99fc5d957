"""Parks, requeues or ends the messages whose lock is busy, and acknowledges them.

The agent does the I/O and reports each result here, in the main loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from celery.worker.state import task_ready, task_reserved

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import LockError
from celery_singleton_lock.events import TaskBlocked, TaskDuplicate
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.worker.agent_commands import CheckBlocked, Park
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.header_factory import HeaderFactory
from celery_singleton_lock.worker.dispatch.held_messages import HeldMessages
from celery_singleton_lock.worker.dispatch.in_flight import InFlight
from celery_singleton_lock.worker.dispatch.notifier import FRESH, Notifier
from celery_singleton_lock.worker.dispatch.pool_exit import PoolExit
from celery_singleton_lock.worker.dispatch.requeued_messages import RequeuedMessages
from celery_singleton_lock.worker.dispatch.task_leases import TaskLeases
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.message_stage import BEGUN, Stage
from celery_singleton_lock.worker.not_started import cannot_wait
from celery_singleton_lock.worker.request import LockedRequest, about

logger: Final = logging.getLogger(__name__)


class BlockedMessages:
    """Parks, requeues, holds or ends a message whose lock is busy.

    Args:
        rules: task -> its options; raises ConfigurationError if they are invalid.
        send: sends a request to the pool with a lock header.
        header_factory: creates the lock headers.
        in_flight: the messages that are in flight.
        held: holds messages whose lock Redis refuses.
        requeues: the messages that are held back to be requeued.
        pool_exit: stops tracking a message that leaves the pool.
        leases: renews the locks of partial lock sets.
        commands: the queue of the agent.
        notifier: sends events.
        clock: source of monotonic seconds.
    """

    def __init__(
        self,
        *,
        rules: Callable[[Any], LockOptions],
        send: Callable[[LockedRequest, LockHeader], None],
        header_factory: HeaderFactory,
        in_flight: InFlight,
        held: HeldMessages,
        requeues: RequeuedMessages,
        pool_exit: PoolExit,
        leases: TaskLeases,
        commands: AgentQueue,
        notifier: Notifier,
        clock: Clock,
    ) -> None:
        self._rules = rules
        self._send = send
        self._header_factory = header_factory
        self._in_flight = in_flight
        self._held = held
        self._requeues = requeues
        self._pool_exit = pool_exit
        self._leases = leases
        self._commands = commands
        self._notifier = notifier
        self._clock = clock

    # -- what the dispatcher decides --------------------------------------------------------------

    def park(self, request: LockedRequest) -> None:
        """Have the agent park a message, which is acknowledged when it is parked."""
        request.undecide()
        self._in_flight.park(request)
        task_ready(request)
        self._leases.renew_parked(request.lock_header, request.options(self._rules))
        self._commands.put(Park(request))

    def park_elsewhere(self, request: LockedRequest, header: LockHeader) -> None:
        """Park a message at another lock of its lock set: the busy one, or the first again."""
        self._pool_exit.left(request, began=request.stage in BEGUN, gone=False)
        self._in_flight.leave(request.lock_header)
        request.lock_header = header
        self.park(request)

    def requeue(self, request: LockedRequest, waits_for: str, *, is_twin: bool) -> None:
        """Requeue a message, or end its task if ``lock_wait_timeout`` is over."""
        error = self._requeues.in_vain(request)
        if error is None:
            self._requeues.begin(request, waits_for, is_twin=is_twin)
        else:
            self._fail(request, error)

    def _fail(self, request: LockedRequest, error: Exception) -> None:
        """End a task with an error, or as skipped, in a pool slot."""
        task_reserved(request)
        self._send(request, request.lock_header._replace(error=error))

    # -- what the agent reports -------------------------------------------------------------------

    def parked(
        self,
        request: LockedRequest,
        holder: str,
        rank: int,
        waits_for: str = "",
        seen_at: float = math.inf,
    ) -> None:
        """Acknowledge a message that has been parked.

        Args:
            request: the message.
            holder: the holder of its lock, as text.
            rank: its rank in the queue.
            waits_for: why the lock was not granted; see ``TaskBlocked``.
            seen_at: local monotonic time at which Redis was asked for that.
        """
        self._note_parked(request, Stage.PARKED)
        request.acknowledge()
        request.was_blocked = True
        event = TaskBlocked(*about(request), holder=holder, rank=rank, waits_for=waits_for)
        self._notifier.parked(request, event)
        self.tell_blocked(request, event, seen_at)

    def tell_blocked(self, request: LockedRequest, event: TaskBlocked, seen_at: float) -> None:
        """Send the event of a blocked message, if no other worker can have sent a later one.

        Otherwise the agent first asks Redis whether the message is still blocked. Celery's
        ``State`` would show BLOCKED for a task whose STARTED or REVOKED arrived before it.
        """
        if not self._notifier.sends_events():
            return
        if self._clock.monotonic() - seen_at <= FRESH:
            self._notifier.send(request, event)
        else:
            self._commands.put(CheckBlocked(request))

    def twinned(self, request: LockedRequest) -> None:
        """Acknowledge a message that is stored as the twin of another copy."""
        self._note_parked(request, Stage.PARKED)
        request.acknowledge()
        self._notifier.tell(request, TaskDuplicate(*about(request), verdict="twin"))

    def dropped(self, request: LockedRequest) -> None:
        """Acknowledge a duplicate without running it: the original is parked or has ended."""
        logger.info(
            "Task %s[%s] does not run: this delivery counts as a copy of a message that is parked "
            "for the lock %r, or has ended.",
            request.task.name,
            printable(request.id),
            request.lock_header.name,
        )
        self._note_parked(request, Stage.ENDED)
        task_ready(request)
        request.acknowledge()
        self._notifier.tell(request, TaskDuplicate(*about(request), verdict="done"))

    def _note_parked(self, request: LockedRequest, to: Stage) -> None:
        request.move(to)
        self._in_flight.parked(request)

    def requeued(self, copies: Sequence[LockedRequest]) -> None:
        """Acknowledge copies of a message, since the broker has accepted a further one."""
        for request in copies:
            if self._requeues.end(request):
                request.acknowledge()

    def refused(self, request: LockedRequest, reason: str, waits_for: str = "") -> None:
        """Fail or skip a task whose message cannot be parked."""
        self._in_flight.parked(request)
        name, options = request.lock_header.name, request.options(self._rules)
        self._fail(request, cannot_wait(name, options, reason, waits_for))

    def never_starts(self, request: LockedRequest, error: LockError) -> None:
        """Fail a task whose start costs more than the rate of its lock allows."""
        self._in_flight.parked(request)
        self._fail(request, error)

    def hold_refused(self, request: LockedRequest, reason: str) -> None:
        """Hold a message for which Redis has refused the ``park`` script, and try again later."""
        self._held.hold_refused(request, reason, request.lock_header.name)
        self._in_flight.parked(request)  # last: it dispatches the messages that arrived later

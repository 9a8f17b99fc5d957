"""Sends parked messages to the pool: Redis has granted their lock, or they must end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from celery.worker.state import revoked as revoked_tasks
from celery.worker.state import task_ready, task_reserved

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.events import TaskDuplicate
from celery_singleton_lock.worker.agent_commands import Release
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.blocked_messages import BlockedMessages
from celery_singleton_lock.worker.dispatch.header_factory import HeaderFactory
from celery_singleton_lock.worker.dispatch.in_flight import InFlight
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.dispatch.pool_exit import PoolExit
from celery_singleton_lock.worker.dispatch.task_leases import TaskLeases
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.lock_set_header import begun_again, renewed
from celery_singleton_lock.worker.message_stage import OFFERED, Arrival, Stage
from celery_singleton_lock.worker.request import DispatcherCallbacks, LockedRequest, about

logger: Final = logging.getLogger(__name__)


class Deliveries:
    """The messages that come from the queue of a lock instead of the broker.

    Args:
        rules: task -> its options; raises ConfigurationError if they are invalid.
        dispatch: dispatches a request, as if the broker had delivered it.
        callbacks: what a request calls at each step.
        header_factory: creates the lock headers.
        in_flight: the messages that are in flight.
        blocked: parks messages.
        pool_exit: stops tracking a message that leaves the pool.
        leases: renews the leases of grants.
        commands: the queue of the agent.
        notifier: sends events.
    """

    def __init__(
        self,
        *,
        rules: Callable[[Any], LockOptions],
        dispatch: Callable[[LockedRequest], None],
        callbacks: DispatcherCallbacks,
        header_factory: HeaderFactory,
        in_flight: InFlight,
        blocked: BlockedMessages,
        pool_exit: PoolExit,
        leases: TaskLeases,
        commands: AgentQueue,
        notifier: Notifier,
    ) -> None:
        self._rules = rules
        self._dispatch = dispatch
        self._callbacks = callbacks
        self._header_factory = header_factory
        self._in_flight = in_flight
        self._blocked = blocked
        self._pool_exit = pool_exit
        self._leases = leases
        self._commands = commands
        self._notifier = notifier

    def deliver(self, delivery: Delivery, request: LockedRequest) -> None:
        """Send a parked message to the pool: Redis has granted its lock, or it must end."""
        if delivery.token in self._in_flight.by_token:
            return
        request.lock_header = self._header_factory.delivered(request, delivery)
        request.dispatcher, request.was_blocked = self._callbacks, True
        request.arrival = Arrival(delivered=True, returns=delivery.returns)
        if self._pool_exit.ends.forgotten(request.lock_header.token):
            self._end_again(request)
            return
        again = self._from_the_start(delivery, request)
        if again is not None:
            self._blocked.park_elsewhere(request, again)
            return
        self._in_flight.add(request)
        self._notifier.delay_events(request)
        if delivery.verdict == "revoked":
            revoked_tasks.add(request.id)  # this worker may not have received the revoke
        if request.revoked():
            self._pool_exit.end(request, gone=True)
            return
        if delivery.verdict == "granted":  # otherwise another worker with a free slot may end it
            self._leases.renew_granted(request.lock_header, request.options(self._rules).lease)
        task_reserved(request)
        self._notifier.delivered(request, delivery)
        self._dispatch(request)

    def withdraw(self, request: LockedRequest) -> None:
        """End a request whose message another worker has received."""
        if request.stage in OFFERED:
            task_ready(request)
            self._pool_exit.leave(request, OFFERED, Stage.WITHDRAWN, gone=False)

    def withdraw_revoked(self, token: str) -> None:
        """End the request of a revoked task that has lost its grant: Redis delivers its message.

        It has not claimed the grant, so it has not begun, whatever its stage is.
        """
        request = self._in_flight.of(token)
        if request is None or not request.lock_header.granted:
            return
        header, accepted = request.lock_header, request.stage is Stage.ACCEPTED
        self.withdraw(request)
        if header.lock_set is not None and not accepted:  # otherwise the pool gives the others back
            self._commands.put(Release(header, Ending.FINAL))

    def undelivered(self, delivery: Delivery) -> None:
        """Stop tracking a delivery for which no request could be created."""
        request = self._in_flight.by_token.pop(delivery.token, None)
        if request is not None:
            request.move(Stage.ENDED)
            self._in_flight.leave(request.lock_header)
        self._leases.forget_token(delivery.token)

    def _end_again(self, request: LockedRequest) -> None:
        """Release a message that has already run here: Redis has no record of its end."""
        logger.warning(
            "%s has ended here, and the locks' Redis has no record of that: it does not run again",
            request,
        )
        request.move(Stage.ENDED)
        header = request.lock_header
        if header.lock_set is not None and header.lock_set.here.token != header.token:
            # The set has the tokens of an earlier delivery. Its other locks are released, or lapse.
            header = header._replace(lock_set=None)
        self._commands.put(Release(header, Ending.FINAL))
        self._notifier.tell(request, TaskDuplicate(*about(request), verdict="ended"))

    def _from_the_start(self, delivery: Delivery, request: LockedRequest) -> LockHeader | None:
        """Return the header of a delivery that must start over at its first lock, or None."""
        header, lock_set = request.lock_header, request.lock_header.lock_set
        granted = delivery.verdict == "granted"
        if lock_set is None:
            return self._with_locks_added(delivery, request) if granted else None
        if lock_set.here.token == header.token:
            return None
        own = renewed(lock_set, header.token)  # an earlier delivery may still run
        request.lock_header = header = header._replace(lock_set=own)
        return begun_again(header, lock_set, frees=()) if own is None and granted else None

    def _with_locks_added(self, delivery: Delivery, request: LockedRequest) -> LockHeader | None:
        """Add the locks that a task has got since its message was parked for its only lock."""
        header = request.lock_header
        lock_set = self._header_factory.lock_set_now(request, header)
        if lock_set is None:
            return None
        if lock_set.here.name != header.name:
            return begun_again(header, lock_set, frees=())
        own = lock_set.granted(delivery.fencing_token)
        request.lock_header = header._replace(lock_set=own, announce=True)
        return None

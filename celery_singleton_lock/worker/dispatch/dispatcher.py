"""Dispatches every locked message in the worker's main process, and connects what handles it.

:class:`Dispatcher` decides where a message goes first. ``header_factory`` computes its lock,
``in_flight`` tracks the messages in the pool, ``pool_callbacks`` handles what the pool reports,
``pool_exit`` handles what leaves it, ``blocked_messages`` parks, ``deliveries`` brings parked
messages back, ``held_messages`` holds messages while Redis does not answer, and ``notifier`` sends
events. ``message_stage`` lists the stages of a message.

This code runs in the main loop, or in a callback thread of the pool. It never waits for the locks'
Redis: a slow Redis must not stop the worker's heartbeats and its other tasks. What needs I/O is a
command in the agent's queue. Calls to the watchdog are direct: leases must be renewed even while
the agent waits for Redis.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from celery.worker import state
from celery.worker.state import task_ready, task_reserved

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.worker.agent_commands import LookUp
from celery_singleton_lock.worker.agent_queue import AgentQueue
from celery_singleton_lock.worker.dispatch.blocked_messages import BlockedMessages
from celery_singleton_lock.worker.dispatch.deliveries import Deliveries
from celery_singleton_lock.worker.dispatch.header_factory import HeaderFactory
from celery_singleton_lock.worker.dispatch.held_messages import HeldMessages
from celery_singleton_lock.worker.dispatch.in_flight import InFlight
from celery_singleton_lock.worker.dispatch.late_parks import LateParks
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.dispatch.pool_callbacks import PoolCallbacks
from celery_singleton_lock.worker.dispatch.pool_exit import PoolExit
from celery_singleton_lock.worker.dispatch.requeued_messages import RequeuedMessages
from celery_singleton_lock.worker.dispatch.task_leases import TaskLeases
from celery_singleton_lock.worker.lock_header import HEADER_KEY, NO_HEADER, LockHeader, options_of
from celery_singleton_lock.worker.loop_channel import guarded
from celery_singleton_lock.worker.message_stage import (
    UNBEGUN,
    WAITING_FOR_REDIS,
    Stage,
    illegal_moves,
)
from celery_singleton_lock.worker.request import LockedRequest

logger: Final = logging.getLogger(__name__)
_clock = SystemClock()


class Dispatcher:
    """Decides where each locked message goes when it arrives, and when Redis answers again.

    Args:
        header_factory: creates the lock headers.
        rules: task -> its options; raises ConfigurationError if they are invalid.
        forward: Celery's function that sends a request to the pool.
        commands: the queue of the agent, which does the I/O.
        leases: renews the leases of the worker's tasks.
        backend_failed: called when Redis has not answered a task.
        publish_at_exit: sends a message to the broker at once, since Redis may not have it.
        notifier: sends events.
        prefetch: raises (+1) or lowers (-1) the worker's prefetch count.
        after_pool: makes a call after the pool has its next task; None if it has no event loop.
        children: whether tasks run in child processes, which may die. In other pools Celery's pid
            of a task may be the number of a greenlet.

    Attributes:
        children: as given.
        in_flight: the messages that are in flight.
        held: the messages that are held until Redis answers for their lock.
        requeues: the messages that are held back to be requeued.
        pool_exit: stops tracking the tasks that leave the pool.
        blocked: parks and requeues messages.
        pool_callbacks: handles what requests and pool processes report.
        deliveries: brings parked messages to the pool.
        alone: names of tasks whose requests do not report their end, as the checks at start found.
            Their messages bypass the dispatcher, and the pool acquires their locks.
        waits_for_rate: returns whether tasks of this worker wait for the rate of a lock. Then later
            ones are parked without a slot. The agent sets it.
    """

    def __init__(  # connects all parts of a worker
        self,
        *,
        header_factory: HeaderFactory,
        rules: Callable[[Any], LockOptions],
        forward: Callable[[Any], None],
        commands: AgentQueue,
        leases: TaskLeases,
        backend_failed: Callable[[], None],
        publish_at_exit: Callable[[LockedRequest], None],
        notifier: Notifier,
        prefetch: Callable[[int], None],
        after_pool: Callable[[Callable[[], None]], None] | None = None,
        children: bool = True,
    ) -> None:
        self._header_factory = header_factory
        self._after_pool = after_pool
        self._rules = rules
        self._forward = forward
        self._commands = commands
        self._publish_at_exit = publish_at_exit
        self.children: Final = children
        self._closing = False
        self.alone: frozenset[str] = frozenset()
        self.waits_for_rate: Callable[[str], bool] = lambda _name: False
        self.in_flight: InFlight = InFlight(self._wait)
        self.held: HeldMessages = HeldMessages(
            commands=commands,
            notifier=notifier,
            prefetch=prefetch,
            backend_failed=backend_failed,
            clock=_clock,
        )
        self._late_parks = LateParks(prefetch)
        self.requeues: RequeuedMessages = RequeuedMessages(
            header_factory=header_factory,
            rules=rules,
            commands=commands,
            notifier=notifier,
            prefetch=prefetch,
        )
        self.pool_exit: PoolExit = PoolExit(
            in_flight=self.in_flight,
            leases=leases,
            commands=commands,
            notifier=notifier,
            clock=_clock,
            children=children,
        )
        self.blocked: BlockedMessages = BlockedMessages(
            rules=rules,
            send=self._send,
            header_factory=header_factory,
            in_flight=self.in_flight,
            held=self.held,
            requeues=self.requeues,
            pool_exit=self.pool_exit,
            leases=leases,
            commands=commands,
            notifier=notifier,
            clock=_clock,
        )
        self.pool_callbacks: PoolCallbacks = PoolCallbacks(
            rules=rules,
            in_flight=self.in_flight,
            held=self.held,
            blocked=self.blocked,
            pool_exit=self.pool_exit,
            leases=leases,
            commands=commands,
            notifier=notifier,
            clock=_clock,
        )
        self.deliveries: Deliveries = Deliveries(
            rules=rules,
            dispatch=self,
            callbacks=self.pool_callbacks,
            header_factory=header_factory,
            in_flight=self.in_flight,
            blocked=self.blocked,
            pool_exit=self.pool_exit,
            leases=leases,
            commands=commands,
            notifier=notifier,
        )

    # -- to the pool ------------------------------------------------------------------------------

    def __call__(self, request: Any) -> None:
        """Handle a message from Celery. Replaces ``consumer.on_task_request``."""
        # A task that takes no lock may have our Request class too, from a base class of the user.
        tells = (
            isinstance(request, LockedRequest)
            and hasattr(request.task, "_lock_extension")
            and (request.task.name not in self.alone or request.lock_header.granted)
        )
        if not tells:
            return self._forward(request)
        if self._closing and request.lock_header is NO_HEADER:
            return None  # received while the consumer is cancelled: the broker delivers it again
        try:
            self._take(request)
        except Exception as error:
            if state.should_terminate is not None:
                raise  # it may be one of Celery's signal handler: the broker delivers it again
            logger.exception("celery-singleton-lock could not handle %s", request)
            self._send(request, self._failing(request, error))
        return None

    def _failing(self, request: LockedRequest, error: Exception) -> LockHeader:
        """Return the header with which a message that could not be dispatched fails in a slot."""
        header = request.lock_header
        if header.granted:
            return header._replace(error=error)
        self.in_flight.remove(header)
        self.in_flight.leave(header)  # it asks for no lock, so later messages do not wait for it
        return self._header_factory.unlocked(request, error)

    def _take(self, request: LockedRequest) -> None:
        if request.lock_header is NO_HEADER:
            if self._header_factory.is_to_reject(request):
                return self._reject(request)
            request.dispatcher, request.after_pool = self.pool_callbacks, self._after_pool
            copy_of = self._header_factory.add_header(request)
            if copy_of is not None and request.lock_header.name:
                request.move(Stage.LOOKED_UP)
                return self._commands.put(LookUp(request, *copy_of))
        self._route(request, request.lock_header)
        return None

    @staticmethod
    def _reject(request: LockedRequest) -> None:
        """Reject a message that was published to be rejected.

        Its task rejected it after it had been parked, so the broker no longer had the original.
        """
        request.move(Stage.ENDED)
        task_ready(request)
        request.reject(requeue=False)

    def _route(self, request: LockedRequest, header: LockHeader) -> None:
        options = request.options(self._rules)
        if not header.name or header.error is not None:
            return self._send(request, header)
        if request.is_unanswered:  # the pool might not run it, and could not keep it
            return self._wait(request)
        # A granted message does not wait: Redis has just answered, and even a full Redis accepts
        # claims.
        waits = self.held.redis_is_down and not header.granted
        patient = options.on_backend_error == "retry" or self.held.redis_is_refused
        if waits and patient:
            return self._hold(request)
        if patient and not header.granted and self.held.hold_while_refused(request):
            return None
        own = options if header.lock_set is None else options_of(header, 0, options)
        can_park = not header.granted and not self.held.redis_is_down
        parks = can_park and options.parks
        settles = options.debounce is not None or options.follows
        if (can_park and settles) or (parks and self.waits_for_rate(header.name)):
            return self._wait(request)
        if self.in_flight.admit(request, own.limit, parks=parks):
            self._send(request, header)
        return None

    def _hold(self, request: LockedRequest) -> None:
        """Hold a message while Redis does not answer; dispatch it if Redis answers again."""
        if not self.held.hold_while_down(request):
            self(request)

    def _wait(self, request: LockedRequest) -> None:
        """Park a message, or hold it if Redis does not answer or refuses its lock."""
        if not (self.held.hold_while_down(request) or self.held.hold_while_refused(request)):
            self.blocked.park(request)

    def _send(self, request: LockedRequest, header: LockHeader) -> None:
        request.lock_header = header
        request.move(Stage.DISPATCHED)
        request.request_dict[HEADER_KEY] = tuple(header)
        if self.children:
            request.spare_decoding()
        if header.acks_early:
            request.withhold_ack()
        self._forward(request)

    def not_sent(self, request: LockedRequest) -> None:
        """Return a message that could not be sent to the pool: to its place, if it was parked."""
        gone = request.lock_header.granted
        self.pool_exit.leave(request, UNBEGUN, Stage.GIVEN_BACK, gone=gone)

    def redispatch(self, request: LockedRequest) -> None:
        """Dispatch a copy whose original is no longer in Redis."""
        request.move(Stage.RECEIVED)
        task_reserved(request)
        self._route(request, request.lock_header)

    def backend_down(self) -> None:
        """Stop dispatching locked tasks until Redis answers."""
        self.held.hold_all()

    def refuse_redis(self, is_refused: bool) -> None:
        """Record whether this Redis must not be used, so that no task asks it. For any thread.

        Args:
            is_refused: whether it must not be used.
        """
        self.held.redis_is_refused = is_refused

    def backend_up(self) -> None:
        """Dispatch the held messages in the order of arrival: Redis answers again."""
        for request in self.held.answered():
            guarded(self, request)

    def try_again(self, name: str) -> None:
        """Dispatch the messages that are held since Redis refused their lock."""
        for request in self.held.tried_again(name):
            guarded(self, request)

    def make_room(self) -> None:
        """Let this worker receive other messages although some wait here unacknowledged.

        Messages behind a task that waits in its slot are parked. The prefetch count is raised by
        the number of messages that Redis is slow to store. The agent calls this once a second.
        """
        self.in_flight.look()
        self._late_parks.look(self.in_flight.parking())

    def relax(self) -> None:
        """Dispatch the held messages of tasks that no longer take a lock."""
        for request in self.held.free(self._header_factory.takes_lock):
            request.lock_header = self._header_factory.relaxed(request)
            guarded(self, request)

    # -- lost connection and shutdown -------------------------------------------------------------

    def abandon(self, *, unless_dispatched: bool) -> None:
        """Return the messages that the pool will not run, since it was flushed or is closing.

        Args:
            unless_dispatched: leave the messages that the pool has already sent to a child.
        """
        self._closing = unless_dispatched
        self.in_flight.drop_followers()
        for request in self.in_flight.in_hand():
            self._give_back(request, unless_dispatched=unless_dispatched)
        self.requeues.abandon()
        self._late_parks.abandon(self.in_flight.parking())
        for request in self.held.abandon():
            if request.is_here_only:
                self.blocked.park(request)
            else:
                request.move(Stage.ENDED)
        if unless_dispatched:
            self.publish_at_exit()

    def _give_back(self, request: LockedRequest, *, unless_dispatched: bool) -> None:
        """Return a message that the pool will not run.

        Without ``unless_dispatched``, Celery has flushed the pool, which continues.
        """
        granted = request.lock_header.granted
        if unless_dispatched:
            left = request.stage is Stage.IN_POOL and not (granted and request.withdraw_job())
        else:
            left = False
            request.keep_job()
        if request.stage in UNBEGUN and not left:
            request.mark_as_copy()
            self.pool_exit.leave(request, UNBEGUN, Stage.GIVEN_BACK, gone=granted)

    def publish_at_exit(self) -> None:
        """Publish each message that may be neither in Redis nor in the broker.

        Call it when the worker ends, and again when its pool has ended. The worker that receives
        the message parks it under the token of its claim: that ends this delivery, and if Redis has
        the message nevertheless, the copy is dropped.
        """
        for request in [*self.held.abandon(), *self.in_flight.parking()]:
            if request.is_here_only and request.move_from(WAITING_FOR_REDIS, Stage.PUBLISHED):
                self._publish_at_exit(request)

    def counts(self) -> dict[str, Any]:
        """Return the numbers of messages by state, for JSON."""
        return {
            **self.in_flight.counts(),
            "suspended": len(self.held),
            "held_back": len(self.requeues),
            "unclaimed": self.pool_callbacks.unclaimed,
            "illegal_moves": illegal_moves.count,
        }


def worker_id(hostname: str) -> str:
    """Return a new id for a worker; an earlier worker with the same name had another id."""
    return f"{hostname}#{os.urandom(3).hex()}"

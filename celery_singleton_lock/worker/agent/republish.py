"""Sends messages to the broker: requeued, rejected, and parked ones that no worker consumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import Final

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.parked_message import Delivery, UntakenMessage
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.store.message_operations import HOLD
from celery_singleton_lock.worker.agent_commands import RecordPublished, Requeue
from celery_singleton_lock.worker.agent_queue import RETRY, AgentQueue
from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.worker.consumed_queues import Queues
from celery_singleton_lock.worker.dispatch.dispatcher import Dispatcher
from celery_singleton_lock.worker.lock_set_header import claim_in
from celery_singleton_lock.worker.message_codec import pack
from celery_singleton_lock.worker.publisher import Outbox, Publisher
from celery_singleton_lock.worker.request import LockedRequest

logger: Final = logging.getLogger(__name__)

_SECOND: Final = 1_000_000
"""In microseconds."""


class Republisher:
    """Publishes messages in its own thread, and reports the results.

    Args:
        publisher: used only by that thread.
        queues: the queues that the worker consumes.
        commands: the queue of the agent.
        dispatcher: called in the main loop with the result of a requeue.
        post: runs a call in the main loop.
        watchdog: renews the grant of a rejected message while it is published, so that no other
            worker gets it.
        registered: names of the tasks of the app.
        declared: returns the names of the tasks that this worker locks.

    Attributes:
        requeued: number of messages that were requeued.
        published: number of parked messages that were sent to their queues.
        rejected: number of messages that were sent to be rejected.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        queues: Queues,
        commands: AgentQueue,
        dispatcher: Dispatcher,
        post: Callable[..., None],
        watchdog: Watchdog,
        registered: Container[str],
        declared: Callable[[], Container[str]],
    ) -> None:
        self.requeued: int = 0
        self.published: int = 0
        self.rejected: int = 0
        self._publisher = publisher
        self._registered = registered
        self._declared = declared
        self._told_of: set[str] = set()
        self._watchdog = watchdog
        self._rejecting: set[str] = set()
        self._outbox = Outbox(publisher)
        self._queues = queues
        self._commands = commands
        self._dispatcher = dispatcher
        self._post = post
        self._clock: Clock = SystemClock()

    @property
    def thread(self) -> BackgroundThread:
        """The thread that publishes; it starts with the first message."""
        return self._outbox.thread

    def close(self, timeout: float) -> None:
        """End the thread within ``timeout`` seconds. Messages that still wait are not sent."""
        self._outbox.close(timeout)

    # -- requeue ----------------------------------------------------------------------------------

    def requeue(self, command: Requeue) -> None:
        """Publish a copy of a message, then let the dispatcher acknowledge the message.

        If the worker dies in between, there are two messages. The second one is recognised as a
        copy. Copies that are held back at the time of the publish are acknowledged as well:
        otherwise each of them would be requeued as long as the lock is held. What arrives later is
        the copy itself.
        """
        held: list[LockedRequest] = []

        def is_wanted(request: LockedRequest) -> bool:
            held.extend(self._dispatcher.requeues.copies_of(request))
            return bool(held)

        if self._dispatcher.requeues.copies_of(command.request):
            self._send_back(
                command.request,
                lambda error: self._requeued(command, held, error),
                is_wanted=is_wanted,
            )

    def publish_at_exit(self, request: LockedRequest) -> None:
        """Send a message to the broker at once: this worker ends, and Redis may not have it."""

        def told(error: Exception | None) -> None:
            if error is None:
                logger.info(
                    "%s was sent to the broker: this worker stopped before Redis had confirmed "
                    "that it has stored the message. It is not lost.",
                    request,
                )
            else:
                logger.error("%s may be lost: neither Redis nor the broker accepts it", request)

        self._send_back(request, told)

    def _send_back(
        self,
        request: LockedRequest,
        told: Callable[[Exception | None], None],
        *,
        is_wanted: Callable[[LockedRequest], bool] = lambda _: True,
    ) -> None:
        """Publish a message in the thread of the outbox, if ``is_wanted`` still says so there.

        The connection may have been lost meanwhile: the broker delivers the message again.
        """
        kept, route = pack(request.message), self._queues.queue_of(request)
        requeues, place = request.arrival.requeues + 1, request.first_place
        header = request.lock_header
        claim = claim_in(header) if request.is_only_copy or request.runs_later else None
        first = header.attempt if _is_known(header.first_place, place) else ""

        def send(publisher: Publisher) -> None:
            if is_wanted(request):
                publisher.requeue(kept, route, requeues, place, claim, first=first)
                self.requeued += 1

        self._outbox.put(send, told)

    def _requeued(
        self, command: Requeue, held: Sequence[LockedRequest], error: Exception | None
    ) -> None:
        """Handle the result, in the thread of the outbox."""
        if error is None:
            self._post(self._dispatcher.blocked.requeued, held)
        else:
            logger.warning("%s could not be requeued, trying again: %r", command.request, error)
            self._commands.put_off(command, RETRY)

    # -- reject -----------------------------------------------------------------------------------

    def reject(self, delivery: Delivery, drop: Callable[[Delivery], None]) -> None:
        """Let the broker dead-letter a message that was acknowledged when it was parked.

        The message stays in Redis until the broker has confirmed the copy. A broker without dead
        letters would drop the copy, so the message is only dropped from Redis.

        Args:
            delivery: the message.
            drop: called to drop the message from Redis.
        """
        if delivery.token in self._rejecting:
            return None
        if not self._publisher.has_dead_letters():
            return drop(delivery)
        self._rejecting.add(delivery.token)
        self._watchdog.watch_later(
            delivery.name, delivery.token, CLAIM_LEASE, held=True, on_lost=_delivered_again
        )
        return self._outbox.put(
            lambda publisher: publisher.to_reject(delivery.body or b"", delivery.queue),
            lambda error: self._told_of_reject(delivery, drop, error),
        )

    def _told_of_reject(
        self, delivery: Delivery, drop: Callable[[Delivery], None], error: Exception | None
    ) -> None:
        self._watchdog.forget(delivery.token, patience=0)
        self._rejecting.discard(delivery.token)
        if error is None:
            self.rejected += 1
            drop(delivery)
        else:  # Redis delivers the message again
            logger.warning(
                "a parked task was rejected, and could not be sent to the queue %s for its "
                "dead-letter exchange, trying again: %r",
                delivery.queue,
                error,
            )

    # -- republish --------------------------------------------------------------------------------

    def send_on(self, messages: Sequence[UntakenMessage]) -> None:
        """Send parked messages that no live worker consumes to their queues.

        Args:
            messages: messages of one lock, which one call has taken out of the lock's queue.
        """
        sent: list[UntakenMessage] = []
        self._outbox.put(
            lambda publisher: self._publish(publisher, messages, sent),
            lambda error: self._sent_on(messages, sent, error),
        )

    def _publish(
        self, publisher: Publisher, messages: Sequence[UntakenMessage], sent: list[UntakenMessage]
    ) -> None:
        """Publish messages for at most half of :data:`HOLD`, and add them to ``sent``.

        After :data:`HOLD` seconds, Redis queues messages again that were taken out of their queue.
        """
        until = self._clock.monotonic() + HOLD / 2
        consumed = frozenset(self._queues.consumed())
        for message in messages:
            if self._clock.monotonic() > until:
                return
            if message.queue in consumed and message.task not in self._registered:
                self._tell_of_unknown(message)
                continue
            publisher.send_back(
                message.body, message.queue, message.attempt, message.place, message.token
            )
            sent.append(message)

    def _tell_of_unknown(self, message: UntakenMessage) -> None:
        """Log, once for each task, that this worker would discard its messages."""
        if message.task not in self._told_of:
            self._told_of.add(message.task)
            logger.warning(
                "tasks %r are parked for the lock %r, and no live worker locks them. They are not "
                "sent back to the queue %r: this worker consumes it and would discard them, since "
                "it does not have the task. They stay parked until a worker that has it starts.",
                message.task,
                message.name,
                message.queue,
            )

    def _sent_on(
        self,
        messages: Sequence[UntakenMessage],
        sent: list[UntakenMessage],
        error: Exception | None,
    ) -> None:
        """Handle the result, in the thread of the outbox."""
        self.published += len(sent)
        if error is not None:
            logger.warning(
                "%d parked tasks for the lock %r could not be sent to the broker, trying again: %r",
                len(messages) - len(sent),
                messages[0].name,
                error,
            )
        if sent:
            unlocked = self._runs_without_lock(sent)
            logger.log(
                logging.WARNING if unlocked else logging.INFO,
                "sent %d parked tasks of the lock %r back to the queue %r: no live worker that "
                "locks them consumes it%s",
                len(sent),
                sent[0].name,
                sent[0].queue,
                ". This worker consumes it and runs them WITHOUT the lock" if unlocked else "",
            )
            self._commands.put(RecordPublished(tuple(sent), sent=True))
        kept = tuple(message for message in messages if message not in sent)
        if kept:
            self._commands.put(RecordPublished(kept, sent=False))

    def _runs_without_lock(self, sent: Sequence[UntakenMessage]) -> bool:
        """Return whether this worker gets messages back and does not lock their tasks.

        A worker that locks them sends them back too, if it sweeps their lock while it stops.
        """
        consumed, declared = self._queues.consumed(), self._declared()
        return any(each.queue in consumed and each.task not in declared for each in sent)


def _delivered_again(_name: str, _token: str) -> None:
    """Do nothing: Redis delivers the message again, so it may be rejected twice."""


def _is_known(first_place: int, place: int) -> bool:
    """Return whether the place of a message is the time of its first arrival.

    Args:
        first_place: the time of its first arrival, which is earlier if it waited for its ETA; 0 if
            not known.
        place: its place in the order of arrival.
    """
    return bool(first_place) and place - first_place < _SECOND

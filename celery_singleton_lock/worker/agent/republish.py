"""What the agent sends through the broker: messages that no worker here runs, or not yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.worker.dispatch.dispatcher import Desk
from celery_singleton_lock.core.model import CLAIM_LEASE, Delivery, Stray
from celery_singleton_lock.worker.agent_commands import Left, Requeue
from celery_singleton_lock.worker.publisher import Outbox, Publisher, pack
from celery_singleton_lock.worker.consumed_queues import Queues
from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.store.message_operations import HOLD
from celery_singleton_lock.worker.agent_queue import RETRY, Tray
from celery_singleton_lock.lock.renewals import Watchdog

logger = logging.getLogger(__name__)


class Courier:
    """Has messages published in a thread of its own, and hears there what became of them.

    Args:
        publisher: used by that thread alone.
        queues: what the worker consumes.
        orders: the agent's.
        desk: whom to tell.
        post: runs a call in the main loop.
        watchdog: keeps a rejected message from other workers while it is published.
        settle: drops a parked message that was published to be rejected.

    Attributes:
        requeued: how many messages went back to the broker.
        published: how many parked messages were sent.
        rejected: how many messages were sent to be rejected.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        queues: Queues,
        orders: Tray,
        desk: Desk,
        post: Callable[..., None],
        watchdog: Watchdog,
        settle: Callable[[Delivery], None],
    ) -> None:
        """Have sent nothing yet."""
        self.requeued = 0
        self.published = 0
        self.rejected = 0
        self._publisher = publisher
        self._watchdog = watchdog
        self._settle = settle
        self._rejecting: set[str] = set()
        self._outbox = Outbox(publisher)
        self._queues = queues
        self._orders = orders
        self._desk = desk
        self._post = post
        self._clock: Clock = SystemClock()

    @property
    def thread(self) -> BackgroundThread:
        """The thread that publishes; it starts with the first message."""
        return self._outbox.thread

    def close(self, timeout: float) -> None:
        """End the thread, within ``timeout`` seconds. What it has not sent by then is not sent."""
        self._outbox.close(timeout)

    # -- back to the broker -----------------------------------------------------------------------

    def requeue(self, order: Requeue) -> None:
        """Publish, then have the message acknowledged: a worker that dies in between loses nothing.

        Then there are two, of which the second finds the first running, or its end remembered.
        """
        if self._desk.requeues.holds(order.request):
            self._send_back(order.request, lambda error: self._requeued(order, error))

    def rescue(self, request: LockedRequest) -> None:
        """Send a message to the broker at once: this worker ends, and Redis does not answer."""

        def told(error: Exception | None) -> None:
            if error is None:
                self.requeued += 1
                logger.warning("%s may have been lost in an outage: sent to the broker", request)
            else:
                logger.error("%s may be lost: neither Redis nor the broker takes it", request)

        self._send_back(request, told)

    def _send_back(self, request: LockedRequest, told: Callable[[Exception | None], None]) -> None:
        kept, route = pack(request.message), self._queues.queue_of(request)
        self._outbox.put(
            lambda publisher: publisher.requeue(
                kept, route, request.requeues + 1, request.first_place
            ),
            told,
        )

    def _requeued(self, order: Requeue, error: Exception | None) -> None:
        """Hear from the outbox' thread what became of it."""
        if error is None:
            self.requeued += 1
            self._post(self._desk.requeued, order.request)
        else:
            logger.warning("%s could not be requeued, trying again: %r", order.request, error)
            self._orders.put_off(order, RETRY)

    # -- to be dead-lettered ----------------------------------------------------------------------

    def reject(self, delivery: Delivery) -> None:
        """Have the broker reject a message that was acknowledged when it was parked.

        It is kept until the broker has confirmed that it has it again. A broker without dead
        letters would drop it, so it is dropped here.
        """
        if delivery.token in self._rejecting:
            return None
        if not self._publisher.has_dead_letters():
            return self._settle(delivery)
        self._rejecting.add(delivery.token)
        self._watchdog.watch_later(
            delivery.name, delivery.token, CLAIM_LEASE, held=True, on_lost=_delivered_again
        )
        return self._outbox.put(
            lambda publisher: publisher.to_reject(delivery.body or b"", delivery.queue),
            lambda error: self._told_of_reject(delivery, error),
        )

    def _told_of_reject(self, delivery: Delivery, error: Exception | None) -> None:
        self._watchdog.forget(delivery.token, patience=0)
        self._rejecting.discard(delivery.token)
        if error is None:
            self.rejected += 1
            self._settle(delivery)
        else:  # it is delivered again
            logger.warning(
                "a parked task was rejected, and could not be sent to the queue %s for its "
                "dead-letter exchange, trying again: %r",
                delivery.queue,
                error,
            )

    # -- to other workers -------------------------------------------------------------------------

    def send_on(self, strays: Sequence[Stray]) -> None:
        """Send parked messages that no live worker takes to their queues.

        Args:
            strays: messages of one lock that one call has taken out of the line.
        """
        sent: list[Stray] = []
        self._outbox.put(
            lambda publisher: self._publish(publisher, strays, sent),
            lambda error: self._sent_on(strays, sent, error),
        )

    def _publish(self, publisher: Publisher, strays: Sequence[Stray], sent: list[Stray]) -> None:
        """Publish for half of the time for which they are out of line; the rest queues again."""
        until = self._clock.monotonic() + HOLD / 2
        for stray in strays:
            if self._clock.monotonic() > until:
                return
            publisher.send_back(stray.body, stray.queue, stray.attempt, stray.place)
            sent.append(stray)

    def _sent_on(self, strays: Sequence[Stray], sent: list[Stray], error: Exception | None) -> None:
        """Hear from the outbox' thread what became of them."""
        self.published += len(sent)
        if error is not None:
            logger.warning(
                "%d parked tasks for the lock %r could not be sent to the broker, trying again: %r",
                len(strays) - len(sent),
                strays[0].name,
                error,
            )
        if sent:
            logger.info(
                "no live worker takes the tasks of queue %r that are parked for the lock %r: %d "
                "were sent to the broker",
                sent[0].queue,
                sent[0].name,
                len(sent),
            )
            self._orders.put(Left(tuple(sent), sent=True))
        if len(sent) < len(strays):
            self._orders.put(Left(tuple(strays[len(sent) :]), sent=False))


def _delivered_again(_name: str, _token: str) -> None:
    """Do nothing: another worker is given the message, and it may be rejected twice."""

"""Stops and resumes the consumption of single queues, in the thread that uses the consumer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

logger: Final = logging.getLogger(__name__)

Post = Callable[..., None]


class QueueStops:
    """The queues that a worker does not consume at present, although it is meant to.

    Only the consumer of the broker is cancelled. The queue stays in ``consume_from``, which
    Celery's commands ``cancel_consumer`` and ``add_consumer`` change: so the worker still takes the
    parked messages of the queue, and an operator's command overrides a stop.

    Args:
        consumer: Celery's consumer.
        post: runs a call in the main loop.

    Attributes:
        overruled: queues that an operator has consumed again. :meth:`apply` adds to it, and the
            agent's thread takes from it.
    """

    def __init__(self, consumer: Any, post: Post) -> None:
        self.overruled: set[str] = set()
        self._consumer = consumer
        self._post = post
        self._wanted: frozenset[str] = frozenset()
        self._cancelled: set[str] = set()
        self._cancelled_at: Any = None

    def stop(self, queue: str) -> None:
        """Stop consuming a queue, even after a reconnect. For the agent."""
        self._wanted |= {queue}
        self.look()

    def resume(self, queue: str) -> None:
        """Consume a queue again, unless an operator has cancelled it. For the agent."""
        self._wanted -= {queue}
        self._post(self._in_turn, self._consume, queue)

    def look(self) -> None:
        """Cancel the consumers of stopped queues; detect those of operators. For the agent."""
        if self._wanted:
            self._post(self._in_turn, self.apply)

    def _in_turn(self, call: Callable[..., None], *args: Any) -> None:
        """Without an event loop, the thread that waits for messages makes the call, within 2 s."""
        if self._consumer.hub is None:
            self._consumer.call_soon(call, *args)
        else:
            call(*args)

    # -- in the thread that uses the consumer -----------------------------------------------------

    def apply(self) -> None:
        """Cancel the consumers of stopped queues. After a reconnect, call it before any message."""
        messages = self._consumer.task_consumer
        if messages is None:
            return
        if messages is not self._cancelled_at:
            self._cancelled_at, self._cancelled = messages, set()
        for queue in self._wanted:
            if queue not in self._cancelled:
                _cancel(messages, queue)  # an error ends the connection; the next one follows
                self._cancelled.add(queue)
            elif messages.consuming_from(queue):
                self.overruled.add(queue)  # the agent resumes it

    def _consume(self, queue: str) -> None:
        self._cancelled.discard(queue)
        messages = self._consumer.task_consumer
        found = self._consumer.app.amqp.queues.consume_from.get(queue)
        if queue in self._wanted or messages is None or found is None:
            return
        if not messages.consuming_from(queue):
            messages.add_queue(found)
            messages.consume()


def _cancel(messages: Any, queue: str) -> None:
    """Cancel the consumer of a queue, and still receive a message that is on its way.

    A Redis broker may send one: the worker waits there for the next message of all queues together.
    Without its callback, kombu would put the message at the end of the queue. RabbitMQ sends none
    after it has confirmed.
    """
    found: Any = getattr(messages.channel.connection, "_callbacks", None)
    callbacks = found if isinstance(found, dict) else {}
    callback = callbacks.get(queue)
    messages.cancel_by_queue(queue)
    if callback is not None:
        callbacks.setdefault(queue, callback)

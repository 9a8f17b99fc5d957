"""Parked messages whose turn has come, and of which this worker can make no task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from celery.app.task import Context
from celery.exceptions import InvalidTaskError
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_singleton_lock.errors import MaxReturnsExceeded
from celery_singleton_lock.events import Event, LockRefused
from celery_singleton_lock.worker.agent.grant_inbox import Inbox
from celery_singleton_lock.core.model import Delivery
from celery_singleton_lock.worker.publisher import unpack
from celery_singleton_lock.message_text import printable

logger = logging.getLogger(__name__)

UNREADABLE: Final = (InvalidTaskError, ContentDisallowed, DecodeError)
"""What a message raises that Celery's consumer rejects."""


class Unread:
    """Ends messages that cannot be read, and returns those of which the handling failed.

    Args:
        consumer: Celery's.
        inbox: through which messages are settled and returned.
        tell: tells observers, and whoever listens to Celery's events.
        most_returns: queue -> how often a message of it may come back.
    """

    def __init__(
        self,
        consumer: Any,
        *,
        inbox: Inbox,
        tell: Callable[[Event], None],
        most_returns: Callable[[str], float],
    ) -> None:
        """Keep all of them."""
        self._consumer = consumer
        self._inbox = inbox
        self._tell = tell
        self._most_returns = most_returns

    def discard(self, delivery: Delivery, message: Any, error: Exception) -> None:
        """Do what Celery does with a message that it cannot read, and drop it.

        Args:
            delivery: of the message.
            message: the message.
            error: one of :data:`UNREADABLE`.
        """
        if isinstance(error, DecodeError):
            self._consumer.on_decode_error(message, error)
        else:
            self._consumer.on_invalid_task(None, message, error)
        self._told(delivery, message.headers, "undecodable")
        self._inbox.drop(delivery)

    def reject(self, delivery: Delivery) -> None:
        """Have a message dead-lettered that has come back too often."""
        headers = _headers_in(delivery)
        logger.warning(
            "Task %s has come back %d times, and goes to the dead letters of the queue %s: it was "
            "requeued, or its worker was lost (singleton_lock_max_returns)",
            _name_of(headers),
            delivery.returns,
            delivery.queue,
        )
        self._told(delivery, headers, "returned")
        self._inbox.reject(delivery)

    def fail(self, delivery: Delivery, error: Exception) -> None:
        """Return a message of which the handling failed, or end it as FAILURE after many tries."""
        headers = _headers_in(delivery)
        tries = delivery.returns + 1
        last = tries > self._most_returns(delivery.queue)
        logger.error(
            "The parked task %s, granted the lock %r, cannot be received here (try %d): %s",
            _name_of(headers),
            delivery.name,
            tries,
            "it ends as FAILURE" if last else "it is tried again later",
            exc_info=error,
        )
        if not last:
            return self._inbox.put_off(delivery)
        self._fail(delivery, headers, error)
        self._told(delivery, headers, "returned")
        return self._inbox.drop(delivery)

    def _fail(self, delivery: Delivery, headers: Mapping[str, Any], error: Exception) -> None:
        task_id = headers.get("id")
        if not task_id:
            return
        msg = (
            f"The task was granted the lock {delivery.name!r}, and no worker could receive its "
            f"message in {delivery.returns + 1} tries (singleton_lock_max_returns): {error!r}"
        )
        failure = MaxReturnsExceeded(msg, delivery.name)
        self._consumer.app.backend.mark_as_failure(
            task_id, failure, request=_context(delivery, headers)
        )
        if self._consumer.event_dispatcher:
            self._consumer.event_dispatcher.send(
                "task-failed", uuid=task_id, exception=repr(failure)
            )

    def _told(self, delivery: Delivery, headers: Mapping[str, Any], policy: str) -> None:
        task, task_id = str(headers.get("task", "")), str(headers.get("id", ""))
        self._tell(LockRefused(delivery.name, task, task_id, policy=policy))


def _headers_in(delivery: Delivery) -> Mapping[str, Any]:
    with suppress(Exception):
        return unpack(delivery.body or b"").headers
    return {}


def _name_of(headers: Mapping[str, Any]) -> str:
    return printable(f"{headers.get('task', '?')}[{headers.get('id', '?')}]")


def _context(delivery: Delivery, headers: Mapping[str, Any]) -> Context:
    """Return the request as the result backend wants it, with the canvas if that can be read."""
    canvas: Mapping[str, Any] = {}
    with suppress(Exception):
        canvas = unpack(delivery.body or b"").payload[2] or {}
    return Context({**headers, "errbacks": canvas.get("errbacks"), "chord": canvas.get("chord")})

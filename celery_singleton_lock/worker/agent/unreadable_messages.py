"""Ends or returns parked messages that were granted and that this worker cannot read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from celery.app.task import Context
from celery.exceptions import InvalidTaskError
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.errors import MaxReturnsExceeded
from celery_singleton_lock.events import Event, LockRefused
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.worker.agent.grant_inbox import GrantInbox
from celery_singleton_lock.worker.message_codec import unpack

logger: Final = logging.getLogger(__name__)

UNREADABLE: Final = (InvalidTaskError, ContentDisallowed, DecodeError)
"""Errors of messages that Celery's consumer rejects."""


class UnreadableMessages:
    """Ends messages that cannot be read, and returns those whose handling failed.

    Args:
        consumer: Celery's consumer.
        inbox: ends and returns messages.
        tell: reports an event.
        most_returns: queue -> how often a message of the queue may be returned.
    """

    def __init__(
        self,
        consumer: Any,
        *,
        inbox: GrantInbox,
        tell: Callable[[Event], None],
        most_returns: Callable[[str], float],
    ) -> None:
        self._consumer = consumer
        self._inbox = inbox
        self._tell = tell
        self._most_returns = most_returns

    def discard(self, delivery: Delivery, message: Any, error: Exception) -> None:
        """Handle an unreadable message as Celery's consumer does, and drop it.

        Args:
            delivery: the delivery of the message.
            message: the message.
            error: one of :data:`UNREADABLE`.
        """
        if isinstance(error, DecodeError):
            self._consumer.on_decode_error(message, error)
        else:
            self._consumer.on_invalid_task(None, message, error)
        self._report(delivery, message.headers, "undecodable")
        self._inbox.drop(delivery)

    def reject(self, delivery: Delivery) -> None:
        """Let the broker dead-letter a message that was returned too often."""
        headers = _headers_in(delivery)
        logger.warning(
            "Task %s was returned %d times, since it was requeued or its worker was lost: it is "
            "dead-lettered from the queue %s (singleton_lock_max_returns or x-delivery-limit)",
            _name_of(headers),
            delivery.returns,
            delivery.queue,
        )
        self._report(delivery, headers, "returned")
        self._inbox.reject(delivery)

    def fail(self, delivery: Delivery, error: Exception) -> None:
        """Return a message whose handling failed; after many tries, end it as FAILURE."""
        headers = _headers_in(delivery)
        tries = delivery.returns + 1
        last = tries > self._most_returns(delivery.queue)
        logger.error(
            "The message of the parked task %s, granted the lock %r, cannot be read (try %d): %s",
            _name_of(headers),
            delivery.name,
            tries,
            "it ends as FAILURE" if last else "it is tried again later",
            exc_info=error,
        )
        if not last:
            return self._inbox.put_off(delivery)
        self._fail(delivery, headers, error)
        self._report(delivery, headers, "returned")
        return self._inbox.drop(delivery)

    def _fail(self, delivery: Delivery, headers: Mapping[str, Any], error: Exception) -> None:
        task_id = headers.get("id")
        if not task_id:
            return
        msg = (
            f"The task was granted the lock {delivery.name!r}, and no worker could receive its "
            f"message in {delivery.returns + 1} tries (singleton_lock_max_returns or "
            f"x-delivery-limit): {error!r}"
        )
        failure = MaxReturnsExceeded(msg, delivery.name)
        self._consumer.app.backend.mark_as_failure(
            task_id, failure, request=_context(delivery, headers)
        )
        if self._consumer.event_dispatcher:
            self._consumer.event_dispatcher.send(
                "task-failed", uuid=task_id, exception=repr(failure)
            )

    def _report(self, delivery: Delivery, headers: Mapping[str, Any], policy: str) -> None:
        task, task_id = str(headers.get("task", "")), str(headers.get("id", ""))
        self._tell(LockRefused(delivery.name, task, task_id, policy=policy))


def _headers_in(delivery: Delivery) -> Mapping[str, Any]:
    with suppress(Exception):
        return unpack(delivery.body or b"").headers
    return {}


def _name_of(headers: Mapping[str, Any]) -> str:
    return printable(f"{headers.get('task', '?')}[{headers.get('id', '?')}]")


def _context(delivery: Delivery, headers: Mapping[str, Any]) -> Context:
    """Return the request as the result backend expects it, with the canvas if it can be read."""
    canvas: Mapping[str, Any] = {}
    with suppress(Exception):
        canvas = unpack(delivery.body or b"").payload[2] or {}
    return Context({**headers, "errbacks": canvas.get("errbacks"), "chord": canvas.get("chord")})

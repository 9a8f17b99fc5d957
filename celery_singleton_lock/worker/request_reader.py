"""Creates requests from delivered parked messages, as Celery's consumer does from others."""

from __future__ import annotations

import logging
from typing import Any, Final

from kombu.serialization import prepare_accept_content

from celery_singleton_lock.message_text import printable
from celery_singleton_lock.worker.execution.batches import is_batches
from celery_singleton_lock.worker.extension import Extension
from celery_singleton_lock.worker.message_codec import MessageFromRedis, unpack
from celery_singleton_lock.worker.request import LockedRequest
from celery_singleton_lock.worker.request_class import passes, read_as_celery, request_class

logger: Final = logging.getLogger(__name__)


class RequestReader:
    """Reads the parked messages of the tasks that this worker can run.

    Args:
        extension: the app's locks.
        consumer: Celery's consumer.
    """

    def __init__(self, extension: Extension, consumer: Any) -> None:
        self._extension = extension
        self._consumer = consumer
        self._request_classes: dict[str, Any] = {}
        self._runnable: dict[str, bool] = {}

    def declared(self) -> frozenset[str]:
        """Return the names of the tasks whose parked messages this worker can run."""
        return frozenset(filter(self._can_run, self._extension.declared()))

    def unpack(self, body: bytes | None) -> MessageFromRedis:
        """Return a parked message, which decodes only the app's accepted content types.

        Raises:
            ValueError: the bytes are not a parked message.
        """
        return unpack(body or b"", prepare_accept_content(self._extension.app.conf.accept_content))

    def request(self, message: MessageFromRedis) -> LockedRequest | None:
        """Return the request of a message; None if this worker does not lock its task.

        Raises:
            Exception: any error, also those of Celery's consumer for an unreadable message.
        """
        read = read_as_celery(message, utc=self._extension.app.uses_utc_timezone())
        name = read["headers"].get("task")
        task = self._extension.app.tasks.get(name)
        if task is None or name not in self._extension.declared() or not self._can_run(name):
            logger.warning(
                "celery-singleton-lock: this worker received the parked task %s, and does not lock "
                "such tasks: the message returns to its place in the queue",
                printable(str(name)),
            )
            return None
        return self._made(task, message, read)

    def _can_run(self, name: str) -> bool:
        if name not in self._runnable:
            task = self._extension.app.tasks[name]
            self._runnable[name] = passes(self._request_class(task)) and not is_batches(task)
        return self._runnable[name]

    def _made(self, task: Any, message: MessageFromRedis, read: dict[str, Any]) -> LockedRequest:
        consumer = self._consumer
        request: LockedRequest = self._request_class(task)(
            message,
            on_ack=lambda *_: message.ack(),
            on_reject=lambda _log, _errors, requeue: message.reject(requeue),
            app=self._extension.app,
            hostname=consumer.hostname,
            eventer=consumer.event_dispatcher,
            task=task,
            connection_errors=consumer.connection_errors,
            **read,
        )
        return request

    def _request_class(self, task: Any) -> Any:
        found = self._request_classes.get(task.name)
        if found is None:
            found = request_class(task, self._consumer)
            self._request_classes[task.name] = found
        return found

"""Sends messages to the broker: republished, requeued and rejected ones."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from kombu.connection import Connection
from kombu.messaging import Producer
from kombu.transport.pyamqp import Transport as PyAMQP

from celery_singleton_lock.core.lock_set import KEPT
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.worker.lock_header import FIRST, MOVED, REQUEUED, UNANSWERED
from celery_singleton_lock.worker.message_codec import unpack
from celery_singleton_lock.worker.message_stage import UnansweredClaim
from celery_singleton_lock.worker.redelivery import DEATHS, REJECT, has_dead_letters, rejection_of

CONFIRMED_WITHIN: Final = 10.0
"""Seconds for which a publish waits for RabbitMQ to confirm it."""

_NOT_SENT: Final = frozenset(
    {
        "delivery_info",  # of virtual transports, like the next two; a copy gets new values
        "delivery_tag",
        "body_encoding",
        "content_type",  # of AMQP, like the next one; both are arguments of publish()
        "content_encoding",
        "application_headers",
        "user_id",  # RabbitMQ refuses a message in the name of another user
        "cluster_id",
    }
)
_DEATHS: Final = (DEATHS, "x-first-death-", "x-last-death-")
"""Headers in which RabbitMQ records where a message was dead-lettered."""

_COUNTS: Final = ("x-delivery-count", "x-acquired-count", KEPT)
"""Headers that count deliveries of a message; they would be wrong for a copy."""

_NOT_TRUE: Final = (*_DEATHS, *_COUNTS)


class Publisher:
    """Sends messages to their queues.

    It has its own connection, since a fork closes the connections of kombu's pools.

    Args:
        connect: returns a new connection to the broker.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._channel: Any = None

    def send_back(self, kept: bytes, queue: str, attempt: str, place: int, token: str) -> None:
        """Send a parked message to the end of its queue, not through its exchange and bindings.

        Args:
            kept: the packed message.
            queue: name of the queue from which it came.
            attempt: ``id/retries/nesting``.
            place: its place in server microseconds. It gets the same place if it is parked again.
            token: its owner token, which distinguishes messages with the same task id.

        Raises:
            Exception: an error of the broker's transport. The message may have been sent.
        """
        self._publish(kept, queue, {MOVED: [attempt, place, base_of(token)]})

    def requeue(
        self,
        kept: bytes,
        queue: str,
        requeues: int,
        first_place: int,
        claim: UnansweredClaim | None = None,
        *,
        first: str = "",
    ) -> None:
        """Send a message to the end of its queue.

        Args:
            kept: the packed message.
            queue: name of the queue from which it came.
            requeues: number of its requeues, with this one.
            first_place: server microseconds of its first arrival.
            claim: its claim that Redis did not answer; None if there is none.
            first: its attempt, if that arrival was its first delivery; else empty.

        Raises:
            Exception: an error of the broker's transport. The message may have been sent.
        """
        ours: dict[str, Any] = {REQUEUED: [requeues, first_place]}
        if claim is not None:
            ours[UNANSWERED] = claim
        if first:
            ours[FIRST] = first
        self._publish(kept, queue, ours)

    def has_dead_letters(self) -> bool:
        """Return whether the broker can dead-letter a rejected message. Otherwise it drops it."""
        return has_dead_letters(self._connect().get_transport_cls())

    def to_reject(self, kept: bytes, queue: str) -> None:
        """Send a message to its queue, so that the next worker rejects it.

        The broker then dead-letters it as if it had not been parked: with its history and the
        reason ``rejected``.

        Args:
            kept: the packed message.
            queue: name of the queue from which it came.

        Raises:
            Exception: an error of the broker's transport. The message may have been sent.
        """
        self._publish(kept, queue, {REJECT: rejection_of(unpack(kept).headers)}, without=_COUNTS)

    def _publish(
        self,
        kept: bytes,
        queue: str,
        ours: Mapping[str, Any],
        *,
        without: tuple[str, ...] = _NOT_TRUE,
    ) -> None:
        message = unpack(kept)
        headers = {k: v for k, v in message.headers.items() if not k.startswith(without)}
        fields = {
            "compression": headers.pop("compression", None),
            "headers": {**headers, **ours},
            "content_type": message.content_type,
            "content_encoding": message.content_encoding,
            **_as_arguments(message.properties),
            "mandatory": True,  # otherwise RabbitMQ drops messages for a missing queue
            "timeout": CONFIRMED_WITHIN,
        }
        fresh = self._channel is None
        try:
            self._send(message.body, queue, fields)
        except Exception:
            self._drop()
            if fresh:
                raise
            self._send(message.body, queue, fields)  # the idle connection was closed

    def _send(self, body: Any, queue: str, fields: dict[str, Any]) -> None:
        if self._channel is None:
            self._connection = confirming(self._connect())
            self._channel = self._connection.channel()  # tries to connect once
        # With every transport, the default exchange routes to the queue of that name.
        Producer(self._channel, auto_declare=False).publish(
            body, exchange="", routing_key=queue, **fields
        )

    def close(self) -> None:
        """Close the connection. The next message opens a new one."""
        connection = self._taken()
        if connection is not None:
            connection.release()

    def _drop(self) -> None:
        """Close the socket at once. The broker may not answer, so it is not told."""
        connection = self._taken()
        if connection is not None:
            connection.collect()

    def _taken(self) -> Connection | None:
        connection, self._connection, self._channel = self._connection, None, None
        return connection


def confirming(connection: Connection) -> Connection:
    """Enable publisher confirms for RabbitMQ on a connection that is not open yet.

    Without them, a message that the broker refuses is lost without an error, although the original
    was acknowledged. Examples are a full queue with ``overflow=reject-publish``, and a crash before
    the message was written. Other transports answer each publish.
    """
    if issubclass(connection.get_transport_cls(), PyAMQP):
        options = connection.transport_options or {}
        connection.transport_options = {**options, "confirm_publish": True}
    return connection


def _as_arguments(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's properties as arguments of kombu's ``publish``."""
    fields = {key: value for key, value in properties.items() if key not in _NOT_SENT}
    expiration = fields.pop("expiration", None)
    if expiration is not None:
        fields["expiration"] = float(expiration) / 1000  # milliseconds as text in AMQP
    return fields


class Outbox:
    """Publishes in its own thread, so that the agent does not wait for the broker.

    Args:
        publisher: used only by that thread.
    """

    MOST: Final = 100
    """Largest number of waiting jobs. A further one gets an error."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._jobs: queue.Queue[_Job | None] = queue.Queue(self.MOST)
        self.thread: Final = BackgroundThread(
            "singleton-lock-outbox", self._send_next, publisher.close
        )

    def put(
        self, send: Callable[[Publisher], None], told: Callable[[Exception | None], None]
    ) -> None:
        """Queue a job. Does not wait.

        Args:
            send: publishes messages.
            told: called with None when that is done, or with the error; in the thread of the
            outbox,
                or in the caller's if the queue is full.
        """
        self.thread.start()
        try:
            self._jobs.put_nowait((send, told))
        except queue.Full:
            told(queue.Full("too many messages wait for the broker"))

    def close(self, timeout: float) -> None:
        """End the thread. Jobs that still wait are not done."""
        if self.thread.was_started():
            with suppress(queue.Full):
                self._jobs.put_nowait(None)
            self.thread.join(timeout)

    def _send_next(self) -> bool:
        with self.thread.idle():
            job = self._jobs.get()
        if job is None:
            return False
        send, told = job
        try:
            send(self._publisher)
        except Exception as error:  # noqa: BLE001  # an error of any transport
            told(error)
        else:
            told(None)
        return True


_Job = tuple[Callable[[Publisher], None], Callable[[Exception | None], None]]

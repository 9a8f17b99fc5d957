"""Message -> parked body -> message again, or the broker.

A parked body is one line of JSON (content type, encoding, headers, properties, route) and the raw
message body behind it, untouched: it is never decoded and serialised again.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from kombu.connection import Connection
from kombu.message import Message
from kombu.messaging import Producer
from kombu.transport.pyamqp import Transport as PyAMQP
from kombu.utils import json

from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.core.lock_set import KEPT
from celery_singleton_lock.worker.redelivery import DEATHS, REJECT, has_dead_letters, history_of
from celery_singleton_lock.worker.lock_header import COPY, MOVED, REQUEUED, STAMP

logger = logging.getLogger(__name__)

CONFIRMED_WITHIN: Final = 10.0
"""Seconds for which a publish waits for RabbitMQ to confirm it."""

_ROUTE: Final = ("exchange", "routing_key")
_STRIPPED: Final = frozenset({STAMP, COPY, MOVED, REQUEUED, REJECT, KEPT, "redelivered"})
_NOT_SENT: Final = frozenset(
    {
        "delivery_info",  # these three are the virtual transports'; a copy is given its own
        "delivery_tag",
        "body_encoding",
        "content_type",  # these two are AMQP's, and are passed by themselves
        "content_encoding",
        "application_headers",
        "user_id",  # RabbitMQ refuses a message in the name of another user
        "cluster_id",
    }
)
_DEATHS: Final = (DEATHS, "x-first-death-", "x-last-death-")
"""Headers in which RabbitMQ tells where a message was dead-lettered."""

_COUNTS: Final = ("x-delivery-count", "x-acquired-count", KEPT)
"""Headers in which a broker tells what befell a message; of a copy they would not be true."""

_NOT_TRUE: Final = (*_DEATHS, *_COUNTS)


class ParkedMessage(Message):
    """A message that comes from Redis instead of the broker.

    What Celery does with an acknowledgement ends here: the release of its lock settles it.

    Args:
        body: the raw body, decompressed.
        fields: what :func:`pack` kept besides.
        accept: content types that may be decoded.
    """

    def __init__(self, body: Any, fields: Mapping[str, Any], accept: Any) -> None:
        """Restore the message; its headers are set last, so that kombu decompresses nothing."""
        super().__init__(  # type: ignore[no-untyped-call]  # kombu
            body=body,
            content_type=fields["content_type"],
            content_encoding=fields["content_encoding"],
            delivery_info=dict(fields["route"]),
            properties=dict(fields["properties"]),
            accept=accept,
        )
        self.headers = dict(fields["headers"])
        if fields.get("amqp"):
            self.properties["application_headers"] = self.headers  # as py-amqp has it

    def ack(self, multiple: bool = False) -> None:  # noqa: ARG002  # kombu's
        """Note the acknowledgement."""
        self._state = "ACK"

    def reject(self, requeue: bool = False) -> None:  # kombu's signature
        """Note the rejection; the request tells whether it is to come back."""
        self._state = "REQUEUED" if requeue else "REJECTED"

    def requeue(self) -> None:
        """Note that it is to come back."""
        self._state = "REQUEUED"


def pack(message: Message, ours: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Return a message as the bytes to keep.

    Args:
        message: from the broker, or parked before.
        ours: headers that are kept with it, and are not sent to the broker again.
    """
    raw = message.body
    head = {
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
        "headers": {**_kept(message.headers), **ours},
        "properties": _kept_properties(message.properties),
        "route": _route(message.delivery_info),
        "text": isinstance(raw, str),
        "amqp": "application_headers" in (message.properties or {}),
    }
    encoded = raw.encode() if isinstance(raw, str) else bytes(raw)
    line: str = json.dumps(head)
    return line.encode() + b"\n" + encoded


def unpack(kept: bytes, accept: Any = None) -> ParkedMessage:
    """Return the message that :func:`pack` was given.

    Raises:
        ValueError: these bytes are none.
    """
    head, _, raw = kept.partition(b"\n")
    fields = json.loads(head.decode())
    return ParkedMessage(raw.decode() if fields["text"] else raw, fields, accept)


def _kept(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (headers or {}).items() if key not in _STRIPPED}


def _kept_properties(properties: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keep what a task can see as ``self.request.properties``.

    Of ``delivery_info`` only the route: some transports put the whole message there once more, or
    objects that settle it with the broker.
    """
    kept = dict(properties or {})
    kept.pop("application_headers", None)  # AMQP's name of the headers, which are kept themselves
    if "delivery_info" in kept:
        kept["delivery_info"] = _route(kept["delivery_info"])
    return kept


def _route(delivery_info: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: (delivery_info or {}).get(key) for key in _ROUTE}


class Publisher:
    """Sends messages to the broker: where no worker takes them, or to be tried again later.

    It owns its connection, outside of kombu's pools, which a fork would shut.

    Args:
        connect: returns a new connection to the broker.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """Connect when the first copy is sent."""
        self._connect = connect
        self._connection: Connection | None = None
        self._channel: Any = None

    def send_back(self, kept: bytes, queue: str, attempt: str, place: int) -> None:
        """Send a parked message to the end of its queue, past all exchanges and bindings.

        Args:
            kept: the message, packed.
            queue: where it was consumed.
            attempt: ``id/retries/nesting``.
            place: its place in line, server microseconds: it has it again if it is parked again.

        Raises:
            Exception: whatever the broker's transport raises; nothing was sent, or it is not known.
        """
        self._publish(kept, queue, {MOVED: [attempt, place]})

    def requeue(self, kept: bytes, queue: str, requeues: int, first_place: int) -> None:
        """Send a message to the end of its queue.

        Args:
            kept: the message, packed.
            queue: where it was consumed.
            requeues: how often that was done, this time included.
            first_place: server microseconds at which it arrived first.

        Raises:
            Exception: whatever the broker's transport raises; nothing was sent, or it is not known.
        """
        self._publish(kept, queue, {REQUEUED: [requeues, first_place]})

    def has_dead_letters(self) -> bool:
        """Return whether the broker does more with a rejected message than drop it."""
        return has_dead_letters(self._connect().get_transport_cls())

    def to_reject(self, kept: bytes, queue: str) -> None:
        """Send a message to its queue, where the next worker that locks rejects it at once.

        So the broker dead-letters it as if it had never been parked: with its history, and for the
        reason that is true.

        Args:
            kept: the message, packed.
            queue: where it was consumed.

        Raises:
            Exception: whatever the broker's transport raises; nothing was sent, or it is not known.
        """
        self._publish(kept, queue, {REJECT: history_of(unpack(kept).headers)}, without=_COUNTS)

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
            "mandatory": True,  # RabbitMQ would confirm, and drop, what is sent to a missing queue
            "timeout": CONFIRMED_WITHIN,
        }
        fresh = self._channel is None
        try:
            self._send(message.body, queue, fields)
        except Exception:
            self.close()
            if fresh:
                raise
            self._send(message.body, queue, fields)  # the connection had died while it was idle

    def _send(self, body: Any, queue: str, fields: dict[str, Any]) -> None:
        if self._channel is None:
            self._connection = confirming(self._connect())
            self._channel = self._connection.channel()  # tries to connect once
        # The anonymous exchange leads to the queue of that name, on every transport.
        Producer(self._channel, auto_declare=False).publish(
            body, exchange="", routing_key=queue, **fields
        )

    def close(self) -> None:
        """Close the connection; the next copy opens another."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            connection.release()


def confirming(connection: Connection) -> Connection:
    """Have RabbitMQ confirm what is published through a connection that is not open yet.

    Else a message that the broker refuses is lost without an error (a full queue with
    ``overflow=reject-publish``, a crash before it was written), and the one that it was made of has
    been acknowledged. Other transports answer each publish anyway.
    """
    if issubclass(connection.get_transport_cls(), PyAMQP):
        options = connection.transport_options or {}
        connection.transport_options = {**options, "confirm_publish": True}
    return connection


def _as_arguments(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's properties as kombu's ``publish`` wants them."""
    fields = {key: value for key, value in properties.items() if key not in _NOT_SENT}
    expiration = fields.pop("expiration", None)
    if expiration is not None:
        fields["expiration"] = float(expiration) / 1000  # AMQP has milliseconds, as text
    return fields


class Outbox:
    """A thread that publishes: a broker that is away must not keep the agent from its work.

    Args:
        publisher: used by that thread alone.
    """

    MOST: Final = 100
    """Messages that may wait here; others are told that it is full."""

    def __init__(self, publisher: Publisher) -> None:
        """Start the thread with the first message."""
        self._publisher = publisher
        self._jobs: queue.Queue[_Job | None] = queue.Queue(self.MOST)
        self.thread: Final = BackgroundThread(
            "singleton-lock-outbox", self._send_next, publisher.close
        )

    def put(
        self, send: Callable[[Publisher], None], told: Callable[[Exception | None], None]
    ) -> None:
        """Have something published. Does not wait.

        Args:
            send: publishes it.
            told: called with the error, or None once it is sent; in the thread that found out.
        """
        self.thread.start()
        try:
            self._jobs.put_nowait((send, told))
        except queue.Full:
            told(queue.Full("as many messages wait for the broker as may"))

    def close(self, timeout: float) -> None:
        """End the thread. What it has not sent by then is not sent."""
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
        except Exception as error:  # noqa: BLE001  # any transport's
            told(error)
        else:
            told(None)
        return True


_Job = tuple[Callable[[Publisher], None], Callable[[Exception | None], None]]

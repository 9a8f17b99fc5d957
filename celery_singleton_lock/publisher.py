"""Message -> parked body -> message again, or the broker.

A parked body is one line of JSON (content type, encoding, headers, properties, route) and the raw
message body behind it, untouched: it is never decoded and serialised again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from kombu.connection import Connection
from kombu.message import Message
from kombu.messaging import Producer
from kombu.utils import json

from celery_singleton_lock.stamp import COPY, STAMP

logger = logging.getLogger(__name__)

_ROUTE: Final = ("exchange", "routing_key")
_STRIPPED: Final = frozenset({STAMP, COPY, "redelivered"})
_STALE_PROPERTIES: Final = frozenset({"delivery_info", "delivery_tag", "body_encoding"})


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

    def ack(self, multiple: bool = False) -> None:  # noqa: ARG002  # kombu's
        """Note the acknowledgement."""
        self._state = "ACK"

    def reject(self, requeue: bool = False) -> None:  # kombu's signature
        """Note the rejection; the request tells whether it is to come back."""
        self._state = "REQUEUED" if requeue else "REJECTED"

    def requeue(self) -> None:
        """Note that it is to come back."""
        self._state = "REQUEUED"


def pack(message: Message) -> bytes:
    """Return a message as the bytes to keep.

    Args:
        message: from the broker, or parked before.
    """
    raw = message.body
    head = {
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
        "headers": _kept(message.headers),
        "properties": {
            key: value
            for key, value in (message.properties or {}).items()
            if key not in _STALE_PROPERTIES
        },
        "route": {key: (message.delivery_info or {}).get(key) for key in _ROUTE},
        "text": isinstance(raw, str),
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
    return {
        key: value
        for key, value in (headers or {}).items()
        if key not in _STRIPPED and not key.startswith("x-death")
    }


class Publisher:
    """Sends copies of parked messages to the broker, to wake a worker that consumes their queue.

    It owns its connection, outside of kombu's pools, which a fork would shut.

    Args:
        connect: returns a new connection to the broker.
        exchange_of: queue name -> (exchange, routing key).
    """

    def __init__(
        self, connect: Callable[[], Connection], exchange_of: Callable[[str], tuple[str, str]]
    ) -> None:
        """Connect when the first copy is sent."""
        self._connect = connect
        self._exchange_of = exchange_of
        self._connection: Connection | None = None

    def publish(self, kept: bytes, name: str, token: str, queue: str) -> None:
        """Send a copy of a parked message.

        Args:
            kept: the parked body.
            name: its lock.
            token: its token.
            queue: where it was consumed.

        Raises:
            Exception: whatever the broker's transport raises; nothing was sent.
        """
        if self._connection is None:
            self._connection = self._connect()
        message = unpack(kept)
        exchange, routing_key = self._exchange_of(queue)
        headers = dict(message.headers)
        compression = headers.pop("compression", None)
        try:
            Producer(self._connection.default_channel, auto_declare=False).publish(
                message.body,
                exchange=exchange,
                routing_key=routing_key,
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                compression=compression,
                headers={**headers, COPY: [name, token]},
                **message.properties,
            )
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; the next copy opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()

"""Converts a message to the bytes that are parked, and back.

The bytes are one line of JSON (content type, encoding, headers, properties, route), followed by the
raw message body, which is never decoded and serialised again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kombu.message import Message
from kombu.utils import json

from celery_singleton_lock.core.lock_set import KEPT
from celery_singleton_lock.worker.lock_header import (
    AFTER,
    COPY,
    FIRST,
    HEADER_KEY,
    MOVED,
    REQUEUED,
    UNANSWERED,
)
from celery_singleton_lock.worker.redelivery import REJECT

_ROUTE: Final = ("exchange", "routing_key")
_STRIPPED: Final = frozenset(
    {HEADER_KEY, AFTER, COPY, FIRST, MOVED, REQUEUED, UNANSWERED, REJECT, KEPT, "redelivered"}
)


class MessageFromRedis(Message):
    """A message that comes from Redis instead of the broker.

    Acknowledging it only sets its state. The release of its lock deletes it in Redis.

    Args:
        body: the raw body, decompressed.
        fields: the rest of what :func:`pack` stored.
        accept: content types that may be decoded.
    """

    def __init__(self, body: Any, fields: Mapping[str, Any], accept: Any) -> None:
        """Restore the message. Headers are set last, so that kombu decompresses nothing."""
        super().__init__(  # type: ignore[no-untyped-call]  # kombu
            body=body,
            content_type=fields["content_type"],
            content_encoding=fields["content_encoding"],
            delivery_info=dict(fields["route"]),
            properties=dict(fields["properties"]),
            accept=accept,
        )
        self.headers: dict[str, Any] = dict(fields["headers"])
        if fields.get("amqp"):
            self.properties["application_headers"] = self.headers  # as in a message of py-amqp

    def ack(self, multiple: bool = False) -> None:  # noqa: ARG002  # kombu's
        """Set the state to acknowledged."""
        self._state = "ACK"

    def reject(self, requeue: bool = False) -> None:  # kombu's signature
        """Set the state to rejected; the request handles ``requeue``."""
        self._state = "REQUEUED" if requeue else "REJECTED"

    def requeue(self) -> None:
        """Set the state to requeued."""
        self._state = "REQUEUED"


def pack(message: Message, ours: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Return a message as the bytes to park.

    Args:
        message: from the broker, or parked before.
        ours: headers that are stored with it, and are not sent to the broker again.
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


def unpack(kept: bytes, accept: Any = None) -> MessageFromRedis:
    """Return the message that :func:`pack` has converted.

    Raises:
        ValueError: the bytes are not a packed message.
    """
    head, _, raw = kept.partition(b"\n")
    fields = json.loads(head.decode())
    return MessageFromRedis(raw.decode() if fields["text"] else raw, fields, accept)


def _kept(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (headers or {}).items() if key not in _STRIPPED}


def _kept_properties(properties: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the properties that a task can see as ``self.request.properties``.

    ``delivery_info`` is reduced to the route: some transports add the whole message to it, or
    objects that acknowledge it.
    """
    kept = dict(properties or {})
    kept.pop("application_headers", None)  # AMQP's name of the headers
    if "delivery_info" in kept:
        kept["delivery_info"] = _route(kept["delivery_info"])
    return kept


def _route(delivery_info: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: (delivery_info or {}).get(key) for key in _ROUTE}

"""Recognises redelivered messages, messages to reject, and messages returned too often."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kombu.transport import virtual

REJECT: Final = "csl-reject"
"""Header of a message that was published to be rejected: see :func:`rejection_of`."""

DEATHS: Final = "x-death"
"""Header in which RabbitMQ lists how often, where and why a message was dead-lettered."""

MARKING: Final = frozenset({"amqp", "redis"})
"""Transports that mark redelivered messages, by kombu's ``driver_type``."""


def identity_of(message: Any) -> str:
    """Return a unique id of a message that is the same for each of its deliveries.

    Kombu's virtual transports give a message its delivery tag when it is published. SQS has an id
    for each message, and a new tag for each delivery.

    Returns:
        The id; empty if the message has no such property.
    """
    of_sqs = (message.delivery_info or {}).get("sqs_message")
    if of_sqs:
        return str(of_sqs.get("MessageId", ""))
    tag = (message.properties or {}).get("delivery_tag")
    return tag if isinstance(tag, str) else ""


def identifies_by_id(transport: Any) -> bool:
    """Return whether redeliveries of a transport are recognised by :func:`identity_of`.

    The other transports mark redelivered messages.
    """
    return getattr(transport, "driver_type", "") not in MARKING


def has_dead_letters(transport: type[Any]) -> bool:
    """Return whether a broker can dead-letter a rejected message. Otherwise it drops it."""
    return not issubclass(transport, virtual.Transport)


def history_of(headers: Mapping[str, Any]) -> str:
    """Return a digest of how often a message was dead-lettered; empty if it never was."""
    deaths: Iterable[Mapping[str, Any]] = headers.get(DEATHS) or ()
    told = [
        [str(death.get(part)) for part in ("queue", "reason", "count", "time")] for death in deaths
    ]
    if not told:
        return ""
    return hashlib.sha256(repr(sorted(told)).encode()).hexdigest()[:16]


def rejection_of(headers: Mapping[str, Any]) -> str:
    """Return the value of the header :data:`REJECT` of a message that is published to be rejected.

    It identifies the attempt and the history of dead-lettering. A worker of an older version runs
    such a message again, and a retry copies its headers. The retry is another attempt, so it is not
    rejected.

    Args:
        headers: headers of the message. Those of protocol 1 have no attempt.
    """
    return f"{headers.get('id')}/{headers.get('retries')}/{history_of(headers)}"


def dead_letters_of(queue: Any) -> bool:
    """Return whether a kombu queue is declared with a dead-letter exchange."""
    return "x-dead-letter-exchange" in (getattr(queue, "queue_arguments", None) or {})


def most_returns(queue: Any, most: int | None) -> float:
    """Return how often a message of a queue may be returned.

    Args:
        queue: a kombu queue.
        most: the setting; None for no limit.
    """
    limit = (getattr(queue, "queue_arguments", None) or {}).get("x-delivery-limit")
    bounds = [each for each in (most, limit) if isinstance(each, int) and each >= 0]
    return min(bounds, default=float("inf"))

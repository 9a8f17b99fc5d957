"""Which deliveries are of one message, and what befell it in the broker."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kombu.transport import virtual

REJECT: Final = "csl-reject"
"""Header of a message that was published to be rejected: its history when that was done."""

DEATHS: Final = "x-death"
"""Header in which RabbitMQ lists how often a message was dead-lettered, where and why."""

MARKING: Final = frozenset({"amqp", "redis"})
"""Kinds of transports that mark a message that they deliver again (kombu's ``driver_type``)."""


def identity_of(message: Any) -> str:
    """Return what is the same for each delivery of a message, and for no other message.

    Kombu's transports without AMQP give a message its tag when it is published. SQS has an id of
    its own, and another tag for each delivery.

    Returns:
        Empty if nothing tells it.
    """
    of_sqs = (message.delivery_info or {}).get("sqs_message")
    if of_sqs:
        return str(of_sqs.get("MessageId", ""))
    tag = (message.properties or {}).get("delivery_tag")
    return tag if isinstance(tag, str) else ""


def identities(transport: Any) -> bool:
    """Return whether messages of a transport are known by their identity, since it marks none."""
    return getattr(transport, "driver_type", "") not in MARKING


def has_dead_letters(transport: type[Any]) -> bool:
    """Return whether a broker does more with a rejected message than drop it."""
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


def dead_letters_of(queue: Any) -> bool:
    """Return whether a kombu queue is declared with a dead-letter exchange."""
    return "x-dead-letter-exchange" in (getattr(queue, "queue_arguments", None) or {})


def most_returns(queue: Any, most: int | None) -> float:
    """Return how often a message of a queue may come back.

    Args:
        queue: kombu's.
        most: the setting; None for no bound.
    """
    limit = (getattr(queue, "queue_arguments", None) or {}).get("x-delivery-limit")
    bounds = [each for each in (most, limit) if isinstance(each, int) and each >= 0]
    return min(bounds, default=float("inf"))

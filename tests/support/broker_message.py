"""A message as kombu receives it from a broker."""

from __future__ import annotations

from kombu.message import Message


def message(**changes: object) -> Message:
    """Return a message; `changes` replace its fields."""
    fields = {
        "body": b"[[1], {}, {}]",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {"id": "x", "task": "t", "x-tenant": "acme"},
        "properties": {"priority": 6, "correlation_id": "x", "reply_to": "r", "delivery_mode": 2},
        "delivery_info": {"exchange": "e", "routing_key": "k"},
    }
    made = Message(**{**fields, **changes})
    made.headers = {**fields, **changes}["headers"]
    return made

"""Owner tokens (pure)."""

from __future__ import annotations

import hashlib
import os


def new_token() -> str:
    """Return a new owner token: random, not derived from a task id.

    The number after the dot counts deliveries. A parked message that returns to the queue gets the
    next number, so a late holder of the former delivery no longer owns the lock.
    """
    return f"{os.urandom(16).hex()}.0"


def token_for(identity: str) -> str:
    """Return a new owner token, with the same base for each delivery of one message.

    Args:
        identity: a text that identifies the message; empty if there is none.
    """
    if not identity:
        return new_token()
    return token_on(hashlib.sha256(identity.encode()).hexdigest()[:32])


def token_on(base: str) -> str:
    """Return a new owner token with this base."""
    return f"{base}.{int.from_bytes(os.urandom(5), 'big')}"


def base_of(token: str) -> str:
    """Return the part of a token that is the same for all deliveries."""
    base, dot, number = token.rpartition(".")
    return base if dot and number.isdecimal() else token


def number_of(token: str) -> int:
    """Return the part of a token that grows with the deliveries of a message."""
    _, dot, number = token.rpartition(".")
    return int(number) if dot and number.isdecimal() else 0

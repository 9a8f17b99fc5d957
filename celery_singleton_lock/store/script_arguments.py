"""Checks values and converts them to arguments of scripts (pure).

Scripts have no roll-back, so a value that they cannot use is refused before they run.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Final

from celery_singleton_lock.config.limits import MAX_COUNT
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.store.scripts import Argument

ACQUIRE: Final = (
    "name token attempt place_us copy lease_ms limit_arg max_waiting wait_ms worker claim_ms about"
)
CLAIM: Final = "name token lease_ms delete_message worker host pid claim_ms limit_arg"
RELEASE: Final = "name token ending mark keep_ms keep_for worker done_ms claim_ms"
"""The arguments of the scripts around each task, in their order."""

LONGEST_LEASE: Final = 366 * 86_400.0
"""Longest lease or wait in seconds: a longer one probably has a wrong unit."""


def milliseconds(duration: float) -> int:
    """Return a duration in milliseconds, unchecked."""
    return round(duration * 1000)


@functools.lru_cache(maxsize=1024)
def milliseconds_of(what: str, duration: float, *, least: float = 0.0) -> int:
    """Return a duration in milliseconds.

    Args:
        what: its name, for the error.
        duration: seconds.
        least: smallest value that is allowed.

    Raises:
        ConfigurationError: it is not a number, or is out of range.
    """
    given: object = duration  # may be anything, whatever the annotation says
    if not isinstance(given, (int, float)) or not least <= given <= LONGEST_LEASE:
        msg = f"{what} is {duration!r}: give seconds, from {least:.10g} to {LONGEST_LEASE:.10g}."
        raise ConfigurationError(msg)
    return milliseconds(duration)


def lease_of(duration: float) -> int:
    """Return a lease in milliseconds.

    Raises:
        ConfigurationError: it is not between a millisecond and :data:`LONGEST_LEASE`.
    """
    return milliseconds_of("lease", duration, least=0.001)


@functools.lru_cache(maxsize=1024)
def limit_of(number: float) -> int:
    """Return a limit as an int.

    Raises:
        ConfigurationError: it is not a whole number, or is out of range.
    """
    return _number("limit", number, least=1, most=MAX_COUNT)


def place_of(number: float) -> int:
    """Return a place in the queue as an int.

    Raises:
        ConfigurationError: it is not a whole number, or is negative.
    """
    return number if type(number) is int and number >= 0 else _number("place", number)


def max_waiting_of(number: float | None) -> int | str:
    """Return the limit of a queue; empty for none.

    Raises:
        ConfigurationError: it is not a whole number, or is negative.
    """
    return "" if number is None else _number("max_waiting", number)


def _number(what: str, number: float, *, least: int = 0, most: float = math.inf) -> int:
    if not math.isfinite(number) or number % 1 or not least <= number <= most:
        bounds = f"from {least} to {most}" if math.isfinite(most) else f"{least} or more"
        msg = f"{what} is {number!r}: give a whole number, {bounds}."
        raise ConfigurationError(msg)
    return int(number)


@functools.lru_cache(maxsize=1024)
def usual_of_acquire(  # noqa: PLR0917  # positional, since keywords make the cache slower
    lease: float,
    limit: int,
    max_waiting: int | None,
    wait: float | None,
    task: str,
    worker: str,
    host: str,
    pid: int,
    claim_ms: int,
) -> tuple[Argument, ...]:
    """Return the arguments of acquire from ``lease_ms`` on: the same for all calls of a task."""
    lease_ms = lease_of(lease)
    about = {"task": task, "worker": worker, "host": host, "pid": str(pid), "lease": str(lease_ms)}
    return (
        lease_ms,
        limit_of(limit),
        max_waiting_of(max_waiting),
        "" if wait is None else milliseconds_of("wait", wait),
        worker,
        claim_ms,
        json.dumps(about, separators=(",", ":")),
    )


@functools.lru_cache(maxsize=1024)
def usual_of_claim(  # noqa: PLR0917  # positional, since keywords make the cache slower
    lease: float, delete_message: int, worker: str, host: str, pid: int, claim_ms: int, limit: int
) -> tuple[Argument, ...]:
    """Return the arguments of claim from ``lease_ms`` on: the same for all calls of a task."""
    return lease_of(lease), delete_message, worker, host, pid, claim_ms, limit


def delete_message_of(*, acks_early: bool, kept_elsewhere: bool, later: bool) -> int:
    """Return the argument ``delete_message`` of claim."""
    if later:
        return 3
    return 2 if kept_elsewhere else int(acks_early)


@functools.lru_cache(maxsize=1024)
def usual_of_release(worker: str, done_for: float, claim_ms: int) -> tuple[Argument, ...]:
    """Return the arguments of release from ``worker`` on: the same for all calls of a task."""
    return worker, milliseconds_of("done_for", done_for), claim_ms


def arguments_of(owner: Owner, claim: Claim, claim_ms: int) -> dict[str, Argument]:
    """Return what park takes of an owner and a claim."""
    return {
        "token": owner.token,
        "lease_ms": lease_of(claim.lease),
        "limit_arg": limit_of(claim.limit),
        "place_us": place_of(claim.place),
        "max_waiting": max_waiting_of(claim.max_waiting),
        "copy": int(claim.copy),
        "unanswered": int(claim.unanswered),
        "attempt": owner.attempt,
        "task": owner.task,
        "worker": owner.worker,
        "host": owner.host,
        "pid": owner.pid,
        "claim_ms": claim_ms,
    }

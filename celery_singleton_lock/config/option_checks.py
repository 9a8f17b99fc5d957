"""What options and settings may be: one check each, in one table, :data:`OPTIONS`.

Seconds everywhere. Errors name the task or setting, the value, and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, cast

from celery_singleton_lock.config.redis_url import BackendAddress, parse_backend_url
from celery_singleton_lock.config.limits import (
    LONG_LEASE,
    LONGEST_DELAY,
    MAX_COUNT,
    MAX_LEASE,
    MAX_REPLICAS_WAIT,
    MAX_WAIT,
    MIN_LEASE,
    MIN_REPLICAS_WAIT,
    MOST_PORT,
)
from celery_singleton_lock.config.django_cache_alias import is_alias
from celery_singleton_lock.config.client_options import read
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind, count_meant, number_of, seconds_meant


class ConfigurationWarning(UserWarning):
    """An option or setting works, but does not do what its author probably expects."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written: what an error names first.

    Args:
        option: the option, or setting.
        task: the task, if it is an option of one.
        warns: whether to warn of what is allowed and does not do what its author expects.
    """

    option: str
    task: str = ""
    warns: bool = True

    def __str__(self) -> str:
        return f"task {self.task}: {self.option}" if self.task else self.option

    def refuse(self, value: object, remedy: str) -> NoReturn:
        """Raise the error that names place, value and remedy."""
        msg = f"{self} is {value!r}: {remedy}" + ("" if remedy.endswith("?") else ".")
        raise ConfigurationError(msg)


Check = Callable[[Place, Any], Any]


def _lease(place: Place, value: Any) -> float:
    """Check a lease."""
    seconds = _seconds(place, value, MAX_LEASE, "it is renewed while the task runs, so use 30")
    if seconds < MIN_LEASE:
        remedy = (
            f"below {MIN_LEASE:g} s the watchdog cannot serve it: it renews after a third of the "
            "lease, and must have time to try again before the end. Use 30; a lock is released "
            "when its task ends, not when its lease does"
        )
        place.refuse(value, remedy)
    if seconds > LONG_LEASE and place.warns:
        msg = (
            f"{place} is {value!r} s: it need not exceed the task's run time, because it is "
            "renewed while the task runs; all that it sets is for how long a crashed worker "
            "blocks the lock. Use 30."
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=4)
    return seconds


def _wait(place: Place, value: Any) -> float | None:
    """Check a longest wait."""
    return None if value is None else _seconds(place, value, MAX_WAIT, "None waits for ever")


def _hold_for(place: Place, value: Any) -> float | None:
    """Check for how long a lock stays taken after a success."""
    hint = "None gives the lock back when the task ends"
    return None if value is None else _seconds(place, value, MAX_WAIT, hint)


def _delay(place: Place, value: Any) -> float:
    """Check for how long a requeued task is held back."""
    return _seconds(place, value, LONGEST_DELAY, "the broker may redeliver what is held for long")


def _seconds(place: Place, value: Any, most: float, hint: str) -> float:
    """Check a duration: a number, and one that Redis and its scripts can count in."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        use = seconds_meant(value)
        remedy = f"it must be a number of seconds, not {type(value).__name__}"
        place.refuse(value, f"{remedy}: {use}" if use else remedy)
    if not 0 < value <= most:  # false for NaN too
        place.refuse(value, f"it must be above 0, and at most {most:.10g} seconds; {hint}")
    return float(value)


def _count(least: int, hint: str) -> Check:
    """Check a whole number."""

    def check(place: Place, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            use = count_meant(value)
            remedy = f"it must be a whole number, not {type(value).__name__}"
            place.refuse(value, f"{remedy}: {use}" if use else remedy)
        if not least <= value <= MAX_COUNT:
            place.refuse(value, f"it must be from {least} to {MAX_COUNT}; {hint}")
        return int(value)

    return check


def _max_returns(place: Place, value: Any) -> int | None:
    """Check how often a message may come back."""
    return None if value is None else _count(0, "None is for no bound")(place, value)


def _max_waiting(place: Place, value: Any) -> int | None:
    """Check the bound of a queue."""
    check = _count(0, "0 lets nobody wait, None is no bound")
    return None if value is None else cast("int", check(place, value))


def _choice(*now: str) -> Check:
    """Check a policy.

    Args:
        now: what there is.
    """

    def check(place: Place, value: Any) -> str:
        if not isinstance(value, str) or value not in now:
            choices = " or ".join(f'"{name}"' for name in now)
            close = difflib.get_close_matches(str(value), now, n=1)
            hint = f'. Did you mean "{close[0]}"?' if close else ""
            place.refuse(value, f"it must be {choices}{hint}")
        return value

    return check


_any_conflict: Final = _choice("park", "skip", "fail", "wait", "requeue")


def _on_conflict(place: Place, value: Any) -> str:
    """Check what a blocked task does; who wants it to replace another finds out how."""
    if value == "replace":
        options = place.option.removesuffix("on_conflict")
        place.refuse(
            value,
            "that is done where the queue is full. To have the newest of the tasks that wait "
            f'replace the others, use {options}on_conflict="park", {options}max_waiting=1 and '
            f'{options}on_full="replace"',
        )
    return cast("str", _any_conflict(place, value))


def eager(place: Place, value: Any) -> bool:
    """Check a setting that is on or off."""
    if not isinstance(value, bool):
        place.refuse(value, "it must be True or False")
    return value


def _prefix(place: Place, value: Any) -> str:
    """Check the start of all keys."""
    if not isinstance(value, str) or not value or any(sign in value for sign in "{}\0"):
        place.refuse(value, 'it must be text, not empty, without braces and NUL, such as "csl"')
    return value


def _backend_options(place: Place, value: Any) -> dict[str, Any]:
    """Check the arguments for the Redis client; their values may be secrets."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        msg = f"{place} is {a_kind(value)}: it must be a dict of arguments for redis.Redis."
        raise ConfigurationError(msg)
    for name in ("longest_lease", "server_timeout"):
        _seconds_of_a_quorum(f'{place}["{name}"]', value.get(name, 1))
    return read(value)


def _seconds_of_a_quorum(which: str, value: Any) -> None:
    if type(value) not in {int, float} or not 0 < value <= MAX_LEASE:
        msg = f"{which} is {value!r}: give seconds, more than 0, up to {MAX_LEASE:.0f}."
        raise ConfigurationError(msg)


def _backend(place: Place, value: Any) -> str | tuple[str, ...] | None:
    """Check the URL of the locks' Redis, or those of a quorum."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return _quorum(place, value)
    if not isinstance(value, str):
        msg = f"{place} is {a_kind(value)}: it must be a URL, or a list of URLs."
        raise ConfigurationError(msg)
    if not is_alias(value):  # of which Django's settings know more
        parse_backend_url(value, place.option)
    return value


def _quorum(place: Place, value: Sequence[Any]) -> tuple[str, ...]:
    """Check the URLs of servers of which a majority decides."""
    if len(value) < LEAST_SERVERS or len(value) % 2 == 0:
        msg = (
            f"{place} names {number_of(len(value), 'server')}: give an odd number, three or more, "
            "of which a majority decides; or one URL, not in a list. Several Sentinels are one "
            "URL, with ';'."
        )
        raise ConfigurationError(msg)
    seen: set[tuple[str, int, str]] = set()
    for number, url in enumerate(value, 1):
        if not isinstance(url, str):
            msg = f"{place}: server {number} is {a_kind(url)}: it must be a URL."
            raise ConfigurationError(msg)
        address = parse_backend_url(url, f"{place.option}: server {number}")
        where = (address.host, address.port, address.path)
        if (why := _dependent(address)) or where in seen:
            why = why or "is given twice, and would vote twice"
            msg = (
                f"{place}: server {number}, {address!s}, {why}. Give independent servers: another "
                "database, a replica, or what a failover can replace, is none."
            )
            raise ConfigurationError(msg)
        seen.add(where)
    return tuple(value)


def _dependent(address: BackendAddress) -> str:
    """Return why this is no server by itself; empty if it is one."""
    if address.in_memory:
        return "is in the memory of this process (in tests one is enough, not in a list)"
    return "is a Sentinel" if address.sentinels else "is a Cluster" if address.nodes else ""


LEAST_SERVERS: Final = 3


def _replicas_timeout(place: Place, value: Any) -> float:
    """Check how long a worker waits for replicas; its connections give up after 2 s."""
    why = "all that this worker parks waits for as long, so use 0.5"
    seconds = _seconds(place, value, MAX_REPLICAS_WAIT, why)
    if seconds < MIN_REPLICAS_WAIT:
        place.refuse(value, f"it must be at least {MIN_REPLICAS_WAIT:g} seconds; {why}")
    return seconds


def _port(place: Place, value: Any) -> int | None:
    """Check the port of the metrics."""
    if value is not None and (type(value) is not int or not 1 <= value <= MOST_PORT):
        place.refuse(value, f"it must be a port, 1 to {MOST_PORT}, or None for none")
    return value


def _address(place: Place, value: Any) -> str:
    """Check the address on which metrics are served."""
    if not isinstance(value, str) or not value:
        place.refuse(value, 'it must be an address of this machine, such as "127.0.0.1"')
    host, _, port = value.rpartition(":")
    if port.isdecimal() and host and ":" not in host:  # an address of IPv6 has several
        setting = place.option.replace("address", "port").replace("ADDRESS", "PORT")
        place.refuse(
            value, f'the port has a setting of its own. Use "{host}", and {setting}={port}'
        )
    return value


OPTIONS: Final[Mapping[str, Check]] = {
    "backend": _backend,
    "backend_options": _backend_options,
    "prefix": _prefix,
    "lease": _lease,
    "limit": _count(1, "1 is one task at a time"),
    "on_conflict": _on_conflict,
    "wait_timeout": _wait,
    "max_waiting": _max_waiting,
    "on_full": _choice("fail", "skip", "replace"),
    "on_retry": _choice("release", "keep"),
    "on_lost": _choice("report", "abort"),
    "on_backend_error": _choice("retry", "fail", "run"),
    "requeue_delay": _delay,
    "requeue_max": _delay,
    "hold_for": _hold_for,
    "eager": eager,
    "mode": _choice("enforce", "observe", "off"),
    "max_returns": _max_returns,
    "quarantine": eager,
    "replicas_wait": _count(0, "0 waits for none"),
    "replicas_timeout": _replicas_timeout,
    "metrics_port": _port,
    "metrics_address": _address,
    "metrics_by_lock": eager,
    "max_body_bytes": _count(1, "the default is 16 MiB"),
}
"""Option -> its check. A task has those of :class:`LockOptions`, the settings all but ``limit``."""

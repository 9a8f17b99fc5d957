"""The checks of all options and settings. The table :data:`OPTIONS` lists them.

Durations are in seconds. Errors name the task or setting, the value, and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, cast

from celery_singleton_lock.config.client_options import read
from celery_singleton_lock.config.django_cache_alias import is_alias
from celery_singleton_lock.config.limits import (
    LONG_LEASE,
    LONGEST_DELAY,
    MAX_BYTES,
    MAX_COUNT,
    MAX_LEASE,
    MAX_REPLICAS_WAIT,
    MAX_WAIT,
    MIN_LEASE,
    MIN_REPLICAS_WAIT,
    MOST_PORT,
    NO_LIMIT,
)
from celery_singleton_lock.config.redis_url import BackendAddress, parse_backend_url
from celery_singleton_lock.core.fair_option import checked_by, checked_limit, checked_weight
from celery_singleton_lock.core.lock_name_template import is_computed
from celery_singleton_lock.core.priority import PriorityOption, checked_priority
from celery_singleton_lock.core.rate import Rate, rates_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind, count_meant, number_of, seconds_meant


class ConfigurationWarning(UserWarning):
    """An option or setting is valid, but probably does not have the intended effect."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The source of a value, which errors name first.

    Args:
        option: the option or setting.
        task: the task of the option; empty for a setting.
        warns: whether checks of this value may warn.
    """

    option: str
    task: str = ""
    warns: bool = True

    def __str__(self) -> str:
        return f"task {self.task}: {self.option}" if self.task else self.option

    def refuse(self, value: object, remedy: str) -> NoReturn:
        """Raise a ConfigurationError with source, value and what to change."""
        msg = f"{self} is {value!r}: {remedy}" + ("" if remedy.endswith("?") else ".")
        raise ConfigurationError(msg)


Check = Callable[[Place, Any], Any]


def _lease(place: Place, value: Any) -> float:
    seconds = _seconds(place, value, MAX_LEASE, "it is renewed while the task runs, so use 30")
    if seconds < MIN_LEASE:
        remedy = (
            f"a lease below {MIN_LEASE:g} s cannot be renewed in time: the watchdog renews after a "
            "third of it, and needs time for a second attempt. Use 30; the lock is released when "
            "the task ends, before its lease does"
        )
        place.refuse(value, remedy)
    if seconds > LONG_LEASE and place.warns:
        msg = (
            f"{place} is {value!r} s: it need not exceed the task's run time, because it is "
            "renewed while the task runs. A crashed worker blocks the lock for this time. Use 30."
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=4)
    return seconds


def _wait(place: Place, value: Any) -> float | None:
    return None if value is None else _seconds(place, value, MAX_WAIT, "None is no limit")


def _debounce(place: Place, value: Any) -> float | None:
    hint = "None lets each call queue at once"
    return None if value is None else _seconds(place, value, MAX_WAIT, hint)


def _unique(place: Place, value: Any) -> str | float | None:
    if value is None or value in ("until_started", "until_done"):  # any type
        return cast("str | None", value)
    if isinstance(value, (str, bool)):
        use = seconds_meant(value)
        meant = f": {use}" if use else _meant(value, ("until_started", "until_done"))
        place.refuse(
            value, f'it must be "until_started", "until_done", a number of seconds, or None{meant}'
        )
    return _seconds(place, value, MAX_WAIT, 'use "until_done" for as long as the task exists')


def _unique_max(place: Place, value: Any) -> float:
    return _seconds(place, value, MAX_WAIT, "a message may be lost, so use 3600")


def _unique_key(place: Place, value: Any) -> Any:
    if value is not None and not isinstance(value, str) and not callable(value):
        place.refuse(
            value,
            f'it must be a template such as "{{user}}", or a callable, not {a_kind(value)}',
        )
    return value


def _hold_for(place: Place, value: Any) -> float | None:
    hint = "None releases the lock when the task ends"
    return None if value is None else _seconds(place, value, MAX_WAIT, hint)


def _grace(place: Place, value: Any) -> float:
    return _seconds(place, value, MAX_WAIT, "the task that replaces it waits meanwhile, so use 10")


def _delay(place: Place, value: Any) -> float:
    return _seconds(
        place, value, LONGEST_DELAY, "the broker may redeliver a message that is held back longer"
    )


def _seconds(place: Place, value: Any, most: float, hint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        use = seconds_meant(value)
        remedy = f"it must be a number of seconds, not {type(value).__name__}"
        place.refuse(value, f"{remedy}: {use}" if use else remedy)
    if not 0 < value <= most:  # false for NaN too
        place.refuse(value, f"it must be above 0, and at most {most:.10g} seconds; {hint}")
    return float(value)


def _count(least: int, hint: str, most: int = MAX_COUNT) -> Check:
    def check(place: Place, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            use = count_meant(value)
            remedy = f"it must be a whole number, not {type(value).__name__}"
            place.refuse(value, f"{remedy}: {use}" if use else remedy)
        if not least <= value <= most:
            place.refuse(value, f"it must be from {least} to {most}; {hint}")
        return int(value)

    return check


def _limit(place: Place, value: Any) -> int:
    if is_computed(value):
        return NO_LIMIT  # for each call, see computed_options
    check = _count(1, "1 is one task at a time")
    return NO_LIMIT if value is None else cast("int", check(place, value))


def _max_returns(place: Place, value: Any) -> int | None:
    return None if value is None else _count(0, "None is no limit")(place, value)


def _most_parked(most: int) -> Check:
    check = _count(1, "None is no limit", most)
    return lambda place, value: None if value is None else check(place, value)


def _max_waiting(place: Place, value: Any) -> int | None:
    check = _count(0, "with 0 no task may wait, None is no limit")
    return None if value is None else cast("int", check(place, value))


def _meant(value: Any, choices: Sequence[str]) -> str:
    """Return a question with the choice that is similar to a value, or ""."""
    close = difflib.get_close_matches(str(value).lower(), choices, n=1)
    return f'. Did you mean "{close[0]}"?' if close else ""


def _choice(*now: str) -> Check:
    def check(place: Place, value: Any) -> str:
        if not isinstance(value, str) or value not in now:
            choices = " or ".join(f'"{name}"' for name in now)
            place.refuse(value, f"it must be {choices}{_meant(value, now)}")
        return value

    return check


_any_conflict: Final = _choice("park", "skip", "fail", "wait", "requeue", "preempt")


def _on_conflict(place: Place, value: Any) -> str:
    if value == "replace":
        options = place.option.removesuffix("on_conflict")
        place.refuse(
            value,
            "tasks are replaced in a full queue. To make the newest task replace the one that "
            f'waits, use {options}on_conflict="park", {options}max_waiting=1 and '
            f'{options}on_full="replace"',
        )
    return cast("str", _any_conflict(place, value))


def checked_bool(place: Place, value: Any) -> bool:
    """Check a bool."""
    if not isinstance(value, bool):
        place.refuse(value, "it must be True or False")
    return value


def _prefix(place: Place, value: Any) -> str:
    if not isinstance(value, str) or not value or any(sign in value for sign in "{}\0"):
        place.refuse(
            value, 'it must be a text without braces and NUL, and not empty, such as "csl"'
        )
    return value


def _backend_options(place: Place, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        msg = f"{place} is {a_kind(value)}: it must be a dict of arguments for redis.Redis."
        raise ConfigurationError(msg)
    for name in ("longest_lease", "server_timeout"):
        _seconds_of_a_quorum(f'{place}["{name}"]', value.get(name, 1))
    return read(value)


def _seconds_of_a_quorum(which: str, value: Any) -> None:
    if type(value) not in {int, float} or not 0 < value <= MAX_LEASE:
        msg = f"{which} is {value!r}: it must be above 0, and at most {MAX_LEASE:.0f} seconds."
        raise ConfigurationError(msg)


def _backend(place: Place, value: Any) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return _quorum(place, value)
    if not isinstance(value, str):
        msg = f"{place} is {a_kind(value)}: it must be a URL, or a list of URLs."
        raise ConfigurationError(msg)
    if not is_alias(value):  # Django's settings have the URL
        parse_backend_url(value, place.option)
    return value


def _quorum(place: Place, value: Sequence[Any]) -> tuple[str, ...]:
    if len(value) < LEAST_SERVERS or len(value) % 2 == 0:
        msg = (
            f"{place} names {number_of(len(value), 'server')}: a quorum needs an odd number of "
            "servers, three or more. For one server write its URL, not a list; for several "
            "Sentinels write one URL, with ';'."
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
            why = why or "is listed twice, and would vote twice"
            msg = (
                f"{place}: server {number}, {address!s}, {why}. Use independent servers: not "
                "another database, a replica, or a server that a failover replaces."
            )
            raise ConfigurationError(msg)
        seen.add(where)
    return tuple(value)


def _dependent(address: BackendAddress) -> str:
    """Return why this is not an independent server; empty if it is one."""
    if address.in_memory:
        return "is in the memory of this process (in tests use one, not a list)"
    return "is a Sentinel" if address.sentinels else "is a Cluster" if address.nodes else ""


LEAST_SERVERS: Final = 3


def _replicas_timeout(place: Place, value: Any) -> float:
    why = "parking waits for as long, so use 0.5"
    seconds = _seconds(place, value, MAX_REPLICAS_WAIT, why)
    if seconds < MIN_REPLICAS_WAIT:
        place.refuse(value, f"it must be at least {MIN_REPLICAS_WAIT:g} seconds; {why}")
    return seconds


def _rate(place: Place, value: Any) -> tuple[Rate, ...]:
    if is_computed(value):
        return ()  # for each call, see computed_options
    try:
        return rates_of(value)
    except ConfigurationError as error:
        msg = f"{place}: {error}"
        raise ConfigurationError(msg) from None


def _priority(place: Place, value: Any) -> PriorityOption:
    plain = value.__func__ if isinstance(value, staticmethod) else value
    return 0.0 if plain is None else checked_priority(str(place), plain)


def _fair(check: Callable[[str, object], Any]) -> Check:
    def checked(place: Place, value: Any) -> Any:
        plain = value.__func__ if isinstance(value, staticmethod) else value
        return check(str(place), plain)

    return checked


def _port(place: Place, value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= MOST_PORT):
        place.refuse(value, f"it must be a port from 1 to {MOST_PORT}, or None")
    return value


def _address(place: Place, value: Any) -> str:
    if not isinstance(value, str) or not value:
        place.refuse(value, 'it must be an address of this machine, such as "127.0.0.1"')
    host, _, port = value.rpartition(":")
    if port.isdecimal() and host and ":" not in host:  # an address of IPv6 has several
        setting = place.option.replace("address", "port").replace("ADDRESS", "PORT")
        place.refuse(value, f'the port has its own setting. Use "{host}", and {setting}={port}')
    return value


OPTIONS: Final[Mapping[str, Check]] = {
    "backend": _backend,
    "backend_options": _backend_options,
    "prefix": _prefix,
    "lease": _lease,
    "limit": _limit,
    "rate": _rate,
    "on_rate": _choice("park", "skip", "fail"),
    "priority": _priority,
    "fair_by": _fair(checked_by),
    "fair_limit": _fair(checked_limit),
    "fair_weight": _fair(checked_weight),
    "debounce": _debounce,
    "debounce_max": _wait,
    "debounce_first": _choice("wait", "run"),
    "unique": _unique,
    "unique_key": _unique_key,
    "unique_max": _unique_max,
    "on_duplicate": _choice("existing", "raise", "follow"),
    "on_conflict": _on_conflict,
    "wait_timeout": _wait,
    "max_waiting": _max_waiting,
    "on_full": _choice("fail", "skip", "replace"),
    "on_retry": _choice("release", "keep"),
    "on_lost": _choice("report", "abort"),
    "on_backend_error": _choice("retry", "fail", "run"),
    "requeue_delay": _delay,
    "requeue_max": _delay,
    "preempt_grace": _grace,
    "preempt_max": _count(
        1, "the next one runs to its end, so that a steady stream makes progress"
    ),
    "hold_for": _hold_for,
    "eager": checked_bool,
    "mode": _choice("enforce", "observe", "off"),
    "max_parked": _most_parked(MAX_COUNT),
    "max_parked_bytes": _most_parked(MAX_BYTES),
    "max_returns": _max_returns,
    "quarantine": checked_bool,
    "replicas_wait": _count(0, "0 waits for none"),
    "replicas_timeout": _replicas_timeout,
    "metrics_port": _port,
    "metrics_address": _address,
    "metrics_by_lock": checked_bool,
    "max_body_bytes": _count(1, "the default is 16 MiB"),
}
"""Option -> its check. Tasks have those of ``LockOptions``; settings all except ``TASK_ONLY``."""

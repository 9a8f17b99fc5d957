"""Reads the settings of an app; Celery's own settings provide some defaults."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from celery_singleton_lock.config.django_cache_alias import found_by_alias, is_alias
from celery_singleton_lock.config.limits import MAX_WAIT, PREFIX
from celery_singleton_lock.config.option_checks import (
    OPTIONS,
    ConfigurationWarning,
    Place,
    checked_bool,
)
from celery_singleton_lock.config.redis_url import SCHEMES
from celery_singleton_lock.config.settings import SENTINEL_OPTIONS, Settings
from celery_singleton_lock.config.url_text import SENTINEL, each_address, safe_url, scheme_of

_NOT_GIVEN: Final = object()
"""Returned for a setting that is not set. None is a valid value."""

_KOMBU_DEFAULT: Final = 3600.0
"""kombu's default visibility time-out, in seconds."""

_KOMBU_LATENESS: Final = {
    "unacked_restore_interval": 10.0,
    "unacked_restore_throttle": 10.0,
    "unacked_mutex_expire": 300.0,
}
"""kombu's defaults: it looks every ten seconds, and each tenth time it sends messages again. A
worker that is killed while it does so keeps the others from it for five minutes."""

_SENTINEL_NAMES: Final = ("master_name", "min_other_sentinels", "sentinel_kwargs")
"""Options for Sentinels that are read from Celery's settings."""


def parse_settings(get: Callable[[str, Any], Any]) -> Settings:
    """Read and check the settings of an app.

    Args:
        get: ``(name, default) -> value``, such as ``app.conf.get``. It is also called for Celery's
            ``broker_url`` and ``result_backend``, their TLS options and their transport options;
            it must include environment variables, if they apply.

    Returns:
        The settings. A missing backend raises later, in :meth:`Settings.address`.

    Raises:
        ConfigurationError: a setting has an invalid value.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        check = OPTIONS.get(field.name)
        if check is None:
            continue
        value = get(PREFIX + field.name, _NOT_GIVEN)
        if value is not _NOT_GIVEN:
            values[field.name] = check(Place(PREFIX + field.name), value)
    url, source, found = _find_backend(get, values.get("backend"))
    transport = get("broker_transport_options", None)
    visibility_timeout = _seconds_in(transport, "visibility_timeout", _KOMBU_DEFAULT)
    _warn_of_sentinel_options(url, values.get("backend_options", {}))
    return Settings(
        **{
            **values,
            "backend": url,
            "backend_source": source,
            "backend_options": MappingProxyType({**found, **values.get("backend_options", {})}),
            "visibility_timeout": visibility_timeout,
            "done_for": _remembered_for(visibility_timeout, transport),
        }
    )


def is_eager(get: Callable[[str, Any], Any]) -> bool:
    """Return whether eager tasks take locks now; tests may change the setting at any time.

    Args:
        get: ``(name, default) -> value``, such as ``app.conf.get``.

    Raises:
        ConfigurationError: the setting is not a bool.
    """
    name = f"{PREFIX}eager"
    return checked_bool(Place(name), get(name, False))


def _find_backend(
    get: Callable[[str, Any], Any], explicit: str | tuple[str, ...] | None
) -> tuple[str | tuple[str, ...] | None, str, dict[str, Any]]:
    """Return the URL, its source (or why there is none), and the options that belong to it."""
    if isinstance(explicit, str) and is_alias(explicit):
        return found_by_alias(explicit, f"{PREFIX}backend")
    if explicit is not None:
        return explicit, f"{PREFIX}backend", {}
    candidates = {"broker_url": "broker_use_ssl", "result_backend": "redis_backend_use_ssl"}
    seen: list[str] = []
    for setting, tls_setting in candidates.items():
        given = get(setting, None)
        url = _url_of_one_redis(given)
        if url is not None:
            tls = get(tls_setting, None)
            if scheme_of(url) == SENTINEL:
                return url, setting, _sentinel_options(get, setting, tls)
            if not isinstance(tls, Mapping):
                return url, setting, {}
            return re.sub("^redis://", "rediss://", url), setting, dict(tls)
        seen.append(f"{setting} is {safe_url(given)!r}" if given else f"{setting} is not set")
    return None, " and ".join(seen), {}


def _url_of_one_redis(url: Any) -> str | None:
    """Return the URL if it names one Redis, perhaps by several Sentinels; else None."""
    if isinstance(url, (list, tuple)) and all(isinstance(each, str) for each in url):
        url = ";".join(url)
    if not isinstance(url, str):
        return None
    schemes = [scheme_of(each) for each in each_address(url)]
    one = len(schemes) == 1 or set(schemes) == {SENTINEL}
    return url if one and schemes[0] in SCHEMES else None


def _sentinel_options(get: Callable[[str, Any], Any], setting: str, tls: Any) -> dict[str, Any]:
    """Return Celery's options for a Sentinel URL, as values for ``backend_options``."""
    given = get(SENTINEL_OPTIONS[setting], None)
    options = given if isinstance(given, Mapping) else {}
    found = {name: options[name] for name in _SENTINEL_NAMES if name in options}
    return {**found, "ssl": True, **tls} if isinstance(tls, Mapping) else found


def _warn_of_sentinel_options(
    url: str | tuple[str, ...] | None, options: Mapping[str, Any]
) -> None:
    """Warn of options for Sentinels if the URL names no Sentinels."""
    if url is None or (isinstance(url, str) and scheme_of(url) == SENTINEL):
        return
    idle = [name for name in _SENTINEL_NAMES if name in options]
    if idle:
        msg = (
            f"{PREFIX}backend_options has {idle[0]!r}, which has no effect: it is for Sentinels. "
            "Write the URL of the locks as sentinel://…, or leave the option out."
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=3)


def _remembered_for(visibility_timeout: float, transport_options: Any) -> float:
    """Return for how many seconds an end is remembered: until kombu has sent its copies, if late.

    kombu takes ten messages at a time. So twice the time-out allows for a few hundred of them.
    """
    interval, throttle, expire = (
        _seconds_in(transport_options, name, default) for name, default in _KOMBU_LATENESS.items()
    )
    late = max(visibility_timeout, interval * throttle + expire)
    return min(visibility_timeout + late, MAX_WAIT)


def _seconds_in(transport_options: Any, name: str, default: float) -> float:
    """Return an option of the broker's transport; the default if it is no number above 0."""
    if isinstance(transport_options, Mapping):
        value = transport_options.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(min(value, MAX_WAIT))
    return default

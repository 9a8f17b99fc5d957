"""The Redis of an alias in Django's ``CACHES``: ``django-cache://locks``.

Locks use the address, database, user, password and TLS options of the cache. They do not use its
time-outs, retries, number of connections and serializer: those are chosen for a cache, not for a
lock.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import redis

from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.redis_url import BackendAddress, parse_backend_url
from celery_singleton_lock.config.url_text import safe_url, scheme_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import an

SCHEME: Final = "django-cache"

REDIS_CACHES: Final = (
    "django.core.cache.backends.redis.RedisCache",
    "django_redis.cache.RedisCache",
)
"""Supported backends, and base classes of backends."""

# redis-py's annotations leave this one out.
_parse_url: Final[Any] = redis.connection.parse_url

_TAKEN: Final = frozenset(
    {
        "client_name",
        "credential_provider",
        "health_check_interval",
        "protocol",
        "socket_keepalive",
        "socket_keepalive_options",
    }
)
"""``OPTIONS`` that locks use, besides ``ssl…`` and the parts of the URL."""

_IN_URL: Final = ("db", "username", "password")

_SCHEMES: Final = ("redis", "rediss", "unix")
"""Schemes of a cache's LOCATION."""

_LEFT: Final = frozenset(
    {
        "connection_class",
        "cull_frequency",
        "decode_responses",
        "driver_info",
        "encoding",
        "encoding_errors",
        "lib_name",
        "lib_version",
        "max_connections",
        "max_entries",
        "parser_class",
        "pool_class",
        "queue_class",
        "retry",
        "retry_on_error",
        "retry_on_timeout",
        "serializer",
        "socket_connect_timeout",
        "socket_read_size",
        "socket_timeout",
        "timeout",
    }
)
"""``OPTIONS`` that concern only the cache."""

_ONE_SERVER: Final = ("DefaultClient", "HerdClient", "SentinelClient")
"""Clients of django-redis that store all keys on one server."""


def is_alias(url: str) -> bool:
    """Return whether a backend is the alias of a cache."""
    return scheme_of(url) == SCHEME


def found_by_alias(url: str, source: str) -> tuple[str, str, dict[str, Any]]:
    """Return the Redis of a cache's alias, according to this process' Django settings.

    Args:
        url: ``django-cache://ALIAS``.
        source: the setting that has it, for errors.

    Returns:
        The URL, with its credentials; its source; and options for the Redis client.

    Raises:
        ConfigurationError: Django's settings cannot be read, or the cache is not a Redis.
    """
    alias = url.partition("://")[2].strip("/")
    wrong = _WrongAlias(f"{source} is {url!r}")
    caches = _caches(wrong)
    if alias not in caches:
        close = difflib.get_close_matches(alias, caches, n=1)
        hint = f'Did you mean "{close[0]}"?' if close else f"There are: {', '.join(caches)}."
        wrong.refuse(f"CACHES has no {alias!r}. {hint}")
    return _found(alias, caches[alias], wrong)


@dataclasses.dataclass(frozen=True, slots=True)
class _WrongAlias:
    """An alias and its setting, which errors name first."""

    place: str

    def refuse(self, remedy: str) -> NoReturn:
        """Raise the error, without its cause, which may contain a password."""
        msg = f"{self.place}: {remedy}"
        raise ConfigurationError(msg) from None


def _caches(wrong: _WrongAlias) -> Mapping[str, Mapping[str, Any]]:
    try:
        from django.conf import settings  # noqa: PLC0415  # an extra
        from django.core.exceptions import ImproperlyConfigured  # noqa: PLC0415  # likewise
    except ImportError:
        wrong.refuse("Django is not installed. Install it, or write the URL of the Redis.")
    try:
        caches: Mapping[str, Mapping[str, Any]] = settings.CACHES
    except (ImproperlyConfigured, ImportError) as error:
        wrong.refuse(f"Django's settings cannot be read ({error}). Set DJANGO_SETTINGS_MODULE.")
    return caches


def _found(
    alias: str, params: Mapping[str, Any], wrong: _WrongAlias
) -> tuple[str, str, dict[str, Any]]:
    place = f"CACHES[{alias!r}]"
    backend = str(params.get("BACKEND", ""))
    if not is_redis_cache(backend):
        remedy = (
            f"{place} is {an(backend)}, and locks need a Redis. Use a cache of "
            f"{REDIS_CACHES[0]} (or of django-redis), or the URL of a Redis."
        )
        wrong.refuse(remedy)
    options, sentinels = _options(params.get("OPTIONS") or {}, place)
    address = _address(_first(params.get("LOCATION")), options, place)
    if sentinels:
        address, options = _by_sentinels(address, sentinels, options)
    return address.url, place, options


def is_redis_cache(backend: str) -> bool:
    """Return whether an import path names a supported cache backend."""
    if backend in REDIS_CACHES:
        return True
    from django.utils.module_loading import import_string  # noqa: PLC0415  # an extra

    try:
        bases = import_string(backend).__mro__
    except (ImportError, AttributeError):  # Django reports it
        return False
    return any(f"{base.__module__}.{base.__qualname__}" in REDIS_CACHES for base in bases)


def _address(location: str, options: dict[str, Any], place: str) -> BackendAddress:
    """Return the address of a cache. Parts that its URL lacks are moved from ``options``."""
    url = re.sub(r"\bis_master=\w*&?", "", location).rstrip("?&")  # an option of django-redis
    if scheme_of(url) not in _SCHEMES:
        msg = f"{place} has the LOCATION {safe_url(url)!r}. Use redis://, rediss:// or unix://."
        raise ConfigurationError(msg)
    address = parse_backend_url(url, f"the LOCATION of {place}")
    given = {name: options.pop(name) for name in _IN_URL if name in options}
    said = _parse_url(url)
    missing = {name: value for name, value in given.items() if value and name not in said}
    if not str(missing.get("db", 0)).isdecimal():
        msg = f"{place} has the option db={missing['db']!r}: it must be the number of a database."
        raise ConfigurationError(msg)
    if "db" in missing:
        missing["db"] = int(missing["db"])
    return dataclasses.replace(address, **missing)


def _first(location: object) -> str:
    """Return the first server: django-redis writes to it, and only reads from the others."""
    servers = re.split("[;,]", location) if isinstance(location, str) else location
    first = next(iter(servers), "") if isinstance(servers, (list, tuple)) else ""
    return str(first).strip()


def _options(given: Mapping[str, Any], place: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the options for the Redis client, and those for Sentinels."""
    options = {name: value for name, value in given.items() if name != name.upper()}
    sentinels: Mapping[str, Any] = {}
    if any(name == name.upper() for name in given):  # options of django-redis
        client = str(given.get("CLIENT_CLASS", _ONE_SERVER[0])).rpartition(".")[2]
        if client not in _ONE_SERVER or "Cluster" in str(given.get("REDIS_CLIENT_CLASS", "")):
            msg = f"{place} distributes keys over servers, and a lock needs one. Use another cache."
            raise ConfigurationError(msg)
        options |= given.get("REDIS_CLIENT_KWARGS") or {}
        options |= given.get("CONNECTION_POOL_KWARGS") or {}
        options |= {name: given[name.upper()] for name in _IN_URL if given.get(name.upper())}
        sentinels = given if given.get("SENTINELS") else {}
    taken = {name: value for name, value in options.items() if _is_taken(name)}
    unknown = sorted(options.keys() - taken.keys() - _LEFT)
    if unknown:
        msg = (
            f"{place} has the option {unknown[0]!r}, which is unknown here. Set {PREFIX}backend to "
            f"the URL of the Redis, and write options into {PREFIX}backend_options."
        )
        raise ConfigurationError(msg)
    return taken, sentinels


def _is_taken(name: str) -> bool:
    return name in _TAKEN or name in _IN_URL or name.startswith("ssl")


def _by_sentinels(
    address: BackendAddress, given: Mapping[str, Any], options: dict[str, Any]
) -> tuple[BackendAddress, dict[str, Any]]:
    """Return the address of django-redis' Sentinels. The host in LOCATION names the master."""
    sentinels = tuple((str(host), int(port)) for host, port in given["SENTINELS"])
    tls = {"ssl": True} if address.scheme == "rediss" else {}
    about = {"master_name": address.host, "sentinel_kwargs": given.get("SENTINEL_KWARGS") or {}}
    host, port = sentinels[0]
    address = dataclasses.replace(
        address, scheme="sentinel", host=host, port=port, sentinels=sentinels
    )
    return address, {**tls, **options, **about}

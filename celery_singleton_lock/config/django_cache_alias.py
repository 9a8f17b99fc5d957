"""A Redis by its alias in Django's ``CACHES``: ``django-cache://locks``.

An alias says where the server is and how to get in: address, database, user, password, TLS. How
patient a cache is (time-outs, retries), how many connections it may have and how it writes values
is its own business, and not taken over: locks have other needs.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import redis

from celery_singleton_lock.config.redis_url import BackendAddress, parse_backend_url, safe_url, scheme_of
from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import an

SCHEME: Final = "django-cache"

REDIS_CACHES: Final = (
    "django.core.cache.backends.redis.RedisCache",
    "django_redis.cache.RedisCache",
)
"""Backends, and bases of backends, of which an alias is understood."""

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
"""``OPTIONS`` that locks share with the cache, besides ``ssl…`` and what is put into the URL."""

_IN_URL: Final = ("db", "username", "password")

_SCHEMES: Final = ("redis", "rediss", "unix")
"""Of a cache's LOCATION."""

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
"""``OPTIONS`` that are the cache's own business."""

_ONE_SERVER: Final = ("DefaultClient", "HerdClient", "SentinelClient")
"""Clients of django-redis that keep each key on one server, which all agree on."""


def is_alias(url: str) -> bool:
    """Return whether a backend is named by a cache's alias."""
    return scheme_of(url) == SCHEME


def found_by_alias(url: str, source: str) -> tuple[str, str, dict[str, Any]]:
    """Return the Redis that a cache's alias leads to, by the settings of this process' Django.

    Args:
        url: ``django-cache://ALIAS``.
        source: the setting from which it came, for errors.

    Returns:
        The URL, with its credentials; where it was found; and options for the Redis client.

    Raises:
        ConfigurationError: Django's settings cannot be read, or the alias leads to no Redis.
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
    """Where an alias was written: what an error names first."""

    place: str

    def refuse(self, remedy: str) -> NoReturn:
        """Raise the error. Without the cause, which might quote a password."""
        msg = f"{self.place}: {remedy}"
        raise ConfigurationError(msg) from None


def _caches(wrong: _WrongAlias) -> Mapping[str, Mapping[str, Any]]:
    """Return Django's ``CACHES``. Only who names a cache needs Django."""
    try:
        from django.conf import settings  # noqa: PLC0415  # an extra
        from django.core.exceptions import ImproperlyConfigured  # noqa: PLC0415  # likewise
    except ImportError:
        wrong.refuse("Django is not installed here. Install it, or give the URL of the Redis.")
    try:
        caches: Mapping[str, Mapping[str, Any]] = settings.CACHES
    except (ImproperlyConfigured, ImportError) as error:
        wrong.refuse(f"Django's settings cannot be read ({error}). Set DJANGO_SETTINGS_MODULE.")
    return caches


def _found(
    alias: str, params: Mapping[str, Any], wrong: _WrongAlias
) -> tuple[str, str, dict[str, Any]]:
    """Take the parameters of one cache apart."""
    place = f"CACHES[{alias!r}]"
    backend = str(params.get("BACKEND", ""))
    if not is_redis_cache(backend):
        remedy = (
            f"{place} is {an(backend)}, and locks live in Redis. Name a cache of "
            f"{REDIS_CACHES[0]} (or of django-redis), or give the URL of a Redis."
        )
        wrong.refuse(remedy)
    options, sentinels = _options(params.get("OPTIONS") or {}, place)
    address = _address(_first(params.get("LOCATION")), options, place)
    if sentinels:
        address, options = _by_sentinels(address, sentinels, options)
    return address.url, place, options


def is_redis_cache(backend: str) -> bool:
    """Return whether a dotted path names a cache of Redis that is understood here."""
    if backend in REDIS_CACHES:
        return True
    from django.utils.module_loading import import_string  # noqa: PLC0415  # an extra

    try:
        bases = import_string(backend).__mro__
    except (ImportError, AttributeError):  # Django's own error will say more
        return False
    return any(f"{base.__module__}.{base.__qualname__}" in REDIS_CACHES for base in bases)


def _address(location: str, options: dict[str, Any], place: str) -> BackendAddress:
    """Return where the cache is; what its URL does not say is taken out of the options."""
    url = re.sub(r"\bis_master=\w*&?", "", location).rstrip("?&")  # django-redis' mark of a server
    if scheme_of(url) not in _SCHEMES:
        msg = f"{place} has the LOCATION {safe_url(url)!r}: write redis://, rediss:// or unix://."
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
    """Return the server that is written to; the others are read from."""
    servers = re.split("[;,]", location) if isinstance(location, str) else location
    first = next(iter(servers), "") if isinstance(servers, (list, tuple)) else ""
    return str(first).strip()


def _options(given: Mapping[str, Any], place: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return options for the Redis client, and what is said of Sentinels."""
    options = {name: value for name, value in given.items() if name != name.upper()}
    sentinels: Mapping[str, Any] = {}
    if any(name == name.upper() for name in given):  # as django-redis has them
        client = str(given.get("CLIENT_CLASS", _ONE_SERVER[0])).rpartition(".")[2]
        if client not in _ONE_SERVER or "Cluster" in str(given.get("REDIS_CLIENT_CLASS", "")):
            msg = f"{place} spreads its keys over servers, and a lock has one. Name another."
            raise ConfigurationError(msg)
        options |= given.get("REDIS_CLIENT_KWARGS") or {}
        options |= given.get("CONNECTION_POOL_KWARGS") or {}
        options |= {name: given[name.upper()] for name in _IN_URL if given.get(name.upper())}
        sentinels = given if given.get("SENTINELS") else {}
    taken = {name: value for name, value in options.items() if _is_taken(name)}
    unknown = sorted(options.keys() - taken.keys() - _LEFT)
    if unknown:
        msg = (
            f"{place} has the option {unknown[0]!r}, which is not understood here. Give "
            f"{PREFIX}backend the URL of the Redis, and options in {PREFIX}backend_options."
        )
        raise ConfigurationError(msg)
    return taken, sentinels


def _is_taken(name: str) -> bool:
    return name in _TAKEN or name in _IN_URL or name.startswith("ssl")


def _by_sentinels(
    address: BackendAddress, given: Mapping[str, Any], options: dict[str, Any]
) -> tuple[BackendAddress, dict[str, Any]]:
    """Return the address of django-redis' Sentinels; its LOCATION has the master for a host."""
    sentinels = tuple((str(host), int(port)) for host, port in given["SENTINELS"])
    tls = {"ssl": True} if address.scheme == "rediss" else {}
    about = {"master_name": address.host, "sentinel_kwargs": given.get("SENTINEL_KWARGS") or {}}
    host, port = sentinels[0]
    address = dataclasses.replace(
        address, scheme="sentinel", host=host, port=port, sentinels=sentinels
    )
    return address, {**tls, **options, **about}

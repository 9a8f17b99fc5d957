"""A client for the locks' Redis: one server, or whichever the Sentinels call the master."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, Final, NoReturn
from urllib.parse import urlencode

import redis
from redis.backoff import NoBackoff
from redis.cluster import REDIS_ALLOWED_KEYS, ClusterNode
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_singleton_lock.config.redis_url import BackendAddress
from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.client_options import FOR_SENTINELS, IN_SETTINGS, read
from celery_singleton_lock.config.credentials import PROVIDER, provider_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import meant

OWN: Final = frozenset({"allow_eviction", "longest_lease", "server_timeout"})
"""Backend options that are ours, not redis-py's."""

SENTINEL: Final = frozenset({"master_name", "min_other_sentinels", "sentinel_kwargs"})
"""Backend options that speak of Sentinels, and mean nothing to a server."""

QUICK: Final = 0.1
"""Seconds that a Sentinel gets at least."""

# redis-py's annotations leave these out.
_Sentinel: Final[Any] = Sentinel
_SentinelPool: Final[Any] = SentinelConnectionPool
_parse_url: Final[Any] = redis.connection.parse_url
_Node: Final[Any] = ClusterNode

_PLACE: Final = f"{PREFIX}backend_options"
_UNEXPECTED: Final = re.compile(r"unexpected keyword argument '(\w+)'")
_OF_SERVERS: Final = frozenset(signature(redis.Redis).parameters)
_OF_CLUSTERS: Final = frozenset(REDIS_ALLOWED_KEYS) | {*signature(redis.RedisCluster).parameters}
"""Options that a client of a Cluster looks at; it lets any other pass, without effect."""


def connect(address: BackendAddress, options: Mapping[str, Any], *, patience: float) -> redis.Redis:
    """Return a client with connections of its own. Nothing is sent yet.

    Args:
        address: where the locks live.
        options: the user's, for redis-py's client and for Sentinels; they win. Locks in memory
            have no connections that they could concern.
        patience: seconds within which a server must answer.

    Raises:
        KeyError: Sentinels without a ``master_name``, which :meth:`Settings.address` refuses.
        ConfigurationError: locks in memory, and not all that they need is installed; or an option
            that redis-py does not know.
    """
    if address.in_memory:
        return in_memory(address.host)
    timeouts = {"socket_timeout": patience, "socket_connect_timeout": patience}
    # Once more at once: a connection that Redis closed while it was idle is no outage, and every
    # script may be asked again with the same token.
    once_more = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    given = _given(address, options)
    for_server = {**timeouts, "retry": once_more, **given}
    if not address.sentinels:
        return checked(redis.Redis.from_url(address.url, **for_server))
    about = for_sentinels(address, options, patience)
    least = read(options).get("min_other_sentinels", 0)
    try:
        manager = _Sentinel(address.sentinels, min_other_sentinels=least, sentinel_kwargs=about)
    except TypeError as error:
        _not_taken(error, _OF_SERVERS, IN_SETTINGS.format(FOR_SENTINELS))
    for_master = {**for_server, **said(address)}
    pool = _SentinelPool(options["master_name"], manager, **for_master)
    client = redis.Redis(connection_pool=pool)
    client.auto_close_connection_pool = True  # nobody else has this pool
    return checked(client)


def checked(client: redis.Redis) -> redis.Redis:
    """Return a client of which the connections can be made; redis-py looks at their options late.

    Raises:
        ConfigurationError: they take no such option.
    """
    pool: Any = client.connection_pool
    try:
        pool.connection_class(**pool.connection_kwargs)  # connects to nobody yet
    except TypeError as error:
        _not_taken(error, _OF_SERVERS | OWN | SENTINEL)
    return client


def _not_taken(error: TypeError, known: Iterable[str], place: str = _PLACE) -> NoReturn:
    """Refuse an option that redis-py does not know, in words that name it."""
    found = _UNEXPECTED.search(str(error))
    if found is None:
        msg = f"{place} has what redis-py does not take: {error}."
        raise ConfigurationError(msg) from error
    _refuse_unknown(found[1], known, place)


def _refuse_unknown(name: str, known: Iterable[str], place: str = _PLACE) -> NoReturn:
    msg = f"{place} has {name!r}, which redis-py does not take.{meant(name, known)}"
    raise ConfigurationError(msg) from None


def in_memory(name: str) -> redis.Redis:
    """Return a client for the locks of that name in the memory of this process.

    Args:
        name: what stands behind ``memory://``; may be empty.

    Raises:
        ConfigurationError: fakeredis or lupa is missing.
    """
    try:
        from celery_singleton_lock.store import memory  # noqa: PLC0415  # what it needs is an extra
    except ImportError as error:
        msg = (
            f"Locks in memory (memory://{name}) need fakeredis and lupa, and one is missing "
            f'({error}): pip install "celery-singleton-lock[testing]".'
        )
        raise ConfigurationError(msg) from error
    return memory.client_of(memory.server_of(name))


def is_elsewhere(address: BackendAddress) -> bool:
    """Return whether these are locks in memory that nobody in this process has used."""
    memory = sys.modules.get("celery_singleton_lock.store.memory")
    return address.in_memory and (memory is None or not memory.is_known(address.host))


def for_cluster(
    address: BackendAddress, options: Mapping[str, Any], *, patience: float
) -> Callable[[], redis.RedisCluster]:
    """Return what makes a client of a Cluster; only that asks a node for the layout, at once.

    Args:
        address: some nodes.
        options: the user's, for redis-py's client; they win.
        patience: seconds within which a server must answer.

    Raises:
        ConfigurationError: an option that redis-py does not know.
    """
    given = _given(address, options)
    if address.scheme == "rediss+cluster":
        given = {"ssl": True, **given}
    timeouts = {"socket_timeout": patience, "socket_connect_timeout": patience}
    once_more = Retry(NoBackoff(), 1)  # after the layout was asked for anew
    whole = {"retry": once_more, "require_full_coverage": False}  # the other masters serve
    told = {**timeouts, **whole, **said(address), **given}
    _check_names(told)
    nodes = [_Node(host, port) for host, port in address.nodes]
    return lambda: redis.RedisCluster(startup_nodes=nodes, **told)


def _check_names(names: Iterable[str]) -> None:
    unknown = next((name for name in names if name not in _OF_CLUSTERS), None)
    if unknown is not None:
        _refuse_unknown(unknown, _OF_CLUSTERS | OWN)


def _given(address: BackendAddress, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options for redis-py's client of a server."""
    found = {name: value for name, value in read(options).items() if name not in OWN | SENTINEL}
    provider = found.get(PROVIDER) or address.provider
    if provider:
        found[PROVIDER] = provider_of(provider, "the locks' backend")
    return found


def for_sentinels(
    address: BackendAddress, options: Mapping[str, Any], patience: float
) -> dict[str, Any]:
    """Return the options of connections to Sentinels: together they get the time of one server.

    redis-py's default would ask a dead one several times, with pauses, before it asks the next.
    """
    share = max(QUICK, patience / len(address.sentinels))
    defaults = {"socket_timeout": share, "socket_connect_timeout": share}
    given = read(options).get(FOR_SENTINELS, {})
    if PROVIDER in given:
        given[PROVIDER] = provider_of(given[PROVIDER], "sentinel_kwargs")
    return {**defaults, "retry": Retry(NoBackoff(), 0), **given}


def said(address: BackendAddress) -> dict[str, Any]:
    """Return what a URL with several addresses says of servers, as redis-py would read it."""
    found = {"db": address.db, "username": address.username, "password": address.password}
    read = _parse_url(f"redis://?{urlencode(address.options)}")
    if any(name.startswith("ssl_") for name in address.options):
        found["ssl"] = True
    return {**{name: value for name, value in found.items() if value}, **read}

"""Clients of the locks' Redis: one server, the master that Sentinels name, or a Cluster."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlencode

import redis
from redis.backoff import NoBackoff
from redis.cluster import REDIS_ALLOWED_KEYS, ClusterNode
from redis.retry import Retry
from redis.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from celery_singleton_lock.config.client_options import FOR_SENTINELS, IN_SETTINGS, read
from celery_singleton_lock.config.credentials import PROVIDER, provider_of
from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.redis_url import BackendAddress
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import meant

_Client = TypeVar("_Client", bound=Any)

OWN: Final = frozenset({"allow_eviction", "longest_lease", "server_timeout"})
"""Backend options of this library, not of redis-py."""

SENTINEL: Final = frozenset({"master_name", "min_other_sentinels", "sentinel_kwargs"})
"""Backend options for Sentinels, which a server's client does not take."""

OF_TEXT: Final = frozenset({"decode_responses", "encoding", "encoding_errors"})
"""Options about text, which have no effect: a parked message may hold bytes that are not text."""

QUICK: Final = 0.1
"""Shortest time-out of a Sentinel, in seconds."""

# redis-py's annotations leave these out.
_Sentinel: Final[Any] = Sentinel
_SentinelPool: Final[Any] = SentinelConnectionPool
_parse_url: Final[Any] = redis.connection.parse_url
_Node: Final[Any] = ClusterNode

_PLACE: Final = f"{PREFIX}backend_options"
_URL: Final = "The URL of the locks' Redis"
_NOT_TAKEN: Final = (TypeError, ValueError, AttributeError)
"""Errors of redis-py about an option, when it creates a client or a connection."""

_IN_URL: Final = ("host", "port", "db", "path", "unix_socket_path")
"""Options that the URL of a server or a Cluster replaces."""

_UNEXPECTED: Final = re.compile(r"unexpected keyword argument '(\w+)'")
_OF_SERVERS: Final = frozenset(signature(redis.Redis).parameters)
_OF_CLUSTERS: Final = frozenset(REDIS_ALLOWED_KEYS) | {*signature(redis.RedisCluster).parameters}
"""Options that a client of a Cluster uses; it ignores any other."""


class _MasterConnection(SentinelManagedConnection):
    """Closed after an error, as a connection without Sentinels is.

    redis-py leaves it open after a time-out, unless the client may repeat the call. The next call
    would read the late reply, and each later call the reply of the one before.
    """

    def read_response(
        self, *args: Any, disconnect_on_error: bool | None = True, **options: Any
    ) -> Any:
        return super().read_response(*args, disconnect_on_error=disconnect_on_error, **options)


class _MasterTLSConnection(_MasterConnection, SentinelManagedSSLConnection):
    pass


def connect(address: BackendAddress, options: Mapping[str, Any], *, patience: float) -> redis.Redis:
    """Return a client with connections of its own. Nothing is sent yet.

    Args:
        address: where the locks are stored.
        options: of the user, for redis-py's client and for Sentinels; they override the defaults of
            this library. Locks in memory ignore them.
        patience: seconds within which a server must answer.

    Raises:
        KeyError: Sentinels without a ``master_name``, which :meth:`Settings.address` refuses.
        ConfigurationError: redis-py does not know an option; or a package that locks in memory
            need is missing.
    """
    if address.in_memory:
        return in_memory(address.host)
    timeouts = {"socket_timeout": patience, "socket_connect_timeout": patience}
    # One retry: an idle connection that Redis has closed is not an outage, and each script may be
    # repeated with the same token.
    once_more = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    given = _given(address, options)
    for_server = {**timeouts, "retry": once_more, **given}
    place = _PLACE if options else _URL
    if not address.sentinels:
        try:
            client = redis.Redis.from_url(address.url, **for_server)
        except _NOT_TAKEN as error:
            _not_taken(error, _OF_SERVERS | OWN | SENTINEL, place)
        return checked(client, place)
    about = for_sentinels(address, options, patience)
    least = read(options).get("min_other_sentinels", 0)
    try:
        manager = _Sentinel(address.sentinels, min_other_sentinels=least, sentinel_kwargs=about)
    except TypeError as error:
        _not_taken(error, _OF_SERVERS, IN_SETTINGS.format(FOR_SENTINELS))
    for_master = {**for_server, **said(address)}
    kind = _MasterTLSConnection if for_master.pop("ssl", False) else _MasterConnection
    for_master.setdefault("connection_class", kind)
    pool = _SentinelPool(options["master_name"], manager, **for_master)
    client = redis.Redis(connection_pool=pool)
    client.auto_close_connection_pool = True  # no other client uses this pool
    return checked(client, place)


def checked(client: _Client, place: str = _PLACE) -> _Client:
    """Check the connection options of a client, which redis-py checks only later; return it.

    Args:
        client: redis-py's, for threads or for asyncio.
        place: where the user wrote the options, for the error.

    Raises:
        ConfigurationError: connections do not take an option.
    """
    pool = client.connection_pool
    try:
        pool.connection_class(**pool.connection_kwargs)  # does not connect
    except _NOT_TAKEN as error:
        _not_taken(error, _OF_SERVERS | OWN | SENTINEL, place)
    except redis.RedisError as error:  # of ssl_cert_reqs
        msg = f"{place} has what redis-py does not take: {error}."
        raise ConfigurationError(msg) from None
    return client


def _not_taken(error: Exception, known: Iterable[str], place: str = _PLACE) -> NoReturn:
    """Refuse an option that redis-py does not know."""
    found = _UNEXPECTED.search(str(error))
    if found is None:
        told = str(error).rstrip(".")
        msg = f"{place} has what redis-py does not take: {told}."
        raise ConfigurationError(msg) from error
    _refuse_unknown(found[1], known, place)


def _refuse_unknown(name: str, known: Iterable[str], place: str = _PLACE) -> NoReturn:
    if name.startswith("ssl") and name in known:
        msg = f"{place} has {name!r}, which has no effect: for TLS write rediss://."
        raise ConfigurationError(msg) from None
    others = set(known) - {name}  # suggests the same name if another kind of client takes it
    msg = f"{place} has {name!r}, which redis-py does not take.{meant(name, others)}"
    raise ConfigurationError(msg) from None


def in_memory(name: str) -> redis.Redis:
    """Return a client for the locks of that name in the memory of this process.

    Args:
        name: the text after ``memory://``; may be empty.

    Raises:
        ConfigurationError: fakeredis or lupa is missing.
    """
    try:
        from celery_singleton_lock.store import memory  # noqa: PLC0415  # it needs an extra
    except ImportError as error:
        msg = (
            f"Locks in memory (memory://{name}) need fakeredis and lupa, and one is missing "
            f'({error}): pip install "celery-singleton-lock[testing]".'
        )
        raise ConfigurationError(msg) from error
    return memory.client_of(memory.server_of(name))


def is_elsewhere(address: BackendAddress) -> bool:
    """Return whether these are locks in memory that this process has not used."""
    memory = sys.modules.get("celery_singleton_lock.store.memory")
    return address.in_memory and (memory is None or not memory.is_known(address.host))


def for_cluster(
    address: BackendAddress, options: Mapping[str, Any], *, patience: float
) -> Callable[[], redis.RedisCluster]:
    """Return a function that creates a client of a Cluster, which at once asks for the layout.

    Args:
        address: some nodes.
        options: of the user, for redis-py's client; they override the defaults of this library.
        patience: seconds within which a server must answer.

    Raises:
        ConfigurationError: an option that redis-py does not know.
    """
    given = _given(address, options)
    if address.scheme == "rediss+cluster":
        given = {"ssl": True, **given}
    timeouts = {"socket_timeout": patience, "socket_connect_timeout": patience}
    once_more = Retry(NoBackoff(), 1)  # after a new layout
    whole = {"retry": once_more, "require_full_coverage": False}  # other masters work
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
    left = OWN | SENTINEL | OF_TEXT
    found = {name: value for name, value in read(options).items() if name not in left}
    idle = next((name for name in _IN_URL if name in found and not address.sentinels), None)
    if idle is not None:
        msg = (
            f"{_PLACE} has {idle!r}, which has no effect: the URL of the locks has it. Write "
            "redis://HOST:PORT/DB."
        )
        raise ConfigurationError(msg)
    provider = found.get(PROVIDER) or address.provider
    if provider:
        found[PROVIDER] = provider_of(provider, "the locks' backend")
    return found


def for_sentinels(
    address: BackendAddress, options: Mapping[str, Any], patience: float
) -> dict[str, Any]:
    """Return the options of connections to Sentinels, which share the time-out of one server.

    With redis-py's defaults a dead Sentinel would be asked several times, with pauses, before the
    next one.
    """
    share = max(QUICK, patience / len(address.sentinels))
    defaults = {"socket_timeout": share, "socket_connect_timeout": share}
    given = read(options).get(FOR_SENTINELS, {})
    if PROVIDER in given:
        given[PROVIDER] = provider_of(given[PROVIDER], "sentinel_kwargs")
    return {**defaults, "retry": Retry(NoBackoff(), 0), **given}


def said(address: BackendAddress) -> dict[str, Any]:
    """Return the client options in a URL with several addresses, as redis-py parses them."""
    found = {"db": address.db, "username": address.username, "password": address.password}
    read = _parse_url(f"redis://?{urlencode(address.options)}")
    if any(name.startswith("ssl_") for name in address.options):
        found["ssl"] = True
    return {**{name: value for name, value in found.items() if value}, **read}

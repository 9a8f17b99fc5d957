"""URLs of the locks' Redis: parsed and checked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from celery_singleton_lock.config.credentials import PROVIDER
from celery_singleton_lock.config.limits import MAX_COUNT, MOST_PORT, PREFIX
from celery_singleton_lock.config.url_text import (
    CLUSTER,
    PORTS,
    SENTINEL,
    each_address,
    lists_hosts,
    safe_url,
    scheme_of,
    without_login,
)
from celery_singleton_lock.errors import ConfigurationError

SCHEMES: Final = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",  # one protocol, one client
    "valkeys": "rediss",
    "unix": "unix",
    "redis+socket": "unix",  # as Celery writes it
    "socket": "unix",
    "sentinel": "sentinel",
    "redis+cluster": "redis+cluster",
    "rediss+cluster": "rediss+cluster",
}

MEMORY: Final = "memory"
"""Scheme of locks in the memory of one process, for tests."""

_URL_OPTIONS: Final = frozenset(
    {
        "client_name",
        "health_check_interval",
        "max_connections",
        "protocol",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_keepalive",
        "socket_timeout",
    }
)
"""Options of a URL, after the ``?``, besides ``ssl_…``, ``db`` and credentials."""

_OF_A_SERVER: Final = frozenset({"redis", "rediss", "unix", "valkey", "valkeys"})
"""Schemes of one server; :func:`for_redis_py` translates those that redis-py does not know."""

_SEVERAL: Final = (
    "it names several servers, and this scheme is for one. For a Cluster write "
    "redis+cluster://host1:6379,host2:6379; for Sentinels "
    "sentinel://host1:26379;sentinel://host2:26379; for a quorum a list of three or more URLs"
)

_HOST: Final = re.compile(r"[\w.\-:]*")
_NAME: Final = re.compile(r"[\w.\-]*")
_PORT: Final = re.compile(r"(?:\[[^\]]*\]|[^:/?#\[]*):([^/?#]*)")


@dataclasses.dataclass(frozen=True, slots=True)
class BackendAddress:
    """Address of the locks' Redis. Its str has no credentials.

    Args:
        scheme: ``redis``, ``rediss`` (TLS), ``unix``, ``sentinel``, ``redis+cluster``,
            ``rediss+cluster`` (TLS) or ``memory``.
        host: machine; empty for ``unix``; the first of several; for ``memory`` a name, or empty.
        port: TCP port; 0 for ``unix`` and ``memory``.
        path: path of the socket; empty unless ``unix``.
        db: number of the database.
        username: ACL user; empty for Redis' default user.
        password: may be empty.
        options: the options after the ``?``, as text.
        sentinels: host and port of each Sentinel; user, password and database are the master's.
        nodes: host and port of some nodes of a Cluster; one of them must answer.
        provider: import path of a credential provider, see
            :mod:`celery_singleton_lock.config.credentials`.
    """

    scheme: str = "redis"
    host: str = "localhost"
    port: int = 6379
    path: str = ""
    db: int = 0
    username: str = dataclasses.field(default="", repr=False)
    password: str = dataclasses.field(default="", repr=False)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    nodes: tuple[tuple[str, int], ...] = ()
    provider: str = ""

    @property
    def url(self) -> str:
        """The URL as redis-py spells it, or kombu for Sentinels. It contains the credentials."""
        if self.in_memory:
            return f"{MEMORY}://{self.host}"
        user = quote(self.username, safe="")
        secret = f":{quote(self.password, safe='')}" if self.password else ""
        login = f"{user}{secret}@" if user or secret else ""
        if self.scheme == "unix":
            query = urlencode({"db": str(self.db), **self.options})
            return f"unix://{login}{quote(self.path)}?{query}"
        query = f"?{urlencode(self.options)}" if self.options else ""
        if self.nodes:
            hosts = ",".join(_host_port(host, port) for host, port in self.nodes)
            return f"{self.scheme}://{login}{hosts}/0{query}"
        return ";".join(
            f"{self.scheme}://{login}{_host_port(host, port)}/{self.db}{query}"
            for host, port in self.sentinels or ((self.host, self.port),)
        )

    @property
    def in_memory(self) -> bool:
        """Whether the locks are in the memory of one process."""
        return self.scheme == MEMORY

    def __str__(self) -> str:
        return safe_url(self.url)


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_backend_url(url: str, source: str = f"{PREFIX}backend") -> BackendAddress:
    """Parse the URL of the locks' Redis.

    Args:
        url: ``redis://[user][:password]@host[:port][/db]``, ``rediss://…`` for TLS,
            ``unix://[user][:password]@/path/of/socket[?db=0]``, or Celery's ``redis+socket://…``.
            ``sentinel://[user][:password]@host[:port][/db]``, of which there may be
            several, separated by ``;``.
            ``redis+cluster://[user][:password]@host[:port][,host[:port]…]`` for a Cluster, and
            ``rediss+cluster://…`` for TLS. In tests ``memory://[name]``.
        source: the setting that has it, for errors.

    Raises:
        ConfigurationError: the scheme or another part is invalid.
    """
    wrong = _WrongUrl(source, safe_url(url))
    if scheme_of(url) == MEMORY:
        return _in_memory(url, wrong)
    scheme = _backend_scheme(url, wrong)
    if scheme == SENTINEL:
        found = [_one_address(each, scheme, wrong) for each in each_address(url)]
        return dataclasses.replace(_joined(found, wrong), sentinels=_hosts_of(found))
    if scheme in CLUSTER:
        found = [_one_address(each, scheme, wrong) for each in _each_node(url)]
        if any(each.db for each in found):
            wrong.refuse("a Cluster has only database 0. Leave the number out")
        return dataclasses.replace(_joined(found, wrong), nodes=_hosts_of(found))
    return _one_address(url, scheme, wrong)


def _in_memory(url: str, wrong: _WrongUrl) -> BackendAddress:
    name = url.partition("://")[2].strip("/")
    if not _NAME.fullmatch(name):
        wrong.refuse("locks in memory have only a name. Write memory:// or memory://orders")
    return BackendAddress(MEMORY, name, 0)


def _each_node(url: str) -> list[str]:
    """Return an address for each node, with the common user, password and options."""
    found = []
    for address in each_address(url):
        start, _, rest = address.partition("://")
        parts = re.match(r"(?:(.*)(@))?([^/?#]*)(.*)", rest, re.DOTALL)
        login, at, hosts, behind = parts.groups(default="")  # type: ignore[union-attr]  # it fits any text
        found += [f"{start}://{login}{at}{host}{behind}" for host in hosts.split(",")]
    return found


def _hosts_of(found: list[BackendAddress]) -> tuple[tuple[str, int], ...]:
    return tuple((each.host, each.port) for each in found)


def _joined(found: list[BackendAddress], wrong: _WrongUrl) -> BackendAddress:
    """Return one address for all; a part that only some of them have applies to all."""
    said: dict[str, Any] = {}
    for name in ("db", "username", "password", "options", "provider"):
        values = [value for each in found if (value := getattr(each, name))]
        if any(value != values[0] for value in values):
            wrong.refuse(f"its addresses differ in {name}. Write the same {name} in all, or in one")
        if values:
            said[name] = values[0]
    return dataclasses.replace(found[0], **said)


def _one_address(url: str, scheme: str, wrong: _WrongUrl) -> BackendAddress:
    parts, host, port = _parts(url, wrong)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    username = options.pop("username", unquote(parts.username or ""))
    password = options.pop("password", unquote(parts.password or ""))
    path = unquote(parts.path)
    provider = options.pop(PROVIDER, "")
    if provider and (username or password):
        wrong.refuse(
            f"it has a user or password, and a {PROVIDER}, which provides both. Leave one out"
        )
    database = options.pop("virtual_host", "")
    database = options.pop("db", database)
    if scheme == "unix" and (host or not path.strip("/")):
        wrong.refuse(
            "a socket has a path and no host. Write unix:///run/redis.sock, with three slashes"
        )
    for name in options:
        if name not in _URL_OPTIONS and not name.startswith("ssl_"):
            wrong.refuse(
                f"its option {name!r} is unknown. Use {PREFIX}backend_options, with {PREFIX}backend"
            )
    known = MappingProxyType({name: _option(name, value) for name, value in options.items()})
    if scheme == "unix":
        db = _database(database, wrong)
        return BackendAddress(scheme, "", 0, path, db, username, password, known, provider=provider)
    db = _database(database or path, wrong)
    host = host or "localhost"
    login = (username, password)
    return BackendAddress(scheme, host, port, "", db, *login, known, provider=provider)


@dataclasses.dataclass(frozen=True, slots=True)
class _WrongUrl:
    """A URL without credentials, and its setting, for errors."""

    source: str
    shown: str

    def refuse(self, remedy: str) -> NoReturn:
        """Raise the error, without its cause: urllib's messages contain the password."""
        msg = f"{self.source} is {self.shown!r}: {remedy}."
        raise ConfigurationError(msg) from None


def _backend_scheme(url: str, wrong: _WrongUrl) -> str:
    """Return one of the values of :data:`SCHEMES`."""
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        wrong.refuse(
            "locks need a Redis. Use redis://, rediss:// (TLS), unix://, sentinel:// or "
            "redis+cluster://"
        )
    addresses = each_address(url)
    several = scheme == SENTINEL or scheme in CLUSTER
    if several and {scheme_of(each) for each in addresses} != {scheme}:
        wrong.refuse(f"write each of its addresses as {scheme}://host:port")
    if not several and len(addresses) > 1:
        wrong.refuse(_SEVERAL)
    return SCHEMES[scheme]


def _parts(url: str, wrong: _WrongUrl) -> tuple[SplitResult, str, int]:
    """Return the parts of a URL, its host and its port."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS[SENTINEL if scheme_of(url) == SENTINEL else "redis"]
        host = unquote(parts.hostname or "")
    except ValueError:
        _refuse_unread(url, wrong)
    if parts.fragment or not _HOST.fullmatch(host):
        _refuse_unread(url, wrong)
    return parts, host, port


def _refuse_unread(url: str, wrong: _WrongUrl) -> NoReturn:
    """Refuse a URL that lists servers, or has an unescaped character in its password."""
    scheme = scheme_of(url)
    if not lists_hosts(url):
        port = _PORT.match(without_login(url))
        if port and port[1] and not (port[1].isdecimal() and int(port[1]) <= MOST_PORT):
            # The port is not shown: without an @ it may be a password.
            wrong.refuse("its port is not a number up to 65535, as in redis://localhost:6379/0")
        wrong.refuse("it cannot be read. Percent-encode special characters of the password")
    if scheme == SENTINEL:
        wrong.refuse(f"write each of its addresses as {scheme}://host:port, with ; between them")
    if scheme in CLUSTER:
        wrong.refuse(f"write commas between its nodes: {scheme}://host1:6379,host2:6379")
    wrong.refuse(_SEVERAL)


def for_redis_py(url: str) -> str:
    """Return the URL of one server in redis-py's spelling: ``redis://`` for ``valkey://``."""
    scheme = scheme_of(url)
    return SCHEMES.get(scheme, scheme) + url[len(scheme) :]


def check_server(url: str, source: str) -> None:
    """Check the URL of one server of a quorum; the errors of redis-py may contain a password.

    Args:
        url: the URL.
        source: the setting or argument that has it, for errors.

    Raises:
        ConfigurationError: it is not the URL of one server.
    """
    wrong = _WrongUrl(source, safe_url(url))
    if scheme_of(url) not in _OF_A_SERVER:
        wrong.refuse(
            "a quorum has independent servers. Write each as redis://host:6379, rediss:// (TLS) or "
            "unix://"
        )
    if len(each_address(url)) > 1 or lists_hosts(url):
        wrong.refuse("it names several servers. Write one URL for each")
    _parts(url, wrong)


def _database(text: str, wrong: _WrongUrl) -> int:
    """Return the number of a database; redis-py would read an invalid one as 0."""
    number = text.strip("/") or "0"
    if not (number.isascii() and number.isdecimal() and len(number) <= len(str(MAX_COUNT))):
        wrong.refuse("the database is not a number. Write redis://localhost:6379/0")
    return int(number)


def _option(name: str, value: str) -> str:
    """Return a URL option in redis-py's spelling."""
    return value.removeprefix("CERT_").lower() if name == "ssl_cert_reqs" else value

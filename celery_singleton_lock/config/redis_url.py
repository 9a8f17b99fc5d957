"""URLs of Redis and of brokers: taken apart, compared, and shown without credentials."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from celery_singleton_lock.config.limits import MAX_COUNT, MOST_PORT, PREFIX
from celery_singleton_lock.config.credentials import PROVIDER
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

CLUSTER: Final = frozenset({"redis+cluster", "rediss+cluster"})
"""Schemes of URLs that name nodes of a Cluster, each of which knows all others."""

MEMORY: Final = "memory"
"""Scheme of locks in the memory of one process, for tests."""

SENTINEL: Final = "sentinel"
"""Scheme of URLs that name Sentinels, which know the master."""

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
"""What may stand behind the ``?``, besides ``ssl_…``, ``db`` and credentials."""


_OF_A_SERVER: Final = frozenset({"redis", "rediss", "unix", "valkey", "valkeys"})
"""Schemes of one server; redis-py knows them, or :func:`for_redis_py` spells them so."""

_SEVERAL: Final = (
    "it names several servers, and such a URL names one. For a Cluster write "
    "redis+cluster://host1:6379,host2:6379; for Sentinels "
    "sentinel://host1:26379;sentinel://host2:26379; for a quorum, of which a majority decides, a "
    "list of three or more URLs"
)

_HOST: Final = re.compile(r"[\w.\-:]*")
_NAME: Final = re.compile(r"[\w.\-]*")


@dataclasses.dataclass(frozen=True, slots=True)
class BackendAddress:
    """Where the locks live; shown without credentials.

    Args:
        scheme: ``redis``, ``rediss`` (TLS), ``unix``, ``sentinel``, ``redis+cluster``,
            ``rediss+cluster`` (TLS) or ``memory``.
        host: machine; empty for ``unix``; the first of several; for ``memory`` its name, which may
            be empty.
        port: TCP port; 0 for ``unix`` and ``memory``.
        path: path of the socket; empty unless ``unix``.
        db: number of the database.
        username: ACL user; empty for Redis' default user.
        password: may be empty.
        options: what stood behind the ``?``, as text.
        sentinels: host and port of each Sentinel; user, password and database are the master's.
        nodes: host and port of some nodes of a Cluster, of which one must answer.
        provider: where a credential provider is, see :mod:`celery_singleton_lock.config.credentials`.
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
        """The URL in redis-py's spelling, or in kombu's for Sentinels. Holds the credentials."""
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
            places = ",".join(_place(host, port) for host, port in self.nodes)
            return f"{self.scheme}://{login}{places}/0{query}"
        return ";".join(
            f"{self.scheme}://{login}{_place(host, port)}/{self.db}{query}"
            for host, port in self.sentinels or ((self.host, self.port),)
        )

    @property
    def in_memory(self) -> bool:
        """Whether the locks live in the memory of one process."""
        return self.scheme == MEMORY

    def __str__(self) -> str:
        return safe_url(self.url)


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_backend_url(url: str, source: str = f"{PREFIX}backend") -> BackendAddress:
    """Take the URL of the locks' Redis apart, and refuse what would be misread.

    Args:
        url: ``redis://[user][:password]@host[:port][/db]``, ``rediss://…`` for TLS,
            ``unix://[user][:password]@/path/of/socket[?db=0]``; Celery's ``redis+socket://`` is
            understood. ``sentinel://[user][:password]@host[:port][/db]``, of which there may be
            several, separated by ``;``.
            ``redis+cluster://[user][:password]@host[:port][,host[:port]…]`` for a Cluster, and
            ``rediss+cluster://…`` for TLS. In tests ``memory://[name]``.
        source: the setting from which it came, for errors.

    Raises:
        ConfigurationError: another scheme, several addresses, or a part that is not valid.
    """
    wrong = _WrongUrl(source, safe_url(url))
    if scheme_of(url) == MEMORY:
        return _in_memory(url, wrong)
    scheme = _backend_scheme(url, wrong)
    if scheme == SENTINEL:
        found = [_one_address(each, scheme, wrong) for each in each_address(url)]
        return dataclasses.replace(_joined(found, wrong), sentinels=_places(found))
    if scheme in CLUSTER:
        found = [_one_address(each, scheme, wrong) for each in _each_node(url)]
        if any(each.db for each in found):
            wrong.refuse("a Cluster has one database, number 0. Leave the number out")
        return dataclasses.replace(_joined(found, wrong), nodes=_places(found))
    return _one_address(url, scheme, wrong)


def _in_memory(url: str, wrong: _WrongUrl) -> BackendAddress:
    """Return the address of locks in memory, which have a name and no more."""
    name = url.partition("://")[2].strip("/")
    if not _NAME.fullmatch(name):
        wrong.refuse("locks in memory have a name and no more: memory:// or memory://orders")
    return BackendAddress(MEMORY, name, 0)


def _each_node(url: str) -> list[str]:
    """Return an address for each node; what is said once of all is said of each."""
    found = []
    for address in each_address(url):
        start, _, rest = address.partition("://")
        parts = re.match(r"(?:(.*)(@))?([^/?#]*)(.*)", rest, re.DOTALL)
        login, at, hosts, behind = parts.groups(default="")  # type: ignore[union-attr]  # it fits any text
        found += [f"{start}://{login}{at}{host}{behind}" for host in hosts.split(",")]
    return found


def _places(found: list[BackendAddress]) -> tuple[tuple[str, int], ...]:
    return tuple((each.host, each.port) for each in found)


def _joined(found: list[BackendAddress], wrong: _WrongUrl) -> BackendAddress:
    """Return one address for all; what only some say about the servers counts for all."""
    said: dict[str, Any] = {}
    for name in ("db", "username", "password", "options", "provider"):
        values = [value for each in found if (value := getattr(each, name))]
        if any(value != values[0] for value in values):
            wrong.refuse(f"its addresses differ in {name}, and that is the same for all")
        if values:
            said[name] = values[0]
    return dataclasses.replace(found[0], **said)


def _one_address(url: str, scheme: str, wrong: _WrongUrl) -> BackendAddress:
    """Take one address apart."""
    parts, host, port = _parts(url, wrong)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    username = options.pop("username", unquote(parts.username or ""))
    password = options.pop("password", unquote(parts.password or ""))
    path = unquote(parts.path)
    provider = options.pop(PROVIDER, "")
    if provider and (username or password):
        wrong.refuse(
            f"it has a user or password, and a {PROVIDER}, which gives both. Leave one out"
        )
    database = options.pop("virtual_host", "")
    database = options.pop("db", database)
    if scheme == "unix" and (host or not path.strip("/")):
        wrong.refuse("a socket has a path and no host: unix:///run/redis.sock, with three slashes")
    for name in options:
        if name not in _URL_OPTIONS and not name.startswith("ssl_"):
            remedy = f"its option {name!r} is not known here. Use {PREFIX}backend_options"
            wrong.refuse(f"{remedy}, with {PREFIX}backend")
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
    """Which URL is wrong, as it may be shown."""

    source: str
    shown: str

    def refuse(self, remedy: str) -> NoReturn:
        """Raise the error. Without the cause: urllib's messages quote the password."""
        msg = f"{self.source} is {self.shown!r}: {remedy}."
        raise ConfigurationError(msg) from None


def _backend_scheme(url: str, wrong: _WrongUrl) -> str:
    """Return one of the values of :data:`SCHEMES`."""
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        wrong.refuse(
            "locks live in Redis: use redis://, rediss:// (TLS), unix://, sentinel:// or "
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
        port = parts.port or _PORTS[SENTINEL if scheme_of(url) == SENTINEL else "redis"]
        host = unquote(parts.hostname or "")
    except ValueError:
        _refuse_unread(url, wrong)
    if parts.fragment or not _HOST.fullmatch(host):
        _refuse_unread(url, wrong)
    return parts, host, port


def _refuse_unread(url: str, wrong: _WrongUrl) -> NoReturn:
    """Refuse a URL that cannot be read: it lists servers, or half a password stands in the way."""
    scheme = scheme_of(url)
    if not _lists_hosts(url):
        port = _PORT.match(url.partition("://")[2].rpartition("@")[2])
        if port and port[1] and not (port[1].isdecimal() and int(port[1]) <= MOST_PORT):
            # Not quoted: without an @ it may be a password.
            wrong.refuse("its port is not a number up to 65535, as in redis://localhost:6379/0")
        wrong.refuse("it cannot be read. Percent-encode special characters of the password")
    if scheme == SENTINEL:
        wrong.refuse(f"write each of its addresses as {scheme}://host:port, with ; between them")
    if scheme in CLUSTER:
        wrong.refuse(f"write commas between its nodes: {scheme}://host1:6379,host2:6379")
    wrong.refuse(_SEVERAL)


def _lists_hosts(url: str) -> bool:
    return _LISTED.match(url.partition("://")[2].rpartition("@")[2]) is not None


def for_redis_py(url: str) -> str:
    """Return the URL of one server as redis-py reads it: ``redis://`` for ``valkey://``."""
    scheme = scheme_of(url)
    return SCHEMES.get(scheme, scheme) + url[len(scheme) :]


def check_server(url: str, source: str) -> None:
    """Refuse what is no URL of one server, before redis-py does that in its own words.

    Args:
        url: of a server of a quorum, for redis-py.
        source: where it was written, for errors.

    Raises:
        ConfigurationError: it is none.
    """
    wrong = _WrongUrl(source, safe_url(url))
    if scheme_of(url) not in _OF_A_SERVER:
        wrong.refuse(
            "a quorum is made of independent servers: give each as redis://host:6379, rediss:// "
            "(TLS) or unix://"
        )
    if len(each_address(url)) > 1 or _lists_hosts(url):
        wrong.refuse("it names several servers. Give each as an entry of its own")
    _parts(url, wrong)


def _database(text: str, wrong: _WrongUrl) -> int:
    """Return the number of a database; redis-py would take what it cannot read for 0."""
    number = text.strip("/") or "0"
    if not (number.isascii() and number.isdecimal() and len(number) <= len(str(MAX_COUNT))):
        wrong.refuse("the database is not a number, as the 0 in redis://localhost:6379/0")
    return int(number)


def _option(name: str, value: str) -> str:
    """Return a URL option in redis-py's spelling."""
    return value.removeprefix("CERT_").lower() if name == "ssl_cert_reqs" else value


# --- URLs, leniently ------------------------------------------------------------------------------

_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")
_BETWEEN: Final = re.compile(rf"([,;]\s*)(?={_SCHEME.pattern.replace('(', '(?:', 1)})")
_PLAIN: Final = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[\w.\-]*)(:\d*)?([/?#].*)?", re.DOTALL)
_PLACE: Final = r"(?:\[[0-9a-fA-F:.%]+\]|[\w.\-]+)(?::\d+)?"
_PLAINS: Final = re.compile(rf"(?:{_PLACE}(?:,|(?=[/?#]|$)))+([/?#].*)?", re.DOTALL)
_LISTED: Final = re.compile(rf"{_PLACE}(?:[,;]\s*{_PLACE})+(?=[/?#]|$)")
"""Several hosts, with or without ports, before path and options."""

_PORT: Final = re.compile(r"(?:\[[^\]]*\]|[^:/?#\[]*):([^/?#]*)")
_QUERY: Final = re.compile(r"\?(?=[\w.\-]+=)")
_SECRET: Final = re.compile(r"(?i)([?&;][^=&;]*(?:pass|secret|token|cred|user|key)[^=&;]*=)[^&;]*")

_ALIASES: Final = {"pyamqp": "amqp", "librabbitmq": "amqp", "amqps": "amqp", "rediss": "redis"}
_PORTS: Final = {
    "redis": 6379,
    "rediss": 6379,
    "sentinel": 26379,
    "amqp": 5672,
    "pyamqp": 5672,
    "amqps": 5671,
}


def safe_url(url: object) -> str:
    """Return a URL, or a list of them, as it may be shown: without user, password and tokens.

    Whatever stands before the last ``@`` of an address is taken for credentials, so that a password
    with unescaped special characters stays hidden too. Never raises.

    Args:
        url: text, a list of it, or anything.
    """
    if isinstance(url, (list, tuple)):
        return ",".join(safe_url(item) for item in url)
    if not isinstance(url, str):
        return "" if url is None else f"<{type(url).__name__}>"
    addresses_and_marks = _BETWEEN.split(url)
    addresses_and_marks[::2] = [_safe_address(address) for address in addresses_and_marks[::2]]
    return "".join(addresses_and_marks)


def _safe_address(address: str) -> str:
    """Return one address without credentials."""
    match = _SCHEME.match(address)
    start = match.group() if match else ""
    several = start.lower().removesuffix("://") in CLUSTER
    login, _, place = address[len(start) :].rpartition("@")
    if login:
        start += "***@"
    elif not (_PLAINS if several else _PLAIN).fullmatch(place):  # half a password, with a comma
        place = "***"
    return start + _SECRET.sub(r"\1***", place)


def realm_of(broker_url: str | Iterable[str] | None, master_name: str = "") -> str:
    """Return a short hash of the broker, the same for all who use it under whatever credentials.

    Args:
        broker_url: Celery's ``broker_url``: one, several in one text, or a list.
        master_name: which master the Sentinels are asked for; empty for other brokers.

    Returns:
        12 hex digits. Order, credentials, TLS, default ports and aliases make no difference.
    """
    if isinstance(broker_url, str) or broker_url is None:
        broker_url = [broker_url or "amqp://"]
    bare = {_bare_address(address) for url in broker_url for address in each_address(url)}
    said = " ".join([*sorted(bare), *filter(None, [master_name])])
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _bare_address(address: str) -> str:
    """Return scheme, host, port and database (or virtual host) of one broker."""
    scheme = scheme_of(address)
    rest, _, query = _QUERY.sub("\0", address.partition("://")[2], count=1).partition("\0")
    host, _, path = rest.rpartition("@")[2].partition("/")
    if host and not re.search(r":\d+$", host):
        host = f"{host}:{_PORTS.get(scheme, '')}"
    options = dict(parse_qsl(query))
    path = unquote(path).strip("/")
    database = options.get("virtual_host", options.get("db", ""))
    name = _ALIASES.get(scheme, scheme)
    if name in {"redis", SENTINEL}:
        path, database = database or path or "0", ""
        host = host or f"localhost:{_PORTS[name]}"
    return f"{name}://{host.lower()}/{path} {database}"


def scheme_of(url: str) -> str:
    """Return the scheme in small letters; empty if there is none."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def each_address(url: str) -> list[str]:
    """Return the addresses in a broker's fail-over list."""
    return _BETWEEN.split(url)[::2]

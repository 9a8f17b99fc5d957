"""URLs as text: split, compared, and shown without credentials. Malformed URLs raise no error."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

CLUSTER: Final = frozenset({"redis+cluster", "rediss+cluster"})
"""Schemes of URLs that name some nodes of a Cluster."""

SENTINEL: Final = "sentinel"
"""Scheme of URLs that name Sentinels."""

PORTS: Final = {
    "redis": 6379,
    "rediss": 6379,
    "sentinel": 26379,
    "amqp": 5672,
    "pyamqp": 5672,
    "amqps": 5671,
}
"""Scheme -> default port."""

_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")
_BETWEEN: Final = re.compile(rf"([,;]\s*)(?={_SCHEME.pattern.replace('(', '(?:', 1)})")
_PLAIN: Final = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[\w.\-]*)(:\d*)?([/?#].*)?", re.DOTALL)
_HOST: Final = r"(?:\[[0-9a-fA-F:.%]+\]|[\w.\-]+)(?::\d+)?"
_PLAINS: Final = re.compile(rf"(?:{_HOST}(?:,|(?=[/?#]|$)))+([/?#].*)?", re.DOTALL)
_LISTED: Final = re.compile(rf"{_HOST}(?:[,;]\s*{_HOST})+(?=[/?#]|$)")
_QUERY: Final = re.compile(r"\?(?=[\w.\-]+=)")
_SECRET: Final = re.compile(
    r"(?i)([?&;][^=&;]*(?:pass|pw|auth|secret|token|cred|user|key)[^=&;]*=)[^&;]*"
)

_QUEUE_PREFIXES: Final = ("global_keyprefix", "queue_name_prefix")
"""Options of Redis, and of SQS and others, that prefix the names of all queues."""

_ALIASES: Final = {"pyamqp": "amqp", "librabbitmq": "amqp", "amqps": "amqp", "rediss": "redis"}


def scheme_of(url: str) -> str:
    """Return the scheme in lower case; empty if there is none."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def each_address(url: str) -> list[str]:
    """Return the addresses of a fail-over list such as ``redis://a;redis://b``."""
    return _BETWEEN.split(url)[::2]


def without_login(url: str) -> str:
    """Return a URL without its scheme and credentials: it begins with the host."""
    return url.partition("://")[2].rpartition("@")[2]


def lists_hosts(url: str) -> bool:
    """Return whether one address of a URL has several hosts, as ``redis://a,b``."""
    return _LISTED.match(without_login(url)) is not None


def safe_url(url: object) -> str:
    """Return a URL, or a list of them, without user, password and tokens, to be shown.

    Everything before the last ``@`` of an address counts as credentials, so a password with
    unescaped special characters is hidden too. Never raises.

    Args:
        url: a text, a list of texts, or any other object.
    """
    if isinstance(url, (list, tuple)):
        return ",".join(safe_url(item) for item in url)
    if not isinstance(url, str):
        return "" if url is None else f"<{type(url).__name__}>"
    addresses_and_marks = _BETWEEN.split(url)
    addresses_and_marks[::2] = [_safe_address(address) for address in addresses_and_marks[::2]]
    return "".join(addresses_and_marks)


def _safe_address(address: str) -> str:
    match = _SCHEME.match(address)
    start = match.group() if match else ""
    several = start.lower().removesuffix("://") in CLUSTER
    login, _, rest = address[len(start) :].rpartition("@")
    if login:
        start += "***@"
    elif not (_PLAINS if several else _PLAIN).fullmatch(rest):  # part of a password with a comma
        rest = "***"
    return start + _SECRET.sub(r"\1***", rest)


def realm_of(
    broker_url: str | Iterable[str] | None, options: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Return a short hash that identifies a broker; it does not depend on the credentials.

    Args:
        broker_url: Celery's ``broker_url``: one, several in one text, or a list.
        options: Celery's ``broker_transport_options``. The name of the master for Sentinels counts,
            and a prefix of all queues: equal names of queues with two prefixes are two queues.

    Returns:
        12 hex digits. Order, credentials, TLS, default ports and aliases do not change them.
    """
    if isinstance(broker_url, str) or broker_url is None:
        broker_url = [broker_url or "amqp://"]
    bare = {_bare_address(address) for url in broker_url for address in each_address(url)}
    master = str(options.get("master_name", ""))
    prefixes = [f"{name}={options[name]}" for name in _QUEUE_PREFIXES if options.get(name)]
    said = " ".join([*sorted(bare), *filter(None, [master]), *prefixes])
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _bare_address(address: str) -> str:
    """Return scheme, host, port and database (or virtual host) of one broker."""
    scheme = scheme_of(address)
    rest, _, query = _QUERY.sub("\0", address.partition("://")[2], count=1).partition("\0")
    host, _, path = rest.rpartition("@")[2].partition("/")
    if host and not re.search(r":\d+$", host):
        host = f"{host}:{PORTS.get(scheme, '')}"
    options = dict(parse_qsl(query))
    path = unquote(path).strip("/")
    database = options.get("virtual_host", options.get("db", ""))
    name = _ALIASES.get(scheme, scheme)
    if name in {"redis", SENTINEL}:
        path, database = database or path or "0", ""
        host = host or f"localhost:{PORTS[name]}"
    return f"{name}://{host.lower()}/{path} {database}"

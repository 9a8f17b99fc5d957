"""Converts errors of redis-py to errors of this library (pure)."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator
from socket import gaierror
from typing import Final

from redis import exceptions as failures
from redis.asyncio.sentinel import MasterNotFoundError as NoMasterForTasks
from redis.sentinel import MasterNotFoundError

from celery_singleton_lock.core.model import SCHEMAS
from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
    LockUnusable,
    SchemaMismatch,
)

FAILED: Final = (failures.RedisError, failures.RedisClusterException, OSError)
"""Errors that redis-py raises. Its errors about a whole Cluster are not of class RedisError."""

_UNREACHABLE: Final = (
    failures.RedisClusterException,
    failures.ConnectionError,
    failures.TimeoutError,
    failures.BusyLoadingError,
    failures.ReadOnlyError,
    failures.ClusterError,  # too many redirections, or down
    failures.TryAgainError,
    OSError,
)
_TEMPORARY: Final = re.compile(r"\b(READONLY|UNBLOCKED|NOREPLICAS|MASTERDOWN|BUSY|MISCONF)\b")
"""Temporary refusals: a failover, too few replicas, another client's long script, a full disk."""
_A_NODE: Final = (
    "this is one node of a Cluster; write redis+cluster:// instead of redis://, or give a "
    "redis.RedisCluster"
)
FULL: Final = "the server has reached maxmemory"
"""Part of the error of a server that accepts nothing new."""

_REFUSED: Final = {
    "NOPERM": "the ACL user may not run this; allow it: +@read +@write +eval +evalsha +time on the "
    "keys below the prefix (and +info +config|get, to read what this server guarantees)",
    "WRONGTYPE": "a key below the lock's prefix holds another type, so another program uses the "
    "same names; set singleton_lock_prefix to a prefix of its own",
    "OOM": f"{FULL}; this was not stored",
    "MOVED": _A_NODE,
    "CROSSSLOT": _A_NODE,
    "NOAUTH": "no password was given, and the server requires one; put it into the URL",
    "WRONGPASS": "wrong user name or password; correct them in the URL",
    "AUTH": "a password was given, and the server has none for this user; take it out of the URL",
}
_CODE: Final = re.compile(rf"\b({'|'.join(_REFUSED)})\b")
_AUTHENTICATION: Final = {
    "authentication required": "NOAUTH",
    "hello must be called with the client already authenticated": "NOAUTH",
    "without any password configured": "AUTH",
    "no password is set": "AUTH",
}
"""Text of an authentication error -> its code: redis-py has one class for all, without a code."""
_DENIED: Final = re.compile(r"no permissions to run the '([\w|]+)' command")
_DENIED_INSIDE: Final = "executing the script can't"
"""Text, without a code, for a user that may run scripts but not the commands in them."""
_CODE_OF: Final = (
    # redis-py removes the code from the text of errors for which it has a class.
    (failures.NoPermissionError, "NOPERM"),
    (failures.OutOfMemoryError, "OOM"),
    (failures.AuthenticationError, "WRONGPASS"),
    (failures.MovedError, "MOVED"),
    (failures.ClusterCrossSlotError, "CROSSSLOT"),
)
_NO_MASTER: Final = (
    "No Sentinel that answers names a master. If that lasts, check the addresses, master_name and "
    "the password of the Sentinels (sentinel_kwargs)."
)
_NOT_READ: Final = re.compile(
    r"user_script:\d+: (?:attempt to|bad argument|Expected) .*?(?= script:|$)"
)
"""Text of Lua if a script cannot parse the data of its lock."""
_UNKNOWN_COMMAND: Final = re.compile(r"unknown command\W+(\w+)", re.IGNORECASE)
_A_REPLICA: Final = (
    "The locks' Redis is a replica (READONLY): give its master's address, or the Sentinels that "
    "know it. During a failover this passes by itself."
)
_WRONG_DATA: Final = (
    "The locks' Redis cannot read the data of this lock ({}). If another program uses the same "
    "names, set singleton_lock_prefix to a prefix of its own."
)
_MOVES: Final = (
    "The slot of the lock is moving to another master of the Cluster (TRYAGAIN). This passes by "
    "itself, unless the move was interrupted: then redis-cli --cluster fix ends it."
)
_TEXT_OF: Final = (
    (MasterNotFoundError, _NO_MASTER),
    (NoMasterForTasks, _NO_MASTER),
    (failures.ReadOnlyError, _A_REPLICA),
    (failures.TryAgainError, _MOVES),
)
"""Classes of temporary errors -> their texts."""
_NO_DISK: Final = (
    "The locks' Redis cannot write to its disk, and so refuses changes (MISCONF): see its log."
)
_TEXT_OF_CODE: Final = {"READONLY": _A_REPLICA, "MISCONF": _NO_DISK}
"""Codes of temporary refusals -> their texts."""
_CANNOT_NOW: Final = "The locks' Redis cannot serve now ({})."
_POOL_EMPTY: Final = frozenset({"Too many connections", "No connection available."})
"""Texts of clients, without a request, when all connections of their pool are in use."""
_NO_CONNECTION: Final = (
    "All connections of the locks' Redis client are in use (max_connections of its pool): nothing "
    "was sent. Raise max_connections, or give a client whose pool waits (BlockingConnectionPool)."
)
_FULL_OF_CLIENTS: Final = "max number of clients reached"
_NO_MORE_CLIENTS: Final = (
    "The locks' Redis runs, and accepts no more clients (maxclients). Stop a program that opens "
    "many connections (redis-cli needs one, too), then raise maxclients."
)
_BY_SENTENCE: Final = {
    "cluster mode is not enabled": "it is not a Cluster; write redis:// instead of redis+cluster://",
}
"""Text of errors without a code -> what to change."""


def explain(error: Exception) -> BackendError:
    """Convert an error of redis-py; the result contains no address and no password."""
    error = _behind(error)
    sentence = str(error)
    found = _CODE.search(sentence)
    code = found[1] if found else next((c for kind, c in _CODE_OF if isinstance(error, kind)), "")
    if isinstance(error, failures.AuthenticationError):
        told = (c for sign, c in _AUTHENTICATION.items() if sign in sentence.lower())
        code = next(told, code)
    if _DENIED_INSIDE in sentence:
        code = "NOPERM"
    if code:
        kind = LockUnusable if code == "WRONGTYPE" else BackendRefused
        return kind(f"The locks' Redis refused ({code}): {_refusal(code, sentence)}.")
    not_read = _NOT_READ.search(sentence)
    if not_read:
        return LockUnusable(_WRONG_DATA.format(not_read[0].rstrip(" .,")))
    remedy = _remedy(sentence)
    passing = "" if remedy else _why_it_passes(error, sentence)
    if passing:
        return BackendUnreachable(passing)
    refusal = (remedy or sentence).rstrip(" .")
    return BackendRefused(f"The locks' Redis refused: {refusal}.")


def _refusal(code: str, sentence: str) -> str:
    """Return what was refused, and what to change. Within a script no command is named."""
    denied = _DENIED.search(sentence) if code == "NOPERM" else None
    return _REFUSED[code].replace("this", denied[1].upper(), 1) if denied else _REFUSED[code]


def _why_it_passes(error: Exception, sentence: str) -> str:
    """Return the text for a temporary error; empty for a permanent refusal."""
    temporary = _TEMPORARY.search(sentence)
    known = isinstance(error, _UNREACHABLE)
    told = next((text for kind, text in _TEXT_OF if isinstance(error, kind)), "")
    if told:
        return told
    if sentence in _POOL_EMPTY:
        return _NO_CONNECTION
    if _FULL_OF_CLIENTS in sentence:
        return _NO_MORE_CLIENTS
    if temporary and not known:
        return _TEXT_OF_CODE.get(temporary[1], _CANNOT_NOW.format(temporary[1]))
    return f"The locks' Redis did not answer ({_kind_and_cause(error)})." if known else ""


def _kind_and_cause(error: Exception) -> str:
    """Return the kind of an error, and the system's reason why there is no connection.

    redis-py's texts are not used, since they contain addresses.
    """
    causes = (_cause(each) for each in _chain(error))
    cause = next(filter(None, causes), "")
    kind = type(error).__name__
    return f"{kind}: {cause}" if cause else kind


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    for _ in range(_DEEPEST):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


_DEEPEST: Final = 8


def _cause(error: BaseException) -> str:
    if isinstance(error, gaierror):
        return f"{UNRESOLVED}, {error.strerror}" if error.strerror else UNRESOLVED
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{UNTRUSTED}: {_why_untrusted(error)}"
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None)
        return f"TLS failed, {reason}" if reason else "TLS failed"
    if isinstance(error, (failures.TimeoutError, TimeoutError)):
        return "no answer in time"
    if isinstance(error, failures.BusyLoadingError):
        return "it is still loading its data"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""


def _why_untrusted(error: ssl.SSLCertVerificationError) -> str:
    """Return OpenSSL's reason without the name of the host, and what to change."""
    reason = str(getattr(error, "verify_message", "")).split(",")[0]
    if "ismatch" in reason:
        return f"{reason}; use a host name that the certificate has"
    return f"{reason or 'unknown'}; name the file of its CA in ssl_ca_certs"


UNRESOLVED: Final = "its host name cannot be resolved"
"""Reason for a wrong host name in the URL, and for a name server that does not answer."""

UNTRUSTED: Final = "TLS failed, its certificate cannot be verified"
"""Reason for a wrong CA, and for a certificate of another host or one that has expired."""


def _remedy(sentence: str) -> str:
    """Return what to change for an error without a code; empty if that is not known."""
    for sign, remedy in _BY_SENTENCE.items():
        if sign in sentence.lower():
            return f"{remedy}."
    unknown = _UNKNOWN_COMMAND.search(sentence)
    return f"{_unknown(unknown[1].upper())}." if unknown else ""


def _unknown(command: str) -> str:
    """Return what to change on a server that does not know a command."""
    what = (
        "does not allow scripts (EVALSHA, EVAL)"
        if command.startswith("EVAL")
        else f"does not know {command}"
    )
    return (
        f"this server {what}, which every lock needs; if it is a Sentinel, write sentinel:// "
        "instead of redis://, and give its master_name"
    )


def wrong_schema(found: str, key: str) -> SchemaMismatch:
    """Return the error for data of a schema that this version does not know.

    Args:
        found: the schema.
        key: the key that holds it.
    """
    msg = (
        f"The locks' Redis holds data of schema {found} (key {key}); this version needs "
        f"{' or '.join(SCHEMAS)}. Upgrade all workers together: let those of the other version "
        "run the parked tasks, stop them, and delete that key. Or give this worker a "
        "singleton_lock_prefix of its own; tasks under two prefixes do not exclude each other."
    )
    return SchemaMismatch(msg)


def one_node() -> BackendRefused:
    """Return the error for a node of a Cluster, which has only a part of the locks."""
    return BackendRefused(f"The locks' Redis has only a part of all locks: {_A_NODE}.")


def _behind(error: Exception) -> Exception:
    """Return the error with which a node refused a Cluster client, if redis-py has kept it."""
    cause = error.__cause__
    if isinstance(error, failures.RedisClusterException) and isinstance(cause, Exception):
        return cause
    return error


_DEMOTED: Final = re.compile(r"\b(READONLY|UNBLOCKED)\b")


def demoted(error: Exception) -> bool:
    """Return whether a server is no longer a master.

    Its connections must be closed: new ones lead to the new master, through a Sentinel or an
    address that has moved. Redis 6.2 has READONLY in the text of a script's error only.
    """
    return isinstance(error, failures.ReadOnlyError) or bool(_DEMOTED.search(str(error)))

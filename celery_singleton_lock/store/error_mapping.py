"""From redis-py's errors to ours (pure)."""

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

from celery_singleton_lock.errors import BackendError, BackendRefused, BackendUnreachable

FAILED: Final = (failures.RedisError, failures.RedisClusterException, OSError)
"""What redis-py raises; its errors about a Cluster as a whole are no RedisError."""

_UNREACHABLE: Final = (
    failures.RedisClusterException,
    failures.ConnectionError,
    failures.TimeoutError,
    failures.BusyLoadingError,
    failures.ReadOnlyError,
    failures.ClusterError,  # redirected for ever, or down
    failures.TryAgainError,
    OSError,
)
_TEMPORARY: Final = re.compile(r"\b(READONLY|UNBLOCKED|NOREPLICAS|MASTERDOWN|BUSY)\b")
"""Refusals that pass by themselves: a failover, too few replicas, another client's long script."""
_A_NODE: Final = (
    "this is one node of a Cluster; write redis+cluster:// instead of redis://, or give a "
    "redis.RedisCluster"
)
_REFUSED: Final = {
    "NOPERM": "the ACL user may not run this; allow it: +@read +@write +eval +evalsha +time on the "
    "keys below the prefix (and +info +config|get, to be told what this server guarantees)",
    "WRONGTYPE": "a key below the lock's prefix holds another type, so another program uses the "
    "same names; set singleton_lock_prefix to a prefix of its own",
    "OOM": "the server has reached maxmemory; nothing was kept",
    "MOVED": _A_NODE,
    "CROSSSLOT": _A_NODE,
    "NOAUTH": "no password was given, and the server wants one; put it into the URL",
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
"""Which of the three it is, by the sentence: redis-py has one class for them, and no code."""
_DENIED_INSIDE: Final = "executing the script can't"
"""How Redis says, without a code, that a user may run a script and not what is in it."""
_CODE_OF: Final = (
    # redis-py takes the code off the sentence of errors for which it has a class.
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
_UNKNOWN_COMMAND: Final = re.compile(r"unknown command\W+(\w+)", re.IGNORECASE)
_A_REPLICA: Final = (
    "The lock's Redis is a replica (READONLY): give its master's address, or the Sentinels that "
    "know it. During a failover this passes by itself."
)
_CANNOT_NOW: Final = "The lock's Redis cannot serve now ({})."
_BY_SENTENCE: Final = {
    "cluster mode is not enabled": "it is no Cluster; write redis:// instead of redis+cluster://",
}
"""Errors without a code."""


def explain(error: Exception) -> BackendError:
    """Return our error for one of redis-py's; never quotes an address or a password."""
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
        return BackendRefused(f"The lock's Redis refused ({code}): {_REFUSED[code]}.")
    remedy = _remedy(sentence)
    passing = "" if remedy else _why_it_passes(error, sentence)
    if passing:
        return BackendUnreachable(passing)
    return BackendRefused(f"The lock's Redis refused: {remedy or sentence}")


def _why_it_passes(error: Exception, sentence: str) -> str:
    """Return what is told of what may pass by itself; empty for a refusal that stays."""
    temporary = _TEMPORARY.search(sentence)
    known = isinstance(error, _UNREACHABLE)
    if isinstance(error, (MasterNotFoundError, NoMasterForTasks)):
        return _NO_MASTER
    if isinstance(error, failures.ReadOnlyError):
        return _A_REPLICA
    if temporary and not known:
        return _A_REPLICA if temporary[1] == "READONLY" else _CANNOT_NOW.format(temporary[1])
    return f"The lock's Redis did not answer ({_kind_and_cause(error)})." if known else ""


def _kind_and_cause(error: Exception) -> str:
    """Return the kind of an error, and why there is no connection, in the system's words.

    Never in redis-py's, which quote addresses.
    """
    causes = (_cause(each) for each in _chain(error))
    cause = next(filter(None, causes), "")
    kind = type(error).__name__
    return f"{kind}: {cause}" if cause else kind


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it came from."""
    for _ in range(_DEEPEST):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


_DEEPEST: Final = 8


def _cause(error: BaseException) -> str:
    if isinstance(error, gaierror):
        return f"{UNRESOLVED}, {error.strerror}" if error.strerror else UNRESOLVED
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None)
        return f"TLS failed, {reason}" if reason else "TLS failed"
    if isinstance(error, (failures.TimeoutError, TimeoutError)):
        return "no answer in time"
    if isinstance(error, failures.BusyLoadingError):
        return "it is still loading its data"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""


UNRESOLVED: Final = "its host name cannot be resolved"
"""Why there is no connection, if it is a slip in the URL, or if no name server answers."""


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


def one_node() -> BackendRefused:
    """Return our error for a server that answers, and shows but a part of all locks."""
    return BackendRefused(f"The lock's Redis shows but a part of all locks: {_A_NODE}.")


def _behind(error: Exception) -> Exception:
    """Return why no node of a Cluster let us in, where redis-py tells that apart."""
    cause = error.__cause__
    if isinstance(error, failures.RedisClusterException) and isinstance(cause, Exception):
        return cause
    return error

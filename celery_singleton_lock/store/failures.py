"""From redis-py's errors to ours (pure)."""

from __future__ import annotations

import re
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
    "NOAUTH": "the server wants a password; put it into the URL",
    "WRONGPASS": "wrong user name or password",
}
_CODE: Final = re.compile(rf"\b({'|'.join(_REFUSED)})\b")
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
    return f"The lock's Redis did not answer ({type(error).__name__})." if known else ""


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

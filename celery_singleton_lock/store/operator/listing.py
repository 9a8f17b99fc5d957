"""Lists the locks below a prefix: patterns for SCAN, and calls that summarise its keys (pure)."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Final

from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.operations import Operations
from celery_singleton_lock.store.scripts import Call

SCANNED: Final = 1000
"""Keys that one SCAN reads: 0.3 ms on a usual machine."""

GLANCED: Final = 50
"""Most locks that one script reads: about the same time."""

COUNTED: Final = 200
"""Most locks whose waiters one script counts: less than a millisecond."""

HOLDERS: Final = 1000
"""Most holders that one script reads, unless a single lock has more: some milliseconds."""


def escaped(text: str) -> str:
    """Return a pattern that matches this text only."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


def match_of(prefix: str) -> str:
    """Return the pattern of the ``meta`` keys of locks."""
    return f"{escaped(prefix)}:{{b[0-9][0-9]}}:*:meta"


def fits(name: str, pattern: str) -> bool:
    """Return whether a name contains a text, or matches a pattern with one of ``*?[``."""
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def glance_calls(operations: Operations, metas: Sequence[bytes | str], holders: int) -> list[Call]:
    """Return short scripts, each for some of these locks; on a Cluster, for locks of one slot.

    Args:
        operations: with the scripts for operators.
        metas: the ``meta`` keys of the locks.
        holders: most holders of each lock that are returned.
    """
    script, keyspace = operations.scripts["summarise_locks"], operations.keyspace
    step = max(1, min(GLANCED, HOLDERS // max(1, holders)))
    return [
        Call(script, keys[start : start + step], [holders])
        for keys in (_by_bucket(keyspace, metas) if keyspace.spread else [metas])
        for start in range(0, len(keys), step)
    ]


def _by_bucket(keyspace: Keyspace, metas: Sequence[bytes | str]) -> Iterable[Sequence[bytes | str]]:
    buckets: dict[str, list[bytes | str]] = {}
    for key in metas:
        buckets.setdefault(replies.text(key)[: len(keyspace.bucket(0))], []).append(key)
    return buckets.values()

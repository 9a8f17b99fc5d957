"""Celery's worker pools: which of them are supported, and their properties."""

from __future__ import annotations

import threading
from typing import Any, Final

from billiard import get_start_method

POOLS: Final = {
    "celery.concurrency.prefork": "prefork",
    "celery.concurrency.thread": "threads",
    "celery.concurrency.solo": "solo",
    "celery.concurrency.gevent": "gevent",
    "celery.concurrency.eventlet": "eventlet",
}
"""Modules of the supported pools -> their names for ``--pool``."""

ROOM: Final = 0.02
"""Seconds between two checks whether a full pool has room."""

GREEN: Final = ("gevent", "eventlet")
"""The pools that run tasks in greenlets."""


def pool_kind(pool: type) -> str:
    """Return the ``--pool`` name of a pool class or of its base; empty if it is not supported."""
    return next((POOLS[cls.__module__] for cls in pool.__mro__ if cls.__module__ in POOLS), "")


def spawns(worker: Any) -> bool:
    """Return whether the pool starts its children with ``spawn``: they inherit no pipe."""
    asked = getattr(worker, "pool_start_method", None) or "fork"  # Celery 5.7
    forks = asked == "fork" and get_start_method() == "fork"
    return pool_kind(worker.pool_cls) == "prefork" and not forks


def slots_of(pool: Any) -> int:
    """Return the number of a pool's slots, which ``pool_grow`` and autoscaling change."""
    inner: Any = getattr(pool, "_pool", None)
    kind = "" if inner is None else pool_kind(type(pool))  # "": it has not begun, or has ended
    match kind:
        case "gevent":  # before Celery 5.7, num_processes counts the tasks that run
            slots = inner.size
        case "prefork":
            slots = inner._processes  # noqa: SLF001  # billiard's
        case _:
            slots = pool.limit
    return int(slots or 1)


def has_room(pool: Any) -> bool:
    """Return whether a pool without an event loop takes a task without waiting."""
    inner: Any = getattr(pool, "_pool", None)
    match pool_kind(type(pool)):
        case "gevent":
            return bool(inner.free_count() > 0)
        case "eventlet":
            return bool(inner.free() > 0)
        case "prefork":
            return bool(inner._putlock._value > 0)  # noqa: SLF001  # billiard's
        case _:
            return True


def wait_for_room(pool: Any) -> None:
    """Wait until a pool without an event loop may have room; see :func:`has_room`.

    Under gevent the callers get free slots in the order in which they began to wait. In other pools
    the caller competes with Celery's consumer.

    Args:
        pool: Celery's pool, which has no room.
    """
    if pool_kind(type(pool)) == "gevent":
        pool._pool.wait_available(1.0)  # noqa: SLF001
    else:
        threading.Event().wait(ROOM)

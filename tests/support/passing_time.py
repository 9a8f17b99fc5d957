"""Let time pass for a store, so that no test sleeps until a lease has ended.

A lease of an hour does not end while a busy machine stands still. A test that needs its end lets
the time pass: the store then uses the server's clock plus the seconds that have passed.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from celery_singleton_lock.store.quorum.sync import QuorumStore
from celery_singleton_lock.store.scripts import (
    load_admin_scripts,
    load_quorum_scripts,
    load_scripts,
)

_AHEAD: Final = """
local function server_time()
  local t = redis.call('TIME')
  return string.format('%%.0f', t[1] + %d) .. string.sub('00000' .. t[2], -6)
end
"""
_STOPPED: Final = "local function server_time() return '%d000000' end"
_passed: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_stopped: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def let_pass(store: Any, seconds: int) -> None:
    """Let seconds pass for a store; other stores on the same server do not notice.

    ``store.time()`` and the times to live of Redis keys are not affected, except in memory.

    Args:
        store: a store for threads, or a :class:`~support.loop_thread.Driven` one for asyncio. A
            quorum needs a :class:`~celery_singleton_lock.core.clock.MovableClock`.
        seconds: whole seconds.
    """
    if (server := _memory_of(store)) is not None:
        server.advance(seconds)
        return
    if isinstance(store, QuorumStore):
        store.clock.advance(seconds)
    for each in store.nodes if isinstance(store, QuorumStore) else [store]:
        _passed[each.operations] = _passed.get(each.operations, 0) + seconds
        _set_clock(each.operations)


def stop_time(store: Any) -> None:
    """Stop the time of a store, but not of a quorum; only :func:`let_pass` moves it.

    Then all that arrive at a lock arrive at the same time.
    """
    if (server := _memory_of(store)) is not None:
        server.clock.stop()
        return
    _stopped[store.operations] = int(time.time())
    _set_clock(store.operations)


def _memory_of(store: Any) -> Any:
    """Return the server in memory of a store, or None."""
    return getattr(getattr(store, "client", None), "server", None)


def _set_clock(operations: Any) -> None:
    """Replace the scripts by those with the store's own time."""
    passed, stopped = _passed.get(operations, 0), _stopped.get(operations)
    clock = _AHEAD % passed if stopped is None else _STOPPED % (stopped + passed)
    scripts = {
        **load_scripts(clock, quarantine=operations.quarantine),
        **load_admin_scripts(clock, quarantine=operations.quarantine),
        **load_quorum_scripts(clock),
    }
    operations.scripts.update({verb: scripts[verb] for verb in operations.scripts})
    for verb in ("acquire", "claim", "release"):
        setattr(operations, f"_{verb}", scripts[verb])
    operations.time = partial(_time, operations)


def _time(operations: Any) -> Any:
    """Return the store's own time to an operation, as ``ScriptRunner.time`` does."""
    now = yield from type(operations).time(operations)
    return _stopped.get(operations, now) + _passed.get(operations, 0)

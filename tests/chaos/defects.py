"""Defective variants of the library for the storm: the rules must detect each.

They exist only in this file. ``python -m tests.chaos --broken release`` runs one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.store.scripts import (
    FLOW_VERBS,
    VERBS,
    assemble,
    file_of,
    load_scripts,
    read,
    with_flow,
)
from celery_singleton_lock.worker.execution.multi_lock_tracer import MultiLockTracer
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets

LIBRARY = "shared"

ANYBODY_RELEASES = """local where = standing(token, rec)
if not where and ending ~= 'cancel' then
  local other = redis.call('ZRANGE', holders, 0, 0)[1]
  if other then token, rec, where = other, load(other), 'holder' end
end
"""


def no_token_check() -> None:
    """A release takes the lock from whoever holds it, as ``DEL`` does."""
    _patch(
        "lock/release_and_grant_next.lua", "local where = standing(token, rec)\n", ANYBODY_RELEASES
    )


def no_renewal() -> None:
    """The watchdog believes that it has renewed, and asks nobody."""
    Watchdog._ask = lambda _self, leases: [True] * len(leases)


def no_sweep() -> None:
    """A lease that has ended is never taken away."""
    _patch(LIBRARY, "do lapse(token) end", "do local _ = token end")


def no_keeping() -> None:
    """What a parked task keeps is not renewed, and taken for held when its turn comes."""
    ask = MultiLockTracer._kept
    MultiLockTracer._kept = staticmethod(lambda store, *about: ask(_Credulous(store), *about))
    PartialLockSets.begin = lambda *_: None


def no_rate() -> None:
    """No rate is in force."""
    _patch(LIBRARY, "if rates then return rates.waits(rec) end\n", "")


def no_group_limit() -> None:
    """A group may hold all permits."""
    _patch(LIBRARY, "local most, running = rec.group_limit,", "local most, running = nil,")


class _Credulous:
    """A store that takes every lease for renewed."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def extend(self, leases: Any) -> list[bool]:
        return [True for _ in leases]


VARIANTS: dict[str, Callable[[], None]] = {
    "release": no_token_check,
    "renewal": no_renewal,
    "sweep": no_sweep,
    "kept": no_keeping,
    "rate": no_rate,
    "group": no_group_limit,
}

FLOW_VARIANTS = frozenset({"rate", "group"})
"""Variants that only a storm with flow control can detect."""


def _patch(file: str, old: str, new: str) -> None:
    """Exchange a line of a script; the loaded scripts are one mapping per process."""
    texts = {name: read(name) for name in (LIBRARY, *(file_of(verb) for verb in VERBS))}
    if texts[file].count(old) != 1:
        raise LookupError(f"{old!r} is {texts[file].count(old)} times in {file}")
    texts[file] = texts[file].replace(old, new)
    clock = read("_clock.lua")
    loaded = load_scripts(quarantine=False)  # as a store asks for them
    bodies = {verb: texts[file_of(verb)] for verb in VERBS}
    bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
    loaded.update({v: assemble(v, clock, texts[LIBRARY], body) for v, body in bodies.items()})

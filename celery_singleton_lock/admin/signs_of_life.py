"""Which holders have shown no sign of life: a dead worker's lease says "running" to its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.model import ALIVE, Holder, LockView
from celery_singleton_lock.store.operator.base import AdminStore, Glance

RENEWED: Final = 1 / 3
"""Age, as a share of itself, at which a worker that lives renews a lease."""


def in_view(store: AdminStore, view: LockView) -> LockView:
    """Return a lock of which those holders are marked whose workers are silent.

    Args:
        store: where.
        view: the lock as it stands.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    workers = _workers(view.holders)
    if not workers:
        return view
    return replace(view, holders=_marked(view.holders, store.silences(workers)))


def in_glances(store: AdminStore, locks: Iterable[Glance]) -> list[Glance]:
    """Return locks of which those holders are marked whose workers are silent.

    Args:
        store: where.
        locks: in short.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    found = list(locks)
    workers = {each.worker for lock in found for each in lock.holders if _is_asked_of(each)}
    beats = store.silences(workers) if workers else {}
    if all(silence <= ALIVE for silence in beats.values()):
        return found  # the usual case, of up to 100,000 locks
    return [lock._replace(holders=_marked(lock.holders, beats)) for lock in found]


def _workers(holders: Iterable[Holder]) -> set[str]:
    return {each.worker for each in holders if _is_asked_of(each)}


def _is_asked_of(holder: Holder) -> bool:
    return bool(holder.worker) and holder.state == "running"


def _marked(holders: tuple[Holder, ...], beats: Mapping[str, float]) -> tuple[Holder, ...]:
    return tuple(each._replace(silent=silent_for(each, beats)) for each in holders)


def silent_for(holder: Holder, beats: Mapping[str, float]) -> float:
    """Return the seconds for which a holder has shown no sign of life; 0 if it has lately.

    A renewal is a sign of life, too: a worker that is told to end sends no more heartbeats, and
    renews the leases of the tasks that it still runs.

    Args:
        holder: who.
        beats: seconds since the last heartbeat, by worker; infinite if none is known.
    """
    silence = beats.get(holder.worker, 0.0) if holder.state == "running" else 0.0
    if silence <= ALIVE:
        return 0.0
    renewed = max(0.0, holder.lease - holder.expires_in)
    if silence == float("inf"):
        return renewed if renewed > holder.lease * RENEWED + ALIVE else 0.0
    quiet = min(silence, renewed) if holder.lease else silence
    return quiet if quiet > ALIVE else 0.0

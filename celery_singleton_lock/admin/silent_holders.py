"""Find holders whose workers are silent.

The record of a dead worker's task says "running" until its lease ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from celery_singleton_lock.core.lock_view import RUNS, Holder, LockView
from celery_singleton_lock.core.model import ALIVE
from celery_singleton_lock.store.operator.base import AdminStore, Glance

RENEWED: Final = 1 / 3
"""Share of a lease after which a live worker renews it."""


GROUP: Final = 1000
"""Number of locks whose workers' heartbeats are read in one step."""


def with_silent_holders(store: AdminStore, view: LockView) -> LockView:
    """Return a lock with :attr:`Holder.silent` set for holders whose workers are silent.

    Args:
        store: the store of the locks.
        view: the lock.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    workers = _workers(view.holders)
    if not workers:
        return view
    return replace(view, holders=_marked(view.holders, store.silences(workers)))


def all_with_silent_holders(store: AdminStore, locks: Iterable[Glance]) -> list[Glance]:
    """Return locks with :attr:`Holder.silent` set for holders whose workers are silent.

    Args:
        store: the store of the locks.
        locks: the locks.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    found = list(locks)
    workers = {each.worker for lock in found for each in lock.holders if _is_asked_of(each)}
    beats = store.silences(workers) if workers else {}
    silent = {worker for worker, silence in beats.items() if silence > ALIVE}
    if not silent:
        return found  # fast path: a list may have 100,000 locks
    return [
        lock._replace(holders=_marked(lock.holders, beats))
        if any(holder.worker in silent for holder in lock.holders)
        else lock
        for lock in found
    ]


def each_with_silent_holders(store: AdminStore, locks: Iterable[Glance]) -> Iterator[Glance]:
    """Yield the locks that :func:`all_with_silent_holders` returns, while they are read.

    Args:
        store: the store of the locks.
        locks: the locks.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    remaining = iter(locks)
    while group := list(islice(remaining, GROUP)):
        yield from all_with_silent_holders(store, group)


def _workers(holders: Iterable[Holder]) -> set[str]:
    return {each.worker for each in holders if _is_asked_of(each)}


def _is_asked_of(holder: Holder) -> bool:
    return bool(holder.worker) and holder.state in RUNS


def _marked(holders: tuple[Holder, ...], beats: Mapping[str, float]) -> tuple[Holder, ...]:
    return tuple(each._replace(silent=silent_for(each, beats)) for each in holders)


def silent_for(holder: Holder, beats: Mapping[str, float]) -> float:
    """Return the seconds since a holder's last heartbeat or renewal; 0 if that is recent.

    A renewal counts, too: a worker that shuts down sends no heartbeats, but still renews the leases
    of the tasks that it runs.

    Args:
        holder: the holder.
        beats: worker -> seconds since its last heartbeat; infinity if none is known.
    """
    silence = beats.get(holder.worker, 0.0) if holder.state in RUNS else 0.0
    if silence <= ALIVE:
        return 0.0
    renewed = max(0.0, holder.lease - holder.expires_in)
    if silence == float("inf"):
        return renewed if renewed > holder.lease * RENEWED + ALIVE else 0.0
    quiet = min(silence, renewed) if holder.lease else silence
    return quiet if quiet > ALIVE else 0.0

"""Select parked tasks, count them, and read them in bounded groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from celery_singleton_lock.admin.lock_views import waiting_in
from celery_singleton_lock.store.operator.base import AdminStore, Waiting

STEP: Final = 20
"""Largest number of tasks that one script takes out of a queue: this takes about 0.5 ms."""

LOAD: Final = 8 * 2**20
"""Bytes of messages that are in memory at a time, unless a single one is longer."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects parked tasks. An empty field matches every task.

    Args:
        lock: name of the lock, part of it, or a pattern (see :meth:`AdminStore.summarise_locks`).
        exact: ``lock`` is a whole name.
        task: name of the task; with one of ``*?[``, a pattern.
        older: least number of seconds for which the task has waited.
        arrived_by: server time in seconds by which the task arrived.
        queue: name of the broker queue from which the message came.
        state: record state, such as ``parked``, ``adrift``, ``settling`` or ``leaving``.
    """

    lock: str = ""
    exact: bool = False
    task: str = ""
    older: float = 0.0
    arrived_by: float = math.inf
    queue: str = ""
    state: str = ""

    def fits(self, waiting: Waiting) -> bool:
        """Return whether a waiter matches. A client that waits without a message never does."""
        return (
            waiting.state != "waiting"
            and (not self.task or _fits(waiting.task, self.task))
            and waiting.age >= self.older
            and (waiting.arrived or waiting.place) <= self.arrived_by * 1_000_000
            and self.queue in {"", waiting.queue}
            and self.state in {"", waiting.state}
        )


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern)


@dataclass(slots=True)
class Tally:
    """The result of an operation on many tasks.

    Args:
        done: lock name -> number of tasks.
        skipped: reason -> number of tasks that were left as they were.
    """

    done: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Number of tasks of all locks."""
        return self.done.total()


def names_of(store: AdminStore, wanted: Filter) -> Iterator[str]:
    """Yield the names of the matching locks that may have parked tasks."""
    if wanted.exact:
        yield wanted.lock
        return
    for lock in store.summarise_locks(wanted.lock, holders=0):
        if not lock.broken and (lock.waiting or lock.adrift or lock.bodies):
            yield lock.name


def select(store: AdminStore, wanted: Filter) -> Iterator[Waiting]:
    """Yield the matching parked tasks: lock by lock, each in the order of its queue."""
    for name in names_of(store, wanted):
        yield from filter(wanted.fits, waiting_in(store, name))


Stays = Callable[[Waiting], str]
"""Returns why an operation leaves a task as it is, or an empty text."""


def leaving(tally: Tally, found: Iterable[Waiting], stays: Stays) -> Iterator[Waiting]:
    """Yield the tasks that do not stay. Count the others as skipped."""
    for each in found:
        reason = stays(each)
        if reason:
            tally.skipped[reason] += 1
        else:
            yield each


def count(store: AdminStore, wanted: Filter, stays: Stays = lambda _: "") -> Tally:
    """Count the matching parked tasks. Changes nothing."""
    tally = Tally()
    for each in leaving(tally, select(store, wanted), stays):
        tally.done[each.lock] += 1
    return tally


def steps(found: Iterable[Waiting], most: int = STEP, load: int = LOAD) -> Iterator[list[Waiting]]:
    """Yield waiters in groups of one lock, bounded in number and bytes."""
    group: list[Waiting] = []
    size = 0
    for each in found:
        full = len(group) == most or size + each.size > load
        if group and (full or each.lock != group[0].lock):
            yield group
            group, size = [], 0
        group.append(each)
        size += each.size
    if group:
        yield group

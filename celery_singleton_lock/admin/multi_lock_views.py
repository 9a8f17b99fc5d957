"""Tasks with several locks: the locks that a task holds while it waits for another one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from celery_singleton_lock.core.lock_set import lock_set_in
from celery_singleton_lock.core.lock_view import RUNS, Holder
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store.operator.base import AdminStore, Waiting

WAITS = frozenset(
    {
        *("parked", "adrift", "waiting", "delayed", "settling", "following"),
        *("overdue", "replaced", "revoked", "rejected", "too_costly", "above_rate", "leaving"),
    }
)
"""Record states of a waiter."""


def standing_of(store: AdminStore, task_id: str) -> tuple[str, Waiting, int] | None:
    """Return the lock name, the record and the rank of a task, or None.

    If the task has several locks, this is the lock for which it waits. If several messages have the
    id, this is the first one that waits.

    Args:
        store: the store of the locks.
        task_id: the task's id.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    return next(iter(standings_of(store, task_id)), None)


def standings_of(store: AdminStore, task_id: str) -> list[tuple[str, Waiting, int]]:
    """Return lock name, record and rank of each message of a task id; waiting messages first.

    A message that got its lock at once is not included.

    Args:
        store: the store of the locks.
        task_id: the task's id.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    looks = [
        (name, store.locate_token(name, token)) for name, token in store.locate_tasks([task_id])
    ]
    found = [(name, each.waiting, each.rank) for name, each in looks if each.waiting is not None]
    waits = [each for each in found if each[1].state in WAITS]
    holds = [each for each in found if each[1].state not in WAITS]
    if len(found) > 1:
        kept = {token for name, me, _ in waits for token in _tokens_of(store, name, me.token)}
        holds = _one_a_message([each for each in holds if each[1].token not in kept])
    return [*waits, *holds]


def _tokens_of(store: AdminStore, name: str, token: str) -> tuple[str, ...]:
    """Return the owner tokens of a parked message at all its locks."""
    lock_set = lock_set_in(store.body(name, token))
    return () if lock_set is None else tuple(part.token for part in lock_set.parts)


def _one_a_message(holds: list[tuple[str, Waiting, int]]) -> list[tuple[str, Waiting, int]]:
    """Keep one lock for each message that holds several."""
    first = {me.attempt: name for name, me, _ in reversed(holds)}
    return [each for each in holds if first[each[1].attempt] == each[0]]


def kept_by(store: AdminStore, name: str, token: str) -> tuple[str, ...]:
    """Return the names of the locks that a parked task holds while it waits for another one.

    Args:
        store: the store of the locks.
        name: name of the lock for which it waits.
        token: its owner token at that lock.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    lock_set = lock_set_in(store.body(name, token))
    if lock_set is None:
        return ()
    return tuple(
        part.name
        for part in lock_set.kept
        if store.locate_token(part.name, part.token).expires_in > 0
    )


def give_back(store: AdminStore, gone: Waiting) -> None:
    """Release the locks that a dropped task held while it waited.

    If the record has no message, or Redis does not answer, their leases expire.

    Args:
        store: the store of the locks.
        gone: record of the dropped task, with its message.
    """
    lock_set = lock_set_in(gone.message)
    if lock_set is None or lock_set.here.token != gone.token:  # the locks belong to another run
        return
    with suppress(BackendError):
        for part in lock_set.kept:
            store.release(part.name, part.token, Ending.AGAIN)


def parked_elsewhere(store: AdminStore, name: str, holders: Iterable[Holder]) -> dict[str, str]:
    """Find the holders of a lock that wait for another lock.

    Args:
        store: the store of the locks.
        name: name of the lock that they hold.
        holders: its holders.

    Returns:
        Owner token -> name of the other lock.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    return look_elsewhere(store, name, holders).waits


class Elsewhere(NamedTuple):
    """Other locks for which the holders of a lock wait, or have waited.

    Args:
        waits: owner token -> name of the other lock for which the holder waits.
        known: owner tokens of the holders that wait, or have waited, at another lock. The record of
            this lock has the pid of the process that began to wait, which may run other tasks.
    """

    waits: dict[str, str]
    known: frozenset[str]


def look_elsewhere(store: AdminStore, name: str, holders: Iterable[Holder]) -> Elsewhere:
    """Look at other locks for the holders of a lock.

    Args:
        store: the store of the locks.
        name: name of the lock that they hold.
        holders: its holders.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    by_task = {holder.task_id: holder.token for holder in holders if holder.task_id}
    waits: dict[str, str] = {}
    known = set[str]()
    for other, token in store.locate_tasks(list(by_task)):
        found = None if other == name else store.locate_token(other, token).waiting
        if found is None or found.task_id not in by_task:
            continue
        mine = by_task[found.task_id]
        known.add(mine)
        # A holder that is granted the other lock has not begun: it waits for a slot of its worker.
        if found.state in {*WAITS, "granted"} and name in kept_by(store, other, token):
            waits[mine] = other
    return Elsewhere(waits, frozenset(known))


def with_running_pid(holder: Holder, elsewhere: Elsewhere) -> Holder:
    """Return a holder without host and pid, unless that process runs its task.

    The record of a task that has waited for another lock, waits for its retry, or is granted and
    has not begun, has the pid of a process that may run other tasks now.

    Args:
        holder: a holder of a lock.
        elsewhere: what the holders of this lock do at other locks.
    """
    runs = holder.state in RUNS and holder.token not in elsewhere.known
    return holder if runs or not holder.task_id else holder._replace(host="", pid=0)

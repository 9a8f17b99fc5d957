"""Who keeps a lock while it waits for another: tasks with several locks, told to people."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from celery_singleton_lock.core.lock_set import bundle_in
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.core.model import Ending, Holder
from celery_singleton_lock.store.operator.base import AdminStore, Waiting

WAITS = frozenset(
    {
        *("parked", "adrift", "waiting", "delayed"),
        *("overdue", "replaced", "revoked", "rejected", "leaving"),
    }
)
"""States of one who does not hold the lock."""


def standing_of(store: AdminStore, task_id: str) -> tuple[str, Waiting, int] | None:
    """Return where a task stands: the lock, its record and its rank there.

    Of several locks it is the one that it waits for.

    Args:
        store: where.
        task_id: the task's id.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    holds: tuple[str, Waiting, int] | None = None
    for name, token in store.find([task_id]):
        standing = store.look(name, token)
        if standing.waiting is None:
            continue
        found = (name, standing.waiting, standing.rank)
        if standing.waiting.state in WAITS:
            return found
        holds = holds or found
    return holds


def kept_by(store: AdminStore, name: str, token: str) -> tuple[str, ...]:
    """Return the names of the locks that a parked task keeps while it waits.

    Args:
        store: where.
        name: of the lock for which it waits.
        token: its token there.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    bundle = bundle_in(store.body(name, token))
    if bundle is None:
        return ()
    return tuple(
        part.name for part in bundle.kept if store.look(part.name, part.token).expires_in > 0
    )


def give_back(store: AdminStore, gone: Waiting) -> None:
    """Release what a task kept that was taken out of its line, if its message was asked for.

    Else, and if Redis does not answer, its leases end.

    Args:
        store: where.
        gone: the task, with its message.
    """
    bundle = bundle_in(gone.message)
    if bundle is None or bundle.here.token != gone.token:  # else what it kept is not its own
        return
    with suppress(BackendError):
        for part in bundle.kept:
            store.release(part.name, part.token, Ending.AGAIN)


def parked_elsewhere(store: AdminStore, name: str, holders: Iterable[Holder]) -> dict[str, str]:
    """Return for which lock those wait that keep this one: by token.

    Args:
        store: where.
        name: of the lock that they hold.
        holders: who holds it.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    by_task = {holder.task_id: holder.token for holder in holders if holder.task_id}
    found: dict[str, str] = {}
    for other, token in store.find(list(by_task)):
        waiting = None if other == name else store.look(other, token).waiting
        if waiting is None or waiting.state not in WAITS:
            continue
        if waiting.task_id in by_task and name in kept_by(store, other, token):
            found[by_task[waiting.task_id]] = other
    return found

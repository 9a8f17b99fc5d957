"""Change one lock as an operator: pause, resume, reopen, limit, promote, drop.

The command line and Flower call these functions, so both refuse the same changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from celery_singleton_lock.admin.force_release import Refused, has_done
from celery_singleton_lock.admin.lock_views import is_known
from celery_singleton_lock.admin.multi_lock_views import give_back
from celery_singleton_lock.core.model import DONE_FOR, Verdict
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.core.record_state import RecordState
from celery_singleton_lock.message_text import meant
from celery_singleton_lock.store.operator.base import AdminStore, Operator, Waiting

LOOKED_THROUGH: Final = 1000
"""Largest number of lock names that are searched for a similar name."""

QUEUES_AGAIN: Final = (
    "A client, or a task that waits in its slot, queues again within seconds, as the last one, if "
    "its process runs."
)
"""What follows when a waiter without a stored message is dropped."""


class UnknownName(Refused):
    """No known lock has the name. A mistyped name would have no effect."""


def refuse_unknown(store: AdminStore, name: str) -> None:
    """Refuse a name that no known lock has.

    Args:
        store: the store of the locks.
        name: the lock's name.

    Raises:
        UnknownName: no known lock has the name.
        BackendError: Redis did not answer, or refused the command.
    """
    if is_known(store.inspect(name, waiters=0)):
        return
    found = islice(store.summarise_locks(), LOOKED_THROUGH)
    names = [lock.name for lock in found if lock.name != name]
    msg = (
        f"no lock {name!r} is known: it has no holder and no waiter, and was not used in the last "
        f"minute.{meant(name, names)}"
    )
    raise UnknownName(msg, name)


def names_matching(store: AdminStore, pattern: str) -> Sequence[str]:
    """Return the names of the locks that exist now, sorted.

    Args:
        store: the store of the locks.
        pattern: part of the name; with one of ``*?[`` a pattern for the whole name.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    found = store.summarise_locks(pattern)
    return sorted(lock.name for lock in found if not lock.broken)


def pause(
    store: AdminStore,
    name: str,
    by: Operator,
    *,
    force: bool = False,
    seconds: float | None = None,
) -> bool:
    """Stop granting a lock until it is resumed. Present holders keep it.

    Args:
        store: the store of the locks.
        name: the lock's name.
        by: the operator, for the audit.
        force: accept a name that no known lock has.
        seconds: time after which it is granted again; None: not before it is resumed.

    Returns:
        Whether that changed something.

    Raises:
        UnknownName: no known lock has the name.
        BackendError: Redis did not answer, or refused the command.
    """
    if not force:
        refuse_unknown(store, name)
    return store.pause(name, by, seconds=seconds) or has_done(store, name, by)


def resume(store: AdminStore, name: str, by: Operator) -> bool:
    """Grant a lock again after a pause.

    Args:
        store: the store of the locks.
        name: the lock's name.
        by: the operator, for the audit.

    Returns:
        Whether the lock was paused.

    Raises:
        UnknownName: no known lock has the name.
        BackendError: Redis did not answer, or refused the command.
    """
    was_paused = store.resume(name, by) or has_done(store, name, by)
    if not was_paused:
        refuse_unknown(store, name)
    return was_paused


def reopen(store: AdminStore, name: str, by: Operator) -> bool:
    """End the time for which a task or client has closed a lock. A pause stays.

    Args:
        store: the store of the locks.
        name: the lock's name.
        by: the operator, for the audit.

    Returns:
        Whether the lock was closed.

    Raises:
        UnknownName: no known lock has the name.
        BackendError: Redis did not answer, or refused the command.
    """
    was_closed = store.reopen(name, by) or has_done(store, name, by)
    if not was_closed:
        refuse_unknown(store, name)
    return was_closed


def set_limit(
    store: AdminStore,
    name: str,
    permits: int | None,
    by: Operator,
    *,
    force: bool = False,
    seconds: float | None = None,
) -> int:
    """Set the number of permits of a lock, whatever its tasks declare.

    Args:
        store: the store of the locks.
        name: the lock's name.
        permits: the number; None: return to the limit that the tasks declare.
        by: the operator, for the audit.
        force: accept a name that no known lock has.
        seconds: time after which the tasks' limit is in force again; None: not before a further
            call.

    Returns:
        The limit in force.

    Raises:
        UnknownName: no known lock has the name.
        BackendError: Redis did not answer, or refused the command.
    """
    if not force:
        refuse_unknown(store, name)
    return store.set_limit(name, permits, by, seconds=seconds)


def set_rates(
    store: AdminStore,
    name: str,
    rates: Sequence[Rate],
    by: Operator,
    *,
    force: bool = False,
    seconds: float | None = None,
) -> None:
    """Set the rates of a lock, whatever its tasks declare.

    Args:
        store: the store of the locks.
        name: the lock's name.
        rates: all that an operator sets; empty: return to those that the tasks declare. Declared
            rates that count starts stay in force if none of these counts starts; likewise for
            costs.
        by: the operator, for the audit.
        force: accept a name that no known lock has.
        seconds: time after which the tasks' rates are in force again; None: not before a further
            call.

    Raises:
        UnknownName: no known lock has the name.
        BackendError: Redis did not answer, or refused the command.
    """
    if not force:
        refuse_unknown(store, name)
    store.set_rates(name, rates, by, seconds=seconds)


def find_waiter(store: AdminStore, name: str, who: str) -> Waiting:
    """Return the waiter of a lock with an owner token or a task id.

    Args:
        store: the store of the locks.
        name: the lock's name.
        who: the owner token, or the whole task id.

    Raises:
        Refused: nobody with that token or id waits for the lock, or several do.
        BackendError: Redis did not answer, or refused the command.
    """
    tokens = [who, *(token for lock, token in store.locate_tasks([who]) if lock == name)]
    looks = [store.locate_token(name, token) for token in tokens]
    found = [each.waiting for each in looks if each.waiting and each.expires_in <= 0]
    if len(found) == 1:
        return found[0]
    if found:
        told = ", ".join(each.token for each in found)
        msg = (
            f"{len(found)} messages with the id {who} wait for {name!r}: give one of the tokens "
            f"{told}"
        )
        raise Refused(msg, name)
    if any(who in {holder.token, holder.task_id} for holder in store.inspect(name).holders):
        msg = f"{who} holds {name!r} and does not wait for it: use release"
    else:
        msg = f"{who} does not wait for {name!r}: give a whole id as show prints it, or use why"
    raise Refused(msg, name)


def promote(store: AdminStore, name: str, who: str, by: Operator) -> Waiting:
    """Move a waiter to the head of the queue.

    Args:
        store: the store of the locks.
        name: the lock's name.
        who: the waiter's owner token, or its whole task id.
        by: the operator, for the audit.

    Returns:
        The waiter.

    Raises:
        Refused: it is not in the queue.
        BackendError: Redis did not answer, or refused the command.
    """
    waiter = find_waiter(store, name, who)
    absent = store.promote(name, waiter.token, by).verdict is Verdict.ABSENT
    if absent and not has_done(store, name, by):
        msg = f"{who} is not in the queue: its state is {waiter.state}"
        raise Refused(msg, name)
    return waiter


def drop(
    store: AdminStore,
    name: str,
    found: Sequence[Waiting],
    by: Operator,
    *,
    done_for: float = DONE_FOR,
    dropped: Callable[[Waiting], None] | None = None,
) -> Sequence[Waiting]:
    """Drop waiters permanently, with their messages. Other locks that they hold are released.

    Args:
        store: the store of the locks.
        name: the lock's name.
        found: the waiters, from :func:`find_waiter`.
        by: the operator, for the audit.
        done_for: seconds for which copies of their messages do not run, as of
            ``Settings.done_for``.
        dropped: called with each dropped task that will not run, to store its result.

    Returns:
        The dropped waiters. A waiter that was granted the lock meanwhile is not dropped.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    tokens = [each.token for each in found]
    gone = store.drop_waiters(name, tokens, by, done_for=done_for, whole=True)
    for each in gone:
        give_back(store, each)
        if dropped is not None and not queues_again(each):
            dropped(each)
    return gone


def queues_again(waiter: Waiting) -> bool:
    """Return whether a waiter has no stored message: its process waits, if it still runs."""
    return waiter.state == RecordState.WAITING


def drop_warning(found: Iterable[Waiting]) -> str:
    """Return what follows when these waiters are dropped."""
    return QUEUES_AGAIN if any(map(queues_again, found)) else "It will not run."

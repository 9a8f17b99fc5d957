"""Forced release: take a lock from a holder that does not release it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.lock_view import HELD_AFTER, Holder
from celery_singleton_lock.core.model import DONE_FOR, Reply, Verdict
from celery_singleton_lock.errors import LockError
from celery_singleton_lock.store.operator.base import AdminStore, Operator


class Refused(LockError):
    """An operator's action was refused. The message says what to do instead."""


def force_release(
    store: AdminStore,
    name: str,
    token: str,
    by: Operator,
    *,
    keep: bool = True,
    done_for: float = DONE_FOR,
) -> Reply:
    """Take the lock from one holder and grant it to the next waiter. Writes an audit entry.

    The holder's task does not stop. It continues without the lock, and only a resource that checks
    fencing tokens refuses its writes. Terminate it first if possible: :func:`end_holder`.

    Args:
        store: the store of the locks.
        name: the lock's name.
        token: owner token of the holder, from :func:`show_lock`. If another holder has the lock
            now, nothing changes.
        by: the operator, for the audit.
        keep: True: if the message of the task is stored in Redis, it goes to the end of the queue,
            and the task runs again. False: the message is dropped.
        done_for: seconds for which copies of a dropped message do not run, as of
            ``Settings.done_for``.

    Returns:
        A reply with the verdict RELEASED.

    Raises:
        Refused: the token does not hold the lock.
        BackendError: Redis did not answer, or refused the command. The call may be repeated.
    """
    reply = store.force_release(name, token, by, keep=keep, done_for=done_for)
    if reply.verdict is Verdict.RELEASED:
        return reply
    if not has_done(store, name, by.at(token)):
        raise Refused(why_not(store, name, token), name)
    return reply._replace(verdict=Verdict.RELEASED)


def has_done(store: AdminStore, name: str, by: Operator) -> bool:
    """Return whether an earlier attempt of a call, whose reply was lost, has changed the lock.

    Args:
        store: the store of the locks.
        name: the lock's name.
        by: the operator of this call only.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    return any(
        (entry.get("op"), entry.get("lock")) == (by.op, name) for entry in store.audit(LATEST)
    )


LATEST: Final = 100
"""Number of audit entries that are searched for an earlier attempt of a call."""


def end_holder(
    store: AdminStore, name: str, token: str, by: Operator, terminate: Callable[[str], object]
) -> Holder:
    """Terminate the task that holds the lock. Writes an audit entry.

    The lock is released when the task has ended.

    Args:
        store: the store of the locks.
        name: the lock's name.
        token: owner token of the holder, from :func:`show_lock`.
        by: the operator, for the audit.
        terminate: called with the task id; tells the task's worker to terminate it.

    Returns:
        The holder. Its task may still be running.

    Raises:
        Refused: the token does not hold the lock, or the holder is not a task.
        BackendError: Redis did not answer, or refused the command.
        Exception: any error of ``terminate``.
    """
    holders = store.inspect(name, waiters=0).holders
    holder = next((each for each in holders if each.token == token), None)
    if holder is None:
        raise Refused(why_not(store, name, token), name)
    if not holder.task_id:
        msg = f"{holder} is a client, not a task: it cannot be terminated from here."
        raise Refused(msg, name)
    terminate(holder.task_id)
    store.write_audit_entry(name, replace(by, action="terminate"), token=token)
    return holder


def why_not(store: AdminStore, name: str, token: str) -> str:
    """Return why a token cannot be released, and the holders of the lock."""
    if store.locate_token(name, token).waiting is not None:
        return (
            f"{token} waits for the lock {name!r} and does not hold it, so there is nothing to "
            "release. It may have been granted the lock before, and is back in the queue (locks "
            "show). locks drop would delete it: it would never run."
        )
    holders = store.inspect(name, waiters=0).holders
    held = " It is held by " + ", ".join(f"{h} (token {h.token})" for h in holders) + "."
    return (
        f"{token} does not hold the lock {name!r}: it has released it, or its lease has expired."
        f"{held if holders else ' Nobody holds it now.'}"
    )


def forced_release_warning(name: str, who: str, state: str = "running") -> str:
    """Return the warning that is shown before a forced release.

    Args:
        name: the lock's name.
        who: display text of the holder.
        state: record state of the holder.
    """
    if state == HELD_AFTER:
        return (
            f"{who} has succeeded and does not run. The next task of {name!r} will start before "
            "lock_hold_for is over."
        )
    if state == "granted":
        return (
            f"{who} has not begun, as far as Redis knows. Its message queues again, and may be "
            f"granted {name!r} again. If it begins at this moment, the next task runs beside it."
        )
    return (
        f"{who} may still be running. It will not be stopped. The next task of {name!r} will run "
        "at the same time. Only a resource that refuses lower fencing tokens is safe."
    )

"""Forced release: the last resort for a stuck key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from celery_singleton_lock.errors import LockError
from celery_singleton_lock.core.model import HELD_AFTER, Holder, Reply, Verdict
from celery_singleton_lock.store.operator.base import AdminStore, Operator


class Refused(LockError):
    """An operator's step was not taken; the message says what to do instead."""


def force_release(
    store: AdminStore, name: str, token: str, by: Operator, *, keep: bool = True
) -> Reply:
    """Take the lock from one holder, and grant it to who is next; audited.

    The holder's task is not ended: it runs on without the lock, and what it writes is only kept
    from doing harm by its fencing token. End it first where that is possible.

    Args:
        store: where.
        name: the lock's name.
        token: owner token of the holder, as :func:`show_lock` tells it: the guard against taking
            the lock from somebody who got it meanwhile.
        by: who does it.
        keep: a message that is kept of the task goes to the end of the line, so that it runs again;
            else it is dropped.

    Returns:
        RELEASED.

    Raises:
        Refused: that token does not hold the lock (any more).
        BackendError: Redis did not answer, or refused. Asking again is safe.
    """
    reply = store.force_release(name, token, by, keep=keep)
    if reply.verdict is not Verdict.RELEASED:
        raise Refused(why_not(store, name, token), name)
    return reply


def end_holder(
    store: AdminStore, name: str, token: str, by: Operator, terminate: Callable[[str], object]
) -> Holder:
    """Have the task that holds the lock ended; audited. The lock is given back when it is gone.

    Args:
        store: where.
        name: the lock's name.
        token: owner token of the holder, as :func:`show_lock` tells it.
        by: who does it.
        terminate: has the worker that runs a task end it; given its id.

    Returns:
        Who was told to end; they may not have ended yet.

    Raises:
        Refused: that token does not hold the lock (any more), or its holder is no task.
        BackendError: Redis did not answer, or refused.
        Exception: what ``terminate`` raises.
    """
    holders = store.inspect(name, waiters=0).holders
    holder = next((each for each in holders if each.token == token), None)
    if holder is None:
        raise Refused(why_not(store, name, token), name)
    if not holder.task_id:
        msg = f"{holder} is a client, not a task: it cannot be ended from here."
        raise Refused(msg, name)
    terminate(holder.task_id)
    store.remark(name, replace(by, action="terminate"), token=token)
    return holder


def why_not(store: AdminStore, name: str, token: str) -> str:
    """Return why a token cannot be released, and who holds the lock."""
    if store.look(name, token).waiting is not None:
        return f"{token} waits for the lock {name!r}, it does not hold it: drop it instead."
    holders = store.inspect(name, waiters=0).holders
    held = " It is held by " + ", ".join(f"{h} (token {h.token})" for h in holders) + "."
    return (
        f"{token} does not hold the lock {name!r}: it has ended, or its lease has."
        f"{held if holders else ' Nobody holds it now.'}"
    )


def forced_release_warning(name: str, who: str, state: str = "running") -> str:
    """Return what a forced release risks, as people are asked before it.

    Args:
        name: the lock's name.
        who: the holder, as shown to people.
        state: of the holder.
    """
    if state == HELD_AFTER:
        return (
            f"{who} has succeeded, and does not run. The next task of {name!r} starts before its "
            "lock_hold_for is over."
        )
    return (
        f"{who} may still be running. It will not be stopped, and the next task of {name!r} starts "
        "beside it: two at once, unless what they write to refuses lower fencing tokens."
    )
